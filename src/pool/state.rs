//! What the pool's lock guards, and the page movements that are neither a sequence's nor a lease's.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::bounds::PageId;
use crate::error::{Error, Result};
use crate::pool::PoolConfig;
use crate::pool::cache::{Cursor, PrefixCache};
use crate::pool::ledger::{EventKind, Ledger, Owner};
use crate::pool::sequence::{Row, SeqId};

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
    /// Rows that are not live, the next one to be used last.
    pub(super) free_rows: Vec<u32>,
    pub(super) cache: PrefixCache,
    /// Times that someone has had write access, so far.
    pub(super) changes: u64,
    /// Calls that stamp rows, so far.
    pub(super) call: u64,
    /// Leases handed out so far; the id of the next one, less 1.
    pub(super) leases: u64,
    /// Rows that have a live lease.
    pub(super) leased_rows: u32,
    /// Cleared buffers of leases that ended.
    pub(super) spare: Vec<super::lease::Buffers>,
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
            free_rows: (0..config.max_seqs).rev().collect(), // row 0 first
            cache: PrefixCache::new(config.page.get()),
            changes: 0,
            call: 0,
            leases: 0,
            leased_rows: 0,
            spare: Vec::new(),
            scratch: Vec::new(),
            config,
        }
    }

    /// Tell the cache which of its pages got or lost their other owners.
    #[inline]
    pub(super) fn settle(&mut self) {
        if self.ledger.pinned.is_empty() && self.ledger.unpinned.is_empty() {
            return;
        }
        // One operation either adds owners or drops them, so the order between the two lists does not matter.
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
    fn uncache(&mut self, page: u32) -> Result<()> {
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

    pub(super) fn cache_lookup(&mut self, tokens: &[u32], max: u32) -> Result<(SeqId, u32)> {
        let (page_len, width) = (self.config.page.get() as usize, self.config.row_pages as usize);
        let full = (tokens.len().min(max as usize) / page_len).min(width);
        let seq = self.create()?;
        let (row, owner) = (seq.row() as usize, Owner::of(seq));
        let (mut at, mut n) = (Cursor::ROOT, 0);
        for chunk in tokens[..full * page_len].chunks_exact(page_len) {
            let Some((next, page)) = self.cache.find(at, chunk) else { break };
            self.ledger.add_ref(page, EventKind::Share, owner)?;
            self.table[row * width + n] = page as i32;
            (at, n) = (next, n + 1);
        }
        let len = (n * page_len) as u32; // at most max
        let r = &mut self.rows[row];
        (r.committed, r.pages, r.base_pages, r.shared) = (len, n as u32, n as u32, n as u32);
        self.settle();
        Ok((seq, len))
    }

    pub(super) fn cache_insert(&mut self, seq: SeqId, tokens: &[u32]) -> Result<u32> {
        let row = self.live_row(seq)?;
        let committed = self.rows[row].committed;
        if tokens.len() > committed as usize {
            let (got, max) = (tokens.len() as i128, committed.into());
            return Err(Error::OutOfRange { what: "tokens to cache", got, min: 0, max });
        }
        let (page_len, width) = (self.config.page.get() as usize, self.config.row_pages as usize);
        let full = tokens.len() / page_len;
        let (mut at, mut have) = (Cursor::ROOT, 0);
        while have < full {
            let Some((next, _)) = self.cache.find(at, &tokens[have * page_len..][..page_len]) else { break };
            (at, have) = (next, have + 1);
        }
        for col in have..full {
            let page = self.table[row * width + col] as u32;
            if self.ledger.recs[page as usize].node().is_some() {
                return Err(Error::Invalid {
                    what: "tokens to cache",
                    got: format!("sequence {seq}, page {page} of positions {}..", col * page_len),
                    why: "the page is in the cache under other tokens".into(),
                });
            }
        }
        let r = &mut self.rows[row];
        r.shared = r.shared.max(full as u32);
        r.version += u64::from(have < full); // as in `fork`
        for (col, chunk) in tokens.chunks_exact(page_len).enumerate().skip(have) {
            let page = self.table[row * width + col] as u32;
            self.ledger.add_ref(page, EventKind::Cache, Owner::Cache)?;
            let (next, node) = self.cache.insert(at, chunk, page);
            self.ledger.recs[page as usize].aux = node + 1;
            at = next;
        }
        Ok((full - have) as u32)
    }

    pub(super) fn cache_clear(&mut self) -> Result<u32> {
        let pages = self.cache.clear();
        for &page in &pages {
            self.uncache(page)?;
        }
        Ok(pages.len() as u32)
    }
}
