//! Launches of draft selection and of the kernels that make trees, on Python's tensors: of a head's candidates, and of
//! two trees.

use pyo3::prelude::*;

use super::device::StreamArg;
use super::operands::{Arg, BeamArrays, BuiltTrees, Operands, ScoredTrees};
use crate::bounds::MAX_BATCH;
use crate::device::{Device, DraftSelectOperands, TreeBuildOperands, TreeUniteOperands};
use crate::py::arg::{Int, detached};
use crate::py::geometry::TreeShape;

register! { fn _device_draft_scratch, _device_draft_select, _device_tree_build, _device_tree_unite; }

/// One step of draft selection from logits [batch (* K), draft vocabulary]; writes `beams` (`BeamArrays`). `scratch` (int64)
/// is 0 before the first call; `_device_draft_scratch` says how long it is.
#[pyfunction]
#[pyo3(signature = (*, step, logits, to_target, vocab, live, shape, beams, scratch, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_draft_select<'py>(
    py: Python<'py>,
    step: Int,
    logits: Arg<'_, 'py>,
    to_target: Option<Arg<'_, 'py>>,
    vocab: Int,
    live: Option<Arg<'_, 'py>>,
    shape: &Bound<'_, TreeShape>,
    beams: BeamArrays<'py>,
    scratch: Arg<'_, 'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let (step, vocab, shape) = (step.u32("step")?, vocab.u32("vocab")?, shape.get().0);
    let mut call = Operands::named();
    let (logits, to_target) = (call.reads("logits", logits), call.reads("to_target", to_target));
    let live = call.reads("live", live);
    let beams = beams.written(&mut call, shape);
    let scratch = call.writes("scratch", scratch);
    call.launch(py, stream, |o, k, s, g| {
        let (to_target, live) = (o.maybe(to_target, g)?, o.maybe(live, g)?);
        k.draft_select.launch(
            s,
            &DraftSelectOperands {
                step,
                logits: &o.rows(logits, g)?,
                to_target: to_target.as_ref(),
                vocab,
                live: live.as_ref(),
                beams: &beams(o, g)?,
                scratch: &o.slice(scratch, g)?,
            },
        )
    })
}

/// 64-bit words of scratch that `_device_draft_select` needs on CUDA device `ordinal` for rounds of up to `batch` requests.
#[pyfunction]
#[pyo3(signature = (shape, batch, draft_vocab, ordinal))]
fn _device_draft_scratch(
    py: Python<'_>,
    shape: &Bound<'_, TreeShape>,
    batch: Int,
    draft_vocab: Int,
    ordinal: Int,
) -> PyResult<usize> {
    let (batch, columns) = (batch.within("batch", 0, MAX_BATCH.into())?, draft_vocab.u32("draft_vocab")?);
    let (shape, ordinal) = (shape.get().0, ordinal.i32("CUDA device")?);
    detached(py, move || {
        let kernels = Device::get(ordinal)?.kernels();
        Ok(kernels.draft_select.scratch(shape, batch as usize, columns as usize))
    })
}

/// Trees of a round's candidates, which are in `beams` (`BeamArrays`): into `trees` (`BuiltTrees`) and, where they are given,
/// their ancestor bits `masks` (int64). `roots`, `max_depths` and `max_nodes` are int32 [batch], `min_score` float32 [1].
#[pyfunction]
#[pyo3(signature = (*, shape, beams, roots, max_depths, max_nodes, min_score, live, trees, masks, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_tree_build<'py>(
    py: Python<'py>,
    shape: &Bound<'_, TreeShape>,
    beams: BeamArrays<'py>,
    roots: Arg<'_, 'py>,
    max_depths: Arg<'_, 'py>,
    max_nodes: Arg<'_, 'py>,
    min_score: Option<Arg<'_, 'py>>,
    live: Option<Arg<'_, 'py>>,
    trees: BuiltTrees<'py>,
    masks: Option<Arg<'_, 'py>>,
    stream: StreamArg,
) -> PyResult<()> {
    let shape = shape.get().0;
    let mut call = Operands::named();
    let beams = beams.read(&mut call, shape);
    let (roots, max_depths) = (call.reads("roots", roots), call.reads("max_depths", max_depths));
    let (max_nodes, min_score) = (call.reads("max_nodes", max_nodes), call.reads("min_score", min_score));
    let live = call.reads("live", live);
    let trees = trees.written(&mut call, masks);
    call.launch(py, stream, |o, k, s, g| {
        let (min_score, live) = (o.maybe(min_score, g)?, o.maybe(live, g)?);
        k.tree_build.launch(
            s,
            &TreeBuildOperands {
                beams: &beams(o, g)?,
                roots: &o.slice(roots, g)?,
                max_depths: &o.slice(max_depths, g)?,
                max_nodes: &o.slice(max_nodes, g)?,
                min_score: min_score.as_ref(),
                live: live.as_ref(),
                trees: &trees(o, g)?,
            },
        )
    })
}

/// One tree of two for each request: its root and the best nodes of `own` and of `other`, each offsets (int32 [batch + 1]),
/// tokens, parents and scores (float32) of batch * V entries (`ScoredTrees`, or `BuiltTrees`). Equal paths are one node.
/// `roots` and `max_nodes` are int32 [batch]; `trees` and `masks` as for `_device_tree_build`; `origins` (int32) says whose a
/// node is, bit 0 of `own`, bit 1 of `other`.
#[pyfunction]
#[pyo3(signature = (*, shape, own, other, roots, max_nodes, live, trees, masks, origins, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_tree_unite<'py>(
    py: Python<'py>,
    shape: &Bound<'_, TreeShape>,
    own: ScoredTrees<'py>,
    other: ScoredTrees<'py>,
    roots: Arg<'_, 'py>,
    max_nodes: Arg<'_, 'py>,
    live: Option<Arg<'_, 'py>>,
    trees: BuiltTrees<'py>,
    masks: Option<Arg<'_, 'py>>,
    origins: Arg<'_, 'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let draft_tokens = shape.get().0.draft_tokens();
    let mut call = Operands::named();
    let own = own.read(&mut call, ["own offsets", "own tokens", "own parents", "own scores"]);
    let other = other.read(&mut call, ["other offsets", "other tokens", "other parents", "other scores"]);
    let (roots, max_nodes) = (call.reads("roots", roots), call.reads("max_nodes", max_nodes));
    let live = call.reads("live", live);
    let trees = trees.written(&mut call, masks);
    let origins = call.writes("origins", origins);
    call.launch(py, stream, |o, k, s, g| {
        let live = o.maybe(live, g)?;
        k.tree_unite.launch(
            s,
            &TreeUniteOperands {
                draft_tokens,
                own: &own(o, g)?,
                other: &other(o, g)?,
                roots: &o.slice(roots, g)?,
                max_nodes: &o.slice(max_nodes, g)?,
                live: live.as_ref(),
                trees: &trees(o, g)?,
                origins: &o.slice(origins, g)?,
            },
        )
    })
}
