//! The launch of `cuda/tree_unite.cu`: one tree of two for each request of a batch.

use std::sync::Arc;

use super::DeviceTrees;
use super::check::{arrays, live_address};
use crate::bounds::fits_i32;
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::draft;
use crate::device::view::DeviceSlice;
use crate::error::{Result, in_range};
use crate::geometry::words_for;
use crate::overlap::{Operand, Span, disjoint};

/// Most nodes of each of the two trees: `MOST` of the kernel.
pub const MAX_UNITED: u32 = 64;

/// The kernel of `cuda/tree_unite.cu` on one device. The function is valid while `_module` is loaded.
#[derive(Debug)]
pub struct TreeUnite {
    function: Function,
    _module: Module,
    context: Arc<Context>,
}

/// Trees of B requests that are read: B * V entries an array, trees behind one another.
#[derive(Debug, Clone, Copy)]
pub struct GivenTrees {
    /// First node of each tree, B + 1 entries; the last counts the nodes.
    pub offsets: DeviceSlice<i32>,
    /// Token of each node; the root's is not read.
    pub tokens: DeviceSlice<i32>,
    /// Parent of each node within its tree, before the node; the root's is not read.
    pub parents: DeviceSlice<i32>,
    /// Cumulative log-probability of each node; the root's is not read.
    pub scores: DeviceSlice<f32>,
}

impl GivenTrees {
    /// The memory of all arrays.
    fn spans(&self) -> [Span; 4] {
        [self.offsets.span(), self.tokens.span(), self.parents.span(), self.scores.span()]
    }

    /// The arrays as the kernel takes them.
    fn params(&self) -> draft::GivenTrees {
        draft::GivenTrees {
            offsets: self.offsets.address(),
            tokens: self.tokens.address(),
            parents: self.parents.address(),
            scores: self.scores.address(),
        }
    }
}

/// The operands of [`TreeUnite::launch`].
#[derive(Debug, Clone, Copy)]
pub struct TreeUniteOperands<'a> {
    /// V: most nodes of a tree, at most [`MAX_UNITED`].
    pub draft_tokens: u32,
    /// Each request's own tree.
    pub own: &'a GivenTrees,
    /// Its other one.
    pub other: &'a GivenTrees,
    /// Token of each root, B entries.
    pub roots: &'a DeviceSlice<i32>,
    /// Most nodes of each tree, root included, each in `1..=V`, B entries.
    pub max_nodes: &'a DeviceSlice<i32>,
    /// An array whose last element counts the live requests; `None` where all are. A dead request has no nodes.
    pub live: Option<&'a DeviceSlice<i32>>,
    /// What is written; none of it is read.
    pub trees: &'a DeviceTrees,
    /// Whose each node is, B * V entries: bit 0 an own one, bit 1 the other tree's; 0 for roots and behind the last
    /// tree.
    pub origins: &'a DeviceSlice<i32>,
}

impl TreeUnite {
    /// Load it into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("tree_unite", context.capability())?)?;
        Ok(Self { function: module.function("tree_unite")?, _module: module, context })
    }

    /// Each request's root and the best nodes of its two trees: equal paths are one node, with the greater score; ties
    /// go to own nodes, then to lower ones. The deepest path comes first, of equally deep ones that whose end scores
    /// higher.
    ///
    /// Offsets that are none of a tree are recorded, and a root alone is taken for it; so is a parent that does not
    /// stand before its node, for which the root stands in, and a limit outside its range, which leaves the root alone
    /// (`nodes of a tree`, `nodes of all trees`, `tree parents`, `max_nodes`). The recorded step of a tree is 0 for own
    /// ones, 1 for the others.
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) for operands that do not fit each other;
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) for trees of more than [`MAX_UNITED`] nodes.
    pub fn launch(&self, stream: Stream, operands: &TreeUniteOperands<'_>) -> Result<()> {
        let o = operands;
        let (context, trees, requests) = (&self.context, o.trees, o.roots.len());
        let v = in_range("nodes of a united tree", o.draft_tokens, 1, MAX_UNITED.into())? as usize;
        fits_i32("batch * draft_tokens", (requests * v) as u64, || format!("{requests} * {v}"))?;
        for (what, given) in [("own offsets", o.own), ("other offsets", o.other)] {
            arrays(context, requests + 1, &[(what, &given.offsets)])?;
        }
        arrays(context, requests + 1, &[("offsets", &trees.offsets)])?;
        let nodes = [
            ("own tokens", &o.own.tokens),
            ("own parents", &o.own.parents),
            ("other tokens", &o.other.tokens),
            ("other parents", &o.other.parents),
            ("tree tokens", &trees.tokens),
            ("depths", &trees.depths),
            ("tree parents", &trees.parents),
            ("next_child", &trees.next_child),
            ("next_sibling", &trees.next_sibling),
            ("origins", o.origins),
        ];
        arrays(context, requests * v, &nodes)?;
        let scores = [("own scores", &o.own.scores), ("other scores", &o.other.scores), ("tree scores", &trees.scores)];
        arrays(context, requests * v, &scores)?;
        let words = words_for(o.draft_tokens) as usize;
        trees.masks.map_or(Ok(()), |masks| arrays(context, requests * v * words, &[("masks", &masks)]))?;
        arrays(context, requests, &[("roots", o.roots), ("max_nodes", o.max_nodes)])?;
        let live = live_address(context, o.live)?;
        let limits = [o.roots.span(), o.max_nodes.span(), o.live.span()];
        disjoint(&[&trees.spans(), &[o.origins.span()]], &[&o.own.spans(), &o.other.spans(), &limits])?;
        if requests == 0 {
            return Ok(());
        }
        let report = context.report(stream)?;
        let params = draft::TreeUniteParams {
            own: o.own.params(),
            other: o.other.params(),
            trees: trees.params(o.roots, o.max_nodes, v),
            live,
            origins: o.origins.address(),
            report,
        };
        let _current = context.enter()?;
        // SAFETY: the module is loaded for the process and its context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe { self.function.launch((requests as u32, 1, 1), 512, stream, &params) }
    }
}
