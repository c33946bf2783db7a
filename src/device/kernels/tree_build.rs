//! The launch of `cuda/tree_build.cu`: the trees of a batch from the candidates of its draft steps.

use std::sync::Arc;

use super::DeviceBeams;
use super::check::{arrays, live_address};
use crate::bounds::fits_i32;
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::draft::{TreeBuildParams, Trees};
use crate::device::view::DeviceSlice;
use crate::error::{Result, in_range};
use crate::geometry::words_for;
use crate::overlap::{Operand, Span, disjoint};

/// Most candidates of a request that the kernel ranks: `MAX_CANDIDATES` of it.
pub const MAX_DEVICE_CANDIDATES: u32 = 4096;

/// The kernel of `cuda/tree_build.cu` on one device. The function is valid while `_module` is loaded.
#[derive(Debug)]
pub struct TreeBuild {
    function: Function,
    _module: Module,
    context: Arc<Context>,
}

/// [`TreeBatch`](crate::round::TreeBatch) in device memory, for B requests of at most V nodes: B * V entries an array,
/// trees behind one another. Entries behind the last tree hold token 0, depth 0, score 0, links of -1 and no ancestors.
#[derive(Debug, Clone, Copy)]
pub struct DeviceTrees {
    /// First node of each tree, B + 1 entries; the last counts the nodes.
    pub offsets: DeviceSlice<i32>,
    /// Token of each node.
    pub tokens: DeviceSlice<i32>,
    /// Depth of each node.
    pub depths: DeviceSlice<i32>,
    /// Parent of each node within its tree, -1 for a root.
    pub parents: DeviceSlice<i32>,
    /// First child, -1 for none.
    pub next_child: DeviceSlice<i32>,
    /// Next child of the same parent, -1 for none.
    pub next_sibling: DeviceSlice<i32>,
    /// Cumulative log-probability of each node, 0 for roots.
    pub scores: DeviceSlice<f32>,
    /// Each node and its ancestors as bits, B * V * `words_for(V)` entries.
    pub masks: Option<DeviceSlice<u64>>,
}

impl DeviceTrees {
    /// The memory of all arrays.
    pub(super) fn spans(&self) -> [Span; 8] {
        [
            self.offsets.span(),
            self.tokens.span(),
            self.depths.span(),
            self.parents.span(),
            self.next_child.span(),
            self.next_sibling.span(),
            self.scores.span(),
            self.masks.span(),
        ]
    }

    /// Trees of at most `draft_tokens` nodes as kernels make them, of these roots and limits; sizes were checked.
    pub(super) fn params(&self, roots: &DeviceSlice<i32>, max_nodes: &DeviceSlice<i32>, draft_tokens: usize) -> Trees {
        Trees {
            roots: roots.address(),
            max_nodes: max_nodes.address(),
            offsets: self.offsets.address(),
            tokens: self.tokens.address(),
            depths: self.depths.address(),
            parents: self.parents.address(),
            next_child: self.next_child.address(),
            next_sibling: self.next_sibling.address(),
            scores: self.scores.address(),
            masks: self.masks.map_or(0, |m| m.address()),
            requests: roots.len() as i32,
            draft_tokens: draft_tokens as i32,
        }
    }
}

/// The operands of [`TreeBuild::launch`].
#[derive(Debug, Clone, Copy)]
pub struct TreeBuildOperands<'a> {
    /// Candidates of the round's steps.
    pub beams: &'a DeviceBeams,
    /// Token of each root, B entries.
    pub roots: &'a DeviceSlice<i32>,
    /// Deepest node of each tree, B entries.
    pub max_depths: &'a DeviceSlice<i32>,
    /// Most nodes of each tree, root included, each in `1..=V`, B entries.
    pub max_nodes: &'a DeviceSlice<i32>,
    /// One element: the least score of a node; `None` for no limit.
    pub min_score: Option<&'a DeviceSlice<f32>>,
    /// An array whose last element counts the live requests; `None` where all are. A dead request has no nodes.
    pub live: Option<&'a DeviceSlice<i32>>,
    /// What is written.
    pub trees: &'a DeviceTrees,
}

impl TreeBuild {
    /// Load it into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("tree_build", context.capability())?)?;
        Ok(Self { function: module.function("tree_build")?, _module: module, context })
    }

    /// Each request's root and the best candidates of its sound steps, as
    /// [`DraftBeams::finish_above`](crate::host::select::DraftBeams::finish_above) chooses and numbers them: the same
    /// scores give the same trees.
    ///
    /// A limit outside its range is recorded; its request gets its root alone (`max_nodes`, `sound steps`).
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) for operands that do not fit each other;
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) for a shape of more than [`MAX_DEVICE_CANDIDATES`].
    pub fn launch(&self, stream: Stream, operands: &TreeBuildOperands<'_>) -> Result<()> {
        let o = operands;
        let (context, beams, trees) = (&self.context, o.beams, o.trees);
        let (requests, shape) = (beams.requests(), beams.shape);
        in_range("draft candidates on a GPU", shape.candidates(), 1, MAX_DEVICE_CANDIDATES.into())?;
        beams.check(context)?;
        let (v, words) = (shape.draft_tokens() as usize, words_for(shape.draft_tokens()) as usize);
        fits_i32("batch * draft_tokens", (requests * v) as u64, || format!("{requests} * {v}"))?;
        arrays(context, requests + 1, &[("offsets", &trees.offsets)])?;
        let nodes = [
            ("tree tokens", &trees.tokens),
            ("depths", &trees.depths),
            ("tree parents", &trees.parents),
            ("next_child", &trees.next_child),
            ("next_sibling", &trees.next_sibling),
        ];
        arrays(context, requests * v, &nodes)?;
        arrays(context, requests * v, &[("tree scores", &trees.scores)])?;
        trees.masks.map_or(Ok(()), |masks| arrays(context, requests * v * words, &[("masks", &masks)]))?;
        arrays(context, requests, &[("roots", o.roots), ("max_depths", o.max_depths), ("max_nodes", o.max_nodes)])?;
        o.min_score.map_or(Ok(()), |least| arrays(context, 1, &[("min_score", least)]))?;
        let live = live_address(context, o.live)?;
        let limits = [o.roots.span(), o.max_depths.span(), o.max_nodes.span(), o.min_score.span(), o.live.span()];
        disjoint(&[&trees.spans()], &[&beams.spans(), &limits])?;
        if requests == 0 {
            return Ok(());
        }
        let report = context.report(stream)?;
        let params = TreeBuildParams {
            drafts: beams.drafts(),
            trees: trees.params(o.roots, o.max_nodes, v),
            max_depths: o.max_depths.address(),
            min_score: o.min_score.map_or(0, DeviceSlice::address),
            live,
            report,
        };
        let _current = context.enter()?;
        // SAFETY: the module is loaded for the process and its context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe { self.function.launch((requests as u32, 1, 1), 512, stream, &params) }
    }
}
