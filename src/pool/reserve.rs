//! Reserving pages for a batch, renewing the reservation, and how it ends: commit and rollback.

use crate::bounds::{PageId, PageSize};
use crate::error::{Error, Result, in_range, same_length};
use crate::pool::changes::ChangeKind;
use crate::pool::ledger::{EventKind, Ledger, Owner, PageRec};
use crate::pool::reserved::{Buffers, PageCopy};
use crate::pool::row::{Row, SeqId};
use crate::pool::state::State;

/// Most buffers that are kept.
const SPARE_BUFFERS: usize = 16;

impl State {
    pub(super) fn reserve(&mut self, wants: &[(SeqId, u32)]) -> Result<(u64, Box<Buffers>)> {
        self.call += 1;
        let mut need = 0;
        for &(seq, positions) in wants {
            let row = self.live_row(seq)?;
            self.stamp("reserve", seq, row)?;
            if self.rows[row].lease != 0 {
                return Err(Self::leased("reserve", seq));
            }
            need += self.check_want(seq, positions)?;
        }
        self.make_room(need)?;
        let mut buffers = self.spare.pop().unwrap_or_default();
        self.leases += 1;
        for &(seq, positions) in wants {
            self.extend(seq, positions, self.leases, &mut buffers.copies)?;
            buffers.seqs.push(seq);
        }
        self.leased_rows += wants.len() as u32; // below max_seqs: no sequence is in two leases
        Ok((self.leases, buffers))
    }

    /// Give more pages to the sequences of a live lease, which keep those that they have.
    pub(super) fn renew(&mut self, id: u64, buffers: &mut Buffers, positions: &[u32]) -> Result<()> {
        same_length("positions to reserve", positions.len(), buffers.seqs.len())?;
        let mut need = 0;
        for (&seq, &positions) in buffers.seqs.iter().zip(positions) {
            need += self.check_want(seq, positions)?;
        }
        self.make_room(need)?;
        buffers.clear_copies();
        let Buffers { seqs, copies, .. } = buffers;
        for (&seq, &positions) in seqs.iter().zip(positions) {
            self.extend(seq, positions, id, copies)?;
        }
        Ok(())
    }

    /// Check what a batch asks for one of its sequences, which is live, and count the pages that this takes.
    #[inline(always)]
    fn check_want(&self, seq: SeqId, positions: u32) -> Result<u64> {
        let (page, width, row) = (self.config.page, self.config.row_pages as usize, seq.row() as usize);
        let (r, pages) = (&self.rows[row], page.pages_for(positions));
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
        let copied = shared_tail(r, &self.table[row * width..][..width], &self.ledger.recs, page, positions).is_some();
        Ok(u64::from(pages.saturating_sub(r.pages)) + u64::from(copied))
    }

    /// Give a row the pages that [`Self::check_want`] counted, under a lease, and note the copy that a shared tail page
    /// needs.
    #[inline(always)]
    fn extend(&mut self, seq: SeqId, positions: u32, lease: u64, copies: &mut Vec<PageCopy>) -> Result<()> {
        let (page, width, row) = (self.config.page, self.config.row_pages as usize, seq.row() as usize);
        let line = &mut self.table[row * width..][..width];
        let (r, owner) = (&mut self.rows[row], Owner::of(seq));
        let (old, new) = (r.pages, page.pages_for(positions).max(r.pages));
        let mut first = old as usize;
        if let Some(col) = shared_tail(r, line, &self.ledger.recs, page, positions) {
            let src = line[col];
            self.ledger.take_into(&mut line[col..=col], EventKind::Copy, owner, as_entry)?;
            r.held = src as u32;
            r.shared = r.shared.min(col as u32);
            r.version += 1;
            // Under a lease that allows writes, the round in flight may write behind the committed positions.
            let len = if r.limit > r.committed { page.get() } else { page.offset(r.committed) };
            first = col;
            copies.push(PageCopy { src: PageId::of_table(src), dst: PageId::of_table(line[col]), len });
        }
        if new > old {
            self.ledger.take_into(&mut line[old as usize..new as usize], EventKind::Alloc, owner, as_entry)?;
            r.pages = new;
            r.version += 1;
        }
        self.changes.note(&mut r.changed, row, ChangeKind::Pages, first, new as usize);
        // A reservation that ends at the committed length allows no writes, so the tail page may stay shared.
        r.limit = if positions > r.committed { r.pages * page.get() } else { r.limit.max(r.committed) };
        r.lease = lease;
        Ok(())
    }

    /// Check new committed lengths for the sequences of a lease.
    fn check_lengths(&self, buffers: &Buffers, committed: &[u32]) -> Result<()> {
        same_length("committed lengths", committed.len(), buffers.seqs.len())?;
        for (seq, &len) in buffers.seqs.iter().zip(committed) {
            let r = &self.rows[seq.row() as usize]; // live: a leased sequence can't be released
            in_range("committed length", len, r.committed.into(), r.limit.into())?;
        }
        Ok(())
    }

    /// New committed lengths under a lease that lives on, with every page that it has.
    pub(super) fn advance(&mut self, buffers: &mut Buffers, committed: &[u32]) -> Result<()> {
        self.check_lengths(buffers, committed)?;
        for (&seq, &len) in buffers.seqs.iter().zip(committed) {
            let row = seq.row() as usize;
            let r = &mut self.rows[row];
            self.progress.advance(row);
            if len == r.committed {
                continue; // a shared tail page that was replaced may still come back
            }
            if r.held != 0 {
                // The copy holds committed KV now, so nothing may copy over it any more.
                self.ledger.drop_ref(std::mem::take(&mut r.held), Owner::of(seq))?;
                r.version += 1;
            }
            (r.committed, r.base_pages) = (len, self.config.page.pages_for(len));
        }
        buffers.clear_copies(); // the copies were launched before the round that this commits
        self.settle();
        Ok(())
    }

    pub(super) fn commit(&mut self, lease: &mut Option<Box<Buffers>>, committed: &[u32]) -> Result<()> {
        let buffers = lease.get_or_insert_default();
        self.check_lengths(buffers, committed)?;
        let page = self.config.page;
        let width = self.config.row_pages as usize;
        for (&seq, &len) in buffers.seqs.iter().zip(committed) {
            let row = seq.row() as usize;
            let (r, owner) = (&mut self.rows[row], Owner::of(seq));
            let (old, new) = (r.pages as usize, page.pages_for(len) as usize);
            let line = &mut self.table[row * width..][..width];
            r.version += 1; // the lease's plans, moves and copies must not run any more
            let mut first = new;
            if r.held != 0 && len == r.committed {
                // No counted token was written into the copy: the row keeps the shared page.
                self.ledger.restore_tail(r, page, line, owner)?;
                first -= 1; // for the partial page, the last of `new`
            } else if r.held != 0 {
                self.ledger.drop_ref(std::mem::take(&mut r.held), owner)?;
            }
            (r.committed, r.pages, r.base_pages) = (len, new as u32, new as u32);
            (r.lease, r.limit) = (0, 0);
            self.progress.end(row);
            self.changes.note(&mut r.changed, row, ChangeKind::Pages, first, old);
            self.ledger.give_back(&mut line[new..old], owner)?;
        }
        self.end(lease);
        Ok(())
    }

    pub(super) fn rollback(&mut self, lease: &mut Option<Box<Buffers>>) -> Result<()> {
        let buffers = lease.get_or_insert_default();
        let (page, width) = (self.config.page, self.config.row_pages as usize);
        for &seq in &buffers.seqs {
            let row = seq.row() as usize;
            let (r, owner) = (&mut self.rows[row], Owner::of(seq));
            let line = &mut self.table[row * width..][..width];
            let (old, new) = (r.pages as usize, r.base_pages as usize);
            r.version += 1;
            (r.pages, r.lease, r.limit) = (r.base_pages, 0, 0);
            self.progress.end(row);
            self.changes.note(&mut r.changed, row, ChangeKind::Pages, new - usize::from(r.held != 0), old);
            self.ledger.give_back(&mut line[new..old], owner)?;
            if r.held != 0 {
                self.ledger.restore_tail(r, page, line, owner)?;
            }
        }
        self.end(lease);
        Ok(())
    }

    /// The part that commit and rollback have in common: the accounts of the lease itself.
    fn end(&mut self, lease: &mut Option<Box<Buffers>>) {
        self.settle();
        let Some(mut buffers) = lease.take() else { return };
        // Saturating: this runs in a destructor, and the audit is where a wrong count is told.
        self.leased_rows = self.leased_rows.saturating_sub(buffers.seqs.len() as u32);
        buffers.clear();
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
