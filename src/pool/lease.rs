//! Leases: the speculative part of a batch of sequences, kept by commit and taken back by drop.

use crate::bounds::{PageId, PageSize};
use crate::error::{Error, Result, in_range};
use crate::pool::ledger::{EventKind, Ledger, Owner, PageRec};
use crate::pool::sequence::Row;
use crate::pool::state::State;
use crate::pool::{Pool, SeqId};

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
    seqs: Vec<SeqId>,
    copies: Vec<PageCopy>,
}

/// Most buffers that are kept.
const SPARE_BUFFERS: usize = 16;

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
    pub(super) fn new(pool: Pool, id: u64, buffers: Buffers) -> Self {
        Self { pool, id, buffers }
    }

    /// The sequences, in the order of the reservation.
    pub fn seqs(&self) -> &[SeqId] {
        &self.buffers.seqs
    }

    /// Check that this is a lease of `pool` and covers each of `seqs`: who plans writes for them may.
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
        // A destructor has nobody to tell; a poisoned pool refuses every later call, which says it.
        let _ = self.end();
    }
}

impl State {
    pub(super) fn reserve(&mut self, wants: &[(SeqId, u32)]) -> Result<(u64, Buffers)> {
        let need = self.check_wants(wants)?;
        self.make_room(need)?;
        let mut buffers = self.spare.pop().unwrap_or_default();
        self.leases += 1;
        let (page, width) = (self.config.page, self.config.row_pages as usize);
        for &(seq, positions) in wants {
            let row = seq.row() as usize;
            let line = &mut self.table[row * width..][..width];
            let (r, owner) = (&mut self.rows[row], Owner::of(seq));
            let (old, new) = (r.pages, page.pages_for(positions).max(r.pages));
            if let Some(col) = shared_tail(r, line, &self.ledger.recs, page, positions) {
                let src = line[col];
                self.ledger.take_into(&mut line[col..=col], EventKind::Copy, owner, as_entry)?;
                r.held = src as u32;
                r.shared = r.shared.min(col as u32);
                r.version += 1;
                let (src, dst) = (PageId::of_table(src), PageId::of_table(line[col]));
                buffers.copies.push(PageCopy { src, dst, len: page.offset(r.committed) });
            }
            if new > old {
                self.ledger.take_into(&mut line[old as usize..new as usize], EventKind::Alloc, owner, as_entry)?;
                r.pages = new;
                r.version += 1;
            }
            // Who reserves no further than what is committed has promised not to write: its tail may be shared.
            r.limit = if positions > r.committed { r.pages * page.get() } else { r.committed };
            r.lease = self.leases;
            buffers.seqs.push(seq);
        }
        self.leased_rows += wants.len() as u32; // below max_seqs: no sequence is in two leases
        Ok((self.leases, buffers))
    }

    /// Check every request of a batch and count the pages it needs.
    fn check_wants(&mut self, wants: &[(SeqId, u32)]) -> Result<u64> {
        self.call += 1;
        let (page, width) = (self.config.page, self.config.row_pages as usize);
        let mut need = 0u64;
        for &(seq, positions) in wants {
            let row = self.live_row(seq)?;
            self.stamp("reserve", seq, row)?;
            let r = &self.rows[row];
            if r.lease != 0 {
                return Err(Self::leased("reserve", seq));
            }
            let pages = page.pages_for(positions);
            if pages as usize > width {
                let (need, have) = (pages.into(), self.config.row_pages.into());
                let hint = format!("sequence {seq}, {positions} positions of {} a page", page.get());
                return Err(Error::Capacity { what: "page table row", need, have, hint });
            }
            if positions < r.committed {
                let max = i128::from(self.config.row_pages) * i128::from(page.get());
                let (what, min) = ("positions to reserve", r.committed.into());
                return Err(Error::OutOfRange { what, got: positions.into(), min, max });
            }
            let line = &self.table[row * width..][..width];
            need += u64::from(pages.saturating_sub(r.pages));
            need += u64::from(shared_tail(r, line, &self.ledger.recs, page, positions).is_some());
        }
        Ok(need)
    }

    fn check_remap(&mut self, id: u64, seq: SeqId, first: u32, order: &[u32]) -> Result<()> {
        let row = self.live_row(seq)?;
        let r = &self.rows[row];
        let refuse = |why: &str| Error::Invalid { what: "remap", got: format!("sequence {seq}"), why: why.into() };
        if r.lease != id {
            return Err(refuse("the sequence is not in this lease"));
        }
        if self.config.page.get() != 1 {
            return Err(refuse("pages hold more than one token; move the KV instead"));
        }
        in_range("first position to remap", first, r.committed.into(), r.pages.into())?;
        let Some(last) = order.iter().copied().max() else { return Ok(()) };
        in_range("position to remap", last, 0, i128::from(r.pages - first) - 1)?;
        let named = &mut self.scratch;
        named.clear();
        named.resize(last as usize + 1, 0);
        for &o in order {
            if std::mem::replace(&mut named[o as usize], 1) == 1 {
                let why = "the order names it twice".into();
                return Err(Error::Invalid { what: "position to remap", got: o.to_string(), why });
            }
        }
        Ok(())
    }

    /// What [`Self::check_remap`] has let through.
    fn remap(&mut self, seq: SeqId, first: u32, order: &[u32]) {
        let Some(last) = order.iter().copied().max() else { return };
        let (row, width) = (seq.row() as usize, self.config.row_pages as usize);
        // What lies behind the last one named stays where it is.
        let range = &mut self.table[row * width + first as usize..][..=last as usize];
        let new = &mut self.scratch;
        new.clear();
        // Page 0 is never in a live column, so it marks what has been named.
        new.extend(order.iter().map(|&o| std::mem::take(&mut range[o as usize])));
        new.extend(range.iter().filter(|&&page| page != 0));
        range.copy_from_slice(new);
        self.rows[row].version += 1;
    }

    fn commit(&mut self, buffers: &mut Buffers, committed: &[u32]) -> Result<()> {
        let page = self.config.page;
        if committed.len() != buffers.seqs.len() {
            let (got, want) = (committed.len().to_string(), buffers.seqs.len().to_string());
            return Err(Error::Mismatch { operand: "committed lengths", got, want });
        }
        for (seq, &len) in buffers.seqs.iter().zip(committed) {
            let r = &self.rows[seq.row() as usize]; // live: a leased sequence can't be released
            in_range("committed length", len, r.committed.into(), r.limit.into())?;
        }
        let width = self.config.row_pages as usize;
        for (&seq, &len) in buffers.seqs.iter().zip(committed) {
            let row = seq.row() as usize;
            let (r, owner) = (&mut self.rows[row], Owner::of(seq));
            let (old, new) = (r.pages as usize, page.pages_for(len) as usize);
            let line = &mut self.table[row * width..][..width];
            // With its shared tail page gone, the lease's copies must not run any more.
            r.version += u64::from(new < old || r.held != 0);
            if r.held != 0 && len == r.committed {
                // Nothing was written into the copy that counts: the row keeps the shared page.
                self.ledger.restore_tail(r, page, line, owner)?;
            } else if r.held != 0 {
                self.ledger.drop_ref(std::mem::take(&mut r.held), owner)?;
            }
            (r.committed, r.pages, r.base_pages) = (len, new as u32, new as u32);
            (r.lease, r.limit) = (0, 0);
            self.ledger.give_back(&mut line[new..old], owner)?;
        }
        self.end(buffers);
        Ok(())
    }

    fn rollback(&mut self, buffers: &mut Buffers) -> Result<()> {
        let (page, width) = (self.config.page, self.config.row_pages as usize);
        for &seq in &buffers.seqs {
            let row = seq.row() as usize;
            let (r, owner) = (&mut self.rows[row], Owner::of(seq));
            let line = &mut self.table[row * width..][..width];
            let (old, new) = (r.pages as usize, r.base_pages as usize);
            r.version += u64::from(new < old);
            (r.pages, r.lease, r.limit) = (r.base_pages, 0, 0);
            self.ledger.give_back(&mut line[new..old], owner)?;
            if r.held != 0 {
                self.ledger.restore_tail(r, page, line, owner)?;
            }
        }
        self.end(buffers);
        Ok(())
    }

    /// What commit and rollback have in common: the accounts of the lease itself.
    fn end(&mut self, buffers: &mut Buffers) {
        // Saturating: this runs in a destructor, and the audit is where a wrong count is told.
        self.leased_rows = self.leased_rows.saturating_sub(buffers.seqs.len() as u32);
        self.settle();
        let mut buffers = std::mem::take(buffers);
        buffers.seqs.clear();
        buffers.copies.clear();
        if self.spare.len() < SPARE_BUFFERS {
            self.spare.push(buffers);
        }
    }
}

/// A page as the table holds it; page ids fit `i32`, which was checked when the pool was made.
fn as_entry(page: u32) -> i32 {
    page as i32
}

impl Ledger {
    /// Put the shared tail page back in its column and give the copy's page back.
    fn restore_tail(&mut self, r: &mut Row, page: PageSize, line: &mut [i32], owner: Owner) -> Result<()> {
        if let Some(col) = r.tail_col(page) {
            let copy = std::mem::replace(&mut line[col as usize], std::mem::take(&mut r.held) as i32);
            self.drop_ref(copy as u32, owner)?;
            r.shared = r.shared.max(col + 1);
            r.version += 1;
        }
        Ok(())
    }
}

/// Column of the tail page where a write behind `committed` would go into a page that has another owner.
fn shared_tail(r: &Row, line: &[i32], recs: &[PageRec], page: PageSize, positions: u32) -> Option<usize> {
    let col = r.tail_col(page)? as usize;
    (positions > r.committed && recs[line[col] as usize].refs > 1).then_some(col)
}
