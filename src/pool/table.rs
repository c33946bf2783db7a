//! Read access to the page table for planners and kernels, and its changes for mirrors.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::bounds::{PageId, PageSize, Slot};
use crate::error::{Error, Result};
use crate::pool::changes::{ChangeKind, Epoch};
use crate::pool::row::{Row, SeqId};
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
    /// Positions from here on may not be written: the end of what the live lease reserved; `committed` without one.
    pub limit: u32,
    /// Columns from here on have no other owner; those before it may.
    pub shared: u32,
    /// Goes up whenever `pages` changes or a page of it gets another owner, and when the row's lease ends; never that of
    /// a row of another pool.
    pub version: u64,
    /// Page of each page-sized run of positions. Each is in `1..num_pages`.
    pub pages: &'a [i32],
}

/// New content of columns of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowChange<'a> {
    /// Index of the row, below `max_seqs`.
    pub row: u32,
    /// The first column.
    pub first: u32,
    /// Pages in the columns from `first` on; 0 where no sequence uses them any more. Some may be as before.
    pub pages: &'a [i32],
    /// Cause of the change.
    pub kind: ChangeKind,
}

/// The page table's changes since an [`Epoch`], from [`Tables::changes`].
#[derive(Debug, Clone, Copy)]
pub struct Changes<'a> {
    state: &'a State,
    since: Option<u64>,
    now: Epoch,
}

impl<'a> Tables<'a> {
    /// Identity of the pool, which no other pool of the process has.
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

    /// The present moment: where a mirror that copies the whole table begins.
    pub fn epoch(&self) -> Epoch {
        Epoch { pool: self.state.id, serial: self.state.changes.look() }
    }

    /// The changes since `since`: a mirror that was the table then is the table now once it has stored all of them, in
    /// any order. A mirror begins as zeros, with `None`, or as a copy of [`Self::table`], with [`Self::epoch`]. Any
    /// number of mirrors may look, each with the epoch of its own. Takes time in the number of rows that changed, and
    /// no memory.
    ///
    /// For a mirror on a device, copy the pages to memory that stays as it is until the upload has been done, under the
    /// same read access as the plans that the mirror serves, and launch the upload on the pool's stream: behind the
    /// rounds in flight, which see the table of their own plans, and before the next.
    ///
    /// A device that permutes its rows itself, before the host learns of it, skips [`ChangeKind::Order`] for rows with
    /// a round in flight. Their other changes are safe to store: they are columns that the lease added since the last
    /// look and, with larger pages, a tail page that it copied, or all that it had once it is dropped.
    ///
    /// # Errors
    /// [`Error::Dead`] for an epoch of another pool.
    pub fn changes(&self, since: Option<Epoch>) -> Result<Changes<'a>> {
        let now = self.epoch();
        if let Some(other) = since.filter(|s| s.pool != now.pool) {
            let (id, why) = (format!("{}.{}", other.pool, other.serial), "it belongs to another pool".into());
            return Err(Error::Dead { what: "epoch", id, why });
        }
        Ok(Changes { state: self.state, since: since.map(|s| s.serial), now })
    }

    /// The pool and how often it may have changed: while the stamp is the same, so is all that can be read here.
    #[inline]
    pub fn stamp(&self) -> (u32, u64) {
        // Both only ever go up, and so does their sum.
        (self.state.id, self.state.writes + self.state.settled.load(Ordering::Relaxed))
    }

    /// Positions of a row that no pass may write again: those that are committed, and an accepted path whose commit has
    /// been planned. `None` outside the table.
    #[inline]
    pub fn settled(&self, row: u32) -> Option<u32> {
        self.state.rows.get(row as usize).map(|r| self.state.progress.settled(row as usize, r))
    }

    /// The longest prefix that a pass of a row may be planned behind: the settled tokens, or the end of the newest pass
    /// in flight. `None` outside the table.
    pub fn reach(&self, row: u32) -> Option<u32> {
        self.state.rows.get(row as usize).map(|r| self.state.progress.reach(row as usize, r))
    }

    /// Note that a pass that writes row positions `start..end`, beyond the settled ones, has been planned.
    #[inline]
    pub(crate) fn note_pass(&self, row: u32, start: u32, end: u32) {
        self.state.progress.note_pass(row as usize, start, end);
    }

    /// The commit of accepted paths has been planned: with it, `rows[i]` has its first `lens[i]` positions for good. Each
    /// path holds a position at least, and its row has a lease.
    pub(crate) fn note_commit(&self, rows: &[i32], lens: &[u32]) {
        for (&row, &len) in rows.iter().zip(lens) {
            self.state.progress.note_commit(row as usize, len);
        }
        self.state.settled.fetch_add(1, Ordering::Relaxed);
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
        Ok(self.view(row))
    }

    /// A live row; `None` for one that no sequence has.
    pub fn row(&self, row: u32) -> Option<RowView<'a>> {
        self.state.rows.get(row as usize).filter(|r| r.live).map(|_| self.view(row as usize))
    }

    #[inline]
    fn view(&self, row: usize) -> RowView<'a> {
        let state = self.state;
        let (r, width) = (&state.rows[row], state.config.row_pages as usize);
        RowView {
            row: row as u32,
            committed: r.committed,
            limit: r.limit.max(r.committed), // 0 without a lease
            shared: r.shared,
            version: r.version,
            pages: &state.table[row * width..][..r.pages as usize],
        }
    }
}

impl<'a> Changes<'a> {
    /// The moment that a mirror has reached once it has stored these changes: its next look starts there.
    pub fn epoch(&self) -> Epoch {
        self.now
    }

    /// True if rows come whole, as [`ChangeKind::Pages`]: for a mirror that begins, and where the log does not reach
    /// back to its last look. The log reaches back if at most one other look at the pool was made since. A mirror that
    /// permutes rows itself waits for its rounds before it stores whole rows.
    pub fn whole_rows(&self) -> bool {
        self.since.and_then(|s| self.state.changes.since(s)).is_none()
    }

    /// The changes; a row comes at most twice for each look at the pool in between.
    pub fn iter(&self) -> impl Iterator<Item = RowChange<'a>> + Clone + use<'a> {
        let Self { state, since, .. } = *self;
        let width = state.config.row_pages as usize;
        let of = move |row: u32, columns: Range<usize>, kind| {
            let pages = &state.table[row as usize * width..][columns.clone()];
            RowChange { row, first: columns.start as u32, pages, kind }
        };
        let log = since.and_then(|s| state.changes.since(s));
        let rows = if log.is_some() { &[] } else { state.rows.as_slice() };
        let changed = move |r: &Row| since.map_or(r.generation > 0, |s| r.changed > s);
        let whole = rows.iter().enumerate().filter(move |(_, r)| changed(r));
        let entries = log.into_iter().flatten().flat_map(move |e| {
            let kinds = [(e.pages, ChangeKind::Pages), (e.order, ChangeKind::Order)];
            kinds.into_iter().filter_map(move |(columns, kind)| Some(of(e.row, columns.range()?, kind)))
        });
        entries.chain(whole.map(move |(row, _)| of(row as u32, 0..width, ChangeKind::Pages)))
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
