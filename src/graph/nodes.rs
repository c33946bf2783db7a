//! Nodes of a graph that is not instantiated: their number by type, child graphs included, and those that may not stand
//! where they stand.
//!
//! Callers of this file hold an `Entered` guard, and the graphs live through the call.

use std::collections::BTreeMap;
use std::ptr;

use cudarc::driver::sys;

use crate::device::named;
use crate::error::{Error, Result};

/// Number of a graph's nodes of each type, by the type's name; nodes of child graphs and of a loop's body are among
/// them, beside the nodes that hold them.
pub type NodeCounts = BTreeMap<&'static str, u64>;

/// The driver's numbers of node types, from `CUgraphNodeType`; newer drivers may know more.
const NAMES: &[(u32, &str)] = &[
    (0, "kernel"),
    (1, "memcpy"),
    (2, "memset"),
    (3, "host"),
    (4, "graph"),
    (5, "empty"),
    (6, "event wait"),
    (7, "event record"),
    (8, "external semaphore signal"),
    (9, "external semaphore wait"),
    (10, "mem alloc"),
    (11, "mem free"),
    (12, "batch mem op"),
    (13, "conditional"),
];
const KERNEL: u32 = 0;
const CHILD: u32 = 4;

fn name_of(kind: u32) -> &'static str {
    NAMES.iter().find(|(id, _)| *id == kind).map_or("unknown", |(_, name)| name)
}

/// Place that a graph is made for, which says what the graph may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Launched as it is: whatever the driver instantiates.
    Top,
    /// A child node of another graph: no memory of its own.
    Child,
    /// The body of a loop: kernels, memsets, copies, empty nodes, and graphs and loops of these.
    Body,
}

impl Place {
    /// Reason why a node of type `kind` may not be here; `None` where it may.
    fn refusal(self, kind: u32, cooperative: bool) -> Option<&'static str> {
        let name = name_of(kind);
        match self {
            Place::Top => None,
            Place::Child => matches!(name, "mem alloc" | "mem free").then_some(
                "a child graph allocates and frees no memory; for torch, use its own allocator and not cudaMallocAsync",
            ),
            Place::Body if kind == KERNEL && cooperative => Some("the body of a loop launches no cooperative kernel"),
            Place::Body => {
                let allowed = ["kernel", "memcpy", "memset", "graph", "empty", "conditional"];
                (!allowed.contains(&name)).then_some(
                    "the body of a loop holds kernels, copies, memsets, empty nodes, and graphs and loops of these",
                )
            }
        }
    }

    /// First part of paths.
    pub(super) fn root(self) -> &'static str {
        match self {
            Place::Top | Place::Child => "graph",
            Place::Body => "body",
        }
    }
}

/// Count the nodes of `graph`, whose path is `at`, and refuse the first that may not be in `place`.
///
/// # Errors
/// [`Error::GraphCapture`] with the node's type and path, such as `body / 3 graph / 0 host`: numbers count the nodes of a
/// graph from 0, in the driver's order, which for captured work is the order of its calls.
pub(super) fn inspect(graph: sys::CUgraph, place: Place, at: &str, call: &'static str) -> Result<NodeCounts> {
    let mut counts = NodeCounts::new();
    walk(graph, at, &mut |node, kind, path| {
        let name = if kind == KERNEL && place == Place::Body && is_cooperative(node)? {
            if let Some(why) = place.refusal(kind, true) {
                return Err(refused(call, "cooperative kernel", path, why));
            }
            name_of(kind)
        } else {
            name_of(kind)
        };
        if let Some(why) = place.refusal(kind, false) {
            return Err(refused(call, name, path, why));
        }
        *counts.entry(name).or_default() += 1;
        Ok(())
    })?;
    Ok(counts)
}

/// The type and the path of a node of `graph`; `None` where it is not there.
pub(super) fn locate(graph: sys::CUgraph, wanted: sys::CUgraphNode, place: Place) -> Option<(&'static str, String)> {
    let mut found = None;
    let walked = walk(graph, place.root(), &mut |node, kind, path| {
        if node == wanted {
            found = Some((name_of(kind), path.to_owned()));
        }
        Ok(())
    });
    walked.ok().and(found)
}

fn refused(call: &'static str, node: &str, path: &str, why: &str) -> Error {
    Error::GraphCapture { call, node: node.into(), path: path.into(), why: format!("{node} at {path}: {why}") }
}

/// Visit every node of a graph and of the child graphs in it.
fn walk(
    graph: sys::CUgraph,
    at: &str,
    visit: &mut impl FnMut(sys::CUgraphNode, u32, &str) -> Result<()>,
) -> Result<()> {
    let mut count = count(graph)?;
    if count == 0 {
        return Ok(());
    }
    let mut nodes = vec![ptr::null_mut(); count];
    // SAFETY: as above; there is room for `count` nodes, and nobody adds one meanwhile.
    named("cuGraphGetNodes", unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count).result() })?;
    for (i, &node) in nodes.iter().take(count).enumerate() {
        let mut kind = u32::MAX;
        // SAFETY: a node of a graph that lives. The driver stores an int, which is read as a plain number: a newer driver
        // may know types that the enum lacks.
        named("cuGraphNodeGetType", unsafe { sys::cuGraphNodeGetType(node, (&raw mut kind).cast()).result() })?;
        let path = format!("{at} / {i} {}", name_of(kind));
        visit(node, kind, &path)?;
        if kind == CHILD {
            let mut child = ptr::null_mut();
            // SAFETY: a child node of a graph that lives, which owns the graph that it gives; `child` is a valid out pointer.
            named("cuGraphChildGraphNodeGetGraph", unsafe {
                sys::cuGraphChildGraphNodeGetGraph(node, &mut child).result()
            })?;
            walk(child, &path, visit)?;
        }
    }
    Ok(())
}

/// Nodes of a graph, without those of its children.
pub(super) fn count(graph: sys::CUgraph) -> Result<usize> {
    let mut count = 0;
    // SAFETY: the graph lives (this file's rule); without room for nodes the call says how many there are.
    named("cuGraphGetNodes", unsafe { sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut count).result() })?;
    Ok(count)
}

/// True if a kernel node launches cooperatively.
fn is_cooperative(node: sys::CUgraphNode) -> Result<bool> {
    let attribute = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    // SAFETY: a kernel node of a graph that lives; `value` is a valid out pointer of the attribute's union.
    named("cuGraphKernelNodeGetAttribute", unsafe {
        sys::cuGraphKernelNodeGetAttribute(node, attribute, &raw mut value).result()
    })?;
    // SAFETY: `cooperative` is what the driver writes for this attribute, and the union was zeroed before.
    Ok(unsafe { value.cooperative } != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_hold_what_the_driver_allows_and_children_no_memory() {
        let refused = |place: Place| -> Vec<&str> {
            NAMES.iter().filter(|(id, _)| place.refusal(*id, false).is_some()).map(|(_, name)| *name).collect()
        };
        assert!(refused(Place::Top).is_empty());
        assert_eq!(refused(Place::Child), ["mem alloc", "mem free"]);
        assert_eq!(
            refused(Place::Body),
            [
                "host",
                "event wait",
                "event record",
                "external semaphore signal",
                "external semaphore wait",
                "mem alloc",
                "mem free",
                "batch mem op"
            ]
        );
        assert!(Place::Body.refusal(KERNEL, true).is_some() && Place::Top.refusal(KERNEL, true).is_none());
        // A type of a newer driver is not known to be allowed.
        assert!(Place::Body.refusal(16, false).is_some() && name_of(16) == "unknown");
    }

    #[test]
    fn names_are_those_of_the_driver() {
        use sys::CUgraphNodeType as T;
        assert_eq!(name_of(T::CU_GRAPH_NODE_TYPE_KERNEL as u32), "kernel");
        assert_eq!(name_of(T::CU_GRAPH_NODE_TYPE_HOST as u32), "host");
        assert_eq!(name_of(T::CU_GRAPH_NODE_TYPE_GRAPH as u32), "graph");
        assert_eq!(name_of(T::CU_GRAPH_NODE_TYPE_WAIT_EVENT as u32), "event wait");
        assert_eq!(name_of(T::CU_GRAPH_NODE_TYPE_MEM_ALLOC as u32), "mem alloc");
        assert_eq!(name_of(T::CU_GRAPH_NODE_TYPE_CONDITIONAL as u32), "conditional");
    }
}
