//! The number of nodes of merged trees that are worth verifying: expected tokens over the seconds of the round.
//!
//! A node of cumulative log-probability s is taken to be accepted with probability `exp(s)`. A pass over more rows takes
//! longer, so the likeliest nodes are taken as long as tokens a second grow.

use super::merge::{MergeLimits, MergedDrafts};
use crate::bounds::MAX_DRAFT_TOKENS;
use crate::error::{Error, Result, in_range, listed, same_length};

/// Seconds of a pass by its number of rows: a measured table, interpolated; beyond it by its last slope.
#[derive(Debug, Clone, PartialEq)]
pub struct PassTable {
    rows: Vec<u32>,
    shape: Vec<f64>,
    pace: f64,
}

impl PassTable {
    /// `rows` ascend; `shape` has the seconds of a pass of each, `pace` what all of them are multiplied by.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for lists of other lengths; [`Error::Invalid`] for an empty table, rows that do not ascend, or
    /// numbers that are not finite.
    pub fn new(rows: Vec<u32>, shape: Vec<f64>, pace: f64) -> Result<Self> {
        same_length("seconds of passes", shape.len(), rows.len())?;
        let invalid = |got: String, why: &str| Error::Invalid { what: "table of passes", got, why: why.into() };
        if rows.is_empty() || rows.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(invalid(listed(&rows), "one row count at least, ascending"));
        }
        if let Some(bad) = shape.iter().chain([&pace]).find(|s| !s.is_finite()) {
            return Err(invalid(bad.to_string(), "must be finite"));
        }
        Ok(Self { rows, shape, pace })
    }

    /// Predicted seconds of a pass over so many rows.
    pub fn at(&self, rows: u64) -> f64 {
        if rows == 0 {
            return 0.0;
        }
        let (table, shape) = (&self.rows, &self.shape);
        if rows <= table[0].into() || table.len() == 1 {
            return shape[0] * self.pace;
        }
        let i = table.partition_point(|&r| u64::from(r) < rows).min(table.len() - 1);
        let slope = (shape[i] - shape[i - 1]) / f64::from(table[i] - table[i - 1]);
        (shape[i - 1] + slope * (rows as f64 - f64::from(table[i - 1]))) * self.pace
    }
}

/// What a round that verifies trees costs.
#[derive(Debug, Clone, PartialEq)]
pub struct RoundCost {
    /// Seconds of the target's pass.
    pub target: PassTable,
    /// Seconds of the round beside that pass.
    pub beside: f64,
    /// Rows that a request's tree may take, ascending, where all requests take as many; empty where a round takes one
    /// row for each node.
    pub tiers: Vec<u32>,
}

/// The trees of a round.
#[derive(Debug, Clone, PartialEq)]
pub struct ChosenTrees {
    /// One for each request; a root alone where nothing is worth verifying.
    pub trees: Vec<MergedDrafts>,
    /// Tokens that the round is expected to give, over the batch.
    pub tokens: f64,
    /// Seconds that it is expected to take.
    pub seconds: f64,
}

impl ChosenTrees {
    /// Whole trees, where nodes cost nothing.
    pub fn all(trees: Vec<MergedDrafts>) -> Self {
        let drafted: f64 = trees.iter().flat_map(drafts).map(f64::exp).sum();
        Self { tokens: trees.len() as f64 + drafted, trees, seconds: 0.0 }
    }
}

impl RoundCost {
    /// Trees cut to the nodes that give the most expected tokens a second. A node of score s is taken to be accepted with
    /// probability `exp(s)`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a tier.
    pub fn choose(&self, trees: &[MergedDrafts]) -> Result<ChosenTrees> {
        self.tiers.iter().try_for_each(|&tier| in_range("tier", tier, 1, MAX_DRAFT_TOKENS.into()).map(drop))?;
        let (nodes, min_score, tokens, rows) =
            if self.tiers.is_empty() { self.best_nodes(trees) } else { self.best_tier(trees) };
        let limits = MergeLimits { nodes, min_score, ..MergeLimits::new(nodes, MAX_DRAFT_TOKENS) };
        let trees = trees.iter().map(|tree| tree.pruned(limits)).collect::<Result<_>>()?;
        Ok(ChosenTrees { trees, tokens, seconds: self.beside + self.target.at(rows) })
    }

    /// Nodes of a tree, score from which on they are taken, expected tokens and rows, where nodes are counted over all
    /// trees.
    fn best_nodes(&self, trees: &[MergedDrafts]) -> (u32, f32, f64, u64) {
        let mut scores: Vec<f64> = trees.iter().flat_map(drafts).collect();
        scores.sort_by(|a, b| b.total_cmp(a));
        let roots = trees.len() as u64;
        let mut expected = roots as f64;
        let mut best = (1, f32::INFINITY, expected, roots);
        let mut best_rate = expected / (self.beside + self.target.at(roots));
        for (rows, score) in (roots + 1..).zip(scores) {
            expected += score.exp();
            let seconds = self.beside + self.target.at(rows);
            let rate = expected / seconds;
            if rate > best_rate {
                best_rate = rate;
                best = (MAX_DRAFT_TOKENS, score as f32, expected, rows);
            }
        }
        best
    }

    /// The same, where each tree takes as many rows as the largest one.
    fn best_tier(&self, trees: &[MergedDrafts]) -> (u32, f32, f64, u64) {
        let batch = trees.len() as u64;
        let mut best = (1, f32::NEG_INFINITY, batch as f64, batch);
        let (mut best_rate, mut filled) = (0.0, 1);
        let largest = trees.iter().map(MergedDrafts::len).max().unwrap_or(1);
        let chances: Vec<Vec<f64>> = trees
            .iter()
            .map(|tree| {
                let mut chances: Vec<f64> = drafts(tree).map(f64::exp).collect();
                chances.sort_by(|a, b| b.total_cmp(a));
                chances
            })
            .collect();
        for &tier in &self.tiers {
            if largest <= filled {
                break; // no tree would fill it
            }
            filled = tier as usize;
            let rows = batch * u64::from(tier);
            let seconds = self.beside + self.target.at(rows);
            let drafted: f64 = chances.iter().flat_map(|own| own.iter().take(filled - 1)).sum();
            let rate = (batch as f64 + drafted) / seconds;
            if rate > best_rate {
                best_rate = rate;
                best = (tier, f32::NEG_INFINITY, batch as f64 + drafted, rows);
            }
        }
        best
    }
}

/// Scores of a tree's nodes, its root apart.
fn drafts(tree: &MergedDrafts) -> impl Iterator<Item = f64> + '_ {
    tree.scores().iter().skip(1).map(|&score| score.into())
}

#[cfg(test)]
mod tests {
    use super::super::{Proposal, merge};
    use super::*;

    fn table() -> PassTable {
        PassTable::new(vec![1, 2, 4, 8], vec![1.0, 1.1, 1.5, 3.5], 2.0).unwrap()
    }

    #[test]
    fn passes_are_interpolated_and_go_on_by_the_last_slope() {
        let t = table();
        for (rows, seconds) in [(0, 0.0), (1, 2.0), (2, 2.2), (3, 2.6), (4, 3.0), (6, 5.0), (8, 7.0), (10, 9.0)] {
            assert!((t.at(rows) - seconds).abs() < 1e-12, "{rows}: {}", t.at(rows));
        }
        assert_eq!(PassTable::new(vec![3], vec![1.0], 1.0).unwrap().at(100), 1.0);
        for (rows, shape) in [(vec![], vec![]), (vec![2, 2], vec![1.0, 1.0]), (vec![1], vec![f64::NAN])] {
            assert!(matches!(PassTable::new(rows, shape, 1.0), Err(Error::Invalid { .. })));
        }
        assert!(matches!(PassTable::new(vec![1], vec![], 1.0), Err(Error::Mismatch { .. })));
    }

    fn tree(chances: &[f32]) -> MergedDrafts {
        let children = Proposal {
            parents: vec![-1; chances.len()],
            tokens: (1..).take(chances.len()).collect(),
            probs: chances.to_vec(),
            buckets: Vec::new(),
        };
        merge(0, 50, &[&children], None, MergeLimits::new(40, 8)).unwrap()
    }

    fn cost(tiers: &[u32]) -> RoundCost {
        RoundCost { target: table(), beside: 0.1, tiers: tiers.to_vec() }
    }

    #[test]
    fn the_best_nodes_of_all_trees_are_taken_together() {
        let trees = [tree(&[0.9, 0.05]), tree(&[]), tree(&[0.8])];
        let chosen = cost(&[]).choose(&trees).unwrap();
        assert_eq!(chosen.trees.iter().map(MergedDrafts::len).collect::<Vec<_>>(), [2, 1, 1]);
        assert!((chosen.tokens - 3.9).abs() < 1e-6 && (chosen.seconds - 3.1).abs() < 1e-9);
        let none = cost(&[]).choose(&[tree(&[0.05]), tree(&[])]).unwrap();
        assert!(none.trees.iter().all(|tree| tree.len() == 1) && none.tokens == 2.0);
    }

    #[test]
    fn a_tier_is_chosen_by_all_trees_and_filled_by_one() {
        let trees = [tree(&[0.3, 0.3, 0.3]), tree(&[0.9])];
        let chosen = cost(&[2, 4, 8]).choose(&trees).unwrap();
        assert_eq!(chosen.trees.iter().map(MergedDrafts::len).collect::<Vec<_>>(), [2, 2]);
        assert!((chosen.tokens - 3.2).abs() < 1e-6 && (chosen.seconds - 3.1).abs() < 1e-9);
        let alone = cost(&[2, 4, 8]).choose(&trees[..1]).unwrap();
        assert_eq!(alone.trees[0].len(), 4, "by itself it pays for a larger tier");
    }
}
