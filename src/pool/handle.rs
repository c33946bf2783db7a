//! The handle of a pool: every call takes the lock and asks the state behind it.

use std::fmt;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::bounds::PageId;
use crate::error::{Error, Result, in_range};
use crate::pool::audit::AuditReport;
use crate::pool::config::{DEFAULT_HISTORY, PoolConfig};
use crate::pool::ledger::Event;
use crate::pool::row::SeqId;
use crate::pool::state::State;
use crate::pool::table::Tables;

/// Counters of a pool. Pages are without the sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolStats {
    /// Pages of the pool.
    pub total_pages: u32,
    /// Pages on the free list.
    pub free_pages: u32,
    /// Pages the prefix cache owns, alone or with others.
    pub cached_pages: u32,
    /// Pages that the prefix cache alone owns. A call in need evicts them: `free_pages + evictable_pages` can be had
    /// now, and are all pages but those that sequences, leases and raw callers own.
    pub evictable_pages: u32,
    /// Live sequences.
    pub live_sequences: u32,
    /// Sequences under a live lease.
    pub leased_sequences: u32,
}

/// A pool of KV pages; a cheap handle, clones share the pool. All calls are safe from any thread.
#[derive(Clone)]
pub struct Pool {
    config: PoolConfig,
    pub(super) state: Arc<RwLock<State>>,
}

impl fmt::Debug for Pool {
    /// Prints without the state: it may be large, and the thread that prints may hold its lock.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Pool {
    /// An empty pool. Allocates 12 bytes a page, the page table, and about 110 bytes a row.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a size outside its range, [`Error::Overflow`] where slots or the page table do not
    /// fit `int32` indexing, [`Error::Invalid`] where there is no memory for its accounts.
    pub fn new(config: PoolConfig) -> Result<Self> {
        Self::with_history(config, DEFAULT_HISTORY)
    }

    /// An empty pool whose ledger remembers the last `events` page movements (rounded up to a power of two, 16
    /// bytes each) for error messages and [`Pool::history`].
    pub fn with_history(config: PoolConfig, events: u32) -> Result<Self> {
        config.check()?;
        in_range("history events", events, 1, 1 << 28)?;
        config.check_memory(events)?;
        Ok(Self { config, state: Arc::new(RwLock::new(State::new(config, events))) })
    }

    /// The sizes it was made with.
    pub fn config(&self) -> PoolConfig {
        self.config
    }

    /// True if `other` is a handle of the same pool.
    pub fn is(&self, other: &Pool) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }

    /// A new sequence without pages.
    ///
    /// # Errors
    /// [`Error::TooManySequences`] where `max_seqs` live.
    pub fn create(&self) -> Result<SeqId> {
        self.write()?.create()
    }

    /// A new sequence that starts with the first `len` positions of `src` and shares their pages, a partial tail
    /// page included. `src` may be under a lease; only what it has committed is shared. Plans made for `src` before
    /// are refused from then on: they may write what is shared now.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where `len` exceeds what `src` has committed; [`Error::Dead`];
    /// [`Error::TooManySequences`].
    pub fn fork(&self, src: SeqId, len: u32) -> Result<SeqId> {
        self.write()?.fork(src, len)
    }

    /// End sequences: each page of theirs loses an owner.
    ///
    /// # Errors
    /// [`Error::Dead`] for a handle that is not live, [`Error::Invalid`] for one that is leased or given twice.
    /// Nothing is changed then.
    pub fn release(&self, seqs: &[SeqId]) -> Result<()> {
        self.write()?.release(seqs)
    }

    /// Valid positions of a sequence.
    pub fn committed(&self, seq: SeqId) -> Result<u32> {
        self.with_tables(|t| t.seq(seq).map(|r| r.committed))?
    }

    /// Positions of a sequence that have a page, the speculative ones included; always whole pages.
    pub fn allocated(&self, seq: SeqId) -> Result<u32> {
        self.with_tables(|t| t.seq(seq).map(|r| r.allocated(t.page())))?
    }

    /// Version of a sequence's row; goes up whenever its pages change or get another owner and when its lease ends, so
    /// that plans made before are refused.
    pub fn version(&self, seq: SeqId) -> Result<u64> {
        self.with_tables(|t| t.seq(seq).map(|r| r.version))?
    }

    /// Pages of a sequence, in the order of its positions.
    pub fn pages(&self, seq: SeqId) -> Result<Vec<PageId>> {
        self.with_tables(|t| t.seq(seq).map(|r| r.pages.iter().map(|&p| PageId::of_table(p)).collect()))?
    }

    /// Run `f` with read access to the page table. Writers wait meanwhile, and calling this pool or one of its
    /// leases from inside `f` deadlocks.
    ///
    /// # Errors
    /// [`Error::Audit`] where a panic left the pool half-changed; every call has this one.
    pub fn with_tables<R>(&self, f: impl FnOnce(Tables<'_>) -> R) -> Result<R> {
        let state = self.read()?;
        Ok(f(Tables { state: &state }))
    }

    /// Take `n` pages for a caller that keeps its own sequences. All or nothing.
    ///
    /// # Errors
    /// [`Error::PoolExhausted`] where free and evictable pages do not suffice.
    pub fn alloc_pages(&self, n: u32) -> Result<Vec<PageId>> {
        let mut out = Vec::new();
        self.alloc_pages_into(n, &mut out)?;
        Ok(out)
    }

    /// [`alloc_pages`](Pool::alloc_pages) that appends to a vector of the caller.
    pub fn alloc_pages_into(&self, n: u32, out: &mut Vec<PageId>) -> Result<()> {
        self.write()?.alloc_pages(n, out)
    }

    /// Add one raw owner to each page (a page given twice gets two): a second [`free_pages`](Pool::free_pages) of it is
    /// due then.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a page that has no raw owner. Nothing is changed then.
    pub fn retain_pages(&self, pages: &[PageId]) -> Result<()> {
        self.write()?.retain_pages(pages)
    }

    /// Give back pages of [`alloc_pages`](Pool::alloc_pages).
    ///
    /// # Errors
    /// [`Error::DoubleFree`] with the page's history for a page given more often than raw callers own it, in this
    /// call or before; [`Error::OutOfRange`] for one outside the pool. Nothing is changed then.
    pub fn free_pages(&self, pages: &[PageId]) -> Result<()> {
        self.write()?.free_pages(pages)
    }

    /// A new sequence that starts with the longest cached chain of full pages of this `salt` that spells a prefix of
    /// `tokens`, at most `max` positions; its length, 0 where nothing matches; and how many of those positions, from
    /// the first on, have the draft's KV too. A prefill that needs the last token's logits passes
    /// `max = tokens.len() - 1`; one that can do nothing with target KV alone looks up again with `max` = the third.
    ///
    /// Prompts of different salts share no page: time to a first token tells nothing about another salt's prompts.
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn cache_lookup(&self, tokens: &[u32], max: u32, salt: u64) -> Result<(SeqId, u32, u32)> {
        self.write()?.cache_lookup(tokens, max, salt)
    }

    /// Let the cache keep the full pages of `tokens`, the tokens of the sequence's first committed positions, for
    /// lookups of this `salt`. The first `drafted` of them have the draft's KV too (0 without a draft model). Returns
    /// how many pages were new to it. Where another sequence cached the same tokens before, those pages stay the cached
    /// ones, unless they lack draft KV that this sequence has: then this sequence's pages take their place.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for more tokens than are committed, or more drafted than tokens; [`Error::Invalid`] where
    /// a page of the sequence is cached under other tokens or another salt; [`Error::Dead`]. Nothing is changed then.
    pub fn cache_insert(&self, seq: SeqId, tokens: &[u32], drafted: u32, salt: u64) -> Result<u32> {
        self.write()?.cache_insert(seq, tokens, drafted, salt)
    }

    /// Empty the cache; returns how many pages it had. Pages that sequences share stay theirs.
    pub fn cache_clear(&self) -> Result<u32> {
        self.write()?.cache_clear()
    }

    /// The events of a page that the ledger still remembers, oldest first. Linear in the ledger's memory.
    pub fn history(&self, page: PageId) -> Result<Vec<Event>> {
        Ok(self.read()?.ledger.history(page.get()))
    }

    /// Counters.
    pub fn stats(&self) -> Result<PoolStats> {
        let s = self.read()?;
        Ok(PoolStats {
            total_pages: self.config.num_pages - 1,
            free_pages: s.ledger.free_len(),
            cached_pages: s.cache.len(),
            evictable_pages: s.cache.idle(),
            live_sequences: s.rows.iter().filter(|r| r.live).count() as u32,
            leased_sequences: s.leased_rows,
        })
    }

    /// Recount every owner of every page and compare with the ledger, the free list, the rows, the leases and the
    /// cache. Linear in the pool and the page table.
    ///
    /// # Errors
    /// [`Error::Audit`]: what disagrees, both values, and the history of the page concerned.
    pub fn audit(&self) -> Result<AuditReport> {
        self.read()?.audit()
    }

    pub(super) fn write(&self) -> Result<RwLockWriteGuard<'_, State>> {
        let mut state = self.state.write().map_err(|_| poisoned())?;
        state.writes += 1;
        Ok(state)
    }

    pub(super) fn read(&self) -> Result<RwLockReadGuard<'_, State>> {
        self.state.read().map_err(|_| poisoned())
    }
}

/// A thread panicked while it changed the pool: the accounts may be half-changed, and no call goes on with them.
#[cold]
fn poisoned() -> Error {
    Error::Audit {
        what: "a thread panicked while it was changing the pool".into(),
        history: "unknown; make a new pool".into(),
    }
}
