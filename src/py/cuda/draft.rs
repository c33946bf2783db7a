//! Launches of draft selection and of the kernels that make trees, on Python's tensors: of a head's candidates, of lists
//! of levels, and of two trees.

use pyo3::prelude::*;

use super::device::StreamArg;
use super::operands::{Arg, BeamArrays, BlockArrays, BuiltTrees, ListArrays, Operands, ScoredTrees};
use crate::bounds::MAX_BATCH;
use crate::device::{
    BlockRowsOperands, Device, DraftSelectOperands, ListBeamsOperands, TreeBuildOperands, TreeListsOperands,
    TreeUniteOperands,
};
use crate::py::arg::{Int, detached};
use crate::py::geometry::TreeShape;

register! {
    fn _device_draft_scratch, _device_draft_select, _device_tree_build, _device_tree_unite, _device_block_rows,
        _device_tree_lists, _device_list_beams;
}

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

/// The rows of the blocks of a batch (`BlockArrays`, written): a request's root (`roots`) and `mask_token` behind it, `rows` of
/// them, or as many as there are positions behind its `lens` in `context`; none where `depths` is 0. The first level is
/// predicted by the row behind `skipped` others, or with -1 by none; then all rows have `mask_token`. All are int32 [batch],
/// `heats` float32 [batch]. A tree has at most `most` nodes, and as many as `nodes` (int32 [batch]) says.
#[pyfunction]
#[pyo3(signature = (*, rows, skipped, context, most, mask_token, lens, roots, depths, nodes, heats, live, blocks, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_block_rows<'py>(
    py: Python<'py>,
    rows: Int,
    skipped: Int,
    context: Int,
    most: Int,
    mask_token: Int,
    lens: Arg<'_, 'py>,
    roots: Arg<'_, 'py>,
    depths: Arg<'_, 'py>,
    nodes: Arg<'_, 'py>,
    heats: Arg<'_, 'py>,
    live: Option<Arg<'_, 'py>>,
    blocks: BlockArrays<'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let (rows, skipped, context) = (rows.u32("rows")?, skipped.i32("skipped")?, context.u32("context")?);
    let (most, mask_token) = (most.u32("most")?, mask_token.u32("mask_token")?);
    let mut call = Operands::named();
    let (lens, roots, depths) = (call.reads("lens", lens), call.reads("roots", roots), call.reads("depths", depths));
    let (nodes, heats, live) = (call.reads("nodes", nodes), call.reads("heats", heats), call.reads("live", live));
    let offsets = call.writes("block offsets", &blocks.offsets);
    let tokens = call.writes("block tokens", &blocks.tokens);
    let masks = call.writes("block masks", &blocks.masks);
    let wanted = call.writes("wanted", &blocks.wanted);
    let row_heats = call.writes("row heats", &blocks.heats);
    let levels = call.writes("levels", &blocks.levels);
    let max_nodes = call.writes("most nodes", &blocks.nodes);
    call.launch(py, stream, |o, k, s, g| {
        let live = o.maybe(live, g)?;
        k.tree_lists.rows(
            s,
            &BlockRowsOperands {
                rows,
                skipped,
                context,
                most,
                mask_token,
                lens: &o.slice(lens, g)?,
                roots: &o.slice(roots, g)?,
                depths: &o.slice(depths, g)?,
                nodes: &o.slice(nodes, g)?,
                heats: &o.slice(heats, g)?,
                live: live.as_ref(),
                offsets: &o.slice(offsets, g)?,
                tokens: &o.slice(tokens, g)?,
                masks: &o.slice(masks, g)?,
                wanted: &o.slice(wanted, g)?,
                row_heats: &o.slice(row_heats, g)?,
                levels: &o.slice(levels, g)?,
                max_nodes: &o.slice(max_nodes, g)?,
            },
        )
    })
}

/// The best trees of the lists of levels (`ListArrays`), of at most `draft_tokens` nodes each: `DraftLists.trees` on the
/// device. `roots`, `max_depths` and `max_nodes` are int32 [batch]; `trees` and `masks` as for `_device_tree_build`; `sound`
/// (int32 [batch], written) is 0 of a request with a list without a distribution.
#[pyfunction]
#[pyo3(signature = (*, draft_tokens, width, lists, to_target, roots, max_depths, max_nodes, live, trees, masks, sound, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_tree_lists<'py>(
    py: Python<'py>,
    draft_tokens: Int,
    width: Int,
    lists: ListArrays<'py>,
    to_target: Option<Arg<'_, 'py>>,
    roots: Arg<'_, 'py>,
    max_depths: Arg<'_, 'py>,
    max_nodes: Arg<'_, 'py>,
    live: Option<Arg<'_, 'py>>,
    trees: BuiltTrees<'py>,
    masks: Option<Arg<'_, 'py>>,
    sound: Arg<'_, 'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let (draft_tokens, width) = (draft_tokens.u32("draft_tokens")?, width.u32("width")?);
    let mut call = Operands::named();
    let lists = lists.read(&mut call);
    let (to_target, roots) = (call.reads("to_target", to_target), call.reads("roots", roots));
    let (max_depths, max_nodes) = (call.reads("max_depths", max_depths), call.reads("max_nodes", max_nodes));
    let live = call.reads("live", live);
    let trees = trees.written(&mut call, masks);
    let sound = call.writes("sound", sound);
    call.launch(py, stream, |o, k, s, g| {
        let (to_target, live) = (o.maybe(to_target, g)?, o.maybe(live, g)?);
        k.tree_lists.lists(
            s,
            &TreeListsOperands {
                draft_tokens,
                width,
                lists: &lists(o, g)?,
                to_target: to_target.as_ref(),
                roots: &o.slice(roots, g)?,
                max_depths: &o.slice(max_depths, g)?,
                max_nodes: &o.slice(max_nodes, g)?,
                live: live.as_ref(),
                trees: &trees(o, g)?,
                sound: &o.slice(sound, g)?,
            },
        )
    })
}

/// The candidates of beams over the lists of levels (`ListArrays`) into `beams` (`BeamArrays`, of as many steps): a token's
/// log-probability changes by the product of its row of `behind` [draft vocabulary, rank] and that of the token before in
/// `before` [vocabulary, rank], times `heats` (float32 [batch * levels]). `weights` [batch * levels, rank] are factors on the
/// product's elements. If the lists are `closed`, no other token has a chance. `roots` and `max_depths` are int32 [batch].
#[pyfunction]
#[pyo3(signature = (*, shape, width, lists, heats, to_target, roots, max_depths, before, behind, weights, closed, live, beams, stream))]
#[allow(clippy::too_many_arguments, reason = "operands, passed by name")]
fn _device_list_beams<'py>(
    py: Python<'py>,
    shape: &Bound<'_, TreeShape>,
    width: Int,
    lists: ListArrays<'py>,
    heats: Arg<'_, 'py>,
    to_target: Option<Arg<'_, 'py>>,
    roots: Arg<'_, 'py>,
    max_depths: Arg<'_, 'py>,
    before: Arg<'_, 'py>,
    behind: Arg<'_, 'py>,
    weights: Option<Arg<'_, 'py>>,
    closed: bool,
    live: Option<Arg<'_, 'py>>,
    beams: BeamArrays<'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let (shape, width) = (shape.get().0, width.u32("width")?);
    let mut call = Operands::named();
    let lists = lists.read(&mut call);
    let (heats, to_target) = (call.reads("heats", heats), call.reads("to_target", to_target));
    let (roots, max_depths) = (call.reads("roots", roots), call.reads("max_depths", max_depths));
    let (before, behind, live) = (call.reads("before", before), call.reads("behind", behind), call.reads("live", live));
    let weights = call.reads("weights", weights);
    let beams = beams.written(&mut call, shape);
    call.launch(py, stream, |o, k, s, g| {
        let (to_target, live, weights) = (o.maybe(to_target, g)?, o.maybe(live, g)?, o.maybe_rows(weights, g)?);
        k.tree_lists.beams(
            s,
            &ListBeamsOperands {
                width,
                lists: &lists(o, g)?,
                heats: &o.slice(heats, g)?,
                to_target: to_target.as_ref(),
                roots: &o.slice(roots, g)?,
                max_depths: &o.slice(max_depths, g)?,
                before: &o.rows(before, g)?,
                behind: &o.rows(behind, g)?,
                weights: weights.as_ref(),
                closed,
                live: live.as_ref(),
                beams: &beams(o, g)?,
            },
        )
    })
}
