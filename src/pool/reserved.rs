//! What a lease says of its batch.

use crate::bounds::PageId;
use crate::pool::row::SeqId;

/// KV to copy before anything is written under a lease: the valid part of a shared tail page into the page that
/// replaces it. `len` tokens from offset 0, in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The shared page; kept alive by the lease until it ends.
    pub src: PageId,
    /// The fresh page; never the source of another copy of the same lease.
    pub dst: PageId,
    /// Tokens; in `1..page_size`.
    pub len: u32,
}

/// Vectors that leases hand from one to the next, so that a warm pool allocates nothing.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pub(super) seqs: Vec<SeqId>,
    pub(super) copies: Vec<PageCopy>,
}
