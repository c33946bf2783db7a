//! Launches of the sampling kernels on Python's tensors: the engine's rounds on a GPU draw by them. As in `device_ops`.

use pyo3::prelude::*;

use super::arg::Int;
use super::device::StreamArg;
use super::dlpack::Array;
use super::sampling::Sampler;
#[cfg(feature = "cuda")]
use super::{arg::detached, device_ops::operands::import, sampling::with_samplers};
#[cfg(feature = "cuda")]
use crate::{
    bounds::MAX_BATCH,
    device::{DeviceAccepts, DeviceSamplers, SAMPLER_ROW_WORDS, VerifyMode, VerifyOperands, params::SamplerRow},
    error::in_range,
};

/// Most edits of a batch, 12 bytes each: a sampler may stand in the list again and again, so that nothing else bounds them.
#[cfg(feature = "cuda")]
const MAX_EDITS: i128 = 1 << 27;

/// A tensor argument.
type Arg<'a, 'py> = &'a Bound<'py, PyAny>;

/// Sampling parameters and histories of a batch as the device reads them: rows (int64 [B, 6]), edit_begins and edit_counts (int32
/// [B]), edit_tokens (int32 [E]), edit_biases (float32 [E]), edit_outputs (int32 [E]).
#[pyfunction]
#[pyo3(signature = (samplers))]
pub(super) fn _device_samplers(py: Python<'_>, samplers: Vec<Bound<'_, Sampler>>) -> PyResult<[Array; 6]> {
    #[cfg(feature = "cuda")]
    {
        let batch = samplers.len();
        in_range("samplers", batch as u64, 0, MAX_BATCH.into())?;
        let (mut rows, mut begins, mut counts) = (Vec::<i64>::new(), Vec::new(), Vec::new());
        let (mut tokens, mut biases, mut outputs) = (Vec::<i32>::new(), Vec::<f32>::new(), Vec::<i32>::new());
        with_samplers(&samplers, |sampler| {
            let edits = sampler.masked_edits();
            in_range("edits of all samplers", (tokens.len() + edits.tokens.len()) as u64, 0, MAX_EDITS)?;
            rows.extend(SamplerRow::of(sampler.config()).words().map(|w| w as i64));
            begins.push(tokens.len() as i32);
            counts.push(edits.tokens.len() as i32);
            tokens.extend(edits.tokens);
            biases.extend(edits.biases);
            outputs.extend(edits.outputs);
            Ok(())
        })?;
        detached(py, || {
            Ok([
                Array::new(&rows, &[batch, SAMPLER_ROW_WORDS])?,
                Array::line(&begins)?,
                Array::line(&counts)?,
                Array::line(&tokens)?,
                Array::line(&biases)?,
                Array::line(&outputs)?,
            ])
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = samplers;
        super::device_ops::absent(py)
    }
}

/// Sampling verification of trees (tokens, parents, offsets) by logits [nodes, vocab]. `samplers` are the arrays of
/// `_device_samplers`, `accepts`, `scratch` and `full` as for greedy
/// verification.
#[pyfunction]
#[pyo3(signature = (logits, trees, lens, live, max_nodes, max_path, samplers, accepts, scratch, full, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_sample_verify(
    py: Python<'_>,
    logits: Arg<'_, '_>,
    trees: [Bound<'_, PyAny>; 3],
    lens: Arg<'_, '_>,
    live: Option<Arg<'_, '_>>,
    max_nodes: Int,
    max_path: Int,
    samplers: [Bound<'_, PyAny>; 6],
    accepts: [Bound<'_, PyAny>; 7],
    scratch: Arg<'_, '_>,
    full: bool,
    stream: StreamArg,
) -> PyResult<()> {
    #[cfg(feature = "cuda")]
    {
        let (max_nodes, max_path) = (max_nodes.usize("max_nodes")?, max_path.usize("max_path")?);
        let operands = import(
            &[
                ("logits", Some(logits)),
                ("tree tokens", Some(&trees[0])),
                ("tree parents", Some(&trees[1])),
                ("offsets", Some(&trees[2])),
                ("lens", Some(lens)),
                ("live", live),
                ("sampler rows", Some(&samplers[0])),
                ("edit_begins", Some(&samplers[1])),
                ("edit_counts", Some(&samplers[2])),
                ("edit_tokens", Some(&samplers[3])),
                ("edit_biases", Some(&samplers[4])),
                ("edit_outputs", Some(&samplers[5])),
            ],
            &[
                ("out_offsets", Some(&accepts[0])),
                ("paths", Some(&accepts[1])),
                ("path_tokens", Some(&accepts[2])),
                ("path_rows", Some(&accepts[3])),
                ("roots", Some(&accepts[4])),
                ("new_lens", Some(&accepts[5])),
                ("faults", Some(&accepts[6])),
                ("scratch", Some(scratch)),
            ],
        )?;
        operands.launch(py, stream, |o, k, s, g| {
            let live = o.maybe(5, g)?;
            let samplers = DeviceSamplers {
                rows: o.slice(6, g)?,
                edit_begins: o.slice(7, g)?,
                edit_counts: o.slice(8, g)?,
                edit_tokens: o.slice(9, g)?,
                edit_biases: o.slice(10, g)?,
                edit_outputs: o.slice(11, g)?,
            };
            let out = DeviceAccepts {
                offsets: o.slice(12, g)?,
                paths: o.slice(13, g)?,
                tokens: o.slice(14, g)?,
                rows: o.slice(15, g)?,
                roots: o.slice(16, g)?,
                new_lens: o.slice(17, g)?,
                faults: o.slice(18, g)?,
            };
            let operands = VerifyOperands {
                logits: &o.rows(0, g)?,
                tree_tokens: &o.slice(1, g)?,
                tree_parents: &o.slice(2, g)?,
                offsets: &o.slice(3, g)?,
                lens: &o.slice(4, g)?,
                live: live.as_ref(),
                max_nodes,
                max_path,
                out: &out,
                scratch: &o.slice(19, g)?,
            };
            let mode = if full { VerifyMode::Full } else { VerifyMode::Walk };
            k.sample_verify.launch(s, &operands, &samplers, mode)
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        _ = (logits, trees, lens, live, max_nodes, max_path, samplers, accepts, scratch, full, stream);
        super::device_ops::absent(py)
    }
}
