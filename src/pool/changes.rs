//! Columns of the page table that changed, for its mirrors: copies of it elsewhere, on a device mostly.
//!
//! A log of bounded size with one entry a row: while nobody has looked since a row's last entry, further changes widen
//! that entry, so that what a mirror uploads does not grow with the number of calls between two looks. Entries say
//! *where*; the content is read from the table at the time of the look. Before the first look nothing is kept.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// A moment in the history of a pool's page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch {
    pub(super) pool: u32,
    /// Serial of the log's next entry then.
    pub(super) serial: u64,
}

/// Cause of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChangeKind {
    /// Columns got other pages, or none.
    Pages,
    /// [`Lease::remap_all`](crate::pool::Lease::remap_all) permuted the columns.
    Order,
}

/// Columns of one kind of change; empty where `first >= end`.
#[derive(Debug, Clone, Copy)]
pub(super) struct ColumnSpan {
    first: u32,
    end: u32,
}

const NO_COLUMNS: ColumnSpan = ColumnSpan { first: u32::MAX, end: 0 };

impl ColumnSpan {
    fn widen(&mut self, first: usize, end: usize) {
        *self = ColumnSpan { first: self.first.min(first as u32), end: self.end.max(end as u32) };
    }

    /// The range of changes; `None` where nothing changed.
    pub(super) fn range(self) -> Option<Range<usize>> {
        (self.first < self.end).then_some(self.first as usize..self.end as usize)
    }
}

/// Changes of one row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) row: u32,
    pub(super) pages: ColumnSpan,
    pub(super) order: ColumnSpan,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct ChangeLog {
    /// The entry with serial n at `n % len`; the length is a power of two and at least twice the rows.
    ring: Vec<Entry>,
    /// Serial of the next entry; the first one's is 1.
    serial: u64,
    /// The largest serial that an [`Epoch`] was given out for, 0 before the first. Entries from here on are of
    /// different rows.
    seen: AtomicU64,
}

impl ChangeLog {
    pub(super) fn new(rows: u32) -> Self {
        let len = (2 * rows as usize).next_power_of_two();
        let none = Entry { row: 0, pages: NO_COLUMNS, order: NO_COLUMNS };
        Self { ring: vec![none; len], serial: 1, seen: AtomicU64::new(0) }
    }

    /// Columns `first..end` of `row` changed. `last` is the row's own note: the serial behind its latest entry, or 0.
    #[inline(always)]
    pub(super) fn note(&mut self, last: &mut u64, row: usize, kind: ChangeKind, first: usize, end: usize) {
        let seen = *self.seen.get_mut();
        if seen == 0 || first >= end {
            return;
        }
        self.keep(last, seen, row, kind, first, end);
    }

    #[cold] // for pools with mirrors alone: the others' loops carry no more than the test above
    fn keep(&mut self, last: &mut u64, seen: u64, row: usize, kind: ChangeKind, first: usize, end: usize) {
        if *last <= seen {
            let at = self.slot(self.serial);
            self.ring[at] = Entry { row: row as u32, pages: NO_COLUMNS, order: NO_COLUMNS };
            self.serial += 1;
            *last = self.serial;
        }
        let at = self.slot(*last - 1);
        let entry = &mut self.ring[at];
        match kind {
            ChangeKind::Pages => entry.pages.widen(first, end),
            ChangeKind::Order => entry.order.widen(first, end),
        }
    }

    fn slot(&self, serial: u64) -> usize {
        serial as usize & (self.ring.len() - 1) // a power of two
    }

    /// The present moment; what changes from now on gets entries behind it.
    pub(super) fn look(&self) -> u64 {
        // Relaxed: writers have the pool's lock to themselves, which orders this before them.
        self.seen.fetch_max(self.serial, Ordering::Relaxed);
        self.serial
    }

    /// Entries since `serial`, oldest first; `None` where some are gone.
    pub(super) fn since(&self, serial: u64) -> Option<impl Iterator<Item = Entry> + Clone + '_> {
        let kept = self.serial.saturating_sub(serial) <= self.ring.len() as u64;
        kept.then(|| (serial..self.serial).map(|n| self.ring[self.slot(n)]))
    }

    /// Check a row's note; returns what is wrong.
    pub(super) fn check(&self, row: usize, last: u64) -> Result<(), String> {
        let kept = last > 0 && self.serial - last.min(self.serial) < self.ring.len() as u64;
        let found = kept.then(|| self.ring[self.slot(last - 1)].row as usize);
        if last > self.serial || found.is_some_and(|found| found != row) {
            return Err(format!("row {row} changed last at {last} of {}, an entry of row {found:?}", self.serial));
        }
        Ok(())
    }
}
