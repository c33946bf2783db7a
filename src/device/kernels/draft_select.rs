//! The launch of `cuda/draft_select.cu`: one step of draft selection, from logits to beams.

use std::sync::Arc;

use super::check::{arrays, length, live_address, on_device, rows_on_device};
use crate::bounds::{MAX_BATCH, fits_i32};
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::draft::{DraftSelectParams, Drafts};
use crate::device::rows::{FloatType, Rows};
use crate::device::view::DeviceSlice;
use crate::error::{Error, Result, in_range};
use crate::geometry::{TreeShape, words_for};
use crate::overlap::{Operand, Span, disjoint};
use crate::round::MAX_VOCAB;

/// Largest K of the kernel: a list lies in the lanes of a warp.
pub const MAX_DEVICE_TOPK: u32 = 32;
/// Columns of a tile: `TILE` of the kernel.
const TILE: usize = 512;
/// Threads of a block: `THREADS` of the kernel; a warp takes a tile.
const BLOCK: u32 = 256;
/// Tiles that a warp of the kernel holds in registers: `TURNS` of the kernel.
const TURNS: usize = 4;
/// Blocks that a small batch is cut into, for each multiprocessor.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;
/// Largest `gridDim.y`.
const MAX_ROWS: i128 = 65_535;

/// The kernels of `cuda/draft_select.cu` on one device, by element type: f32, bf16, f16. Functions are valid while
/// `_module` is loaded.
#[derive(Debug)]
pub struct DraftSelect {
    functions: [Function; 3],
    _module: Module,
    context: Arc<Context>,
}

/// Candidates and beams of B requests in device memory, [`DraftBeams`](crate::host::select::DraftBeams) there: K beams, C
/// candidates, W words of ancestor bits a beam.
#[derive(Debug, Clone, Copy)]
pub struct DeviceBeams {
    /// K, S and V.
    pub shape: TreeShape,
    /// Cumulative log-probability of each candidate, B * C entries.
    pub scores: DeviceSlice<f32>,
    /// Token of each candidate in the target's vocabulary, B * C entries.
    pub candidate_tokens: DeviceSlice<i32>,
    /// Parent candidate, -1 below the root, B * C entries.
    pub candidate_parents: DeviceSlice<i32>,
    /// The candidate that each beam is, B * K entries.
    pub beams: DeviceSlice<i32>,
    /// Token of each beam, B * K entries: the draft model's next input.
    pub tokens: DeviceSlice<i32>,
    /// Row of the previous step that each beam continues, B * K entries: the request after step 0, `request * K + beam`
    /// after others.
    pub parents: DeviceSlice<i32>,
    /// Draft slots of each beam's true ancestors and of itself, B * K * W entries.
    pub ancestors: DeviceSlice<u64>,
    /// Steps of each request before its first fault, B entries.
    pub sound: DeviceSlice<i32>,
}

impl DeviceBeams {
    /// Requests (B).
    pub fn requests(&self) -> usize {
        self.sound.len()
    }

    /// The memory of all arrays.
    pub(super) fn spans(&self) -> [Span; 8] {
        [
            self.scores.span(),
            self.candidate_tokens.span(),
            self.candidate_parents.span(),
            self.beams.span(),
            self.tokens.span(),
            self.parents.span(),
            self.ancestors.span(),
            self.sound.span(),
        ]
    }

    /// The candidates as kernels take them; [`Self::check`] has seen that sizes fit.
    pub(super) fn drafts(&self) -> Drafts {
        Drafts {
            scores: self.scores.address(),
            tokens: self.candidate_tokens.address(),
            parents: self.candidate_parents.address(),
            sound: self.sound.address(),
            topk: self.shape.topk() as i32,
            steps: self.shape.steps() as i32,
            candidates: self.shape.candidates() as i32,
            reserved: 0,
        }
    }

    /// Check that the arrays fit each other and the kernel.
    pub(super) fn check(&self, context: &Context) -> Result<()> {
        let (b, k) = (self.requests(), self.shape.topk() as usize);
        in_range("requests", b as u64, 0, MAX_BATCH.into())?;
        let candidates = self.shape.candidates();
        fits_i32("batch * candidates", b as u64 * u64::from(candidates), || format!("{b} * {candidates}"))?;
        let tables = b * candidates as usize;
        let words = words_for(self.shape.draft_slots()) as usize;
        arrays(context, tables, &[("scores", &self.scores)])?;
        let candidates = [("candidate tokens", &self.candidate_tokens), ("candidate parents", &self.candidate_parents)];
        arrays(context, tables, &candidates)?;
        arrays(
            context,
            b * k,
            &[("beams", &self.beams), ("beam tokens", &self.tokens), ("beam parents", &self.parents)],
        )?;
        arrays(context, b * k * words, &[("ancestors", &self.ancestors)])?;
        arrays(context, b, &[("sound", &self.sound)])
    }
}

/// The operands of [`DraftSelect::launch`].
#[derive(Debug, Clone, Copy)]
pub struct DraftSelectOperands<'a> {
    /// This step, 0-based.
    pub step: u32,
    /// `[B, draft vocabulary]` in step 0, `[B * K, draft vocabulary]` later.
    pub logits: &'a Rows,
    /// Token of the target for each draft id (`id + d2t[id]`); `None` where they are the same.
    pub to_target: Option<&'a DeviceSlice<i32>>,
    /// The target's vocabulary.
    pub vocab: u32,
    /// An array whose last element counts the live requests; `None` where all are.
    pub live: Option<&'a DeviceSlice<i32>>,
    /// Written, and read from step 1 on.
    pub beams: &'a DeviceBeams,
    /// At least [`DraftSelect::scratch`] words, zero before the first launch; launches leave it ready for the next.
    pub scratch: &'a DeviceSlice<u64>,
}

impl DraftSelect {
    /// Load them into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("draft_select", context.capability())?)?;
        let [f32, bf16, f16] =
            ["draft_select_f32", "draft_select_bf16", "draft_select_f16"].map(|n| module.function(n));
        Ok(Self { functions: [f32?, bf16?, f16?], _module: module, context })
    }

    /// 64-bit words of scratch for rounds of up to `requests` requests.
    pub fn scratch(&self, shape: TreeShape, requests: usize, draft_vocab: usize) -> usize {
        let rows = requests * shape.topk() as usize;
        // Fewer rows are cut into more chunks: a step of one row a request may need more lists than later ones.
        let lists = |rows: usize| rows * chunks(rows, draft_vocab, self.context.multiprocessors());
        requests.div_ceil(2)
            + lists(rows).max(lists(requests)) * shape.topk() as usize
            + rows * draft_vocab.div_ceil(TILE)
    }

    /// The K best tokens of each row with their log-probabilities, and the K best beams of each request among their
    /// continuations, ties by lower index: [`DraftBeams::start`](crate::host::select::DraftBeams::start) for step 0,
    /// [`DraftBeams::advance`](crate::host::select::DraftBeams::advance) later. Choices by logit are the host's;
    /// log-probabilities agree to rounding (f32), and depend on their row alone.
    ///
    /// Logits without a distribution are recorded as [`Error::NonFinite`] (`draft logits`) and end the drafting of their
    /// request: `sound` stays behind, its beams go on as placeholders. Dead requests get token 0 and no ancestors.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for operands that do not fit each other; [`Error::OutOfRange`] for K above
    /// [`MAX_DEVICE_TOPK`], a step that the shape does not have, or a vocabulary that is too small or too large.
    pub fn launch(&self, stream: Stream, operands: &DraftSelectOperands<'_>) -> Result<()> {
        let o = operands;
        let (context, beams, shape) = (&self.context, o.beams, o.beams.shape);
        in_range("topk on a GPU", shape.topk(), 1, MAX_DEVICE_TOPK.into())?;
        in_range("draft step", o.step, 0, i128::from(shape.steps()) - 1)?;
        in_range("vocab", o.vocab, 1, MAX_VOCAB.into())?;
        beams.check(context)?;
        let (requests, draft_vocab) = (beams.requests(), o.logits.columns());
        in_range("draft vocabulary", draft_vocab as u64, shape.topk().into(), MAX_VOCAB.into())?;
        let rows = if o.step == 0 { requests } else { requests * shape.topk() as usize };
        in_range("rows of draft logits", rows as u64, 0, MAX_ROWS)?;
        o.logits.expect(rows, draft_vocab, o.logits.float())?;
        match o.to_target {
            Some(map) => arrays(context, draft_vocab, &[("to_target", map)])?,
            None if draft_vocab > o.vocab as usize => {
                return Err(Error::Mismatch {
                    operand: "draft logits",
                    got: format!("{draft_vocab} columns"),
                    want: format!("at most {}, the target's vocabulary, without to_target", o.vocab),
                });
            }
            None => {}
        }
        length("scratch", o.scratch.len(), self.scratch(shape, requests, draft_vocab), false)?;
        rows_on_device(context, &[o.logits])?;
        on_device(context, &[("scratch", o.scratch.device())])?;
        let live = live_address(context, o.live)?;
        let read = [o.logits.span(), o.to_target.span(), o.live.span()];
        disjoint(&[&beams.spans(), &[o.scratch.span()]], &[&read])?;
        if requests == 0 {
            return Ok(());
        }
        let chunks = chunks(rows, draft_vocab, context.multiprocessors());
        let lists = o.scratch.address() + 8 * requests.div_ceil(2) as u64;
        let report = context.report(stream)?;
        let params = DraftSelectParams {
            logits: o.logits.address(),
            to_target: o.to_target.map_or(0, DeviceSlice::address),
            live,
            drafts: beams.drafts(),
            beams: beams.beams.address(),
            tokens: beams.tokens.address(),
            parents: beams.parents.address(),
            ancestors: beams.ancestors.address(),
            lists,
            partials: lists + 8 * (rows * chunks * shape.topk() as usize) as u64,
            counters: o.scratch.address(),
            report,
            logits_stride: o.logits.stride() as u64,
            requests: requests as i32, // limits above fit
            step: o.step as i32,
            draft_vocab: draft_vocab as i32,
            vocab: o.vocab as i32,
            chunks: chunks as i32,
            tiles: draft_vocab.div_ceil(TILE) as i32,
        };
        let function = match o.logits.float() {
            FloatType::F32 => self.functions[0],
            FloatType::Bf16 => self.functions[1],
            FloatType::F16 => self.functions[2],
        };
        let _current = context.enter()?;
        // SAFETY: the module is loaded for the process and its context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe { function.launch((chunks as u32, rows as u32, 1), BLOCK, stream, &params) }
    }
}

/// Blocks that share a row: enough to fill the GPU and to hold the row in registers, and not more than there are tiles for
/// their warps.
fn chunks(rows: usize, draft_vocab: usize, multiprocessors: u32) -> usize {
    let wanted = (multiprocessors as usize * BLOCKS_PER_MULTIPROCESSOR).div_ceil(rows.max(1));
    let of_warps = draft_vocab.div_ceil(TILE).div_ceil(BLOCK as usize / 32).max(1);
    wanted.clamp(of_warps.div_ceil(TURNS), of_warps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_fill_a_gpu_and_have_tiles_for_their_warps() {
        assert_eq!([1, 8, 64, 512].map(|rows| chunks(rows, 32_000, 132)), [8, 8, 8, 2]);
        assert_eq!([1, 8, 512, 4096].map(|rows| chunks(rows, 128_256, 132)), [32, 32, 8, 8]);
        assert_eq!([1, 4096, 4097].map(|vocab| chunks(1, vocab, 132)), [1, 1, 2]);
        assert_eq!(chunks(0, 5, 1), 1);
    }
}
