//! Progress of the passes of the rows under their live leases, which planners note in a pool that they only read.
//!
//! A row has three lengths. `committed` is what a lease has committed. `settled` is what no pass may write again: the
//! committed positions, and behind them an accepted path whose commit has been planned. `reach` is how far a next pass
//! may be planned ahead: the settled positions, and behind them those of the newest pass in flight.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::pool::row::Row;

/// Notes on all rows: for a row without a lease, nothing. There is an array for each note, since a planner writes the
/// one in each pass and reads the other once a round.
///
/// Relaxed: a row is planned by one thread at a time, and whoever changes the pool does so alone.
#[derive(Debug)]
pub(super) struct Progress {
    /// End of the accepted path whose commit has been planned; 0 without one.
    planned: Vec<AtomicU32>,
    /// Newest pass that was planned: its first position in the upper half, one past its last in the lower; 0 without one.
    pass: Vec<AtomicU64>,
}

impl Progress {
    pub(super) fn new(rows: u32) -> Self {
        let rows = rows as usize;
        Self {
            planned: std::iter::repeat_with(AtomicU32::default).take(rows).collect(),
            pass: std::iter::repeat_with(AtomicU64::default).take(rows).collect(),
        }
    }

    /// Positions that no pass may write again.
    #[inline]
    pub(super) fn settled(&self, index: usize, row: &Row) -> u32 {
        self.planned[index].load(Relaxed).max(row.committed)
    }

    /// The longest prefix that a pass may be planned behind.
    pub(super) fn reach(&self, index: usize, row: &Row) -> u32 {
        let (settled, pass) = (self.settled(index, row), self.pass[index].load(Relaxed));
        let (start, end) = ((pass >> 32) as u32, pass as u32);
        if start >= settled { end.max(settled) } else { settled }
    }

    /// Note that a pass that writes `start..end` has been planned. It ends behind the settled tokens, so its row has a
    /// lease.
    #[inline]
    pub(super) fn note_pass(&self, index: usize, start: u32, end: u32) {
        if let Some(pass) = self.pass.get(index) {
            pass.store(u64::from(start) << 32 | u64::from(end), Relaxed);
        }
    }

    /// The commit of a path that ends at `settled` has been planned.
    #[inline]
    pub(super) fn note_commit(&self, index: usize, settled: u32) {
        if let Some(planned) = self.planned.get(index) {
            planned.store(settled, Relaxed);
        }
    }

    /// The row was committed under a lease that lives on: a pass behind that stays in flight, an older one has landed.
    pub(super) fn advance(&mut self, index: usize) {
        *self.planned[index].get_mut() = 0;
    }

    /// The row's lease has ended.
    #[inline]
    pub(super) fn end(&mut self, index: usize) {
        *self.planned[index].get_mut() = 0;
        *self.pass[index].get_mut() = 0;
    }
}
