//! Lists of a block drafter's levels, and the trees of them; over [`crate::draft`].

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use super::arg::{Int, detached, i32s, same_len, u32s};
use super::dlpack::{Array, Tensor};
use super::trees::{TreeBatch, merged_trees};
use crate::bounds::MAX_TOPK;
use crate::draft::{ListBeams, Lists, MergeLimits, MergedDrafts, list_tree};
use crate::error::{Error, Result, in_range};
use crate::host::select::TopK;

/// The likeliest tokens of each level of a batch's blocks, best first, with their log-probabilities.
///
/// `logits` are float32 [rows, draft vocabulary]: `levels[i]` rows of request i, which may be none. `width` tokens of
/// each are listed, or as many as there are; `target_ids` (int64 [draft vocabulary]) are these in the target's
/// vocabulary, `None` where both share one. A request with a row that has no distribution (NaN, +inf, no finite value), or
/// with a bias that is not finite, is one of `faults` and gets only its root.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct DraftLists {
    ids: Vec<u32>,
    tokens: Vec<i32>,
    log_probs: Vec<f32>,
    width: usize,
    levels: Vec<u32>,
    /// First row of each request, and the end of the last one's.
    starts: Vec<usize>,
    faults: Vec<Error>,
    /// Beams of the requests that have levels and no fault, once they have begun.
    beams: Mutex<Option<Beams>>,
}

/// The beams of a batch.
struct Beams {
    width: usize,
    /// One of each request that has levels.
    each: Vec<(usize, ListBeams)>,
    level: u32,
    /// Requests whose biases were no numbers.
    faults: Vec<Error>,
}

impl Beams {
    /// Rows of a request: the root before the first level.
    fn rows(&self) -> usize {
        if self.level == 0 { 1 } else { self.width }
    }
}

impl DraftLists {
    fn beams(&self) -> MutexGuard<'_, Option<Beams>> {
        self.beams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The levels of request `i`, or `of` them alone.
    fn lists(&self, i: usize, of: Option<u32>) -> Lists<'_> {
        let rows = of.map_or(self.starts[i]..self.starts[i + 1], |level| {
            let row = self.starts[i] + level as usize;
            row..row + 1
        });
        let range = rows.start * self.width..rows.end * self.width;
        Lists { tokens: &self.tokens[range.clone()], log_probs: &self.log_probs[range], width: self.width }
    }

    /// The array of a number of each beam's row, padded with 0.
    fn rows_of(&self, number: impl Fn(&ListBeams) -> Vec<i32>) -> PyResult<Array> {
        let state = self.beams();
        let beams = state.as_ref().ok_or_else(not_begun)?;
        let mut all = vec![0; beams.each.len() * beams.rows()];
        for ((_, one), row) in beams.each.iter().zip(all.chunks_exact_mut(beams.rows())) {
            row.iter_mut().zip(number(one)).for_each(|(to, n)| *to = n);
        }
        Ok(Array::new(&all, &[beams.each.len(), beams.rows()])?)
    }
}

/// First row of each request, and the end of the last one's.
fn starts_of(levels: &[u32]) -> Vec<usize> {
    let mut starts = vec![0; levels.len() + 1];
    for (i, &count) in levels.iter().enumerate() {
        starts[i + 1] = starts[i] + count as usize;
    }
    starts
}

/// A listed id as the target's token.
fn target_token(map: Option<&[i64]>, id: u32) -> Result<i32> {
    map.map_or(Ok(id as i32), |map| in_range("target id", map[id as usize], 0, i128::from(i32::MAX)).map(|t| t as i32))
}

/// True if one of `faults` is of request `i`.
fn is_faulty(faults: &[Error], i: usize) -> bool {
    faults.iter().any(|fault| matches!(fault, Error::NonFinite { request, .. } if *request == i as i64))
}

fn not_begun() -> Error {
    Error::Invalid { what: "beams", got: "none".into(), why: "`begin` begins them".into() }
}

#[pymethods]
impl DraftLists {
    #[new]
    #[pyo3(signature = (logits, levels, width, target_ids=None))]
    fn new(
        py: Python<'_>,
        logits: &Bound<'_, PyAny>,
        levels: Vec<Int>,
        width: Int,
        target_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let levels = u32s("levels", &levels)?;
        let width = width.within("width", 1, MAX_TOPK.into())? as usize;
        let logits = Tensor::import(logits, "draft logits", None)?;
        let shape @ [rows, vocab] = logits.dims("shape [levels of all requests, draft vocabulary]")?;
        same_len("draft logits", rows, "the levels", levels.iter().map(|&n| n as usize).sum())?;
        let map = Tensor::import_option(target_ids, "target ids")?;
        let map = map.as_ref().map(|t| t.input::<i64>(&[vocab])).transpose()?;
        let logits = logits.input(&shape)?;
        detached(py, || {
            let width = width.min(vocab);
            let mut top = TopK::default();
            top.compute(logits, vocab, width)?;
            let tokens = top.ids().iter().map(|&id| target_token(map, id)).collect::<Result<Vec<_>>>()?;
            let starts = starts_of(&levels);
            let mut faults: Vec<Error> = Vec::new();
            let mut last = None;
            for (row, fault) in top.faults() {
                let request = starts.partition_point(|&start| start <= row) - 1;
                if last.replace(request) != Some(request) {
                    faults.push(match fault {
                        Error::NonFinite { what, value, row, position, index, .. } => {
                            Error::NonFinite { what, value, request: request as i64, row, position, index }
                        }
                        fault => fault,
                    });
                }
            }
            let (ids, log_probs) = (top.ids().to_vec(), top.log_probs().to_vec());
            Ok(Self { ids, tokens, log_probs, width, levels, starts, faults, beams: Mutex::default() })
        })
    }

    /// The lists that a device has made: `ids` (int32) and `log_probs` (float32), [rows, width] each; a row whose `sound`
    /// (int32 [rows]) is 0 has no distribution.
    #[staticmethod]
    #[pyo3(signature = (ids, log_probs, sound, levels, target_ids=None))]
    fn of(
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        log_probs: &Bound<'_, PyAny>,
        sound: &Bound<'_, PyAny>,
        levels: Vec<Int>,
        target_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let levels = u32s("levels", &levels)?;
        let starts = starts_of(&levels);
        let rows = starts[levels.len()];
        let ids = Tensor::import(ids, "ids", None)?;
        let [listed, width] = ids.dims("shape [levels of all requests, width]")?;
        same_len("lists", listed, "the levels", rows)?;
        in_range("width", width as u64, 1, MAX_TOPK.into())?;
        let log_probs = Tensor::import(log_probs, "log-probabilities", None)?;
        let sound = Tensor::import(sound, "sound", None)?;
        let map = Tensor::import_option(target_ids, "target ids")?;
        let vocab =
            map.as_ref().map(|t| t.dims("shape [draft vocabulary]")).transpose()?.map_or(i32::MAX as usize, |[n]| n);
        let map = map.as_ref().map(|t| t.input::<i64>(&[vocab])).transpose()?;
        let (ids, sound) = (ids.input::<i32>(&[rows, width])?, sound.input::<i32>(&[rows])?);
        let log_probs = log_probs.input::<f32>(&[rows, width])?;
        detached(py, || {
            let good = |&id: &i32| in_range("listed token", id, 0, vocab as i128 - 1).map(|id| id as u32);
            let ids = ids.iter().map(good).collect::<Result<Vec<_>>>()?;
            let tokens = ids.iter().map(|&id| target_token(map, id)).collect::<Result<Vec<_>>>()?;
            let log_probs = log_probs.iter().map(|p| p.min(0.0)).collect(); // sums in f32 may exceed 1
            let mut faults = Vec::new();
            for (request, rows) in starts.windows(2).enumerate() {
                if let Some(row) = (rows[0]..rows[1]).find(|&row| sound[row] == 0) {
                    let (request, row, what, value) = (request as i64, row as i64, "draft logits", "not finite");
                    faults.push(Error::NonFinite { what, value, request, row, position: -1, index: -1 });
                }
            }
            Ok(Self { ids, tokens, log_probs, width, levels, starts, faults, beams: Mutex::default() })
        })
    }

    /// Listed tokens in the draft's vocabulary, int32 [rows, width].
    #[getter]
    fn ids(&self) -> PyResult<Array> {
        Ok(Array::new(bytemuck::cast_slice::<u32, i32>(&self.ids), &[self.ids.len() / self.width, self.width])?)
    }

    /// A `NonFiniteError` for each request that has no drafts, with `request` (its place in the batch), and `row` and
    /// `index` into the logits.
    #[getter]
    fn faults(&self) -> Vec<PyErr> {
        let later = self.beams().as_ref().map_or(Vec::new(), |beams| beams.faults.clone());
        self.faults.iter().cloned().chain(later).map(PyErr::from).collect()
    }

    /// Begin beams below the tokens `roots`, one of each request: of up to `width` prefixes a request, by which `advance`
    /// makes the lists of a level depend on the path. Those with levels and without a fault have beams; returns their
    /// places.
    fn begin(&self, roots: Vec<Int>, width: Int) -> PyResult<Vec<usize>> {
        same_len("roots", roots.len(), "the batch", self.levels.len())?;
        let (roots, width) = (i32s("root token", &roots)?, width.usize("width")?);
        let able = |i: &usize| self.levels[*i] > 0 && !is_faulty(&self.faults, *i);
        let each = (0..roots.len()).filter(able).map(|i| Ok((i, ListBeams::new(roots[i], width)?)));
        let beams = Beams { width, each: each.collect::<Result<_>>()?, level: 0, faults: Vec::new() };
        let places = beams.each.iter().map(|one| one.0).collect();
        *self.beams() = Some(beams);
        Ok(places)
    }

    /// Token of each beam, int32 [requests with beams, width]; the root alone before the first level. 0 where there are
    /// fewer beams.
    #[getter]
    fn tokens(&self) -> PyResult<Array> {
        self.rows_of(|one| one.tokens().collect())
    }

    /// Place of each beam's parent among the beams of the level before, as `tokens` has them.
    #[getter]
    fn parents(&self) -> PyResult<Array> {
        self.rows_of(|one| one.parents().iter().map(|&p| p as i32).collect())
    }

    /// Go one level on. `bias` is what each listed token's log-probability changes by behind each beam, float32 [requests
    /// with beams, beams of `tokens`, width of the lists]; that of beams that are not there does not count, nor that of
    /// requests without another level.
    fn advance(&self, py: Python<'_>, bias: &Bound<'_, PyAny>) -> PyResult<()> {
        let bias = Tensor::import(bias, "bias", None)?;
        let mut state = self.beams();
        let beams = state.as_mut().ok_or_else(not_begun)?;
        let (rows, level) = (beams.rows(), beams.level);
        let bias = bias.input::<f32>(&[beams.each.len(), rows, self.width])?;
        detached(py, || {
            for ((i, one), bias) in beams.each.iter_mut().zip(bias.chunks_exact(rows * self.width)) {
                if level >= self.levels[*i] || is_faulty(&beams.faults, *i) {
                    continue;
                }
                let there = one.tokens().len();
                let bias = &bias[..there * self.width];
                if let Some(at) = bias.iter().position(|b| !b.is_finite()) {
                    let value = if bias[at].is_nan() { "NaN" } else { "infinite" };
                    let (request, row) = (*i as i64, i64::from(level));
                    let what = "draft bias";
                    beams.faults.push(Error::NonFinite { what, value, request, row, position: -1, index: at as i64 });
                    continue;
                }
                one.advance(self.lists(*i, Some(level)), bias)?;
            }
            beams.level += 1;
            Ok(())
        })
    }

    /// The best trees below the tokens `roots`, of at most `nodes` nodes each, root included: of the lists, or of the
    /// beams if they have begun. The deepest path stands first, and no path has more than `off_spine` nodes off it; nodes
    /// of a score below `min_score` are left out.
    #[pyo3(signature = (roots, nodes, *, off_spine=Int::EIGHT, min_score=None))]
    #[pyo3(text_signature = "($self, roots, nodes, *, off_spine=8, min_score=None)")]
    fn trees(
        &self,
        py: Python<'_>,
        roots: Vec<Int>,
        nodes: Int,
        off_spine: Int,
        min_score: Option<f32>,
    ) -> PyResult<TreeBatch> {
        same_len("roots", roots.len(), "the batch", self.levels.len())?;
        let roots = i32s("root token", &roots)?;
        let (nodes, off_spine) = (nodes.u32("nodes")?, off_spine.u32("off_spine")?);
        let limits = MergeLimits {
            off_spine,
            min_score: min_score.unwrap_or(f32::NEG_INFINITY),
            ..MergeLimits::new(nodes, crate::bounds::MAX_DRAFT_TOKENS)
        };
        detached(py, || {
            let state = self.beams();
            let tree = |(i, &root): (usize, &i32)| -> Result<MergedDrafts> {
                let later = state.as_ref().map_or(&[][..], |beams| &beams.faults);
                let faulty = is_faulty(&self.faults, i) || is_faulty(later, i);
                if let Some(beams) = &*state
                    && !faulty
                    && let Ok(at) = beams.each.binary_search_by_key(&i, |one| one.0)
                {
                    return beams.each[at].1.tree(limits);
                }
                let none = Lists { tokens: &[], log_probs: &[], width: self.width };
                list_tree(root, if faulty { none } else { self.lists(i, None) }, limits)
            };
            let trees = roots.iter().enumerate().map(tree).collect::<Result<Vec<_>>>()?;
            merged_trees(&trees.iter().collect::<Vec<_>>())
        })
        .map(TreeBatch)
    }

    fn __repr__(&self) -> String {
        format!("DraftLists(levels={:?}, width={})", self.levels, self.width)
    }
}
