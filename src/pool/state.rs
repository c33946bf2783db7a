//! The state that the pool's lock guards, and the page movements that are neither a sequence's nor a lease's.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::bounds::PageId;
use crate::error::{Error, Result};
use crate::pool::cache::PrefixCache;
use crate::pool::changes::ChangeLog;
use crate::pool::config::PoolConfig;
use crate::pool::ledger::{EventKind, Ledger, Owner};
use crate::pool::progress::Progress;
use crate::pool::reserved::Buffers;
use crate::pool::row::{Row, SeqId};

/// Tells the handles of different pools apart.
static POOLS: AtomicU32 = AtomicU32::new(1);

#[derive(Debug)]
pub(super) struct State {
    pub(super) id: u32,
    pub(super) config: PoolConfig,
    pub(super) ledger: Ledger,
    /// `max_seqs x row_pages` page ids, row-major. Columns from a row's `pages` on are 0, the sink.
    pub(super) table: Vec<i32>,
    pub(super) rows: Vec<Row>,
    /// Notes of planners on each row.
    pub(super) progress: Progress,
    /// Commits that planners noted: with `writes`, how often anything that a planner reads has changed.
    pub(super) settled: AtomicU64,
    /// Changes of the table. Every write of live columns is noted here.
    pub(super) changes: ChangeLog,
    /// Rows that are not live, the next one to be used last.
    pub(super) free_rows: Vec<u32>,
    pub(super) cache: PrefixCache,
    /// Times that someone has had write access, so far.
    pub(super) writes: u64,
    /// Calls that stamp rows, so far.
    pub(super) call: u64,
    /// Leases handed out so far; the id of the next one, less 1.
    pub(super) leases: u64,
    /// Rows that have a live lease.
    pub(super) leased_rows: u32,
    /// Cleared buffers of leases that ended.
    #[expect(clippy::vec_box, reason = "a lease takes its box and gives it back: 8 bytes move, not four vectors")]
    pub(super) spare: Vec<Box<Buffers>>,
    /// Page ids in passing, of `remap`.
    pub(super) scratch: Vec<i32>,
}

impl State {
    /// `config` has been checked.
    pub(super) fn new(config: PoolConfig, events: u32) -> Self {
        let id = POOLS.fetch_add(1, Ordering::Relaxed);
        let row = Row { version: u64::from(id) << 40, ..Row::default() };
        Self {
            id,
            ledger: Ledger::new(config.num_pages, events),
            table: vec![0; config.max_seqs as usize * config.row_pages as usize],
            rows: vec![row; config.max_seqs as usize],
            progress: Progress::new(config.max_seqs),
            settled: AtomicU64::new(0),
            free_rows: (0..config.max_seqs).rev().collect(), // row 0 first
            cache: PrefixCache::new(config.page.get()),
            changes: ChangeLog::new(config.max_seqs),
            writes: 0,
            call: 0,
            leases: 0,
            leased_rows: 0,
            spare: Vec::new(),
            scratch: Vec::new(),
            config,
        }
    }

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

    /// Tell the cache which of its pages got or lost their other owners.
    #[inline]
    pub(super) fn settle(&mut self) {
        if self.ledger.pinned.is_empty() && self.ledger.unpinned.is_empty() {
            return;
        }
        // One operation either adds owners or drops them, never both, so the order between the two lists does not
        // matter.
        for n in self.ledger.pinned.drain(..) {
            self.cache.pin(n);
        }
        for n in self.ledger.unpinned.drain(..) {
            self.cache.unpin(n);
        }
    }

    /// Make sure that `need` pages are on the free list, evicting from the cache. Changes nothing on an error.
    #[inline]
    pub(super) fn make_room(&mut self, need: u64) -> Result<()> {
        if need <= self.ledger.free.len() as u64 { Ok(()) } else { self.evict_for(need) }
    }

    #[cold]
    fn evict_for(&mut self, need: u64) -> Result<()> {
        let free = u64::from(self.ledger.free_len() + self.cache.idle());
        if need > free {
            let total = u64::from(self.config.num_pages - 1);
            return Err(Error::PoolExhausted { need, free, total });
        }
        let mut forgotten = Vec::new(); // stays empty, and without memory, unless the cache has to cut
        while (self.ledger.free.len() as u64) < need {
            let Some(page) = self.cache.evict(&mut forgotten) else { break }; // idle pages were counted: not reached
            for page in forgotten.drain(..).chain([page]) {
                self.uncache(page)?;
            }
        }
        Ok(())
    }

    /// Drop the reference of a cache node that is gone.
    pub(super) fn uncache(&mut self, page: u32) -> Result<()> {
        self.ledger.recs[page as usize].aux = 0;
        self.ledger.drop_ref(page, Owner::Cache)
    }

    pub(super) fn alloc_pages(&mut self, n: u32, out: &mut Vec<PageId>) -> Result<()> {
        self.make_room(n.into())?;
        let old = out.len();
        out.resize(old + n as usize, PageId::SINK);
        self.ledger.take_into(&mut out[old..], EventKind::Alloc, Owner::Raw, |page| PageId::of_table(page as i32))
    }

    pub(super) fn retain_pages(&mut self, pages: &[PageId]) -> Result<()> {
        for &page in pages {
            let raw = self.ledger.recs.get(page.get() as usize).map_or(0, |r| r.raw());
            if raw == 0 || raw.checked_add(pages.len() as u32).is_none() {
                return Err(Error::Invalid {
                    what: "retain_pages",
                    got: format!("page {}", page.get()),
                    why: format!("it has {raw} raw owner(s); only pages of alloc_pages can be retained"),
                });
            }
        }
        for &page in pages {
            self.ledger.add_ref(page.get(), EventKind::Share, Owner::Raw)?;
        }
        Ok(())
    }

    pub(super) fn free_pages(&mut self, pages: &[PageId]) -> Result<()> {
        self.ledger.free_raw(pages)
    }
}
