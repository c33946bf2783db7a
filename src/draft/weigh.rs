//! The number of nodes of merged trees that are worth verifying: expected tokens over the seconds of the round.
//!
//! A node of cumulative log-probability s is taken to be accepted with probability `exp(temper * s)`, where its
//! request's temper says what such claims have been worth. A pass over more rows takes longer, so the likeliest nodes
//! are taken as long as tokens a second grow.

use super::merge::MergedDrafts;
use crate::error::{Error, Result, listed, same_length};

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

/// The chosen number of nodes to verify.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Draft nodes.
    pub nodes: usize,
    /// Score from which on they are taken; infinite for none.
    pub min_score: f64,
    /// Tokens that the round is expected to give, over the batch.
    pub expected: f64,
}

/// A node that may be worth verifying.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Cumulative log-probability.
    pub score: f64,
    /// Probability that it is accepted.
    pub chance: f64,
    /// Index of its tree.
    pub tree: usize,
    /// The node's token.
    pub token: i32,
}

/// Nodes of the trees of a batch, the likeliest first.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Candidates(Vec<Candidate>);

impl Candidates {
    /// Nodes of these trees, roots apart, whose score is not below `least`; each tree has the temper of its request.
    pub fn of(trees: &[(&MergedDrafts, f64)], least: f64) -> Self {
        let nodes = trees.iter().enumerate().flat_map(|(tree, &(drafts, temper))| {
            let each = drafts.scores().iter().zip(drafts.tokens()).skip(1);
            each.map(move |(&score, &token)| Self::candidate(score.into(), temper, tree, token))
        });
        let mut nodes: Vec<_> = nodes.filter(|n| n.score >= least).collect();
        nodes.sort_by(|a, b| b.score.total_cmp(&a.score)); // stable: of equal ones the first tree's
        Self(nodes)
    }

    /// Nodes by their scores, each with its temper, likeliest first.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for lists of other lengths.
    pub fn scored(scores: &[f64], tempers: &[f64]) -> Result<Self> {
        same_length("tempers", tempers.len(), scores.len())?;
        Ok(Self(scores.iter().zip(tempers).map(|(&s, &t)| Self::candidate(s, t, 0, -1)).collect()))
    }

    fn candidate(score: f64, temper: f64, tree: usize, token: i32) -> Candidate {
        Candidate { score, chance: (temper * score).exp(), tree, token }
    }

    /// The nodes.
    pub fn nodes(&self) -> &[Candidate] {
        &self.0
    }

    /// The number of nodes with the most expected tokens a second, for a batch of so many requests, each with its root.
    /// `beside`: seconds of the round beside the target's pass; `limit`: seconds that it may take.
    pub fn choose(&self, batch: u32, target: &PassTable, beside: f64, limit: f64) -> Choice {
        let roots = u64::from(batch);
        let mut best = Choice { nodes: 0, min_score: f64::INFINITY, expected: f64::from(batch) };
        let mut best_rate = best.expected / (beside + target.at(roots));
        let mut expected = best.expected;
        for (n, node) in (1u64..).zip(&self.0) {
            expected += node.chance;
            let seconds = beside + target.at(roots + n);
            let rate = expected / seconds;
            if rate > best_rate && seconds <= limit {
                best_rate = rate;
                best = Choice { nodes: n as usize, min_score: node.score, expected };
            }
        }
        best
    }

    /// `choice` for one request, or fewer nodes where two rounds bring its tokens in less than `share` of the time.
    ///
    /// A sure chain below a doubtful token is verified for nothing where that is refused. A round with the k nodes
    /// before it draws that token anyway, and where it is the one that was foretold, the next round verifies the rest:
    /// the same expected tokens, at the cost of the first round and the chance of the second. `plain`: seconds of a round
    /// without nodes.
    pub fn settle(&self, choice: Choice, target: &PassTable, beside: f64, plain: f64, share: f64) -> Choice {
        let n = choice.nodes.min(self.0.len());
        let seconds = |nodes: usize| if nodes == 0 { plain } else { beside + target.at(nodes as u64 + 1) };
        let (mut best, mut least, mut expected) = (choice, share * seconds(n), 1.0);
        for k in 0..n.saturating_sub(1) {
            let chance = self.0[k].chance;
            let both = seconds(k) + chance * seconds(n - k - 1);
            if both < least {
                least = both;
                let min_score = if k == 0 { f64::INFINITY } else { self.0[k - 1].score };
                best = Choice { nodes: k, min_score, expected };
            }
            expected += chance;
        }
        best
    }

    /// True if some number n of the best nodes of a tree is expected to give more tokens than `price(n)`.
    pub fn pays(&self, tree: usize, price: impl Fn(u64) -> f64) -> bool {
        let mut wins = 0.0;
        self.0.iter().filter(|node| node.tree == tree).zip(1u64..).any(|(node, n)| {
            wins += node.chance;
            wins > price(n)
        })
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn sure_nodes_are_taken_and_doubtful_ones_are_not() {
        let sure = Candidates::scored(&[-0.01, -0.02, -0.03, -4.0], &[1.0; 4]).unwrap();
        let choice = sure.choose(1, &table(), 0.1, f64::INFINITY);
        assert_eq!((choice.nodes, choice.min_score), (3, -0.03));
        assert!((choice.expected - (1.0 + (-0.01f64).exp() + (-0.02f64).exp() + (-0.03f64).exp())).abs() < 1e-12);
        assert_eq!(sure.choose(1, &table(), 0.1, 2.5).nodes, 1, "no longer than the limit");
        let none = Candidates::scored(&[-4.0], &[1.0]).unwrap().choose(2, &table(), 0.1, f64::INFINITY);
        assert_eq!(none, Choice { nodes: 0, min_score: f64::INFINITY, expected: 2.0 });
        assert!(Candidates::scored(&[-1.0], &[]).is_err());
    }

    #[test]
    fn a_sure_chain_waits_behind_a_doubtful_token() {
        let scores = [-0.01, -2.0, -2.01, -2.02, -2.03, -2.04, -2.05];
        let nodes = Candidates::scored(&scores, &[1.0; 7]).unwrap();
        let all = Choice { nodes: 7, min_score: -2.05, expected: 2.7 };
        let settled = nodes.settle(all, &table(), 0.1, 2.0, 0.93);
        assert_eq!((settled.nodes, settled.min_score), (1, -0.01));
        assert_eq!(nodes.settle(all, &table(), 0.1, 2.0, 0.1), all, "two rounds save too little");
        let none = Choice { nodes: 0, min_score: f64::INFINITY, expected: 1.0 };
        assert_eq!(nodes.settle(none, &table(), 0.1, 2.0, 0.93), none);
    }

    #[test]
    fn a_tree_pays_by_any_number_of_its_nodes() {
        let nodes = Candidates::scored(&[-0.5, -0.5, -0.5], &[1.0; 3]).unwrap();
        assert!(nodes.pays(0, |n| if n == 3 { 1.5 } else { 9.0 }));
        assert!(!nodes.pays(0, |n| n as f64) && !nodes.pays(1, |_| 0.0));
    }
}
