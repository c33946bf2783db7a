//! The paged KV allocator: who owns which page, for every sequence, always accounted.
//!
//! Place in the flow: sizes come from [`geometry`](crate::geometry); [`plan`](crate::plan) reads the page table
//! through [`Pool::with_tables`]; the engine holds [`SeqId`]s and [`Lease`]s. Nothing here touches KV bytes.
//!
//! A **page** holds the KV of `page_size` tokens in every layer. Page 0 is the sink: padded lanes write there, no
//! sequence ever owns it. A **sequence** is a row of one page table, `max_seqs x row_pages` of `i32`; position `pos`
//! of a row lives in slot `table[row][pos / P] * P + pos % P`. Its first `committed` positions are valid; what is
//! behind them is speculative and exists only under a **lease**:
//!
//! ```
//! use specrs::bounds::PageSize;
//! use specrs::pool::{Pool, PoolConfig};
//! let pool = Pool::new(PoolConfig { num_pages: 65, page: PageSize::new(4)?, max_seqs: 8, row_pages: 16 })?;
//! let a = pool.create()?;
//! let lease = pool.reserve(&[(a, 10)])?; // 3 pages, for positions 0..12
//! lease.commit(&[6])?; // 6 tokens are valid now: 2 pages stay, the third went back
//! assert_eq!((pool.committed(a)?, pool.allocated(a)?), (6, 8));
//!
//! let b = pool.fork(a, 5)?; // shares both pages, the half-used one too
//! let lease = pool.reserve(&[(b, 7)])?; // b is about to write: it gets a page of its own
//! assert_eq!(lease.copies().len(), 1); // run these before writing
//! drop(lease); // rolled back: b has the shared page again
//!
//! pool.release(&[a, b])?;
//! assert_eq!(pool.audit()?.free_pages, 64);
//! # Ok::<(), specrs::Error>(())
//! ```
//!
//! What holds at all times, and what [`Pool::audit`] checks:
//!
//! * a page's reference count is the number of its owners: rows, shared tails held by leases, the prefix cache, and
//!   raw callers; it is on the free list exactly when that is 0;
//! * without a lease a row has exactly the pages of its committed positions; whole pages are taken and given back,
//!   so what is allocated is what is recorded and what is freed;
//! * a page behind a row's committed positions has one owner; a partial tail page with two is replaced before it is
//!   written ([`Lease::copies`]); full pages are never written again, since lengths only grow;
//! * a call that fails changes nothing.
//!
//! [`Pool::cache_insert`] lets full pages outlive their sequence and [`Pool::cache_lookup`] starts a new one from
//! them. Pages that the cache alone owns count as free: a call that needs pages evicts them, least recently used
//! first, leaves before what they hang from. There is no state of the cache in which such a page can't be had: pages
//! that are neither on the free list nor evictable are those that sequences, leases and raw callers own.

mod audit;
mod cache;
mod lease;
mod ledger;
mod owners;
mod sequence;
mod state;
mod table;

use std::fmt;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::bounds::{PageId, PageSize, fits_i32};
use crate::error::{Error, Result, in_range};

pub use audit::AuditReport;
pub use lease::{Lease, PageCopy, Refused};
pub use ledger::{Event, EventKind, Owner};
pub use sequence::SeqId;
use state::State;
pub use table::{RowView, Tables};

/// Largest number of sequences of a pool; more than a batch, since sequences may wait and prefixes may be kept.
pub const MAX_SEQS: u32 = 1 << 20;

/// Events that the ledger remembers unless [`Pool::with_history`] says otherwise: 256 KiB.
pub const DEFAULT_HISTORY: u32 = 1 << 14;

/// Sizes of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Pages, the sink included; at least 2.
    pub num_pages: u32,
    /// Tokens per page.
    pub page: PageSize,
    /// Sequences that can live at once; at least 1.
    pub max_seqs: u32,
    /// Columns of the page table: pages that one sequence can have. See
    /// [`Geometry::row_pages`](crate::geometry::Geometry::row_pages).
    pub row_pages: u32,
}

impl PoolConfig {
    fn check(&self) -> Result<()> {
        in_range("num_pages", self.num_pages, 2, i32::MAX.into())?;
        in_range("max_seqs", self.max_seqs, 1, MAX_SEQS.into())?;
        in_range("row_pages", self.row_pages, 1, i32::MAX.into())?;
        let (n, p, s, w) = (self.num_pages, self.page.get(), self.max_seqs, self.row_pages);
        fits_i32("KV slots", u64::from(n) * u64::from(p), || format!("num_pages {n} * page_size {p}"))?;
        fits_i32("row positions", u64::from(w) * u64::from(p), || format!("row_pages {w} * page_size {p}"))?;
        fits_i32("page table", u64::from(s) * u64::from(w), || format!("max_seqs {s} * row_pages {w}"))?;
        Ok(())
    }
}

impl PoolConfig {
    /// Refuse sizes whose accounts the allocator has no room for: the allocations themselves would end the process.
    fn check_memory(&self, events: u32) -> Result<()> {
        // Upper bounds: 24 bytes a page, 64 a row beside its columns, 64 an event (16, rounded up to a power of two).
        let (n, s, w) = (u64::from(self.num_pages), u64::from(self.max_seqs), u64::from(self.row_pages));
        let bytes = 24 * n + s * (4 * w + 64) + 64 * u64::from(events);
        let mut probe = Vec::<u8>::new();
        let given = usize::try_from(bytes).is_ok_and(|b| probe.try_reserve_exact(b).is_ok());
        std::hint::black_box(&probe); // or the allocation may be optimised away as unused
        if given {
            return Ok(());
        }
        Err(Error::Invalid {
            what: "pool",
            got: format!("num_pages {n}, max_seqs {s} * row_pages {w}"),
            why: format!("its accounts need up to {bytes} bytes, which the system does not give"),
        })
    }
}

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
    state: Arc<RwLock<State>>,
}

impl fmt::Debug for Pool {
    /// Without the state: it may be large, and its lock may be held by whoever prints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Pool {
    /// An empty pool. Allocates 12 bytes a page and the page table.
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

    /// Whether `other` is a handle of the same pool.
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

    /// Make sure that each sequence has pages for its row positions `0..positions`, for the whole batch or not at
    /// all. `positions` is rounded up to whole pages and at least what is committed.
    ///
    /// A partial tail page that another owner shares is replaced by a fresh page, and the copy that this needs is in
    /// [`Lease::copies`]; that page counts as needed too.
    ///
    /// # Errors
    /// [`Error::PoolExhausted`] where free and evictable pages do not suffice; [`Error::Capacity`] beyond
    /// `row_pages`; [`Error::OutOfRange`] below the committed length; [`Error::Invalid`] for a sequence that is
    /// leased or given twice; [`Error::Dead`]. Nothing is changed then.
    pub fn reserve(&self, wants: &[(SeqId, u32)]) -> Result<Lease> {
        let (id, buffers) = self.write()?.reserve(wants)?;
        Ok(Lease::new(self.clone(), id, buffers))
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

    /// Version of a sequence's row; goes up whenever its pages change or get another owner, so that plans made
    /// before are refused.
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

    /// One more raw owner for each page (a page given twice gets two): a second [`free_pages`](Pool::free_pages) of
    /// it is due then.
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

    /// A new sequence that starts with the longest cached chain of full pages that spells a prefix of `tokens`, at
    /// most `max` positions; and its length, 0 where nothing matches. A prefill that needs the last token's logits
    /// passes `max = tokens.len() - 1`.
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn cache_lookup(&self, tokens: &[u32], max: u32) -> Result<(SeqId, u32)> {
        self.write()?.cache_lookup(tokens, max)
    }

    /// Let the cache keep the full pages of `tokens`, the tokens of the sequence's first committed positions.
    /// Returns how many pages were new to it; where another sequence cached the same tokens before, those pages
    /// stay the cached ones.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for more tokens than are committed; [`Error::Invalid`] where a page of the sequence is
    /// cached under other tokens; [`Error::Dead`]. Nothing is changed then.
    pub fn cache_insert(&self, seq: SeqId, tokens: &[u32]) -> Result<u32> {
        self.write()?.cache_insert(seq, tokens)
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

    fn write(&self) -> Result<RwLockWriteGuard<'_, State>> {
        let mut state = self.state.write().map_err(|_| poisoned())?;
        state.changes += 1;
        Ok(state)
    }

    fn read(&self) -> Result<RwLockReadGuard<'_, State>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_send<T: Send>() {}
    fn assert_sync<T: Sync>() {}

    #[test]
    fn handles_cross_threads() {
        assert_send::<Lease>();
        assert_send::<SeqId>();
        assert_send::<Pool>();
        assert_sync::<Pool>();
    }

    /// After a panic inside the pool every call is refused, and dropping a lease is silent.
    #[test]
    fn a_poisoned_pool_refuses() {
        let page = PageSize::new(4).unwrap();
        let pool = Pool::new(PoolConfig { num_pages: 9, page, max_seqs: 2, row_pages: 2 }).unwrap();
        let seq = pool.create().unwrap();
        let (dropped, explicit) = (pool.reserve(&[(seq, 3)]).unwrap(), pool.reserve(&[]).unwrap());
        let inside = pool.clone();
        std::thread::spawn(move || {
            let _guard = inside.state.write();
            panic!("inside the pool");
        })
        .join()
        .unwrap_err();
        drop(dropped);
        assert!(matches!(explicit.rollback(), Err(Error::Audit { .. })));
        assert!(matches!(pool.reserve(&[]), Err(Error::Audit { .. })));
        assert!(matches!(pool.audit(), Err(Error::Audit { .. })));
        assert!(matches!(pool.committed(seq), Err(Error::Audit { .. })));
    }

    /// The audit finds what it is there to find.
    #[test]
    fn audit_names_the_fault() {
        let page = PageSize::new(4).unwrap();
        let make = || {
            let pool = Pool::new(PoolConfig { num_pages: 9, page, max_seqs: 3, row_pages: 4 }).unwrap();
            let (a, b) = (pool.create().unwrap(), pool.create().unwrap());
            pool.reserve(&[(a, 8), (b, 4)]).unwrap().commit(&[8, 4]).unwrap();
            pool.cache_insert(a, &[1, 2, 3, 4]).unwrap();
            let lease = pool.reserve(&[(b, 9)]).unwrap();
            pool.audit().unwrap();
            (pool, lease)
        };
        type Fault = (&'static str, fn(&mut State));
        let faults: [Fault; 15] = [
            ("is wrongly or twice on the free list", |s| s.ledger.free.push(7)),
            ("is wrongly or twice on the free list", |s| s.ledger.free.push(0)),
            ("on the free list: false", |s| s.ledger.free.truncate(1)),
            ("the ledger has 3 owner(s), found 2", |s| s.ledger.recs[1].refs += 1),
            ("the ledger has 1 owner(s), found 2", |s| s.ledger.recs[3].aux = u32::MAX),
            ("dead column 3 holds 2", |s| s.table[3] = 2),
            ("has page 1 twice", |s| s.table[1] = 1),
            ("outside 1..9", |s| s.table[1] = 0),
            ("outside 1..9", |s| s.table[1] = 9),
            ("1 pages are committed", |s| s.rows[0].committed = 4),
            ("rows have a lease", |s| s.leased_rows = 0),
            ("list of free rows", |s| s.free_rows.push(0)),
            ("the ledger says None", |s| s.ledger.recs[1].aux = 0),
            ("neither live nor free", |s| s.free_rows.clear()),
            ("4 pages are free or evictable, 3 are not in use", |s| s.cache.spoil_idle()),
        ];
        for (what, spoil) in faults {
            let (pool, _lease) = make();
            spoil(&mut pool.write().unwrap());
            let e = pool.audit().unwrap_err().to_string();
            assert!(e.contains(what), "{e}, not {what}");
        }
    }
}
