//! Limits and every capacity that follows from them.

use crate::bounds::{MAX_BATCH, MAX_CONTEXT_LEN, PageSize, add, fits_i32, mul};
use crate::error::{Result, in_range};
use crate::geometry::{DraftRegion, Layout, TreeShape, words_for};
use crate::revert::{Fault, Reverts};

/// Limits that the user sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Largest number of requests in a batch.
    pub max_batch: u32,
    /// Largest number of tokens of a request, prompt and output together.
    pub max_context_len: u32,
    /// Tokens per page; a power of two.
    pub page_size: u32,
}

/// Checked limits, tree shape and draft layout; the source of every size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    limits: Limits,
    page: PageSize,
    shape: TreeShape,
    layout: Layout, // always effective
    reverts: Reverts,
    alloc_len: u32,
    row_width: u32,
}

impl Geometry {
    /// Check a configuration. Faults that [`SPECRS_DEBUG_REVERT`](crate::revert) names are put back.
    ///
    /// # Errors
    /// A limit outside its range, or a size that does not fit `int32` indexing; each names its operands.
    pub fn new(limits: Limits, shape: TreeShape, layout: Layout) -> Result<Self> {
        Self::with_reverts(limits, shape, layout, Reverts::from_env()?)
    }

    /// [`Self::new`] with the faults of `reverts` put back, whatever the environment says.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn with_reverts(limits: Limits, shape: TreeShape, layout: Layout, reverts: Reverts) -> Result<Self> {
        in_range("max_batch", limits.max_batch, 1, MAX_BATCH as i128)?;
        in_range("max_context_len", limits.max_context_len, 1, MAX_CONTEXT_LEN as i128)?;
        let page = PageSize::new(limits.page_size)?;
        let layout = layout.effective(shape, page);
        let (k, s, v, p) = (shape.topk(), shape.steps(), shape.draft_tokens(), page.get());
        let alloc_len = match layout {
            Layout::Dense => shape.draft_slots().max(v),
            Layout::Holey if reverts.has(Fault::HoleyReserve) => shape.draft_slots().max(v),
            Layout::Holey => mul("alloc_len_per_decode", page.pages_for(p - 1 + s) * p, k)?.max(v),
        };
        let reserve = mul("reserve_per_decode", 2, alloc_len)?;
        let headroom = add("row headroom", reserve, p - 1)?.max(4 + v);
        let row_width = page.round_up(add("row_width", limits.max_context_len, headroom)?)?;
        let g = Self { limits, page, shape, layout, reverts, alloc_len, row_width };
        fits_i32("max_batch * row_width", limits.max_batch as u64 * row_width as u64, || {
            format!("{} * {row_width}", limits.max_batch)
        })?;
        fits_i32("max_batch * draft_tokens", limits.max_batch as u64 * v as u64, || {
            format!("{} * {v}", limits.max_batch)
        })?;
        fits_i32("max_batch * candidates", limits.max_batch as u64 * shape.candidates() as u64, || {
            format!("{} * {}", limits.max_batch, shape.candidates())
        })?;
        Ok(g)
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// The page size.
    pub fn page(&self) -> PageSize {
        self.page
    }

    /// The tree shape.
    pub fn shape(&self) -> TreeShape {
        self.shape
    }

    /// The draft layout in force.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Historical faults that are put back; none but for debugging.
    pub fn reverts(&self) -> Reverts {
        self.reverts
    }

    /// Positions that one round may write beyond the committed length: `max(S*K, V)` in the dense layout, else
    /// `max(ceil((P-1+S)/P)*P*K, V)`.
    pub fn alloc_len_per_decode(&self) -> u32 {
        self.alloc_len
    }

    /// Twice [`Self::alloc_len_per_decode`]: with overlapped scheduling the host's committed length lags one round.
    pub fn reserve_per_decode(&self) -> u32 {
        2 * self.alloc_len // checked in `new`
    }

    /// Positions a request must have allocated for its next round:
    /// `max(allocated, round_up(committed + reserve, P))`; always whole pages.
    pub fn alloc_target(&self, committed: u32, allocated: u32) -> Result<u32> {
        let need = self.page.round_up(add("allocation target", committed, self.reserve_per_decode())?)?;
        Ok(need.max(allocated))
    }

    /// Length of a request's row, whole pages:
    /// `round_up(max_context_len + max(4 + V, reserve + P - 1), P)`.
    pub fn row_width(&self) -> u32 {
        self.row_width
    }

    /// Columns of a request's page table, `row_width / P`.
    pub fn row_pages(&self) -> u32 {
        self.row_width / self.page.get()
    }

    /// Pages of a pool in which `max_batch` requests of full context can run at once, without the sink.
    pub fn pages_for_full_load(&self) -> Result<u32> {
        mul("pool pages", self.limits.max_batch, self.row_pages())
    }

    /// Width of one step's `kv_indices` in the per-branch formats: `max_batch * K * max_context_len`, plus the
    /// draft slots that a branch at the context wall adds.
    ///
    /// # Errors
    /// An error if the size does not fit `int32` indexing; such a configuration must use the `native` format.
    pub fn per_branch_kv_indices(&self) -> Result<u32> {
        let Limits { max_batch: b, max_context_len: context, .. } = self.limits;
        fits_i32("per-branch kv_indices", self.per_branch_elements(b, context), || {
            let (k, s) = (self.shape.topk(), self.shape.steps());
            format!("max_batch {b} * topk {k} * (max_context_len {context} + steps {s})")
        })
        .map(|v| v as u32)
    }

    /// Most elements that one step of the per-branch formats needs for `requests` of up to `len` tokens: `requests * K
    /// * (len + S)`.
    pub fn per_branch_elements(&self, requests: u32, len: u32) -> u64 {
        let branches = if self.reverts.has(Fault::BranchWidth) { 1 } else { self.shape.topk() as u64 };
        requests as u64 * branches * (len as u64 + self.shape.steps() as u64)
    }

    /// 64-bit words of a draft query's ancestor mask over the K*S draft slots.
    pub fn draft_mask_words(&self) -> u32 {
        words_for(self.shape.draft_slots())
    }

    /// 64-bit words of a verify query's ancestor mask over the V tree nodes.
    pub fn verify_mask_words(&self) -> u32 {
        words_for(self.shape.draft_tokens())
    }

    /// The draft region behind a committed prefix of `committed` tokens.
    ///
    /// # Errors
    /// An error if `committed` exceeds `max_context_len`.
    pub fn draft_region(&self, committed: u32) -> Result<DraftRegion> {
        in_range("committed length", committed, 0, self.limits.max_context_len as i128)?;
        Ok(self.region(committed))
    }

    /// [`Self::draft_region`] for a length that has been compared with `max_context_len`.
    pub(crate) fn region(&self, committed: u32) -> DraftRegion {
        DraftRegion { layout: self.layout, shape: self.shape, page: self.page, committed }
    }
}
