//! Launches of verification, sampling and commit on Python's tensors: how a round on a GPU decides.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::device::StreamArg;
use super::operands::{AcceptArrays, Arg, MoveArrays, Operands, SamplerArrays, TreeArrays};
use crate::bounds::{MAX_BATCH, PageSize};
use crate::device::params::verify::SamplerRow;
use crate::device::{CommitOperands, SAMPLER_ROW_WORDS, VerifyMode, VerifyOperands, verify_scratch};
use crate::error::in_range;
use crate::py::arg::{Int, detached};
use crate::py::dlpack::Array;
use crate::py::sampling::{Sampler, with_samplers};

register! {
    fn _device_kv_commit, _device_sample_verify, _device_samplers, _device_verify_greedy, _device_verify_scratch;
}

/// Most edits of a batch, 12 bytes each: a sampler may stand in the list again and again, so that nothing else bounds them.
const MAX_EDITS: i128 = 1 << 27;

/// Greedy verification of trees (`TreeArrays`) by logits [nodes, vocab]; writes `accepts` (`AcceptArrays`). `full` picks the
/// mode that reads all rows. `scratch` (int64) is 0 before the first call.
#[pyfunction]
#[pyo3(signature = (*, logits, trees, lens, live, max_nodes, max_path, accepts, scratch, full, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_verify_greedy<'py>(
    py: Python<'py>,
    logits: Arg<'_, 'py>,
    trees: TreeArrays<'py>,
    lens: Arg<'_, 'py>,
    live: Option<Arg<'_, 'py>>,
    max_nodes: Int,
    max_path: Int,
    accepts: AcceptArrays<'py>,
    scratch: Arg<'_, 'py>,
    full: bool,
    stream: StreamArg,
) -> PyResult<()> {
    let (max_nodes, max_path) = (max_nodes.usize("max_nodes")?, max_path.usize("max_path")?);
    let mut call = Operands::named();
    let (logits, lens, live) = (call.reads("logits", logits), call.reads("lens", lens), call.reads("live", live));
    let tree_tokens = call.reads("tree tokens", &trees.tokens);
    let tree_parents = call.reads("tree parents", &trees.parents);
    let offsets = call.reads("offsets", &trees.offsets);
    let accepts = accepts.written(&mut call);
    let scratch = call.writes("scratch", scratch);
    call.launch(py, stream, |o, k, s, g| {
        let (live, out) = (o.maybe(live, g)?, accepts(o, g)?);
        let operands = VerifyOperands {
            logits: &o.rows(logits, g)?,
            tree_tokens: &o.slice(tree_tokens, g)?,
            tree_parents: &o.slice(tree_parents, g)?,
            offsets: &o.slice(offsets, g)?,
            lens: &o.slice(lens, g)?,
            live: live.as_ref(),
            max_nodes,
            max_path,
            out: &out,
            scratch: &o.slice(scratch, g)?,
        };
        let mode = if full { VerifyMode::Full } else { VerifyMode::Walk };
        k.verify_greedy.launch(s, &operands, mode)
    })
}

/// Sampling parameters and histories of a batch as the device reads them, by the names of `SamplerArrays`: rows (int64
/// [B, 6]), edit_begins and edit_counts (int32 [B]), edit_tokens (int32 [E]), edit_biases (float32 [E]), edit_outputs (int32
/// [E]).
#[pyfunction]
#[pyo3(signature = (samplers))]
fn _device_samplers<'py>(py: Python<'py>, samplers: Vec<Bound<'py, Sampler>>) -> PyResult<Bound<'py, PyDict>> {
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
    let arrays = detached(py, || {
        Ok([
            ("rows", Array::new(&rows, &[batch, SAMPLER_ROW_WORDS])?),
            ("edit_begins", Array::line(&begins)?),
            ("edit_counts", Array::line(&counts)?),
            ("edit_tokens", Array::line(&tokens)?),
            ("edit_biases", Array::line(&biases)?),
            ("edit_outputs", Array::line(&outputs)?),
        ])
    })?;
    let by_name = PyDict::new(py);
    arrays.into_iter().try_for_each(|(name, array)| by_name.set_item(name, array))?;
    Ok(by_name)
}

/// Sampling verification: as `_device_verify_greedy`, by what tokens are drawn by, `samplers` (`SamplerArrays`), and
/// always along the walks alone.
#[pyfunction]
#[pyo3(signature = (*, logits, trees, lens, live, max_nodes, max_path, samplers, accepts, scratch, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_sample_verify<'py>(
    py: Python<'py>,
    logits: Arg<'_, 'py>,
    trees: TreeArrays<'py>,
    lens: Arg<'_, 'py>,
    live: Option<Arg<'_, 'py>>,
    max_nodes: Int,
    max_path: Int,
    samplers: SamplerArrays<'py>,
    accepts: AcceptArrays<'py>,
    scratch: Arg<'_, 'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let (max_nodes, max_path) = (max_nodes.usize("max_nodes")?, max_path.usize("max_path")?);
    let mut call = Operands::named();
    let (logits, lens, live) = (call.reads("logits", logits), call.reads("lens", lens), call.reads("live", live));
    let tree_tokens = call.reads("tree tokens", &trees.tokens);
    let tree_parents = call.reads("tree parents", &trees.parents);
    let offsets = call.reads("offsets", &trees.offsets);
    let samplers = samplers.read(&mut call);
    let accepts = accepts.written(&mut call);
    let scratch = call.writes("scratch", scratch);
    call.launch(py, stream, |o, k, s, g| {
        let (live, out) = (o.maybe(live, g)?, accepts(o, g)?);
        let operands = VerifyOperands {
            logits: &o.rows(logits, g)?,
            tree_tokens: &o.slice(tree_tokens, g)?,
            tree_parents: &o.slice(tree_parents, g)?,
            offsets: &o.slice(offsets, g)?,
            lens: &o.slice(lens, g)?,
            live: live.as_ref(),
            max_nodes,
            max_path,
            out: &out,
            scratch: &o.slice(scratch, g)?,
        };
        k.sample_verify.launch(s, &operands, &samplers(o, g)?)
    })
}

/// 64-bit words of scratch that `_device_verify_greedy` needs.
#[pyfunction]
#[pyo3(signature = (nodes, batch, max_path))]
fn _device_verify_scratch(py: Python<'_>, nodes: Int, batch: Int, max_path: Int) -> PyResult<usize> {
    let within = |what, n: Int| n.within(what, 0, i32::MAX.into()).map(|n| n as usize);
    let (nodes, batch, path) = (within("nodes", nodes)?, within("batch", batch)?, within("max_path", max_path)?);
    detached(py, move || Ok(verify_scratch(nodes, batch, path)))
}

/// Accepted paths into the rows of the page table [rows, columns]: reordered where `moves` is `None` (pages of one token),
/// else as the moves (`MoveArrays`) of `_device_kv_move`. `offsets`, `paths` and `new_lens` are those of `AcceptArrays`.
#[pyfunction]
#[pyo3(signature = (*, offsets, paths, new_lens, table, rows, live, num_pages, page_size, max_nodes, moves, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_kv_commit<'py>(
    py: Python<'py>,
    offsets: Arg<'_, 'py>,
    paths: Arg<'_, 'py>,
    new_lens: Arg<'_, 'py>,
    table: Arg<'_, 'py>,
    rows: Arg<'_, 'py>,
    live: Option<Arg<'_, 'py>>,
    num_pages: Int,
    page_size: Int,
    max_nodes: Int,
    moves: Option<MoveArrays<'py>>,
    stream: StreamArg,
) -> PyResult<()> {
    let (num_pages, max_nodes) = (num_pages.usize("num_pages")?, max_nodes.usize("max_nodes")?);
    let page = PageSize::new(page_size.u32("page_size")?)?;
    let mut call = Operands::named();
    let (offsets, paths) = (call.reads("offsets", offsets), call.reads("paths", paths));
    let (new_lens, rows, live) = (call.reads("new_lens", new_lens), call.reads("rows", rows), call.reads("live", live));
    let table = call.writes("table", table);
    let moves = moves.as_ref().map(|moves| moves.written(&mut call));
    call.launch(py, stream, |o, k, s, g| {
        let live = o.maybe(live, g)?;
        let operands = CommitOperands {
            offsets: &o.slice(offsets, g)?,
            paths: &o.slice(paths, g)?,
            new_lens: &o.slice(new_lens, g)?,
            table: &o.slice(table, g)?,
            table_width: o.columns(table)?,
            rows: &o.slice(rows, g)?,
            live: live.as_ref(),
            num_pages,
            page,
            max_nodes,
        };
        match &moves {
            Some(moves) => k.kv_commit.moves(s, &operands, &moves(o, g)?),
            None => k.kv_commit.remap(s, &operands),
        }
    })
}
