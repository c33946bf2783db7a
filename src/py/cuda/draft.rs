//! Launches of draft selection and of the kernels that make trees, on Python's tensors: of a head's candidates, and of
//! two trees.

use pyo3::prelude::*;

use super::device::StreamArg;
use super::operands::{Arg, Operands, import};
use crate::bounds::MAX_BATCH;
use crate::device::{
    Device, DeviceBeams, DeviceTrees, DraftSelectOperands, GivenTrees, TreeBuildOperands, TreeUniteOperands,
};
use crate::error::Result;
use crate::geometry;
use crate::py::arg::{Int, detached};
use crate::py::geometry::TreeShape;

/// The arrays of beams: operands from `first` on.
fn beams_from(o: &Operands, first: usize, shape: geometry::TreeShape, g: i32) -> Result<DeviceBeams> {
    Ok(DeviceBeams {
        shape,
        scores: o.slice(first, g)?,
        candidate_tokens: o.slice(first + 1, g)?,
        candidate_parents: o.slice(first + 2, g)?,
        beams: o.slice(first + 3, g)?,
        tokens: o.slice(first + 4, g)?,
        parents: o.slice(first + 5, g)?,
        ancestors: o.slice(first + 6, g)?,
        sound: o.slice(first + 7, g)?,
    })
}

/// One step of draft selection from logits [batch (* K), draft vocabulary]. `beams` are the arrays scores, candidate tokens and
/// parents, beams, their tokens and parents, ancestors (int64) and sound steps. `scratch` (int64) is 0 before the first
/// call; `_device_draft_scratch` says how long it is.
#[pyfunction]
#[pyo3(signature = (step, logits, to_target, vocab, live, shape, beams, scratch, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_draft_select(
    py: Python<'_>,
    step: Int,
    logits: Arg<'_, '_>,
    to_target: Option<Arg<'_, '_>>,
    vocab: Int,
    live: Option<Arg<'_, '_>>,
    shape: &Bound<'_, TreeShape>,
    beams: [Bound<'_, PyAny>; 8],
    scratch: Arg<'_, '_>,
    stream: StreamArg,
) -> PyResult<()> {
    let (step, vocab, shape) = (step.u32("step")?, vocab.u32("vocab")?, shape.get().0);
    let operands = import(
        &[("logits", Some(logits)), ("to_target", to_target), ("live", live)],
        &[
            ("scores", Some(&beams[0])),
            ("candidate_tokens", Some(&beams[1])),
            ("candidate_parents", Some(&beams[2])),
            ("beams", Some(&beams[3])),
            ("beam_tokens", Some(&beams[4])),
            ("beam_parents", Some(&beams[5])),
            ("ancestors", Some(&beams[6])),
            ("sound", Some(&beams[7])),
            ("scratch", Some(scratch)),
        ],
    )?;
    operands.launch(py, stream, |o, k, s, g| {
        let (to_target, live) = (o.maybe(1, g)?, o.maybe(2, g)?);
        k.draft_select.launch(
            s,
            &DraftSelectOperands {
                step,
                logits: &o.rows(0, g)?,
                to_target: to_target.as_ref(),
                vocab,
                live: live.as_ref(),
                beams: &beams_from(o, 3, shape, g)?,
                scratch: &o.slice(11, g)?,
            },
        )
    })
}

/// 64-bit words of scratch that `_device_draft_select` needs on CUDA device `ordinal` for rounds of up to `batch` requests.
#[pyfunction]
#[pyo3(signature = (shape, batch, draft_vocab, ordinal))]
pub(super) fn _device_draft_scratch(
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

/// The trees that a launch writes: operands from `first` on, masks last.
fn written(o: &Operands, first: usize, g: i32) -> Result<DeviceTrees> {
    Ok(DeviceTrees {
        offsets: o.slice(first, g)?,
        tokens: o.slice(first + 1, g)?,
        depths: o.slice(first + 2, g)?,
        parents: o.slice(first + 3, g)?,
        next_child: o.slice(first + 4, g)?,
        next_sibling: o.slice(first + 5, g)?,
        scores: o.slice(first + 6, g)?,
        masks: o.maybe(first + 7, g)?,
    })
}

/// Trees of a round's candidates: roots, max_depths and max_nodes (int32 [batch]), min_score (float32 [1]). `beams` as
/// for `_device_draft_select`; `trees` are the arrays offsets, tokens, depths, parents, next_child, next_sibling and
/// scores; `masks` (int64) their ancestor bits.
#[pyfunction]
#[pyo3(signature = (shape, beams, limits, min_score, live, trees, masks, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_tree_build(
    py: Python<'_>,
    shape: &Bound<'_, TreeShape>,
    beams: [Bound<'_, PyAny>; 8],
    limits: [Bound<'_, PyAny>; 3],
    min_score: Option<Arg<'_, '_>>,
    live: Option<Arg<'_, '_>>,
    trees: [Bound<'_, PyAny>; 7],
    masks: Option<Arg<'_, '_>>,
    stream: StreamArg,
) -> PyResult<()> {
    let shape = shape.get().0;
    let operands = import(
        &[
            ("scores", Some(&beams[0])),
            ("candidate_tokens", Some(&beams[1])),
            ("candidate_parents", Some(&beams[2])),
            ("beams", Some(&beams[3])),
            ("beam_tokens", Some(&beams[4])),
            ("beam_parents", Some(&beams[5])),
            ("ancestors", Some(&beams[6])),
            ("sound", Some(&beams[7])),
            ("roots", Some(&limits[0])),
            ("max_depths", Some(&limits[1])),
            ("max_nodes", Some(&limits[2])),
            ("min_score", min_score),
            ("live", live),
        ],
        &[
            ("offsets", Some(&trees[0])),
            ("tree tokens", Some(&trees[1])),
            ("depths", Some(&trees[2])),
            ("tree parents", Some(&trees[3])),
            ("next_child", Some(&trees[4])),
            ("next_sibling", Some(&trees[5])),
            ("tree scores", Some(&trees[6])),
            ("masks", masks),
        ],
    )?;
    operands.launch(py, stream, |o, k, s, g| {
        let (min_score, live) = (o.maybe(11, g)?, o.maybe(12, g)?);
        k.tree_build.launch(
            s,
            &TreeBuildOperands {
                beams: &beams_from(o, 0, shape, g)?,
                roots: &o.slice(8, g)?,
                max_depths: &o.slice(9, g)?,
                max_nodes: &o.slice(10, g)?,
                min_score: min_score.as_ref(),
                live: live.as_ref(),
                trees: &written(o, 13, g)?,
            },
        )
    })
}

/// One tree of two for each request: its root and the best nodes of `own` and of `other`, each the arrays offsets
/// (int32 [batch + 1]), tokens, parents and scores (float32) of batch * V entries. Equal paths are one node. `limits`
/// are the roots and max_nodes (int32 [batch]); `trees` and `masks` as for `_device_tree_build`; `origins` (int32) says
/// whose a node is, bit 0 of `own`, bit 1 of `other`.
#[pyfunction]
#[pyo3(signature = (shape, own, other, limits, live, trees, masks, origins, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_tree_unite(
    py: Python<'_>,
    shape: &Bound<'_, TreeShape>,
    own: [Bound<'_, PyAny>; 4],
    other: [Bound<'_, PyAny>; 4],
    limits: [Bound<'_, PyAny>; 2],
    live: Option<Arg<'_, '_>>,
    trees: [Bound<'_, PyAny>; 7],
    masks: Option<Arg<'_, '_>>,
    origins: Arg<'_, '_>,
    stream: StreamArg,
) -> PyResult<()> {
    let draft_tokens = shape.get().0.draft_tokens();
    let operands = import(
        &[
            ("own offsets", Some(&own[0])),
            ("own tokens", Some(&own[1])),
            ("own parents", Some(&own[2])),
            ("own scores", Some(&own[3])),
            ("other offsets", Some(&other[0])),
            ("other tokens", Some(&other[1])),
            ("other parents", Some(&other[2])),
            ("other scores", Some(&other[3])),
            ("roots", Some(&limits[0])),
            ("max_nodes", Some(&limits[1])),
            ("live", live),
        ],
        &[
            ("offsets", Some(&trees[0])),
            ("tree tokens", Some(&trees[1])),
            ("depths", Some(&trees[2])),
            ("tree parents", Some(&trees[3])),
            ("next_child", Some(&trees[4])),
            ("next_sibling", Some(&trees[5])),
            ("tree scores", Some(&trees[6])),
            ("masks", masks),
            ("origins", Some(origins)),
        ],
    )?;
    operands.launch(py, stream, |o, k, s, g| {
        let given = |first: usize| -> Result<GivenTrees> {
            Ok(GivenTrees {
                offsets: o.slice(first, g)?,
                tokens: o.slice(first + 1, g)?,
                parents: o.slice(first + 2, g)?,
                scores: o.slice(first + 3, g)?,
            })
        };
        let live = o.maybe(10, g)?;
        k.tree_unite.launch(
            s,
            &TreeUniteOperands {
                draft_tokens,
                own: &given(0)?,
                other: &given(4)?,
                roots: &o.slice(8, g)?,
                max_nodes: &o.slice(9, g)?,
                live: live.as_ref(),
                trees: &written(o, 11, g)?,
                origins: &o.slice(19, g)?,
            },
        )
    })
}
