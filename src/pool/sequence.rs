//! Sequences: handles, rows, and creating, forking and releasing them.

use std::fmt;

use crate::bounds::PageSize;
use crate::error::{Error, Result, in_range};
use crate::pool::ledger::{EventKind, Owner};
use crate::pool::state::State;

/// Handle of a sequence: a row of the page table and the generation it was created in.
///
/// Rows are used again after a release, generations are not, so a handle that is kept too long is an error
/// ([`Error::Dead`]) and never another request's row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqId {
    /// The pool that made it.
    pub(super) pool: u32,
    row: u32,
    generation: u32,
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

/// What the pool keeps of a row besides its line of the page table.
#[derive(Debug, Clone, Copy, Default)]
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
    /// Goes up whenever the row's pages change or get another owner, across generations too. Starts at a number of
    /// the pool's own, so that what was planned for one pool does not fit the rows of another.
    pub(super) version: u64,
    /// Stamp of the last call that named this row: finds a sequence given twice in one call.
    pub(super) stamp: u64,
}

impl Row {
    /// Column of the partial tail page, where there is one.
    pub(super) fn tail_col(&self, page: PageSize) -> Option<u32> {
        (page.offset(self.committed) != 0).then(|| page.page_of(self.committed))
    }
}

impl State {
    /// Index of a live sequence's row.
    #[inline]
    pub(super) fn live_row(&self, seq: SeqId) -> Result<usize> {
        match self.rows.get(seq.row as usize) {
            Some(r) if r.live && r.generation == seq.generation && seq.pool == self.id => Ok(seq.row as usize),
            _ => Err(self.dead(seq)),
        }
    }

    #[cold]
    fn dead(&self, seq: SeqId) -> Error {
        let why = match self.rows.get(seq.row as usize) {
            _ if seq.pool != self.id => "it belongs to another pool".to_string(),
            Some(r) if r.live => format!("it was released, and its row is now {}.{}", seq.row, r.generation),
            _ => "it was released".to_string(),
        };
        Error::Dead { what: "sequence", id: seq.to_string(), why }
    }

    /// The error for a sequence that has a live lease where none may be.
    #[cold]
    pub(super) fn leased(what: &'static str, seq: SeqId) -> Error {
        Error::Invalid {
            what,
            got: format!("sequence {seq}"),
            why: "a lease on it is live; commit or drop the lease first".into(),
        }
    }

    /// Stamp `row` for the current call; an error if this call named it before.
    #[inline]
    pub(super) fn stamp(&mut self, what: &'static str, seq: SeqId, row: usize) -> Result<()> {
        if self.rows[row].stamp == self.call {
            return Err(Error::Invalid {
                what,
                got: format!("sequence {seq}"),
                why: "it is given twice in one call".into(),
            });
        }
        self.rows[row].stamp = self.call;
        Ok(())
    }

    pub(super) fn create(&mut self) -> Result<SeqId> {
        let row = self.free_rows.pop().ok_or(Error::TooManySequences { limit: self.config.max_seqs.into() })?;
        let r = &mut self.rows[row as usize];
        r.generation += 1; // a row at u32::MAX is never put back on the list
        r.live = true;
        r.version += 1;
        Ok(SeqId::new(self.id, row, r.generation))
    }

    pub(super) fn fork(&mut self, src: SeqId, len: u32) -> Result<SeqId> {
        let s = self.live_row(src)?;
        let from = self.rows[s];
        in_range("fork length", len, 0, from.committed.into())?;
        let seq = self.create()?;
        let (n, width) = (self.config.page.pages_for(len) as usize, self.config.row_pages as usize);
        let (d, owner) = (seq.row as usize, Owner::of(seq));
        for col in 0..n {
            // Under a lease that copies the tail, the old tail page is the one whose KV is certainly there.
            let copied = from.held != 0 && from.tail_col(self.config.page) == Some(col as u32);
            let page = if copied { from.held } else { self.table[s * width + col] as u32 };
            self.ledger.add_ref(page, EventKind::Share, owner)?;
            self.table[d * width + col] = page as i32;
        }
        let r = &mut self.rows[d];
        (r.committed, r.pages, r.base_pages, r.shared) = (len, n as u32, n as u32, n as u32);
        let r = &mut self.rows[s];
        r.shared = from.shared.max(n as u32);
        r.version += u64::from(n > 0); // a plan that writes those pages was made when they had one owner
        self.settle();
        Ok(seq)
    }

    pub(super) fn release(&mut self, seqs: &[SeqId]) -> Result<()> {
        self.call += 1;
        for &seq in seqs {
            let row = self.live_row(seq)?;
            if self.rows[row].lease != 0 {
                return Err(Self::leased("release", seq));
            }
            self.stamp("release", seq, row)?;
        }
        let width = self.config.row_pages as usize;
        for &seq in seqs {
            let row = seq.row as usize;
            let r = &mut self.rows[row];
            let pages = r.pages as usize;
            *r = Row { generation: r.generation, version: r.version + 1, stamp: r.stamp, ..Row::default() };
            self.ledger.give_back(&mut self.table[row * width..][..pages], Owner::of(seq))?;
            if seq.generation < u32::MAX {
                self.free_rows.push(seq.row);
            }
        }
        self.settle();
        Ok(())
    }
}
