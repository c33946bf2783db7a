//! Proposals of drafters, their union in one tree, and their calibration; over [`crate::draft`].

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use super::arg::{Int, guarded, i32s, u32s};
use crate::draft::{self, MergeLimits};
use crate::error::{Result, in_range};

/// What a source of the core proposes: a tree below a request's last token, as `specrs.drafters.Proposal` describes it.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct DraftProposal(pub(super) draft::Proposal);

#[pymethods]
impl DraftProposal {
    /// Lists as `specrs.drafters.Proposal` has them, but for tokens, which nothing is known of here.
    #[new]
    #[pyo3(signature = (parents, tokens, probs, buckets=Vec::new()))]
    #[pyo3(text_signature = "(parents, tokens, probs, buckets=())")]
    fn new(parents: Vec<Int>, tokens: Vec<Int>, probs: Vec<f32>, buckets: Vec<Int>) -> PyResult<Self> {
        let made = draft::Proposal {
            parents: i32s("proposal parent", &parents)?,
            tokens: u32s("proposed token", &tokens)?,
            probs,
            buckets: self::buckets(&buckets, tokens.len())?,
        };
        made.check(u32::MAX)?;
        Ok(Self(made))
    }

    /// Index of each node's parent in this proposal; -1 for a child of the request's last token.
    #[getter]
    fn parents(&self) -> Vec<i32> {
        self.0.parents.clone()
    }

    /// Token of each node.
    #[getter]
    fn tokens(&self) -> Vec<u32> {
        self.0.tokens.clone()
    }

    /// Probability that each node is accepted, given that its parent is.
    #[getter]
    fn probs(&self) -> Vec<f32> {
        self.0.probs.clone()
    }

    /// Class of each node, for calibration.
    #[getter]
    fn buckets(&self) -> Vec<u32> {
        self.0.buckets.iter().map(|&b| b.into()).collect()
    }

    /// The likeliest next token, of equal ones the first; `None` where nothing is proposed.
    fn first(&self) -> Option<u32> {
        self.0.first()
    }

    /// Whether there are at most so many nodes, all of a vocabulary of `vocab` tokens.
    fn fits(&self, nodes: Int, vocab: Int) -> PyResult<bool> {
        Ok(self.0.fits(nodes.usize("nodes")?, vocab.u32("vocab")?))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("DraftProposal(nodes={})", self.0.len())
    }
}

/// Classes of `nodes` nodes: one each, or none.
fn buckets(all: &[Int], nodes: usize) -> PyResult<Vec<u8>> {
    if !all.is_empty() {
        super::arg::same_len("proposal buckets", all.len(), "proposal tokens", nodes)?;
    }
    let last = draft::BUCKETS as i128 - 1;
    Ok(all.iter().map(|b| b.within("proposal bucket", 0, last).map(|v| v as u8)).collect::<Result<_>>()?)
}

/// A proposal of a class of the caller's: anything with the four lists. One of the core is taken as it is.
fn proposal(source: &Bound<'_, PyAny>) -> PyResult<draft::Proposal> {
    let numbers = |name: &str| source.getattr(name)?.extract::<Vec<Int>>();
    let parents = i32s("proposal parent", &numbers("parents")?)?;
    let tokens = u32s("proposed token", &numbers("tokens")?)?;
    let buckets = match source.getattr("buckets")?.extract::<Option<Vec<Int>>>()? {
        None => Vec::new(),
        Some(all) => {
            // Fewer or none are as wrong as too many, where nodes have one each.
            super::arg::same_len("proposal buckets", all.len(), "proposal tokens", tokens.len())?;
            self::buckets(&all, tokens.len())?
        }
    };
    Ok(draft::Proposal { parents, tokens, probs: source.getattr("probs")?.extract()?, buckets })
}

fn limits(nodes: Int, depth: Int, off_spine: Int, min_score: Option<f32>) -> Result<MergeLimits> {
    let min_score = min_score.unwrap_or(f32::NEG_INFINITY);
    let (nodes, depth) = (nodes.u32("nodes")?, depth.u32("depth")?);
    Ok(MergeLimits { nodes, depth, off_spine: off_spine.u32("off_spine")?, min_score })
}

/// One tree from the proposals of many sources, below the token `root`: equal tokens under equal parents are one node,
/// its probability that of their union, each claim corrected by `calibration`; siblings sum to at most 1. The tree
/// takes the best nodes by cumulative log-probability: `nodes` at most, the root included, `depth` levels, none of a
/// score below `min_score`. The deepest path (the spine) stands first; no path has more than `off_spine` nodes off it,
/// as the GPU's attention asks for.
///
/// Source i of `calibration` and of the tree's masks is `sources[i]`: a `DraftProposal`, or any object with `parents`,
/// `tokens`, `probs` and `buckets`.
#[pyfunction]
#[pyo3(signature = (root, vocab, sources, nodes, depth, *, calibration=None, off_spine=Int::EIGHT, min_score=None))]
#[pyo3(text_signature = "(root, vocab, sources, nodes, depth, *, calibration=None, off_spine=8, min_score=None)")]
#[allow(clippy::too_many_arguments)]
pub(super) fn merge_drafts(
    py: Python<'_>,
    root: Int,
    vocab: Int,
    sources: Vec<Bound<'_, PyAny>>,
    nodes: Int,
    depth: Int,
    calibration: Option<&Bound<'_, DraftCalibration>>,
    off_spine: Int,
    min_score: Option<f32>,
) -> PyResult<MergedDrafts> {
    let (root, vocab, limits) =
        (root.u32("root token")?, vocab.u32("vocab")?, limits(nodes, depth, off_spine, min_score)?);
    in_range("draft sources", sources.len() as u64, 0, draft::MAX_SOURCES as i128).map_err(PyErr::from)?;
    let core: Vec<_> = sources.iter().map(|s| s.cast::<DraftProposal>().ok()).collect();
    let given = sources.iter().zip(&core).filter(|(_, core)| core.is_none());
    let given: Vec<_> = given.map(|(source, _)| proposal(source)).collect::<PyResult<_>>()?;
    let mut given = given.iter();
    let all: Vec<&draft::Proposal> =
        core.iter().filter_map(|c| c.map_or_else(|| given.next(), |c| Some(&c.get().0))).collect();
    guarded(py, || {
        let calibration = calibration.map(|c| c.get().state());
        draft::merge(root, vocab, &all, calibration.as_deref(), limits)
    })
    .map(MergedDrafts)
}

/// A tree of `merge_drafts`, for one request.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct MergedDrafts(pub(super) draft::MergedDrafts);

#[pymethods]
impl MergedDrafts {
    /// Parent of each node, parents first; -1 for the root, node 0.
    #[getter]
    fn parents(&self) -> Vec<i32> {
        self.0.parents().to_vec()
    }

    /// Token of each node.
    #[getter]
    fn tokens(&self) -> Vec<i32> {
        self.0.tokens().to_vec()
    }

    /// Cumulative log-probability of each node; 0 for the root.
    #[getter]
    fn scores(&self) -> Vec<f32> {
        self.0.scores().to_vec()
    }

    /// Which sources proposed each node, a bit a source; 0 for the root.
    #[getter]
    fn sources(&self) -> Vec<u32> {
        self.0.sources().to_vec()
    }

    /// Nodes of the deepest path, root included; they stand first.
    #[getter]
    fn spine(&self) -> u32 {
        self.0.spine()
    }

    /// The best nodes of this tree within closer limits, as `merge_drafts` takes them.
    #[pyo3(signature = (nodes, depth, *, off_spine=Int::EIGHT, min_score=None))]
    #[pyo3(text_signature = "($self, nodes, depth, *, off_spine=8, min_score=None)")]
    fn pruned(&self, py: Python<'_>, nodes: Int, depth: Int, off_spine: Int, min_score: Option<f32>) -> PyResult<Self> {
        let limits = limits(nodes, depth, off_spine, min_score)?;
        guarded(py, || self.0.pruned(limits)).map(Self)
    }

    /// Tell a calibration what was accepted: `path` are the nodes that verification walked, from the root (0) on. Nodes
    /// whose parent is on the path had their chance; of those, the ones on the path were accepted.
    fn settle(&self, py: Python<'_>, path: Vec<Int>, calibration: &Bound<'_, DraftCalibration>) -> PyResult<()> {
        let path = u32s("accepted path", &path)?;
        guarded(py, || self.0.settle(&path, &mut calibration.get().state()))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("MergedDrafts(nodes={}, spine={})", self.0.len(), self.0.spine())
    }
}

/// What the probabilities of so many sources have been worth: claims are corrected by the outcomes of their source and
/// bucket, decayed over about 500 of them.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct DraftCalibration(Mutex<draft::Calibration>);

impl DraftCalibration {
    pub(super) fn state(&self) -> MutexGuard<'_, draft::Calibration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn source(&self, source: Int) -> Result<usize> {
        let last = self.state().sources() as i128 - 1;
        source.within("draft source", 0, last).map(|s| s as usize)
    }
}

#[pymethods]
impl DraftCalibration {
    #[new]
    fn new(sources: Int) -> PyResult<Self> {
        Ok(Self(Mutex::new(draft::Calibration::new(sources.usize("draft sources")?)?)))
    }

    /// Sources.
    #[getter]
    fn sources(&self) -> usize {
        self.state().sources()
    }

    /// Of a source's nodes whose parent was accepted: how many there were, and how many were accepted.
    fn account(&self, source: Int) -> PyResult<(u64, u64)> {
        let source = self.source(source)?;
        Ok(self.state().account(source).map_or((0, 0), |a| (a.proposed, a.accepted)))
    }

    /// The corrected probability of a claim of a source in a bucket.
    fn corrected(&self, source: Int, bucket: Int, prob: f32) -> PyResult<f32> {
        let (source, bucket) = (self.source(source)?, claim(bucket, prob)?);
        Ok(self.state().corrected(source, bucket, prob))
    }

    /// A node that a source claimed with probability `prob`, and whose parent was accepted, was accepted or not.
    fn observe(&self, source: Int, bucket: Int, prob: f32, accepted: bool) -> PyResult<()> {
        let (source, bucket) = (self.source(source)?, claim(bucket, prob)?);
        self.state().observe(source, bucket, prob, accepted);
        Ok(())
    }

    /// Compare what sources proposed, one of each or `None`, with the tokens that the target drew: every node whose parent
    /// these reached had its outcome, verified or not. Returns how many of the tokens each proposal has, one below the
    /// other.
    fn grade(
        &self,
        py: Python<'_>,
        proposals: Vec<Option<Bound<'_, DraftProposal>>>,
        drawn: Vec<Int>,
    ) -> PyResult<Vec<usize>> {
        let drawn = u32s("token", &drawn)?;
        guarded(py, || {
            let mut state = self.state();
            state.check(proposals.len())?;
            let each = proposals.iter().enumerate();
            let graded = each.map(|(source, one)| one.as_ref().map_or(0, |p| state.grade(source, &p.get().0, &drawn)));
            Ok(graded.collect())
        })
    }

    fn __repr__(&self) -> String {
        format!("DraftCalibration(sources={})", self.sources())
    }
}

/// The bucket of a claim, once it and the probability are checked.
fn claim(bucket: Int, prob: f32) -> Result<u8> {
    let bucket = bucket.within("proposal bucket", 0, draft::BUCKETS as i128 - 1)? as u8;
    let one = draft::Proposal { parents: vec![-1], tokens: vec![0], probs: vec![prob], buckets: Vec::new() };
    one.check(1).map(|()| bucket)
}
