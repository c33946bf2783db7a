//! Reserving pages for a batch, and how a reservation ends: commit and rollback.

use crate::bounds::{PageId, PageSize};
use crate::error::{Error, Result, in_range};
use crate::pool::ledger::{EventKind, Ledger, Owner, PageRec};
use crate::pool::reserved::{Buffers, PageCopy};
use crate::pool::row::{Row, SeqId};
use crate::pool::state::State;

/// Most buffers that are kept.
const SPARE_BUFFERS: usize = 16;

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
            // A reservation that ends at the committed length allows no writes, so the tail page may stay shared.
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

    pub(super) fn check_remap(&mut self, id: u64, seq: SeqId, first: u32, order: &[u32]) -> Result<()> {
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
    pub(super) fn remap(&mut self, seq: SeqId, first: u32, order: &[u32]) {
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

    pub(super) fn commit(&mut self, buffers: &mut Buffers, committed: &[u32]) -> Result<()> {
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

    pub(super) fn rollback(&mut self, buffers: &mut Buffers) -> Result<()> {
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
