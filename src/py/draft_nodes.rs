//! The choice of the nodes that are worth verifying; over [`crate::draft`].

use pyo3::prelude::*;

use super::arg::{Int, detached, guarded, u32s};
use super::draft_merge::{DraftCalibration, DraftProposal, MergedDrafts};
use super::grammar::GrammarTracker;
use crate::bounds::{MAX_BATCH, MAX_DRAFT_TOKENS};
use crate::draft::{self, ChosenTrees, MergeLimits, PassTable, Proposal, RoundCost};
use crate::error::{Result, in_range};

/// Seconds of passes: row counts, seconds of each, and what these are multiplied by.
type Table = (Vec<Int>, Vec<f64>, f64);
/// A request: its last token, what each source proposes, levels of its tree at most, and its grammar.
type Asked<'py> = (Int, Vec<Option<Bound<'py, DraftProposal>>>, Int, Option<Bound<'py, GrammarTracker>>);
/// A round's cost: seconds of the target's passes, those beside them, and rows that a tree may take.
type Cost = (Table, f64, Vec<Int>);

fn table((rows, seconds, pace): Table) -> Result<PassTable> {
    PassTable::new(u32s("rows of a pass", &rows)?, seconds, pace)
}

/// The trees of a round, the tokens that it is expected to give, and its seconds. What the sources propose for a request
/// is merged as by `merge_drafts`, without what the request's grammar forbids; of all trees, the nodes stay that give
/// the most tokens a second.
///
/// Each request is (last token, proposal of each source or `None`, levels of its tree at most, grammar or `None`).
/// `nodes`: of a tree at most, root included. `cost` is (table, seconds of the round beside the target's pass, tiers).
/// The table has the target's passes: (row counts, seconds of a pass of each, factor on them), interpolated. `tiers` are
/// the rows that a tree may take, ascending, where all trees take as many; else there are none, and each node takes a
/// row. Without a cost all nodes stay, and the round takes 0 seconds.
#[pyfunction]
#[pyo3(signature = (requests, calibration, vocab, nodes, cost=None))]
pub(super) fn choose_drafts(
    py: Python<'_>,
    requests: Vec<Asked<'_>>,
    calibration: &Bound<'_, DraftCalibration>,
    vocab: Int,
    nodes: Int,
    cost: Option<Cost>,
) -> PyResult<(Vec<MergedDrafts>, f64, f64)> {
    in_range("requests", requests.len() as u64, 1, MAX_BATCH.into())?;
    let (vocab, nodes) = (vocab.u32("vocab")?, nodes.u32("nodes")?);
    let cost = cost.map(|(target, beside, tiers)| {
        let tiers = u32s("tier", &tiers)?;
        table(target).map(|target| RoundCost { target, beside, tiers })
    });
    let cost = cost.transpose()?;
    let nothing = Proposal::default();
    let mut asked = Vec::with_capacity(requests.len());
    for (root, said, depth, grammar) in &requests {
        let said: Vec<_> = said.iter().map(|one| one.as_ref().map_or(&nothing, |one| &one.get().0)).collect();
        let limits = MergeLimits::new(nodes, depth.u32("depth")?);
        asked.push((root.u32("root token")?, said, limits, grammar.as_ref().map(|grammar| &grammar.get().0)));
    }
    let calibration = calibration.get();
    let run = || {
        let state = calibration.state();
        let trees = asked.iter().map(|(root, said, limits, grammar)| match grammar {
            None => draft::merge(*root, vocab, said, Some(&state), *limits),
            Some(tracker) => {
                let wide = MergeLimits { nodes: nodes.saturating_mul(2).min(MAX_DRAFT_TOKENS), ..*limits };
                let tree = draft::merge(*root, vocab, said, Some(&state), wide)?;
                tree.kept(*limits, |path, token| tracker.allows(path, token))
            }
        });
        let trees = trees.collect::<Result<Vec<_>>>()?;
        match &cost {
            Some(cost) => cost.choose(&trees),
            None => Ok(ChosenTrees::all(trees)),
        }
    };
    // Walking a grammar may take long; other work is over before another thread would have taken the GIL.
    let walks = requests.iter().any(|(.., grammar)| grammar.is_some());
    let chosen = if walks { detached(py, run) } else { guarded(py, run) }?;
    Ok((chosen.trees.into_iter().map(MergedDrafts).collect(), chosen.tokens, chosen.seconds))
}
