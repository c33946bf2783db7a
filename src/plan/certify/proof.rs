//! Placements: every position that a round writes, for every residue of the committed length; and the collector of
//! what fails.

use std::fmt;

use crate::error::{Error, Result};
use crate::geometry::{DraftRegion, Geometry, Layout};
use crate::plan::Phase;

/// A position, size or write that breaks its limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Description of the fault.
    pub what: String,
    /// Layout it was found in.
    pub layout: Layout,
    /// Committed length.
    pub committed: u32,
    /// `committed mod P`.
    pub residue: u32,
    /// Branch or node, -1 where none applies.
    pub branch: i64,
    /// Step, -1 where none applies.
    pub step: i64,
    /// The value.
    pub got: u64,
    /// Limit of the value.
    pub limit: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { what, layout, committed, residue, branch, step, got, limit } = self;
        write!(
            f,
            "{what}: {got} against {limit} ({layout} layout, committed {committed}, residue {residue}, \
             branch {branch}, step {step})"
        )
    }
}

/// Failures that a certificate lists.
pub const MAX_FAILURES: usize = 32;

/// Positions that a round behind a committed length may use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// Positions that one round may write behind the tail page's start (holey) or the prefix (dense).
    alloc_len: u64,
    /// Positions that the row has allocated.
    allocated: u64,
    /// Positions of a row.
    row_width: u64,
}

impl Room {
    pub(super) fn of(geometry: &Geometry, committed: u32) -> Result<Self> {
        Ok(Self {
            alloc_len: geometry.alloc_len_per_decode() as u64,
            allocated: geometry.alloc_target(committed, 0)? as u64,
            row_width: geometry.row_width() as u64,
        })
    }
}

/// Collects what fails.
#[derive(Debug)]
pub(super) struct Proof {
    pub(super) layout: Layout,
    pub(super) placed: u64,
    pub(super) plans: u64,
    pub(super) failures: Vec<Failure>,
    pub(super) failed: u64,
    /// Taken positions of the region; scratch.
    pub(super) taken: Vec<bool>,
}

impl Default for Proof {
    fn default() -> Self {
        Self { layout: Layout::Dense, placed: 0, plans: 0, failures: Vec::new(), failed: 0, taken: Vec::new() }
    }
}

/// Place of a failure.
#[derive(Debug, Clone, Copy)]
pub(super) struct FailureSite {
    pub(super) committed: u32,
    pub(super) residue: u32,
    pub(super) branch: i64,
    pub(super) step: i64,
}

impl FailureSite {
    /// Behind `committed` tokens, in no branch and no step.
    pub(super) fn behind(geometry: &Geometry, committed: u32) -> Self {
        Self { committed, residue: geometry.page().offset(committed), branch: -1, step: -1 }
    }

    /// The draft step of `phase`, if it is one.
    pub(super) fn of_phase(self, phase: Phase) -> Self {
        match phase {
            Phase::Draft { step } => Self { step: step as i64, ..self },
            _ => self,
        }
    }
}

impl Proof {
    pub(super) fn fail(&mut self, what: impl Into<String>, at: FailureSite, got: u64, limit: u64) {
        self.failed += 1;
        if self.failures.len() < MAX_FAILURES {
            let FailureSite { committed, residue, branch, step } = at;
            let layout = self.layout;
            self.failures.push(Failure { what: what.into(), layout, committed, residue, branch, step, got, limit });
        }
    }

    /// An error of the code under proof, with its operands where it has them.
    pub(super) fn error(&mut self, what: impl Into<String>, at: FailureSite, error: &Error) {
        let (got, limit) = match *error {
            Error::Capacity { need, have, .. } => (need, have),
            Error::OutOfBounds { index, bound, .. } => (index.max(0) as u64, bound.max(0) as u64),
            _ => (0, 0),
        };
        self.fail(format!("{}: {error}", what.into()), at, got, limit);
    }

    /// `got <= limit`.
    pub(super) fn at_most(&mut self, what: &'static str, at: FailureSite, got: u64, limit: u64) {
        if got > limit {
            self.fail(what, at, got, limit);
        }
    }

    /// Take position `pos` for one write: in bounds, behind the prefix, and free.
    fn take(&mut self, what: &'static str, at: FailureSite, pos: u64, base: u64, room: Room) {
        self.placed += 1;
        let end = room.allocated.min(room.row_width);
        if pos < at.committed as u64 {
            self.fail(format!("{what} inside the prefix"), at, pos, at.committed as u64);
        } else if pos >= end {
            self.fail(format!("{what} beyond the allocation"), at, pos, end);
        } else if let Some(taken) = self.taken.get_mut((pos - base) as usize) {
            if std::mem::replace(taken, true) {
                self.fail(format!("{what} placed on another"), at, pos, pos);
            }
        } else {
            self.fail(format!("{what} beyond the round's allocation length"), at, pos, base + room.alloc_len);
        }
    }

    /// Every position that one round behind `committed` writes.
    pub(super) fn placements(&mut self, geometry: &Geometry, room: Room, committed: u32) -> Result<()> {
        let shape = geometry.shape();
        let region = geometry.draft_region(committed)?;
        let at = FailureSite::behind(geometry, committed);
        self.at_most("allocation of a row", at, room.allocated, room.row_width);
        let base = match region.layout() {
            Layout::Dense => committed as u64,
            Layout::Holey => region.base() as u64,
        };
        // Draft slots and holes of one round, together.
        self.taken.clear();
        self.taken.resize(room.alloc_len as usize, false);
        for b in 0..shape.topk() {
            let at = FailureSite { branch: b as i64, ..at };
            for s in 0..shape.steps() {
                let at = FailureSite { step: s as i64, ..at };
                self.take("draft slot", at, region.pos(b, s)? as u64, base, room);
            }
            if let Some(hole) = region.hole(b)? {
                self.at_most("source of a tail copy", at, (hole.src + hole.len) as u64, committed as u64);
                for o in 0..hole.len {
                    self.take("hole", at, (hole.dst + o) as u64, base, room);
                }
            }
            self.branch_pages(at, geometry, &region)?;
        }
        self.at_most("end of the draft region", at, region.end()? as u64, base + room.alloc_len);
        // The verified nodes take the same positions again, after the draft is done.
        self.taken.clear();
        self.taken.resize(room.alloc_len as usize, false);
        for node in 0..shape.draft_tokens() {
            let at = FailureSite { branch: node as i64, ..at };
            self.take("verified node", at, committed as u64 + node as u64, committed as u64, room);
        }
        // The host's length may lag by one round: the next round still fits what was allocated for this one.
        for accepted in 1..=geometry.max_accepted() {
            let Some(later) = committed.checked_add(accepted).filter(|&l| l < geometry.limits().max_context_len) else {
                break;
            };
            let next = geometry.draft_region(later)?.end()?.max(later + shape.draft_tokens());
            self.at_most("the round after, on a lagging length", at, next as u64, room.allocated);
        }
        Ok(())
    }

    /// Pages that a kernel that reads whole pages sees of one branch: at step t `ceil((r + t + 1) / P)`, at most t + 1.
    fn branch_pages(&mut self, at: FailureSite, geometry: &Geometry, region: &DraftRegion) -> Result<()> {
        if region.layout() == Layout::Dense {
            return Ok(());
        }
        let page = geometry.page();
        let (b, mut last, mut distinct) = (at.branch as u32, None, 0u64);
        for t in 0..geometry.shape().steps() {
            let col = page.page_of(region.pos(b, t)?);
            distinct += u64::from(last != Some(col));
            last = Some(col);
            let at = FailureSite { step: t as i64, ..at };
            self.at_most("expand pages against steps", at, distinct, t as u64 + 1);
            self.at_most("expand pages against their number", at, distinct, page.pages_for(at.residue + t + 1) as u64);
        }
        Ok(())
    }

    /// Per-branch index width: what the last step uses with every request at its longest.
    pub(super) fn index_widths(&mut self, geometry: &Geometry) -> Result<()> {
        let Ok(width) = geometry.per_branch_kv_indices() else { return Ok(()) };
        let (limits, shape) = (geometry.limits(), geometry.shape());
        let committed = limits.max_context_len;
        let at = FailureSite { step: shape.steps() as i64 - 1, ..FailureSite::behind(geometry, committed) };
        let (b, k, s) = (limits.max_batch as u64, shape.topk() as u64, shape.steps() as u64);
        self.at_most("per-branch kv_indices", at, k * b * committed as u64 + b * k * s, width as u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{Limits, TreeShape};

    fn geometry(layout: Layout) -> Geometry {
        let limits = Limits { max_batch: 4, max_context_len: 64, page_size: 4 };
        Geometry::new(limits, TreeShape::new(3, 6, 16).unwrap(), layout).unwrap()
    }

    /// Failures that a proof finds for capacities that are one or more positions short.
    fn failures(layout: Layout, committed: u32, short: impl Fn(&mut Room)) -> Vec<Failure> {
        let g = geometry(layout);
        let mut room = Room::of(&g, committed).unwrap();
        short(&mut room);
        let mut proof = Proof { layout, ..Proof::default() };
        proof.placements(&g, room, committed).unwrap();
        proof.failures
    }

    #[test]
    fn capacities_hold_as_they_are() {
        for (layout, committed) in [(Layout::Dense, 7), (Layout::Holey, 7), (Layout::Holey, 8), (Layout::Holey, 63)] {
            assert_eq!(failures(layout, committed, |_| ()), []);
        }
    }

    /// Dense: K*S = 18 positions from 7, so one less misses branch 2, step 5.
    #[test]
    fn an_allocation_length_one_short_is_found() {
        let f = failures(Layout::Dense, 7, |c| c.alloc_len -= 1);
        assert_eq!(f[0].what, "draft slot beyond the round's allocation length");
        assert_eq!((f[0].branch, f[0].step, f[0].got), (2, 5, 7 + 2 * 6 + 5));
        assert!(f[0].to_string().contains("residue 3"), "{}", f[0]);
    }

    /// Holey at L = 7: the last draft slot is 31 + 5 = 36; a row of 36 positions has none for it.
    #[test]
    fn a_row_too_narrow_for_the_holes_is_found() {
        let f = failures(Layout::Holey, 7, |c| (c.allocated, c.row_width) = (36, 36));
        assert_eq!(f[0].what, "draft slot beyond the allocation");
        assert_eq!((f[0].branch, f[0].step, f[0].got, f[0].limit), (2, 5, 36, 36));
    }

    /// The reserve is twice a round's length because the host's length may lag: once is too little.
    #[test]
    fn a_reserve_without_the_lag_is_found() {
        let g = geometry(Layout::Dense);
        let once = 7 + g.alloc_len_per_decode() as u64;
        let f = failures(Layout::Dense, 7, |c| c.allocated = once);
        assert!(f.iter().any(|f| f.what.starts_with("the round after")), "{f:?}");
    }

    #[test]
    fn a_position_taken_twice_or_inside_the_prefix_is_found() {
        let room = Room { alloc_len: 8, allocated: 64, row_width: 64 };
        let at = FailureSite { committed: 10, residue: 2, branch: 1, step: 2 };
        let mut proof = Proof { taken: vec![false; 8], ..Proof::default() };
        proof.take("draft slot", at, 12, 10, room);
        assert_eq!(proof.failed, 0);
        proof.take("draft slot", at, 12, 10, room);
        proof.take("draft slot", at, 9, 8, room);
        let what: Vec<_> = proof.failures.iter().map(|f| f.what.as_str()).collect();
        assert_eq!(what, ["draft slot placed on another", "draft slot inside the prefix"]);
    }

    #[test]
    fn a_list_of_failures_ends() {
        let mut proof = Proof::default();
        let at = FailureSite { committed: 0, residue: 0, branch: -1, step: -1 };
        (0..100).for_each(|i| proof.at_most("test", at, i + 1, 0));
        assert_eq!((proof.failures.len(), proof.failed), (MAX_FAILURES, 100));
    }
}
