//! The paged pool for Python: sequences, leases as context managers, the prefix cache, the account.
//!
//! Calls wait for the pool's lock without the GIL, since a kernel in another thread may hold the lock for a while.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::arg::{Int, detached, u32s};
use super::plan::Moves;
use crate::bounds::{PageId, PageSize};
use crate::error::{Error, Result};
use crate::{plan, pool};

/// Handle of a sequence of a pool. The handle does not own the sequence: `Pool.release` ends the sequence, and using
/// the handle afterwards raises `StaleHandleError`.
#[pyclass(frozen, eq, hash, module = "specrs._specrs")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Sequence(pub(super) pool::SeqId);

#[pymethods]
impl Sequence {
    /// Row of the page table.
    #[getter]
    fn row(&self) -> u32 {
        self.0.row()
    }

    /// Number of sequences that had the row so far, this one included.
    #[getter]
    fn generation(&self) -> u32 {
        self.0.generation()
    }

    fn __repr__(&self) -> String {
        format!("Sequence({})", self.0)
    }
}

/// Ids of a list of handles.
pub(super) fn ids(seqs: &[Bound<'_, Sequence>]) -> Vec<pool::SeqId> {
    seqs.iter().map(|s| s.get().0).collect()
}

/// Account of KV pages: page ids and their owners, no KV bytes. Page 0 is the sink. A call that fails changes nothing.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct Pool(pub(super) pool::Pool);

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (num_pages, page_size, max_seqs, row_pages))]
    fn new(py: Python<'_>, num_pages: Int, page_size: Int, max_seqs: Int, row_pages: Int) -> PyResult<Self> {
        let config = pool::PoolConfig {
            num_pages: num_pages.u32("num_pages")?,
            page: PageSize::new(page_size.u32("page_size")?)?,
            max_seqs: max_seqs.u32("max_seqs")?,
            row_pages: row_pages.u32("row_pages")?,
        };
        detached(py, || pool::Pool::new(config)).map(Self)
    }

    /// Pages, the sink included.
    #[getter]
    fn num_pages(&self) -> u32 {
        self.0.config().num_pages
    }

    /// Tokens per page.
    #[getter]
    fn page_size(&self) -> u32 {
        self.0.config().page.get()
    }

    /// Sequences that can live at once.
    #[getter]
    fn max_seqs(&self) -> u32 {
        self.0.config().max_seqs
    }

    /// Pages that one sequence can have.
    #[getter]
    fn row_pages(&self) -> u32 {
        self.0.config().row_pages
    }

    /// Make a sequence without pages. Raises `PoolExhaustedError` if `max_seqs` sequences live.
    fn create(&self, py: Python<'_>) -> PyResult<Sequence> {
        detached(py, || self.0.create()).map(Sequence)
    }

    /// Make a sequence that shares the pages of the first `length` committed positions of `seq`.
    fn fork(&self, py: Python<'_>, seq: &Bound<'_, Sequence>, length: Int) -> PyResult<Sequence> {
        let (seq, length) = (seq.get().0, length.u32("fork length")?);
        detached(py, || self.0.fork(seq, length)).map(Sequence)
    }

    /// Reserve pages for row positions `0..positions` of each sequence, for all sequences or none
    /// (`PoolExhaustedError`). The lease is a context manager: leaving it without `commit` rolls back.
    fn reserve(&self, py: Python<'_>, wants: Vec<(Bound<'_, Sequence>, Int)>) -> PyResult<Lease> {
        let wants: Vec<(pool::SeqId, u32)> =
            wants.iter().map(|(s, n)| Ok((s.get().0, n.u32("positions")?))).collect::<Result<_>>()?;
        let lease = detached(py, || self.0.reserve(&wants))?;
        Ok(Lease { pool: self.0.clone(), state: Mutex::new(State::Live(lease)) })
    }

    /// End sequences; each of their pages loses an owner.
    fn release(&self, py: Python<'_>, seqs: Vec<Bound<'_, Sequence>>) -> PyResult<()> {
        let seqs = ids(&seqs);
        detached(py, || self.0.release(&seqs))
    }

    /// Valid positions of a sequence.
    fn committed(&self, py: Python<'_>, seq: &Bound<'_, Sequence>) -> PyResult<u32> {
        let seq = seq.get().0;
        detached(py, || self.0.committed(seq))
    }

    /// Positions of a sequence that have a page: a multiple of the page size.
    fn allocated(&self, py: Python<'_>, seq: &Bound<'_, Sequence>) -> PyResult<u32> {
        let seq = seq.get().0;
        detached(py, || self.0.allocated(seq))
    }

    /// Pages of a sequence, in the order of its positions.
    fn pages(&self, py: Python<'_>, seq: &Bound<'_, Sequence>) -> PyResult<Vec<u32>> {
        let seq = seq.get().0;
        let pages = detached(py, || self.0.pages(seq))?;
        Ok(pages.iter().map(|p| p.get()).collect())
    }

    /// Returns a new sequence that starts with the longest cached prefix of `tokens` (full pages, at most `max`
    /// positions, default all), the length of that prefix, and how many of its positions have the draft's KV too.
    /// `salt` has 64 bits: prefixes of different salts share no page.
    #[pyo3(signature = (tokens, max=None, salt=Int::ZERO))]
    fn cache_lookup(
        &self,
        py: Python<'_>,
        tokens: Vec<Int>,
        max: Option<Int>,
        salt: Int,
    ) -> PyResult<(Sequence, u32, u32)> {
        let salt = salt.u64("salt")?;
        let tokens = u32s("token", &tokens)?;
        let max = max.map_or(Ok(u32::MAX), |m| m.u32("max"))?;
        let (seq, length, drafted) = detached(py, || self.0.cache_lookup(&tokens, max, salt))?;
        Ok((Sequence(seq), length, drafted))
    }

    /// Let the cache keep the full pages of `tokens`, the first committed tokens of `seq`; the first `drafted` of them
    /// have the draft's KV too (0 without a draft model). Returns how many pages were new to the cache. It keeps the
    /// pages that it has already, unless they lack draft KV that this sequence's pages have. Lookups with the same
    /// `salt` may find the pages.
    #[pyo3(signature = (seq, tokens, drafted=Int::ZERO, salt=Int::ZERO))]
    fn cache_insert(
        &self,
        py: Python<'_>,
        seq: &Bound<'_, Sequence>,
        tokens: Vec<Int>,
        drafted: Int,
        salt: Int,
    ) -> PyResult<u32> {
        let (seq, tokens) = (seq.get().0, u32s("token", &tokens)?);
        let (drafted, salt) = (drafted.u32("drafted")?, salt.u64("salt")?);
        detached(py, || self.0.cache_insert(seq, &tokens, drafted, salt))
    }

    /// Empty the prefix cache; returns how many pages it had.
    fn cache_clear(&self, py: Python<'_>) -> PyResult<u32> {
        detached(py, || self.0.cache_clear())
    }

    /// Take `n` pages, or none, for a caller that keeps its own sequences.
    fn alloc_pages(&self, py: Python<'_>, n: Int) -> PyResult<Vec<u32>> {
        let n = n.u32("pages")?;
        let pages = detached(py, || self.0.alloc_pages(n))?;
        Ok(pages.iter().map(|p| p.get()).collect())
    }

    /// Give back pages of `alloc_pages`. A page that is given back more often than it is owned raises `LedgerError`,
    /// and nothing is changed.
    fn free_pages(&self, py: Python<'_>, pages: Vec<Int>) -> PyResult<()> {
        let pages: Vec<PageId> = pages.iter().map(|p| PageId::new(p.u32("page id")?)).collect::<Result<_>>()?;
        detached(py, || self.0.free_pages(&pages))
    }

    /// Returns `(page, owner)` for each owner of each page, pages ascending: `"sequence ROW.GENERATION"`, `"prefix
    /// cache"`, or `"raw pages"` (of `alloc_pages`).
    fn owners(&self, py: Python<'_>) -> PyResult<Vec<(u32, String)>> {
        let owners = detached(py, || self.0.owners())?;
        Ok(owners.iter().map(|(page, owner)| (page.get(), owner.to_string())).collect())
    }

    /// Put these free pages before all others, so that the next calls take them, in this order. Raises `ConfigError`
    /// for a page that has an owner or is given twice, and changes nothing then.
    fn take_next(&self, py: Python<'_>, pages: Vec<Int>) -> PyResult<()> {
        let pages: Vec<PageId> = pages.iter().map(|p| PageId::new(p.u32("page id")?)).collect::<Result<_>>()?;
        detached(py, || self.0.take_next(&pages))
    }

    /// Recount every owner of every page; raises `LedgerError` if the account is wrong, else returns the counts.
    fn audit<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let r = detached(py, || self.0.audit())?;
        dict(
            py,
            &[
                ("total_pages", r.total_pages.into()),
                ("free_pages", r.free_pages.into()),
                ("owned_pages", r.owned_pages.into()),
                ("shared_pages", r.shared_pages.into()),
                ("cached_pages", r.cached_pages.into()),
                ("raw_pages", r.raw_pages.into()),
                ("held_pages", r.held_pages.into()),
                ("table_entries", r.table_entries),
                ("sequences", r.sequences.into()),
                ("leased_sequences", r.leased_sequences.into()),
                ("events", r.events),
            ],
        )
    }

    /// Counters: pages (without the sink) and sequences.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let s = detached(py, || self.0.stats())?;
        dict(
            py,
            &[
                ("total_pages", s.total_pages.into()),
                ("free_pages", s.free_pages.into()),
                ("cached_pages", s.cached_pages.into()),
                ("evictable_pages", s.evictable_pages.into()),
                ("live_sequences", s.live_sequences.into()),
                ("leased_sequences", s.leased_sequences.into()),
            ],
        )
    }

    fn __repr__(&self) -> String {
        let c = self.0.config();
        let page_size = c.page.get();
        format!(
            "Pool(num_pages={}, page_size={page_size}, max_seqs={}, row_pages={})",
            c.num_pages, c.max_seqs, c.row_pages
        )
    }
}

fn dict<'py>(py: Python<'py>, entries: &[(&str, u64)]) -> PyResult<Bound<'py, PyDict>> {
    let d = PyDict::new(py);
    for (key, value) in entries {
        d.set_item(key, value)?;
    }
    Ok(d)
}

/// The error that kept a lease from ending, and the lease if it lives on.
struct NotEnded {
    error: Error,
    lease: Option<pool::Lease>,
}

enum State {
    Live(pool::Lease),
    /// The lease has ended; the reason.
    Ended(&'static str),
}

/// Lease on pages reserved for a batch. `with pool.reserve(...) as lease:` rolls back on leaving unless `commit` was
/// called; a lease that is dropped rolls back, too.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct Lease {
    pool: pool::Pool,
    state: Mutex<State>,
}

impl Lease {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Run `f` on the live lease.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut pool::Lease) -> Result<T>) -> Result<T> {
        match &mut *self.state() {
            State::Live(lease) => f(lease),
            State::Ended(why) => Err(ended(why)),
        }
    }

    /// End the lease by `f`, which may give it back.
    fn end(&self, why: &'static str, f: impl FnOnce(pool::Lease) -> Result<(), Box<NotEnded>>) -> Result<()> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Ended(why)) {
            State::Live(lease) => f(lease).map_err(|refused| {
                if let Some(lease) = refused.lease {
                    *state = State::Live(lease);
                }
                refused.error
            }),
            State::Ended(before) => {
                *state = State::Ended(before);
                Err(ended(before))
            }
        }
    }
}

fn ended(why: &str) -> Error {
    Error::Dead { what: "lease", id: "this".into(), why: why.into() }
}

#[pymethods]
impl Lease {
    /// Copies of slots, to be run by `kv_move` before any write under the lease.
    #[getter]
    fn copies(&self, py: Python<'_>) -> PyResult<Moves> {
        let pool = self.pool.clone();
        let moves = detached(py, || self.with(|lease| self.pool.with_tables(|t| plan::Moves::of_lease(lease, &t))?))?;
        Ok(Moves { moves, pool: Some(pool) })
    }

    /// The sequences, in the order of the reservation.
    #[getter]
    fn sequences(&self, py: Python<'_>) -> PyResult<Vec<Sequence>> {
        let seqs = detached(py, || self.with(|l| Ok(l.seqs().to_vec())))?;
        Ok(seqs.into_iter().map(Sequence).collect())
    }

    /// True if the lease has neither been committed nor rolled back.
    #[getter]
    fn live(&self) -> bool {
        matches!(&*self.state(), State::Live(_))
    }

    /// Make `committed[i]` the committed length of sequence i and end the lease; whole pages beyond the lengths go
    /// back. If a length is refused (`ConfigError`), nothing changes and the lease stays live.
    fn commit(&self, py: Python<'_>, committed: Vec<Int>) -> PyResult<()> {
        let committed = u32s("committed length", &committed)?;
        detached(py, || {
            self.end("it was committed", |lease| {
                let refused = |r: Box<pool::Refused>| Box::new(NotEnded { error: r.error, lease: Some(r.lease) });
                lease.commit(&committed).map_err(refused)
            })
        })
    }

    /// Reserve pages for row positions `0..positions[i]` of sequence i, for all sequences or none
    /// (`PoolExhaustedError`): room for a later round while one is in flight. No page goes back. Afterwards `copies`
    /// are those of this call, to be run after the round in flight.
    fn renew(&self, py: Python<'_>, positions: Vec<Int>) -> PyResult<()> {
        let positions = u32s("positions", &positions)?;
        detached(py, || self.with(|l| l.renew(&positions)))
    }

    /// Make `committed[i]` the committed length of sequence i and keep the lease with all of its pages: `commit` of a
    /// round while the next one is in flight. Leaving the lease later rolls back to these lengths.
    fn advance(&self, py: Python<'_>, committed: Vec<Int>) -> PyResult<()> {
        let committed = u32s("committed length", &committed)?;
        detached(py, || self.with(|l| l.advance(&committed)))
    }

    /// Give back every page beyond the committed lengths and end the lease.
    fn rollback(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || {
            self.end("it was rolled back", |lease| {
                lease.rollback().map_err(|error| Box::new(NotEnded { error, lease: None }))
            })
        })
    }

    /// Reorder the pages of `seq`, which must have one token each: position `first + i` gets the page that `first +
    /// order[i]` had.
    fn remap(&self, py: Python<'_>, seq: &Bound<'_, Sequence>, first: Int, order: Vec<Int>) -> PyResult<()> {
        let (seq, first, order) = (seq.get().0, first.u32("first")?, u32s("order", &order)?);
        detached(py, || self.with(|l| l.remap(seq, first, &order)))
    }

    fn __repr__(&self) -> String {
        // This does not wait for the lock: another thread's call on the lease may be waiting for the pool.
        match self.state.try_lock() {
            Ok(state) => match &*state {
                State::Live(lease) => format!("Lease(sequences={}, live=True)", lease.seqs().len()),
                State::Ended(why) => format!("Lease(live=False: {why})"),
            },
            Err(_) => "Lease(in use by another thread)".into(),
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().with(|_| Ok(()))?;
        Ok(slf)
    }

    #[pyo3(signature = (exc_type=None, exc=None, traceback=None))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: Option<Bound<'_, PyAny>>,
        exc: Option<Bound<'_, PyAny>>,
        traceback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let _ = (exc_type, exc, traceback); // rolls back whether the body raised or not
        if self.live() {
            self.rollback(py)?;
        }
        Ok(false)
    }
}
