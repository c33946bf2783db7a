//! Draft trees: beams while the draft model runs, and the trees of a batch: [`crate::host::select`],
//! [`crate::round`].

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use super::arg::{Int, check_entries, detached, guarded, i32s, same_len, u32s};
use super::dlpack::{Array, Call, Tensor};
use super::draft_merge::{DraftProposal, MergedDrafts};
use super::geometry::TreeShape;
use crate::draft;
use crate::error::Result;
use crate::host::select;
use crate::round;

/// The token trees of a batch, one for each request; the nodes of each request follow those of the request before. Node
/// 0 of each tree is its root; indices count within the request's own tree.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct TreeBatch(pub(super) round::TreeBatch);

#[pymethods]
impl TreeBatch {
    /// Trees of any shape, from a parent array (-1 for the root, `parents[i] < i`) and the tokens of each request;
    /// `scores` are cumulative log-probabilities, 0 for roots.
    #[staticmethod]
    #[pyo3(signature = (parents, tokens, scores=None))]
    fn from_parents(
        py: Python<'_>,
        parents: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        scores: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let lists = |what: &'static str, given: &Bound<'_, PyAny>| -> PyResult<Vec<Vec<i32>>> {
            check_entries(what, given)?;
            let lists: Vec<Vec<Int>> = given.extract()?;
            Ok(lists.iter().map(|list| i32s(what, list)).collect::<Result<_>>()?)
        };
        let (parents, tokens) = (lists("tree parent", parents)?, lists("tree token", tokens)?);
        scores.map_or(Ok(()), |scores| check_entries("tree score", scores))?;
        let scores: Option<Vec<Vec<f32>>> = scores.map(|scores| scores.extract()).transpose()?;
        detached(py, || match scores {
            None => round::TreeBatch::from_parents(&parents, &tokens),
            Some(scores) => round::TreeBatch::from_scored(&parents, &tokens, &scores),
        })
        .map(Self)
    }

    /// The trees of merged drafts, one a request, with their scores.
    #[staticmethod]
    fn from_drafts(py: Python<'_>, drafts: Vec<Py<MergedDrafts>>) -> PyResult<Self> {
        let each: Vec<_> = drafts.iter().map(|d| &d.get().0).collect();
        detached(py, || merged_trees(&each)).map(Self)
    }

    /// Trees from the arrays of a device, on the host: int32 `offsets` [B + 1], int32 `tokens` and `parents` and
    /// float32 `scores` of at least as many nodes; entries after the last are not read.
    #[staticmethod]
    fn from_arrays(
        py: Python<'_>,
        offsets: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        parents: &Bound<'_, PyAny>,
        scores: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let given = [("offsets", offsets), ("tree tokens", tokens), ("tree parents", parents), ("tree scores", scores)];
        let ([offsets, tokens, parents, scores], [], []) = Call::on_host().take(given, [], [])?;
        let (offsets, tokens, parents) = (offsets.line()?, tokens.line()?, parents.line()?);
        let scores = scores.line()?;
        detached(py, || round::TreeBatch::from_arrays(offsets, tokens, parents, scores)).map(Self)
    }

    /// Nodes of each tree.
    #[getter]
    fn sizes(&self) -> Vec<u32> {
        self.0.sizes().collect()
    }

    /// Token of each node, int32 [nodes].
    #[getter]
    fn tokens(&self) -> PyResult<Array> {
        Ok(Array::line(self.0.tokens())?)
    }

    /// Cumulative log-probability that its source gave each node, float32 [nodes]; 0 for roots, and for trees made
    /// without scores.
    #[getter]
    fn scores(&self) -> PyResult<Array> {
        Ok(Array::line(self.0.scores())?)
    }

    /// Depth of each node (0 for a root), int32 [nodes].
    #[getter]
    fn depths(&self) -> PyResult<Array> {
        Ok(Array::line(self.0.depths())?)
    }

    /// Parent of each node within its tree (-1 for a root), int32 [nodes].
    #[getter]
    fn parents(&self) -> PyResult<Array> {
        Ok(Array::line(self.0.parents())?)
    }

    /// The trees of a head as proposals, in which a node's probability is conditional on its parent and its class the tenth
    /// that this lies in; `None` for a root alone.
    fn proposals(&self, py: Python<'_>) -> PyResult<Vec<Option<DraftProposal>>> {
        guarded(py, || {
            let made = draft::Proposal::of_trees(&self.0);
            Ok(made.into_iter().map(|one| (!one.is_empty()).then_some(DraftProposal(one))).collect())
        })
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("TreeBatch(sizes={:?})", self.sizes())
    }
}

/// The trees of merged drafts, with their scores.
pub(super) fn merged_trees(each: &[&draft::MergedDrafts]) -> Result<round::TreeBatch> {
    let parents: Vec<_> = each.iter().map(|d| d.parents()).collect();
    let tokens: Vec<_> = each.iter().map(|d| d.tokens()).collect();
    let scores: Vec<_> = each.iter().map(|d| d.scores()).collect();
    round::TreeBatch::from_scored(&parents, &tokens, &scores)
}

/// Candidates and beams of a batch while the draft model runs: made once, for rounds of up to `max_batch` requests.
/// `vocab` is the target's vocabulary; `d2t` (int64 [draft vocabulary]) holds the offset to add to each draft id (the
/// EAGLE-3 format), `None` where both share one; only this constructor reads it.
///
/// Call `start(logits)` once a round, then `advance(logits)` after each forward of the draft model; after each call
/// `tokens` and `parents` are the next forward's input, K rows a request. Logits without a distribution (NaN, +inf, no
/// finite value) raise no error: their request stops drafting, see `faults`.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct DraftBeams {
    max_batch: usize,
    shape: crate::geometry::TreeShape,
    draft_vocab: usize,
    state: Mutex<select::DraftBeams>,
}

impl DraftBeams {
    /// The beams; waits for another thread's call on them.
    pub(super) fn state(&self) -> MutexGuard<'_, select::DraftBeams> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests of the round.
    pub(super) fn batch(&self) -> usize {
        self.state().batch()
    }
}

#[pymethods]
impl DraftBeams {
    #[new]
    #[pyo3(signature = (max_batch, shape, d2t, vocab))]
    fn new(
        py: Python<'_>,
        max_batch: Int,
        shape: &Bound<'_, TreeShape>,
        d2t: Option<&Bound<'_, PyAny>>,
        vocab: Int,
    ) -> PyResult<Self> {
        let max_batch = max_batch.within("max_batch", 0, crate::bounds::MAX_BATCH.into())? as usize;
        let (shape, vocab) = (shape.get().0, vocab.u32("vocab")?);
        select::check_batch(max_batch, shape)?;
        let d2t = Tensor::import_option(d2t, "d2t")?;
        let offsets = match &d2t {
            Some(t) => {
                let [n] = t.dims("shape [draft vocabulary]")?;
                Some(t.input::<i64>(&[n])?)
            }
            None => None,
        };
        let beams = detached(py, || select::DraftBeams::new(shape, vocab, offsets))?;
        Ok(Self { max_batch, shape, draft_vocab: beams.draft_vocab(), state: Mutex::new(beams) })
    }

    /// The tree shape.
    #[getter]
    fn shape(&self) -> TreeShape {
        TreeShape(self.shape)
    }

    /// Most requests of a round.
    #[getter]
    fn max_batch(&self) -> usize {
        self.max_batch
    }

    /// Requests of this round; 0 before `start`.
    #[getter(batch)]
    fn py_batch(&self) -> usize {
        self.batch()
    }

    /// Columns of a row of draft logits.
    #[getter]
    fn draft_vocab(&self) -> usize {
        self.draft_vocab
    }

    /// Steps done in this round; 0 before `start`.
    #[getter]
    fn steps_done(&self) -> usize {
        self.state().steps_done()
    }

    /// Begin a round of any batch up to `max_batch` from the logits at the roots, float32 [batch, draft vocabulary].
    fn start(&self, py: Python<'_>, logits: &Bound<'_, PyAny>) -> PyResult<()> {
        let logits = Tensor::import(logits, "draft logits", None)?;
        let [batch, _] = logits.dims("shape [batch, draft vocabulary]")?;
        if batch > self.max_batch {
            let most = format_args!("at most {} (max_batch)", self.max_batch);
            return Err(logits.mismatch(format_args!("{batch} rows"), most).into());
        }
        let rows = logits.input(&[batch, self.draft_vocab])?;
        detached(py, || self.state().start(rows))
    }

    /// Extend the tree by one step from the logits of the beams, float32 [batch * K, draft vocabulary].
    fn advance(&self, py: Python<'_>, logits: &Bound<'_, PyAny>) -> PyResult<()> {
        let logits = Tensor::import(logits, "draft logits", None)?;
        let rows = logits.input(&[self.batch() * self.shape.topk() as usize, self.draft_vocab])?;
        detached(py, || self.state().advance(rows))
    }

    /// Why requests of this round stopped drafting: a `NonFiniteError` each, with `request` (its row of the batch), and
    /// `row` and `index` into the logits. Such a request keeps the levels that were drafted before; if `start` met the
    /// fault, `finish` gives it only its root.
    #[getter]
    fn faults(&self) -> Vec<PyErr> {
        // Exceptions are made after the lock is released: an allocation may collect garbage, whose finalizers look at
        // these beams.
        let faults = self.state().faults().to_vec();
        faults.into_iter().map(PyErr::from).collect()
    }

    /// Token of each beam in the target's vocabulary, int32 [batch * K].
    #[getter]
    fn tokens(&self) -> PyResult<Array> {
        let tokens = Array::line(self.state().tokens());
        Ok(tokens?)
    }

    /// Row of the previous hidden states that each beam continues, int32 [batch * K]: the request after `start`,
    /// `request * K + beam` after `advance`.
    #[getter]
    fn parents(&self) -> PyResult<Array> {
        let parents = Array::line(self.state().parents());
        Ok(parents?)
    }

    /// True ancestors of each beam and itself, int64 [batch * K, words]: bit `b * S + s` is beam b of step s.
    #[getter]
    fn ancestors(&self) -> PyResult<Array> {
        let of = |state: &select::DraftBeams| {
            let bits: &[i64] = bytemuck::cast_slice(state.ancestors());
            Array::new(bits, &[bits.len() / state.mask_words().max(1), state.mask_words()])
        };
        let ancestors = of(&self.state());
        Ok(ancestors?)
    }

    /// Cumulative log-probabilities of the beams of each request, best first.
    fn scores(&self) -> Vec<Vec<f32>> {
        let state = self.state();
        (0..state.batch()).map(|i| state.beam_scores(i).collect()).collect()
    }

    /// The trees of the round so far: for request i the root `roots[i]` and the best candidates by cumulative
    /// log-probability, of depth <= `max_depths[i]`, with at most `max_nodes[i]` nodes, root included, and none of a
    /// score below `min_score`. The round can go on or be finished again.
    #[pyo3(signature = (roots, max_depths, max_nodes, min_score=None))]
    fn finish(
        &self,
        py: Python<'_>,
        roots: Vec<Int>,
        max_depths: Vec<Int>,
        max_nodes: Vec<Int>,
        min_score: Option<f32>,
    ) -> PyResult<TreeBatch> {
        same_len("roots", roots.len(), "the batch", self.batch())?;
        let roots = i32s("root token", &roots)?;
        let (depths, nodes) = (u32s("max_depths", &max_depths)?, u32s("max_nodes", &max_nodes)?);
        let min_score = min_score.unwrap_or(f32::NEG_INFINITY);
        detached(py, || {
            let mut trees = round::TreeBatch::default();
            self.state().finish_above(&roots, &depths, &nodes, min_score, &mut trees)?;
            Ok(TreeBatch(trees))
        })
    }
}
