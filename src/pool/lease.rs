//! Leases: the speculative part of a batch of sequences, kept by commit and taken back by drop.

use crate::error::{Error, Result};
use crate::pool::handle::Pool;
use crate::pool::reserved::{Buffers, PageCopy};
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
        Ok(Lease { pool: self.clone(), id, buffers })
    }
}

/// Pages reserved for a batch of sequences, from [`Pool::reserve`]. While it lives, its sequences can't be
/// released or reserved again, and its owner may write their positions from `committed` on.
///
/// [`commit`](Lease::commit) keeps part of it; dropping it gives every reserved page back, and the shared tail
/// pages that copies had replaced return to their rows.
#[derive(Debug)]
#[must_use = "dropping a lease rolls it back"]
pub struct Lease {
    pool: Pool,
    /// Unique in the pool, from 1; 0 once the lease has ended.
    id: u64,
    buffers: Buffers,
}

/// A commit that was refused: why, and the lease, still live. Converted to [`Error`] by `?` it drops the lease,
/// which rolls back.
#[derive(Debug)]
pub struct Refused {
    /// Why.
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
        &self.buffers.seqs
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

    /// Copies to run before anything is written under this lease, in any order.
    pub fn copies(&self) -> &[PageCopy] {
        &self.buffers.copies
    }

    /// Pages of one token only: reorder a sequence's speculative positions without moving bytes. Position
    /// `first + i` gets the page that position `first + order[i]` had; the other pages of the range follow in their
    /// old order, so that the accounts stay exact.
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
    pub fn remap_all<'a>(&mut self, remaps: impl Iterator<Item = (SeqId, u32, &'a [u32])> + Clone) -> Result<()> {
        let mut state = self.pool.write()?;
        remaps.clone().try_for_each(|(seq, first, order)| state.check_remap(self.id, seq, first, order))?;
        remaps.for_each(|(seq, first, order)| state.remap(seq, first, order));
        Ok(())
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

    /// What dropping does, with its error: only a pool that a panic left half-changed has one.
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
