//! Leases: the speculative part of a batch of sequences, kept by commit and taken back by drop.

use crate::error::{Error, Result};
use crate::pool::handle::Pool;
use crate::pool::reserved::{Buffers, PageCopy, Permutation, Ran};
use crate::pool::row::SeqId;

impl Pool {
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
        Ok(Lease { pool: self.clone(), id, buffers: Some(buffers) })
    }
}

/// Pages reserved for a batch of sequences, from [`Pool::reserve`]. While it lives, its sequences can't be
/// released or reserved again, and its owner may write their positions from `committed` on.
///
/// [`commit`](Lease::commit) keeps part of it; dropping it gives every page behind the committed positions back, and
/// the shared tail pages that copies had replaced return to their rows.
///
/// A lease may span rounds that overlap: while the device runs round n, the host plans round n + 1 and then learns
/// what round n accepted. [`advance`](Lease::advance) commits round n and keeps every page for the round in flight;
/// [`renew`](Lease::renew) adds pages for a later one, whether round n is committed or not:
///
/// ```
/// # use specrs::bounds::PageSize;
/// # use specrs::pool::{Pool, PoolConfig};
/// # let pool = Pool::new(PoolConfig { num_pages: 65, page: PageSize::new(4)?, max_seqs: 8, row_pages: 16 })?;
/// let seq = pool.create()?;
/// let mut lease = pool.reserve(&[(seq, 16)])?; // two rounds of up to 8 positions
/// // Rounds 0 and 1 run on the device. Round 0 accepted 3 positions:
/// lease.advance(&[3])?;
/// lease.renew(&[3 + 16])?; // round 2 has pages, wherever round 1 ends
/// assert_eq!((pool.committed(seq)?, pool.allocated(seq)?), (3, 20));
/// // Round 1 accepted 5 positions, and the request ends. Dropping the lease here would keep the 3 of round 0.
/// lease.commit(&[8])?;
/// assert_eq!((pool.committed(seq)?, pool.allocated(seq)?), (8, 8));
/// # Ok::<(), specrs::Error>(())
/// ```
///
/// Invariants of a live lease, which [`Pool::audit`] checks: no call on the lease takes a page from a row; each of its
/// sequences may commit up to the end of its pages, or no more positions if it was reserved no further than its
/// committed length; rolling back ends at the last committed length.
#[derive(Debug)]
#[must_use = "dropping a lease rolls it back"]
pub struct Lease {
    pool: Pool,
    /// Unique in the pool, from 1; 0 once the lease has ended.
    id: u64,
    /// `None` once the lease has ended. Boxed: they pass from hand to hand in each round.
    buffers: Option<Box<Buffers>>,
}

/// A commit that was refused: why, and the lease, still live. Converted to [`Error`] by `?` it drops the lease,
/// which rolls back.
#[derive(Debug)]
pub struct Refused {
    /// The reason.
    pub error: Error,
    /// The lease, as before the call.
    pub lease: Lease,
}

impl From<Box<Refused>> for Error {
    fn from(refused: Box<Refused>) -> Self {
        refused.error
    }
}

impl Lease {
    /// The sequences, in the order of the reservation.
    pub fn seqs(&self) -> &[SeqId] {
        self.buffers.as_ref().map_or(&[], |b| &b.seqs)
    }

    /// Check that this is a lease of `pool` and covers each of `seqs`, so that its owner may plan writes for them.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a lease of another pool, and for the first sequence that it does not cover.
    pub fn check_covers(&self, pool: &Pool, seqs: &[SeqId]) -> Result<()> {
        let mismatch = |got: String, want: &str| Err(Error::Mismatch { operand: "lease", got, want: want.into() });
        if !self.pool.is(pool) {
            return mismatch("a lease of another pool".into(), "one of the planner's pool");
        }
        let own = self.seqs();
        let mut next = 0; // batches come in the order of their reservation, mostly
        for seq in seqs {
            if own.get(next) != Some(seq) {
                match own.iter().position(|own| own == seq) {
                    Some(at) => next = at,
                    None => return mismatch(format!("one without sequence {seq}"), "a lease of every sequence given"),
                }
            }
            next += 1;
        }
        Ok(())
    }

    /// Copies of the reservation, or of the last [`renew`](Lease::renew): to launch once each, in any order, before
    /// anything more is written under this lease and before the next call that changes the pool.
    pub fn copies(&self) -> &[PageCopy] {
        self.buffers.as_ref().map_or(&[], |b| &b.copies)
    }

    /// Record of where the copies have run.
    pub(crate) fn ran(&self) -> Ran {
        self.buffers.as_ref().map_or_else(Ran::default, |b| b.ran.get_or_init(Ran::default).clone())
    }

    /// Pages of one token only: reorder a sequence's speculative positions without moving bytes. Position
    /// `first + i` gets the page that position `first + order[i]` had; the other pages of the range follow in their
    /// old order, so that the accounts stay exact. [`permutations`](Lease::permutations) tells it to copies of the row.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the page size is not 1, the sequence is not in this lease, or `order` names a
    /// position twice; [`Error::OutOfRange`] where `first` is committed or a position is not reserved. Nothing is
    /// changed then.
    pub fn remap(&mut self, seq: SeqId, first: u32, order: &[u32]) -> Result<()> {
        self.remap_all(std::iter::once((seq, first, order)))
    }

    /// [`remap`](Lease::remap) for several sequences, as `(seq, first, order)`: all of them or, on an error, none.
    ///
    /// # Errors
    /// Those of [`remap`](Lease::remap).
    pub fn remap_all<'a>(&mut self, remaps: impl Iterator<Item = (SeqId, u32, &'a [u32])>) -> Result<()> {
        self.pool.write()?.remap_all(self.id, self.buffers.get_or_insert_default(), remaps)
    }

    /// The permutations that the last [`remap`](Lease::remap) or [`remap_all`](Lease::remap_all) made of the rows, in
    /// its order; nothing where it was refused.
    pub fn permutations(&self) -> impl Iterator<Item = Permutation<'_>> + Clone {
        self.buffers.iter().flat_map(|b| b.permutations())
    }

    /// Make sure that sequence i has pages for its row positions `0..positions[i]`, for the whole batch or not at all,
    /// and may write them. A row keeps every page that it has, so rounds in flight are not disturbed; a smaller number
    /// than before changes nothing. The committed lengths need not be up to date.
    ///
    /// A partial tail page that another owner shares by now (a fork, since it was reserved) is replaced as in
    /// [`Pool::reserve`]. [`copies`](Lease::copies) has then whole pages, with what a round in flight writes into
    /// them: launch them behind that round.
    ///
    /// # Errors
    /// [`Error::PoolExhausted`] where free and evictable pages do not suffice; [`Error::Capacity`] beyond
    /// `row_pages`; [`Error::OutOfRange`] below the committed length; [`Error::Mismatch`] for a wrong number of
    /// positions. The lease and the pool are as before then.
    pub fn renew(&mut self, positions: &[u32]) -> Result<()> {
        self.pool.write()?.renew(self.id, self.buffers.get_or_insert_default(), positions)
    }

    /// Make `committed[i]` the committed length of sequence i and keep the lease with every page of it, for the round
    /// in flight and those to come. Empties [`copies`](Lease::copies), which were launched before.
    ///
    /// # Errors
    /// Those of [`commit`](Lease::commit). Nothing is changed then.
    pub fn advance(&mut self, committed: &[u32]) -> Result<()> {
        self.pool.write()?.advance(self.buffers.get_or_insert_default(), committed)
    }

    /// Make `committed[i]` the committed length of sequence i and end the lease. Pages beyond the last committed
    /// position go back to the pool, whole; the tail page stays.
    ///
    /// # Errors
    /// All or nothing over the batch, with the lease given back in [`Refused`]: [`Error::Mismatch`] for a wrong
    /// number of lengths, [`Error::OutOfRange`] for a length below the present one or beyond the reserved pages
    /// (beyond the present length, for a sequence reserved no further than that).
    pub fn commit(mut self, committed: &[u32]) -> Result<(), Box<Refused>> {
        let ended = match self.pool.write() {
            Ok(mut state) => state.commit(&mut self.buffers, committed),
            Err(e) => Err(e),
        };
        match ended {
            Ok(()) => {
                self.id = 0;
                Ok(())
            }
            Err(error) => Err(Box::new(Refused { error, lease: self })),
        }
    }

    /// Drop the lease, and return the error of that: only a pool that a panic left half-changed has one.
    pub fn rollback(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let id = std::mem::take(&mut self.id);
        if id == 0 { Ok(()) } else { self.pool.write()?.rollback(&mut self.buffers) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A destructor can't return its error. A poisoned pool refuses every later call and says why.
        let _ = self.end();
    }
}
