//! Nodes of merged trees by what they are worth; over [`crate::draft`].

use pyo3::prelude::*;

use super::arg::{Int, same_len, u32s};
use super::draft_merge::MergedDrafts;
use crate::bounds::MAX_BATCH;
use crate::draft::{Candidate, Candidates, Choice, PassTable};
use crate::error::{Result, in_range};

/// Seconds of passes: row counts, seconds of each, and what these are multiplied by.
type Table = (Vec<Int>, Vec<f64>, f64);
/// Nodes, the score from which on they are taken, expected tokens.
type Chosen = (usize, f64, f64);

fn table((rows, seconds, pace): Table) -> Result<PassTable> {
    PassTable::new(u32s("rows of a pass", &rows)?, seconds, pace)
}

fn chosen(choice: Choice) -> Chosen {
    (choice.nodes, choice.min_score, choice.expected)
}

/// Nodes of the trees of a batch whose score is not below `least`, the likeliest first. A node of score s is taken to be
/// accepted with probability `exp(temper * s)`; each tree has the temper of its request.
///
/// `target`, wherever it is asked for, is (row counts, seconds of a pass of each, factor on them): a pass of other rows is
/// interpolated.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct DraftNodes(Candidates);

impl DraftNodes {
    fn node(&self, index: Int) -> Result<Candidate> {
        let index = index.within("node", 0, self.0.nodes().len() as i128 - 1)? as usize;
        Ok(self.0.nodes()[index])
    }
}

#[pymethods]
impl DraftNodes {
    #[new]
    fn new(trees: Vec<Bound<'_, MergedDrafts>>, tempers: Vec<f64>, least: f64) -> PyResult<Self> {
        in_range("trees", trees.len() as u64, 0, MAX_BATCH.into())?;
        same_len("tempers", tempers.len(), "trees", trees.len())?;
        let trees: Vec<_> = trees.iter().map(|tree| &tree.get().0).zip(tempers).collect();
        Ok(Self(Candidates::of(&trees, least)))
    }

    /// Nodes by their scores, likeliest first, each with its temper.
    #[staticmethod]
    fn scored(scores: Vec<f64>, tempers: Vec<f64>) -> PyResult<Self> {
        Ok(Self(Candidates::scored(&scores, &tempers)?))
    }

    /// A node's cumulative log-probability.
    fn score(&self, index: Int) -> PyResult<f64> {
        Ok(self.node(index)?.score)
    }

    /// The probability that a node is accepted.
    fn chance(&self, index: Int) -> PyResult<f64> {
        Ok(self.node(index)?.chance)
    }

    /// A node's token; -1 of one that has only a score.
    fn token(&self, index: Int) -> PyResult<i32> {
        Ok(self.node(index)?.token)
    }

    /// The number of nodes with the most expected tokens a second, the score of the last one (infinite for none) and
    /// these tokens, for a batch of so many requests, each with its root.
    ///
    /// `beside`: seconds of the round beside the target's pass; `limit`: seconds that it may take.
    fn choose(&self, batch: Int, target: Table, beside: f64, limit: f64) -> PyResult<Chosen> {
        let (batch, target) = (batch.u32("batch")?, table(target)?);
        Ok(chosen(self.0.choose(batch, &target, beside, limit)))
    }

    /// A choice for one request, or fewer nodes where two rounds bring its tokens in less than `share` of the time: a sure
    /// chain below a doubtful token waits until that has come.
    ///
    /// `plain`: seconds of a round without nodes.
    fn settle(&self, choice: (Int, f64, f64), target: Table, beside: f64, plain: f64, share: f64) -> PyResult<Chosen> {
        let (nodes, min_score, expected) = choice;
        let nodes = nodes.within("nodes", 0, self.0.nodes().len() as i128)? as usize;
        let target = table(target)?;
        Ok(chosen(self.0.settle(Choice { nodes, min_score, expected }, &target, beside, plain, share)))
    }

    /// What verifying one node for each of `batch` requests takes, in plain rounds of `plain` seconds, where some number
    /// of the best nodes of tree `tree` is expected to give more tokens than verifying as many takes; `None` else.
    ///
    /// `least`: plain rounds that it takes at least. `tiers`: rows that a request's tree takes, ascending, where rounds
    /// are made for those alone.
    #[pyo3(signature = (tree, batch, target, beside, plain, least, tiers=None))]
    #[allow(clippy::too_many_arguments)]
    fn price(
        &self,
        tree: Int,
        batch: Int,
        target: Table,
        beside: f64,
        plain: f64,
        least: f64,
        tiers: Option<Vec<Int>>,
    ) -> PyResult<Option<f64>> {
        let (tree, batch, target) = (tree.usize("tree")?, batch.u32("batch")?, table(target)?);
        let tiers = u32s("tier", &tiers.unwrap_or_default())?;
        let price = |nodes: u64| {
            let rows = tiers.iter().map(|&t| t.into()).find(|&t: &u64| t > nodes).or(tiers.last().map(|&t| t.into()));
            let seconds = beside + target.at(u64::from(batch) * rows.unwrap_or(nodes + 1));
            f64::max(seconds / plain - 1.0, least)
        };
        Ok(self.0.pays(tree, price).then(|| price(1)))
    }

    fn __len__(&self) -> usize {
        self.0.nodes().len()
    }

    fn __repr__(&self) -> String {
        format!("DraftNodes(nodes={})", self.0.nodes().len())
    }
}
