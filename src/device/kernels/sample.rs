//! The launch of `cuda/sample.cu`: the accepted path of each tree by tokens drawn from its rows of logits.

use std::sync::Arc;

use super::VerifyOperands;
use super::check::{length, on_device};
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::verify::{SampleParams, SamplerRow};
use crate::device::rows::FloatType;
use crate::device::view::DeviceSlice;
use crate::error::{Result, in_range};
use crate::overlap::{Operand, Span};
use crate::round::SamplerConfig;
use crate::round::weight::{Softmax, min_weight};

/// Largest vocabulary that the kernel draws from: its ranks hold ids of 18 bits.
pub const MAX_SAMPLED_VOCAB: usize = 1 << 18;
/// Threads and warps of a block: `THREADS` and `WARPS` of the kernel.
const THREADS: u32 = 512;
const WARPS: usize = THREADS as usize / 32;
/// Blocks of a request, where the GPU has clusters: the first of these of which all requests run at once, even where they hold
/// no whole row; else the last one that does.
const CLUSTERS: [u32; 4] = [16, 8, 4, 2];
/// Logits that a warp's lanes take at a time: `TURN` of the kernel.
const TURN: usize = 128;
/// Bytes of shared memory of a block beside the logits: no less than the kernel has.
const SHARED: u32 = 48 << 10;
/// 64-bit words of a [`SamplerRow`].
pub const SAMPLER_ROW_WORDS: usize = size_of::<SamplerRow>() / 8;

impl SamplerRow {
    /// The row of a request with this configuration, which was checked.
    pub fn of(config: &SamplerConfig) -> Self {
        let greedy = config.temperature == 0.0;
        Self {
            seed: config.seed,
            min_weight: min_weight(config.min_p),
            top_p: config.top_p.to_bits(),
            top_k: config.top_k.clamp(0, u32::MAX.into()) as u32,
            inv_t: if greedy { 0 } else { Softmax::new(0.0, config.temperature).inv_t().to_bits() },
            repetition: (config.repetition_penalty as f32).to_bits(),
            presence: (config.presence_penalty as f32).to_bits(),
            frequency: (config.frequency_penalty as f32).to_bits(),
            penalises: config.penalises().into(),
        }
    }

    /// The row as the words that a device reads.
    pub fn words(&self) -> [u64; SAMPLER_ROW_WORDS] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32; // CUDA is little-endian
        [
            self.seed,
            self.min_weight,
            self.top_p,
            pair(self.top_k, self.inv_t),
            pair(self.repetition, self.presence),
            pair(self.frequency, self.penalises),
        ]
    }
}

/// What the requests of a batch are drawn by, in device memory: B requests, E edits
/// ([`TokenEdits`](crate::round::TokenEdits)).
#[derive(Debug, Clone, Copy)]
pub struct DeviceSamplers {
    /// A [`SamplerRow`] a request, B * [`SAMPLER_ROW_WORDS`] words.
    pub rows: DeviceSlice<u64>,
    /// First edit of each request, B entries.
    pub edit_begins: DeviceSlice<i32>,
    /// Edits of each request, B entries.
    pub edit_counts: DeviceSlice<i32>,
    /// Tokens of the edits, ascending within a request, E entries.
    pub edit_tokens: DeviceSlice<i32>,
    /// Bias of each, 0 for none.
    pub edit_biases: DeviceSlice<f32>,
    /// Times that each is in the output; 0 where it is in the prompt alone, -1 where in neither.
    pub edit_outputs: DeviceSlice<i32>,
}

impl DeviceSamplers {
    /// The memory of all arrays.
    fn spans(&self) -> [Span; 6] {
        [
            self.rows.span(),
            self.edit_begins.span(),
            self.edit_counts.span(),
            self.edit_tokens.span(),
            self.edit_biases.span(),
            self.edit_outputs.span(),
        ]
    }
}

/// The kernels of `cuda/sample.cu` on one device, by element type: f32, bf16, f16. Functions are valid while `_module`
/// is loaded.
#[derive(Debug)]
pub struct SampleVerify {
    walk: [Function; 3],
    /// Clusters of each size of [`CLUSTERS`] that run at once; none on a GPU without clusters.
    at_once: Vec<u32>,
    /// Most logits that a warp holds.
    most: usize,
    _module: Module,
    context: Arc<Context>,
}

impl SampleVerify {
    /// Load them into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let image = images::select("sample", context.capability())?;
        let module = Module::load(image)?;
        let [f32, bf16, f16] = ["sample_walk_f32", "sample_walk_bf16", "sample_walk_f16"].map(|n| module.function(n));
        let walk = [f32?, bf16?, f16?];
        let room = context.shared_memory()?.0.saturating_sub(SHARED) as usize / (4 * WARPS);
        let most = room / TURN * TURN;
        for function in walk {
            function.allow_shared(shared_bytes(most))?;
            if image.exact {
                function.allow_large_clusters()?;
            }
        }
        // Registers leave a multiprocessor room for one block, however little of a row it holds.
        let clusters = if image.exact { &CLUSTERS[..] } else { &[] };
        let at_once = clusters.iter().map(|blocks| walk[0].clusters_at_once(THREADS, *blocks, shared_bytes(most)));
        let at_once = at_once.collect::<Result<_>>()?;
        Ok(Self { walk, at_once, most, _module: module, context })
    }

    /// Blocks of a request in a batch of `requests`, of which each warp has the stretch that `stretch_of` tells by their number.
    fn blocks(&self, requests: usize, stretch_of: impl Fn(u32) -> usize) -> u32 {
        let sizes = || CLUSTERS.iter().zip(&self.at_once).filter(|(_, at_once)| **at_once > 0);
        let fits = sizes().find(|(_, at_once)| requests <= **at_once as usize);
        let whole = || sizes().rev().find(|(blocks, _)| stretch_of(**blocks) <= self.most);
        fits.or_else(whole).map_or(1, |(blocks, _)| *blocks)
    }

    /// For each tree: from the root, draw the token of the node's row of logits as
    /// [`Sampler::draw`](crate::host::sample::Sampler::draw) does, go on at the first child that carries it, end where
    /// none does. The result is that of [`Verifier::verify`](crate::host::verify::Verifier::verify), token for token;
    /// temperature 0 is the argmax. Rows that no walk reaches are not read.
    ///
    /// A row on a walk from which nothing can be drawn ends its request's walk: recorded for
    /// [`Device::check`](crate::device::Device::check) as [`Error::NonFinite`](crate::Error::NonFinite) (`target logits`, or
    /// `target logits after logit_bias and penalties` where only those made it so), and noted in `out.faults`. Offsets
    /// and edits outside their arrays leave their request without a path, a path longer than `max_path` ends early;
    /// either is recorded.
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) for operands that do not fit each other;
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) for a limit that the kernel does not have, such as a vocabulary of
    /// more than [`MAX_SAMPLED_VOCAB`].
    pub fn launch(&self, stream: Stream, operands: &VerifyOperands<'_>, samplers: &DeviceSamplers) -> Result<()> {
        let (o, s, context) = (operands, samplers, &self.context);
        let live = o.check(context, &s.spans())?;
        let requests = o.lens.len();
        in_range("vocabulary", o.logits.columns() as u64, 1, MAX_SAMPLED_VOCAB as i128)?;
        length("sampler rows", s.rows.len(), requests * SAMPLER_ROW_WORDS, true)?;
        length("edit begins", s.edit_begins.len(), requests, true)?;
        length("edit counts", s.edit_counts.len(), requests, true)?;
        length("edit biases", s.edit_biases.len(), s.edit_tokens.len(), true)?;
        length("edit outputs", s.edit_outputs.len(), s.edit_tokens.len(), true)?;
        in_range("edits", s.edit_tokens.len() as u64, 0, i128::from(i32::MAX))?;
        on_device(
            context,
            &[
                ("sampler rows", s.rows.device()),
                ("edit begins", s.edit_begins.device()),
                ("edit counts", s.edit_counts.device()),
                ("edit tokens", s.edit_tokens.device()),
                ("edit biases", s.edit_biases.device()),
                ("edit outputs", s.edit_outputs.device()),
            ],
        )?;
        if requests == 0 {
            return Ok(());
        }
        let (float, wide) = match o.logits.float() {
            FloatType::F32 => (0, 4),
            FloatType::Bf16 => (1, 8),
            FloatType::F16 => (2, 8),
        };
        let stretch_of = |blocks| stretch(o.logits.columns(), wide, blocks);
        let blocks = self.blocks(requests, stretch_of);
        let piece = stretch_of(blocks).min(self.most);
        let params = SampleParams {
            verify: o.params(context, stream, live)?,
            samplers: s.rows.address(),
            edit_begins: s.edit_begins.address(),
            edit_counts: s.edit_counts.address(),
            edit_tokens: s.edit_tokens.address(),
            edit_biases: s.edit_biases.address(),
            edit_outputs: s.edit_outputs.address(),
            edits: s.edit_tokens.len() as i32,
            piece: piece as i32,
        };
        let _current = context.enter()?;
        let (function, shared) = (self.walk[float], shared_bytes(piece));
        // SAFETY: the module is loaded for the process and its context is current. Addresses and sizes come from views,
        // whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe {
            function.launch_in_clusters((requests as u32 * blocks, 1, 1), THREADS, (shared, blocks), stream, &params)
        }
    }
}

/// Logits of a warp's stretch of a row, of `wide` in 16 bytes: `stretch_of` of the kernel.
fn stretch(vocab: usize, wide: usize, blocks: u32) -> usize {
    (vocab + wide - 1).div_ceil(blocks as usize * WARPS).next_multiple_of(TURN)
}

/// Bytes of a block's dynamic shared memory where each warp holds `piece` logits.
fn shared_bytes(piece: usize) -> u32 {
    (4 * WARPS * piece) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_holds_what_the_host_draws_by() {
        let config = SamplerConfig {
            temperature: 0.5,
            top_k: i64::MAX,
            top_p: 0.25,
            min_p: 0.5,
            seed: u64::MAX - 1,
            repetition_penalty: 1.5,
            presence_penalty: -2.0,
            frequency_penalty: 3.0,
            logit_bias: vec![],
            allowed: None,
        };
        let row = SamplerRow::of(&config);
        let f = |bits: u32| f32::from_bits(bits);
        assert_eq!((row.seed, row.min_weight, f64::from_bits(row.top_p)), (u64::MAX - 1, 1 << 39, 0.25));
        assert_eq!((row.top_k, f(row.inv_t), row.penalises), (u32::MAX, 2.0, 1));
        assert_eq!((f(row.repetition), f(row.presence), f(row.frequency)), (1.5, -2.0, 3.0));
        let words = row.words();
        assert_eq!(words[3], u64::from(u32::MAX) | u64::from(2.0f32.to_bits()) << 32);
        assert_eq!(words[5], u64::from(3.0f32.to_bits()) | 1 << 32);
        let greedy = SamplerRow::of(&SamplerConfig::default());
        assert_eq!((greedy.inv_t, greedy.penalises, f64::from_bits(greedy.top_p)), (0, 0, 1.0));
        // A temperature whose inverse rounds to nothing is still no greedy one.
        let hot = SamplerRow::of(&SamplerConfig { temperature: 1e300, ..SamplerConfig::default() });
        assert!(f(hot.inv_t) > 0.0);
    }
}
