//! The launch of `cuda/verify_greedy.cu`: the accepted path of each tree by the argmax of its rows of logits.

use std::sync::Arc;

use super::check::{arrays, length, live_address, on_device, rows_on_device};
use crate::bounds::MAX_DRAFT_TOKENS;
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::verify::VerifyParams;
use crate::device::rows::{FloatType, Rows};
use crate::device::view::DeviceSlice;
use crate::error::{Result, in_range};
use crate::overlap::{Operand, Span, disjoint};

/// Blocks of mode full that run on a multiprocessor at once, by the kernel's registers.
const FULL_RESIDENT: u32 = 4;
/// Blocks that share a row in mode full, at most.
const MOST_CHUNKS: u32 = 16;
/// Largest batch that is verified in mode full where the caller leaves the choice.
const FULL_REQUESTS: usize = 2;
/// Largest `gridDim.y`: rows of mode full.
const MAX_GRID_Y: usize = 65_535;

/// How the rows of a batch are read; the result is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerifyMode {
    /// All rows at once, then the walks: for one or two requests.
    Full,
    /// A block a request, which reads the rows on its path alone: for batches.
    Walk,
}

impl VerifyMode {
    /// The faster mode for a batch of this capacity.
    pub fn of(requests: usize) -> Self {
        if requests <= FULL_REQUESTS { VerifyMode::Full } else { VerifyMode::Walk }
    }
}

/// The kernels of `cuda/verify_greedy.cu` on one device, by element type: f32, bf16, f16. Functions are valid while
/// `_module` is loaded.
#[derive(Debug)]
pub struct VerifyGreedy {
    walk: [Function; 3],
    full: [Function; 3],
    _module: Module,
    context: Arc<Context>,
}

/// The operands of [`VerifyGreedy::launch`]: B requests, N rows of logits, paths of at most P nodes.
#[derive(Debug, Clone, Copy)]
pub struct VerifyOperands<'a> {
    /// `[N, vocab]`, a row a node.
    pub logits: &'a Rows,
    /// Token of each node, N entries.
    pub tree_tokens: &'a DeviceSlice<i32>,
    /// Parent of each node within its tree, -1 for a root, N entries.
    pub tree_parents: &'a DeviceSlice<i32>,
    /// First node of each tree, B + 1 entries.
    pub offsets: &'a DeviceSlice<i32>,
    /// Committed lengths, B entries.
    pub lens: &'a DeviceSlice<i32>,
    /// An array whose last element counts the live requests; `None` where all are.
    pub live: Option<&'a DeviceSlice<i32>>,
    /// Most nodes of one tree (V).
    pub max_nodes: usize,
    /// Most nodes of a path (P): draft steps + 1.
    pub max_path: usize,
    /// What is written.
    pub out: &'a DeviceAccepts,
    /// At least [`verify_scratch`] words, zero before the first launch; launches leave it ready for the next.
    pub scratch: &'a DeviceSlice<u64>,
}

/// [`Accepts`](crate::round::Accepts) in device memory, for B requests with paths of at most P nodes. All arrays are
/// written in full: entries behind the last accepted node are 0, and their tokens -1.
#[derive(Debug, Clone, Copy)]
pub struct DeviceAccepts {
    /// First entry of each request in the three arrays below, B + 1 entries; the last counts the accepted nodes.
    pub offsets: DeviceSlice<i32>,
    /// Accepted nodes, B * P entries.
    pub paths: DeviceSlice<i32>,
    /// The token drawn at each; -1 where none could be drawn.
    pub tokens: DeviceSlice<i32>,
    /// The row of logits (and of features) of each.
    pub rows: DeviceSlice<i32>,
    /// Each request's last token, the root of its next tree, B entries; -1 after a fault, 0 for a dead request.
    pub roots: DeviceSlice<i32>,
    /// Committed lengths with the accepted nodes, B entries.
    pub new_lens: DeviceSlice<i32>,
    /// Why a request's walk ended, B entries: 0, or the number of a probe ([`Table::Probe`](crate::device::params::Table::Probe)).
    pub faults: DeviceSlice<i32>,
}

impl DeviceAccepts {
    /// The memory of all arrays.
    fn spans(&self) -> [Span; 7] {
        [self.offsets, self.paths, self.tokens, self.rows, self.roots, self.new_lens, self.faults].map(|a| a.span())
    }
}

/// 64-bit words of scratch of a verification of up to `requests` trees with `nodes` nodes together.
pub fn verify_scratch(nodes: usize, requests: usize, max_path: usize) -> usize {
    nodes + 1 + (requests * (2 * max_path + 1)).div_ceil(2)
}

impl VerifyOperands<'_> {
    /// Check that the operands fit each other, lie on the device of `context`, and that nothing that is written lies in
    /// another of them, or in `beside`; the address of the live count.
    ///
    /// # Errors
    /// [`Error::Mismatch`] and [`Error::OutOfRange`], as the launches of verification.
    pub(super) fn check(&self, context: &Context, beside: &[Span]) -> Result<u64> {
        let o = self;
        let (nodes, requests) = (o.logits.rows(), o.lens.len());
        in_range("requests", requests as u64, 0, i128::from(crate::bounds::MAX_BATCH))?;
        in_range("max_nodes", o.max_nodes as u64, 1, i128::from(MAX_DRAFT_TOKENS))?;
        in_range("max_path", o.max_path as u64, 1, i128::from(MAX_DRAFT_TOKENS))?;
        let (entries, out) = (requests * o.max_path, o.out);
        arrays(context, nodes, &[("tree tokens", o.tree_tokens), ("tree parents", o.tree_parents)])?;
        arrays(context, requests + 1, &[("offsets", o.offsets), ("accepted offsets", &out.offsets)])?;
        arrays(context, entries, &[("paths", &out.paths), ("tokens", &out.tokens), ("rows", &out.rows)])?;
        arrays(context, requests, &[("lens", o.lens), ("new_lens", &out.new_lens)])?;
        arrays(context, requests, &[("roots", &out.roots), ("faults", &out.faults)])?;
        rows_on_device(context, &[o.logits])?;
        length("scratch", o.scratch.len(), verify_scratch(nodes, requests, o.max_path), false)?;
        on_device(context, &[("scratch", o.scratch.device())])?;
        let read = [
            o.logits.span(),
            o.tree_tokens.span(),
            o.tree_parents.span(),
            o.offsets.span(),
            o.lens.span(),
            o.live.span(),
        ];
        disjoint(&[&out.spans(), &[o.scratch.span()]], &[&read, beside])?;
        live_address(context, o.live)
    }

    /// The parameters of a verification whose operands were checked; `live` is the address of its live count.
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) for a fault record of another device.
    pub(super) fn params(&self, context: &Context, stream: Stream, live: u64) -> Result<VerifyParams> {
        let (o, out) = (self, self.out);
        let (nodes, requests) = (o.logits.rows(), o.lens.len());
        let entries = requests * o.max_path;
        let counter = o.scratch.address() + 8 * nodes as u64;
        let walk_paths = counter + 8;
        let walk_tokens = walk_paths + 4 * entries as u64;
        let report = context.report(stream)?;
        Ok(VerifyParams {
            logits: o.logits.address(),
            tree_tokens: o.tree_tokens.address(),
            tree_parents: o.tree_parents.address(),
            offsets: o.offsets.address(),
            lens: o.lens.address(),
            live,
            out_offsets: out.offsets.address(),
            paths: out.paths.address(),
            tokens: out.tokens.address(),
            rows: out.rows.address(),
            roots: out.roots.address(),
            new_lens: out.new_lens.address(),
            faults: out.faults.address(),
            row_keys: o.scratch.address(),
            walk_paths,
            walk_tokens,
            walk_lengths: walk_tokens + 4 * entries as u64,
            counter,
            report,
            logits_stride: o.logits.stride() as u64,
            nodes: nodes as i32, // `Rows` checked that it fits
            requests: requests as i32,
            vocab: o.logits.columns() as i32,
            max_nodes: o.max_nodes as i32,
            max_path: o.max_path as i32,
            reserved: 0,
        })
    }
}

impl VerifyGreedy {
    /// Load them into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("verify_greedy", context.capability())?)?;
        let [f32, bf16, f16] = ["verify_walk_f32", "verify_walk_bf16", "verify_walk_f16"].map(|n| module.function(n));
        let walk = [f32?, bf16?, f16?];
        let [f32, bf16, f16] = ["verify_full_f32", "verify_full_bf16", "verify_full_f16"].map(|n| module.function(n));
        let full = [f32?, bf16?, f16?];
        Ok(Self { walk, full, _module: module, context })
    }

    /// For each tree: from the root, draw the argmax of the node's row of logits (ties to the lower token), go on at the
    /// first child that carries it, end where none does. The result is that of
    /// [`Verifier::verify`](crate::host::verify::Verifier::verify) at temperature 0.
    ///
    /// A row on a walk that holds a NaN, a +inf or nothing but -inf ends its request's walk: recorded for
    /// [`Device::check`](crate::device::Device::check) as [`Error::NonFinite`](crate::Error::NonFinite) (`target logits`) and noted in
    /// `out.faults`. Offsets outside the arrays leave their request without a path, a path longer than P ends early; either
    /// is recorded.
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) for operands that do not fit each other;
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) for a limit that the kernel does
    /// not have.
    pub fn launch(&self, stream: Stream, operands: &VerifyOperands<'_>, mode: VerifyMode) -> Result<()> {
        let o = operands;
        let context = &self.context;
        let (nodes, requests) = (o.logits.rows(), o.lens.len());
        let live = o.check(context, &[])?;
        if requests == 0 {
            return Ok(());
        }
        let mode = if nodes == 0 || nodes > MAX_GRID_Y { VerifyMode::Walk } else { mode };
        let params = o.params(context, stream, live)?;
        let float = match o.logits.float() {
            FloatType::F32 => 0,
            FloatType::Bf16 => 1,
            FloatType::F16 => 2,
        };
        let (function, grid, block) = match mode {
            VerifyMode::Walk => (self.walk[float], (requests as u32, 1, 1), 1024),
            VerifyMode::Full => (self.full[float], (chunks(context.multiprocessors(), nodes), nodes as u32, 1), 256),
        };
        let _current = context.enter()?;
        // SAFETY: the module is loaded for the process and its context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe { function.launch(grid, block, stream, &params) }
    }
}

/// Blocks that share each of `nodes` rows in mode full: as many as all run at once, since a second wave of blocks waits for memory
/// as long as the first.
fn chunks(multiprocessors: u32, nodes: usize) -> u32 {
    (FULL_RESIDENT * multiprocessors / nodes.max(1) as u32).clamp(1, MOST_CHUNKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_so_that_all_blocks_run_at_once() {
        for (nodes, want) in [(1, 16), (33, 16), (34, 15), (64, 8), (128, 4), (528, 1), (1024, 1), (65_535, 1)] {
            assert_eq!(chunks(132, nodes), want, "{nodes} nodes");
        }
    }

    #[test]
    fn scratch_holds_every_region() {
        for (nodes, requests, path) in [(0, 0, 1), (1, 1, 1), (64, 1, 7), (4096, 64, 7), (1023, 3, 6)] {
            let bytes = nodes * 8 + 8 + requests * path * 8 + requests * 4;
            assert!(verify_scratch(nodes, requests, path) * 8 >= bytes);
            assert!(verify_scratch(nodes, requests, path) * 8 < bytes + 8);
        }
        assert_eq!(
            [1, 2, 3, 64].map(VerifyMode::of),
            [VerifyMode::Full, VerifyMode::Full, VerifyMode::Walk, VerifyMode::Walk]
        );
    }
}
