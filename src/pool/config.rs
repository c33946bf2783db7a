//! Sizes of a pool, checked before anything is allocated.

use crate::bounds::{PageSize, fits_i32};
use crate::error::{Error, Result, in_range};

/// Largest number of sequences of a pool; more than a batch, since sequences may wait and prefixes may be kept.
pub const MAX_SEQS: u32 = 1 << 20;

/// Events that the ledger remembers, 256 KiB of them, unless
/// [`Pool::with_history`](crate::pool::Pool::with_history) says otherwise.
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
    pub(super) fn check(&self) -> Result<()> {
        in_range("num_pages", self.num_pages, 2, i32::MAX.into())?;
        in_range("max_seqs", self.max_seqs, 1, MAX_SEQS.into())?;
        in_range("row_pages", self.row_pages, 1, i32::MAX.into())?;
        let (n, p, s, w) = (self.num_pages, self.page.get(), self.max_seqs, self.row_pages);
        fits_i32("KV slots", u64::from(n) * u64::from(p), || format!("num_pages {n} * page_size {p}"))?;
        fits_i32("row positions", u64::from(w) * u64::from(p), || format!("row_pages {w} * page_size {p}"))?;
        fits_i32("page table", u64::from(s) * u64::from(w), || format!("max_seqs {s} * row_pages {w}"))?;
        Ok(())
    }

    /// Refuse sizes whose accounts the allocator has no room for: the allocations themselves would end the process.
    pub(super) fn check_memory(&self, events: u32) -> Result<()> {
        // Upper bounds: 24 bytes a page, 160 a row beside its columns, 64 an event (16, rounded up to a power of two).
        let (n, s, w) = (u64::from(self.num_pages), u64::from(self.max_seqs), u64::from(self.row_pages));
        let bytes = 24 * n + s * (4 * w + 160) + 64 * u64::from(events);
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
