//! The paged KV allocator: it accounts for the owners of every page at all times.
//!
//! Place in the flow: sizes come from [`geometry`](crate::geometry); [`plan`](crate::plan) reads the page table
//! through [`Pool::with_tables`]; the engine holds [`SeqId`]s and [`Lease`]s. Nothing here touches KV bytes.
//!
//! A **page** holds the KV of `page_size` tokens in every layer. Page 0 is the sink: padded queries write there, no
//! sequence ever owns it. A **sequence** is a row of one page table, `max_seqs x row_pages` of `i32`; position `pos` of
//! a row lives in slot `table[row][pos / P] * P + pos % P`. Its first `committed` positions are valid; those behind
//! them are speculative and exist only under a **lease**:
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
//! These hold at all times, and [`Pool::audit`] checks them:
//!
//! * a page's reference count is the number of its owners: rows, shared tails held by leases, the prefix cache, and
//!   raw callers; it is on the free list exactly when that is 0;
//! * without a lease a row has exactly the pages of its committed positions; whole pages are taken and given back,
//!   so what is allocated is what is recorded and what is freed;
//! * a page behind a row's committed positions has one owner; a partial tail page with two is replaced before it is
//!   written ([`Lease::copies`]); full pages are never written again, since lengths only grow;
//! * a call that fails changes nothing.
//!
//! A **plan** is tied to its rows' versions, which go up when pages change and when a lease ends, and to the length that it
//! was made for. The pool notes how far passes have been planned under a lease (`progress`), so that a pass behind fewer
//! tokens than are settled, or behind positions that nobody writes, is refused.
//!
//! Rounds may overlap: [`Lease::renew`] and [`Lease::advance`] let one lease span them. Pages are freed in host time
//! and written in stream time, so all work on one pool's KV, and the uploads of its table, go on one stream.
//! A **mirror**, a copy of the table elsewhere, asks for what changed since it last looked ([`Tables::changes`]). A
//! device that permutes its own rows (P = 1) does what [`Lease::permutations`] tells of the host's.
//!
//! [`Pool::cache_insert`] lets full pages outlive their sequence and [`Pool::cache_lookup`] starts a new one from
//! them. Pages that the cache alone owns count as free: a call that needs pages evicts them, least recently used
//! first, leaves before what they hang from. There is no state of the cache in which such a page can't be had: pages
//! that are neither on the free list nor evictable are those that sequences, leases and raw callers own.
//!
//! A file of this module imports only from those on its left:
//! `config, row -> ledger, cache, changes, progress, reserved -> state -> sequence, reserve, remap, audit, table -> handle ->
//! lease, owners`.

mod audit;
mod cache;
mod changes;
mod config;
mod handle;
mod lease;
mod ledger;
mod owners;
mod progress;
mod remap;
mod reserve;
mod reserved;
mod row;
mod sequence;
mod state;
mod table;
#[cfg(test)]
mod tests;

pub use audit::AuditReport;
pub use changes::{ChangeKind, Epoch};
pub use config::{DEFAULT_HISTORY, MAX_SEQS, PoolConfig};
pub use handle::{Pool, PoolStats};
pub use lease::{Lease, Refused};
pub use ledger::{Event, EventKind, Owner};
pub(crate) use reserved::Ran;
pub use reserved::{PageCopy, Permutation};
pub use row::SeqId;
pub use table::{Changes, RowChange, RowView, Tables};
