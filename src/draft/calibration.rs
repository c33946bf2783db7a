//! The worth of each source's probabilities: claims corrected by outcomes.
//!
//! A claim is the probability p that a source gave a node. Its outcome counts once the node's parent was accepted: the
//! node was accepted, or it was not. Each source and bucket keeps three decayed sums: outcomes n, accepted A, claimed
//! E. A bucket's claims are off by the ratio of the odds of what was accepted to the odds of what was claimed; so the
//! corrected probability has the odds of p times that ratio. It stays in (0, 1), keeps the order of a bucket's claims,
//! and is what was observed where all claims of a bucket are alike. A prior of [`PRIOR`] outcomes as claimed keeps
//! early noise out.

use super::proposal::{BUCKETS, Proposal};
use crate::error::{Error, Result, in_range};

/// Most sources of one tree: bits of a mask.
pub const MAX_SOURCES: usize = 32;
/// Outcomes after which one weighs 1/e.
const MEMORY: f64 = 512.0;
/// Outcomes, as claimed, that a bucket is taken to have seen.
const PRIOR: f64 = 8.0;
/// Claims nearer to 0 or 1 than this count as this near: odds stay finite.
const EDGE: f64 = 1e-4;

/// Sums of one bucket of one source.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Cell {
    outcomes: f64,
    accepted: f64,
    claimed: f64,
}

/// Proposals of a source so far, counted over nodes whose parent was accepted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Account {
    /// Nodes.
    pub proposed: u64,
    /// Number of those that were accepted.
    pub accepted: u64,
}

/// Corrections of up to [`MAX_SOURCES`] sources; 1.5 KiB a source.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    cells: Vec<Cell>,
    accounts: Vec<Account>,
}

impl Calibration {
    /// A calibration of `sources` sources of which nothing is known: every claim stands.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for none, or too many.
    pub fn new(sources: usize) -> Result<Self> {
        in_range("draft sources", sources as u64, 1, MAX_SOURCES as i128)?;
        Ok(Self { cells: vec![Cell::default(); sources * BUCKETS], accounts: vec![Account::default(); sources] })
    }

    /// Sources.
    pub fn sources(&self) -> usize {
        self.accounts.len()
    }

    /// The account of a source; `None` where there is no such source.
    pub fn account(&self, source: usize) -> Option<Account> {
        self.accounts.get(source).copied()
    }

    /// The corrected probability of a claim, in (0, 1].
    ///
    /// # Panics
    /// Where there is no such source or bucket; [`Calibration::check`] tells before.
    pub fn corrected(&self, source: usize, bucket: u8, prob: f32) -> f32 {
        let cell = self.cells[source * BUCKETS + usize::from(bucket)];
        if cell.outcomes == 0.0 {
            return prob;
        }
        let within = |p: f64| p.clamp(EDGE, 1.0 - EDGE);
        let odds = |p: f64| p / (1.0 - p);
        let mean = within(cell.claimed / cell.outcomes);
        let seen = within((cell.accepted + PRIOR * mean) / (cell.outcomes + PRIOR));
        let odds = odds(within(prob.into())) * odds(seen) / odds(mean);
        (odds / (1.0 + odds)) as f32
    }

    /// A node that a source claimed with probability `prob`, and whose parent was accepted, was accepted or not.
    ///
    /// # Panics
    /// As [`Calibration::corrected`].
    pub fn observe(&mut self, source: usize, bucket: u8, prob: f32, accepted: bool) {
        let cell = &mut self.cells[source * BUCKETS + usize::from(bucket)];
        let kept = 1.0 - 1.0 / MEMORY;
        cell.outcomes = cell.outcomes * kept + 1.0;
        cell.accepted = cell.accepted * kept + f64::from(u8::from(accepted));
        cell.claimed = cell.claimed * kept + f64::from(prob);
        let account = &mut self.accounts[source];
        account.proposed += 1;
        account.accepted += u64::from(accepted);
    }

    /// Compare a source's proposal with the tokens that the target drew: every node whose parent these reached had its
    /// outcome, verified or not. Returns how many of the tokens the proposal has, one below the other.
    ///
    /// # Panics
    /// As [`Calibration::corrected`].
    pub fn grade(&mut self, source: usize, proposal: &Proposal, drawn: &[u32]) -> usize {
        let mut reached = -1;
        for (hits, &token) in drawn.iter().enumerate() {
            let mut found = None;
            for node in (0..proposal.len()).filter(|&node| proposal.parents[node] == reached) {
                let hit = proposal.tokens[node] == token;
                self.observe(source, proposal.bucket(node), proposal.probs[node], hit);
                found = if hit { Some(node) } else { found };
            }
            let Some(node) = found else { return hits };
            reached = node as i32;
        }
        drawn.len()
    }

    /// Check that there are at least so many sources.
    ///
    /// # Errors
    /// [`Error::Mismatch`].
    pub fn check(&self, sources: usize) -> Result<()> {
        if sources <= self.sources() {
            return Ok(());
        }
        let (got, want) =
            (format!("{sources} sources"), format!("at most {}, those of the calibration", self.sources()));
        Err(Error::Mismatch { operand: "draft sources", got, want })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_stand_until_outcomes_say_otherwise() {
        let mut c = Calibration::new(2).unwrap();
        assert_eq!(c.corrected(1, 3, 0.7), 0.7);
        // A quarter of the nodes that were claimed at 0.8 is accepted.
        for i in 0..4000 {
            c.observe(1, 3, 0.8, i % 4 == 0);
        }
        assert!((c.corrected(1, 3, 0.8) - 0.25).abs() < 0.02, "{}", c.corrected(1, 3, 0.8));
        let (low, high) = (c.corrected(1, 3, 0.1), c.corrected(1, 3, 1.0));
        assert!(0.0 < low && low < 0.1 && c.corrected(1, 3, 0.9) < high && high < 1.0);
        assert_eq!(c.corrected(1, 2, 0.8), 0.8, "another bucket");
        assert_eq!(c.corrected(0, 3, 0.8), 0.8, "another source");
        assert_eq!(c.account(1), Some(Account { proposed: 4000, accepted: 1000 }));
        assert_eq!(c.account(2), None);
    }

    #[test]
    fn a_proposal_is_graded_along_the_tokens_that_came() {
        let parents = vec![-1, -1, 0, 0, 2, 1];
        let tokens = vec![5, 6, 7, 8, 9, 7];
        let proposal = Proposal { parents, tokens, probs: vec![0.5; 6], buckets: vec![0, 1, 2, 3, 4, 5] };
        let account = |drawn: &[u32]| {
            let mut c = Calibration::new(1).unwrap();
            let hits = c.grade(0, &proposal, drawn);
            let a = c.account(0).unwrap();
            (hits, a.proposed, a.accepted)
        };
        assert_eq!(account(&[]), (0, 0, 0));
        assert_eq!(account(&[4]), (0, 2, 0));
        assert_eq!(account(&[5, 7, 9, 1]), (3, 5, 3));
        assert_eq!(account(&[5, 9]), (1, 4, 1));
        assert_eq!(account(&[6, 7]), (2, 3, 2));
        assert_eq!(proposal.first(), Some(5));
        assert_eq!(Proposal::default().first(), None);
        assert!(proposal.fits(6, 10) && !proposal.fits(5, 10) && !proposal.fits(6, 9));
    }

    #[test]
    fn a_few_outcomes_move_little_and_old_ones_are_forgotten() {
        let mut c = Calibration::new(1).unwrap();
        c.observe(0, 0, 0.9, false);
        assert!(c.corrected(0, 0, 0.9) > 0.75);
        for _ in 0..5000 {
            c.observe(0, 0, 0.9, false);
        }
        assert!(c.corrected(0, 0, 0.9) < 0.05);
        for _ in 0..5000 {
            c.observe(0, 0, 0.9, true);
        }
        assert!(c.corrected(0, 0, 0.9) > 0.95);
    }

    #[test]
    fn certain_claims_stay_finite() {
        let mut c = Calibration::new(1).unwrap();
        for accepted in [true, false] {
            for _ in 0..3000 {
                c.observe(0, 63, 1.0, accepted);
                let p = c.corrected(0, 63, 1.0);
                assert!(p > 0.0 && p < 1.0, "{p}");
            }
        }
        assert!(c.check(1).is_ok() && c.check(2).is_err());
        assert!(Calibration::new(0).is_err() && Calibration::new(33).is_err());
    }
}
