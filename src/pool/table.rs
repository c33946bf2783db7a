//! Read access to the page table for planners and kernels.

use crate::bounds::{PageId, PageSize, Slot};
use crate::error::{Error, Result};
use crate::pool::row::SeqId;
use crate::pool::state::State;

/// The pool's page table and lengths, for as long as its read lock is held. Calling the pool or a lease while
/// holding one deadlocks.
#[derive(Debug, Clone, Copy)]
pub struct Tables<'a> {
    pub(super) state: &'a State,
}

/// One live row.
#[derive(Debug, Clone, Copy)]
pub struct RowView<'a> {
    /// Index of the row, below `max_seqs`.
    pub row: u32,
    /// Positions whose KV is valid; covered by `pages`.
    pub committed: u32,
    /// Columns from here on have no other owner; those before it may.
    pub shared: u32,
    /// Goes up whenever `pages` changes or a page of it gets another owner; never that of a row of another pool.
    pub version: u64,
    /// Page of each page-sized run of positions. Each is in `1..num_pages`.
    pub pages: &'a [i32],
}

impl<'a> Tables<'a> {
    /// Identity of the pool: that of no other pool of the process.
    pub fn pool(&self) -> u32 {
        self.state.id
    }

    /// Tokens per page.
    pub fn page(&self) -> PageSize {
        self.state.config.page
    }

    /// Columns of the table.
    pub fn row_pages(&self) -> u32 {
        self.state.config.row_pages
    }

    /// Rows of the table.
    pub fn max_seqs(&self) -> u32 {
        self.state.config.max_seqs
    }

    /// Pages of the pool, the sink included; every entry of the table is below it.
    pub fn num_pages(&self) -> u32 {
        self.state.config.num_pages
    }

    /// The whole table, `max_seqs x row_pages`, row-major; entries that no sequence uses are 0, the sink.
    pub fn table(&self) -> &'a [i32] {
        &self.state.table
    }

    /// The whole line of a row, dead columns (0) included; `None` outside the table.
    pub fn line(&self, row: u32) -> Option<&'a [i32]> {
        let width = self.state.config.row_pages as usize;
        self.state.table.get(row as usize * width..)?.get(..width)
    }

    /// Version of a row, live or not; `None` outside the table. A plan made at another version must not run.
    pub fn version(&self, row: u32) -> Option<u64> {
        self.state.rows.get(row as usize).map(|r| r.version)
    }

    /// The pool and how often it may have changed: while the stamp is the same, so is all that can be read here.
    #[inline]
    pub fn stamp(&self) -> (u32, u64) {
        (self.state.id, self.state.changes)
    }

    /// Owners of a page: rows, leases, the cache and raw callers; 0 for a free page, `None` for the sink and outside
    /// the pool.
    #[inline]
    pub fn owners(&self, page: u32) -> Option<u32> {
        if page == 0 { None } else { self.state.ledger.recs.get(page as usize).map(|r| r.refs) }
    }

    /// The row of a sequence.
    ///
    /// # Errors
    /// [`Error::Dead`] for a handle that is not live.
    #[inline]
    pub fn seq(&self, seq: SeqId) -> Result<RowView<'a>> {
        let row = self.state.live_row(seq)?;
        let (r, width) = (&self.state.rows[row], self.state.config.row_pages as usize);
        let pages = &self.state.table[row * width..][..r.pages as usize];
        Ok(RowView { row: seq.row(), committed: r.committed, shared: r.shared, version: r.version, pages })
    }
}

impl RowView<'_> {
    /// Positions that have a page.
    pub fn allocated(&self, page: PageSize) -> u32 {
        self.pages.len() as u32 * page.get() // checked against int32 when the pool was made
    }

    /// Slot of a position.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] for a position without a page.
    pub fn slot(&self, page: PageSize, pos: u32) -> Result<Slot> {
        match self.pages.get(page.page_of(pos) as usize) {
            Some(&p) => page.slot(PageId::of_table(p), page.offset(pos)),
            None => Err(Error::OutOfBounds {
                kernel: "page table",
                buffer: "row positions",
                request: self.row.into(),
                step: -1,
                index: pos.into(),
                bound: self.allocated(page).into(),
            }),
        }
    }
}
