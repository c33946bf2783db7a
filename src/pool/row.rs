//! Handles of sequences, and the pool's record of a row.

use std::fmt;

use crate::bounds::PageSize;

/// Handle of a sequence: a row of the page table and the generation it was created in.
///
/// Rows are used again after a release, generations are not, so a handle that is kept too long is an error
/// ([`Error::Dead`](crate::Error::Dead)) and never another request's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqId {
    /// The pool that made it.
    pub(super) pool: u32,
    pub(super) row: u32,
    pub(super) generation: u32,
}

impl SeqId {
    pub(super) fn new(pool: u32, row: u32, generation: u32) -> Self {
        Self { pool, row, generation }
    }

    /// Row of the page table; below `max_seqs`.
    pub fn row(self) -> u32 {
        self.row
    }

    /// Generation of the row, from 1.
    pub fn generation(self) -> u32 {
        self.generation
    }
}

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.row, self.generation)
    }
}

/// Data that the pool keeps of a row besides its line of the page table. It fills one cache line, since each call reads
/// most of it.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
pub(super) struct Row {
    /// Generation of the current (or, while not live, the next) sequence; 0 only before the first.
    pub(super) generation: u32,
    pub(super) live: bool,
    /// Positions whose KV is valid.
    pub(super) committed: u32,
    /// Live columns. Without a lease always `pages_for(committed)`; with one, at least that.
    pub(super) pages: u32,
    /// Columns before the live lease; equal to `pages` without one.
    pub(super) base_pages: u32,
    /// Columns from here on have no other owner: forks and the cache share leading columns alone. Those before may.
    pub(super) shared: u32,
    /// One past the last position that the live lease may commit. 0 without one.
    pub(super) limit: u32,
    /// The shared tail page that the live lease replaced by a copy; it still owns a reference. 0 for none.
    pub(super) held: u32,
    /// Id of the live lease, 0 for none.
    pub(super) lease: u64,
    /// Goes up whenever the row's pages change or get another owner and when its lease ends, across generations too. Starts at a number of
    /// the pool's own, so that what was planned for one pool does not fit the rows of another.
    pub(super) version: u64,
    /// The change log's note of the row's last change, across generations too.
    pub(super) changed: u64,
    /// Stamp of the last call that named this row: finds a sequence given twice in one call.
    pub(super) stamp: u64,
}

impl Row {
    /// Column of the partial tail page, where there is one.
    pub(super) fn tail_col(&self, page: PageSize) -> Option<u32> {
        (page.offset(self.committed) != 0).then(|| page.page_of(self.committed))
    }
}
