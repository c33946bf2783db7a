//! How far the passes of a row have come under its live lease: what planners note of a pool that they only read.
//!
//! A row has three lengths. `committed` is what a lease has committed. `settled` is what no pass may write again: the
//! committed positions, and behind them an accepted path whose commit has been planned. `reach` is how far a next pass
//! may be planned ahead: the settled positions, and behind them those of the newest pass in flight.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::pool::row::Row;

/// The notes of one row. They count while their lease lives; those of a lease that has ended are void.
///
/// Relaxed: a row is planned by one thread at a time, and whoever changes the pool does so alone.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Id of the lease that the rest was noted under.
    lease: AtomicU64,
    settled: AtomicU32,
    /// First position of the newest pass in flight.
    start: AtomicU32,
    /// One past its last position.
    end: AtomicU32,
}

impl Progress {
    /// Positions that no pass may write again.
    #[inline]
    pub(super) fn settled(&self, row: &Row) -> u32 {
        if self.counts(row) { self.settled.load(Relaxed) } else { row.committed }
    }

    /// The longest prefix that a pass may be planned behind.
    #[inline]
    pub(super) fn reach(&self, row: &Row) -> u32 {
        let settled = self.settled(row);
        let flies = self.counts(row) && self.start.load(Relaxed) >= settled;
        if flies { self.end.load(Relaxed).max(settled) } else { settled }
    }

    /// A pass that writes `start..end` has been planned; nothing is noted of one that writes settled positions alone.
    #[inline]
    pub(super) fn pass(&self, row: &Row, start: u32, end: u32) {
        let settled = self.settled(row);
        if row.lease != 0 && end > settled {
            self.note(row.lease, settled, start, end);
        }
    }

    /// The commit of a path that ends at `settled` has been planned.
    pub(super) fn settle(&self, row: &Row, settled: u32) {
        if row.lease != 0 {
            let (start, end) = self.flight(row);
            self.note(row.lease, settled, start, end);
        }
    }

    /// The row's committed length became `row.committed` under a lease that lives on: a pass behind it stays in flight,
    /// an older one has landed.
    pub(super) fn advance(&self, row: &Row) {
        let (start, end) = self.flight(row);
        self.note(row.lease, row.committed, start, end);
    }

    #[inline]
    fn counts(&self, row: &Row) -> bool {
        row.lease != 0 && self.lease.load(Relaxed) == row.lease
    }

    fn flight(&self, row: &Row) -> (u32, u32) {
        if self.counts(row) { (self.start.load(Relaxed), self.end.load(Relaxed)) } else { (0, 0) }
    }

    #[inline]
    fn note(&self, lease: u64, settled: u32, start: u32, end: u32) {
        self.settled.store(settled, Relaxed);
        self.start.store(start, Relaxed);
        self.end.store(end, Relaxed);
        self.lease.store(lease, Relaxed);
    }
}
