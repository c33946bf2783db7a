//! Launches of verification, sampling and commit on Python's tensors: how a round on a GPU decides.

use pyo3::prelude::*;

use super::device::StreamArg;
use super::operands::{Arg, import};
use crate::bounds::{MAX_BATCH, PageSize};
use crate::device::params::SamplerRow;
use crate::device::{
    CommitOperands, DeviceAccepts, DeviceSamplers, MovesView, SAMPLER_ROW_WORDS, VerifyMode, VerifyOperands,
    verify_scratch,
};
use crate::error::in_range;
use crate::py::arg::{Int, detached};
use crate::py::dlpack::Array;
use crate::py::sampling::{Sampler, with_samplers};

/// Most edits of a batch, 12 bytes each: a sampler may stand in the list again and again, so that nothing else bounds them.
const MAX_EDITS: i128 = 1 << 27;

/// Greedy verification of trees (tokens, parents, offsets) by logits [nodes, vocab]. `accepts` are the arrays offsets, paths,
/// tokens, rows, roots, new_lens and faults; `full` picks the mode that reads all rows. `scratch` (int64) is 0 before
/// the first call.
#[pyfunction]
#[pyo3(signature = (logits, trees, lens, live, max_nodes, max_path, accepts, scratch, full, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_verify_greedy(
    py: Python<'_>,
    logits: Arg<'_, '_>,
    trees: [Bound<'_, PyAny>; 3],
    lens: Arg<'_, '_>,
    live: Option<Arg<'_, '_>>,
    max_nodes: Int,
    max_path: Int,
    accepts: [Bound<'_, PyAny>; 7],
    scratch: Arg<'_, '_>,
    full: bool,
    stream: StreamArg,
) -> PyResult<()> {
    let (max_nodes, max_path) = (max_nodes.usize("max_nodes")?, max_path.usize("max_path")?);
    let operands = import(
        &[
            ("logits", Some(logits)),
            ("tree tokens", Some(&trees[0])),
            ("tree parents", Some(&trees[1])),
            ("offsets", Some(&trees[2])),
            ("lens", Some(lens)),
            ("live", live),
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
        let out = DeviceAccepts {
            offsets: o.slice(6, g)?,
            paths: o.slice(7, g)?,
            tokens: o.slice(8, g)?,
            rows: o.slice(9, g)?,
            roots: o.slice(10, g)?,
            new_lens: o.slice(11, g)?,
            faults: o.slice(12, g)?,
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
            scratch: &o.slice(13, g)?,
        };
        k.verify_greedy.launch(s, &operands, if full { VerifyMode::Full } else { VerifyMode::Walk })
    })
}

/// Sampling parameters and histories of a batch as the device reads them: rows (int64 [B, 6]), edit_begins and edit_counts (int32
/// [B]), edit_tokens (int32 [E]), edit_biases (float32 [E]), edit_outputs (int32 [E]).
#[pyfunction]
#[pyo3(signature = (samplers))]
pub(super) fn _device_samplers(py: Python<'_>, samplers: Vec<Bound<'_, Sampler>>) -> PyResult<[Array; 6]> {
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

/// 64-bit words of scratch that `_device_verify_greedy` needs.
#[pyfunction]
#[pyo3(signature = (nodes, batch, max_path))]
pub(super) fn _device_verify_scratch(py: Python<'_>, nodes: Int, batch: Int, max_path: Int) -> PyResult<usize> {
    let within = |what, n: Int| n.within(what, 0, i32::MAX.into()).map(|n| n as usize);
    let (nodes, batch, path) = (within("nodes", nodes)?, within("batch", batch)?, within("max_path", max_path)?);
    detached(py, move || Ok(verify_scratch(nodes, batch, path)))
}

/// Accepted paths (offsets, paths, new_lens) into the rows of the page table [rows, columns]: reordered where `moves` is
/// `None` (pages of one token), else as the moves src, dst, offsets of `_device_kv_move`.
#[pyfunction]
#[pyo3(signature = (accepts, table, rows, live, num_pages, page_size, max_nodes, moves, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_kv_commit(
    py: Python<'_>,
    accepts: [Bound<'_, PyAny>; 3],
    table: Arg<'_, '_>,
    rows: Arg<'_, '_>,
    live: Option<Arg<'_, '_>>,
    num_pages: Int,
    page_size: Int,
    max_nodes: Int,
    moves: Option<[Bound<'_, PyAny>; 3]>,
    stream: StreamArg,
) -> PyResult<()> {
    let (num_pages, max_nodes) = (num_pages.usize("num_pages")?, max_nodes.usize("max_nodes")?);
    let page = PageSize::new(page_size.u32("page_size")?)?;
    let [moves0, moves1, moves2] = match &moves {
        Some([src, dst, offsets]) => [Some(src), Some(dst), Some(offsets)],
        None => [None, None, None],
    };
    let operands = import(
        &[
            ("offsets", Some(&accepts[0])),
            ("paths", Some(&accepts[1])),
            ("new_lens", Some(&accepts[2])),
            ("rows", Some(rows)),
            ("live", live),
        ],
        &[("table", Some(table)), ("src", moves0), ("dst", moves1), ("move offsets", moves2)],
    )?;
    operands.launch(py, stream, |o, k, s, g| {
        let live = o.maybe(4, g)?;
        let operands = CommitOperands {
            offsets: &o.slice(0, g)?,
            paths: &o.slice(1, g)?,
            new_lens: &o.slice(2, g)?,
            table: &o.slice(5, g)?,
            table_width: o.columns(5)?,
            rows: &o.slice(3, g)?,
            live: live.as_ref(),
            num_pages,
            page,
            max_nodes,
        };
        match (o.maybe(6, g)?, o.maybe(7, g)?, o.maybe(8, g)?) {
            (Some(src), Some(dst), Some(offsets)) => {
                k.kv_commit.moves(s, &operands, &MovesView::new(src, dst, offsets)?)
            }
            _ => k.kv_commit.remap(s, &operands),
        }
    })
}
