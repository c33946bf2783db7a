//! The owners of each page now, and which free pages come next: a recorder keeps them, and a replay makes the same page
//! tables from them.

use crate::bounds::PageId;
use crate::error::{Error, Result, in_range};
use crate::pool::handle::Pool;
use crate::pool::ledger::Owner;
use crate::pool::state::State;

impl Pool {
    /// One entry for each owner of each page, in increasing order of the page: sequences by row (a shared tail page
    /// that a lease has replaced and holds is its sequence's too), then the cache, or raw callers as often as they
    /// own it. Linear in the pool and the page table.
    ///
    /// # Errors
    /// [`Error::Audit`] where a panic left the pool half-changed.
    pub fn owners(&self) -> Result<Vec<(PageId, Owner)>> {
        Ok(self.read()?.owners())
    }

    /// Put these free pages before all others: the next calls that need pages take them, in this order. No page
    /// changes its owner, so the ledger has nothing to tell. Linear in the pool.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a page outside the pool or the sink, [`Error::Invalid`] for one that has an owner
    /// (the cache is one) or is given twice. Nothing is changed then.
    pub fn take_next(&self, pages: &[PageId]) -> Result<()> {
        self.write()?.take_next(pages)
    }
}

impl State {
    fn owners(&self) -> Vec<(PageId, Owner)> {
        let width = self.config.row_pages as usize;
        let mut out = Vec::new();
        for (row, r) in self.rows.iter().enumerate().filter(|(_, r)| r.live) {
            let owner = Owner::Sequence { row: row as u32, generation: r.generation };
            let held = (r.held != 0).then_some(r.held as i32);
            let pages = self.table[row * width..][..r.pages as usize].iter().copied().chain(held);
            out.extend(pages.map(|page| (PageId::of_table(page), owner)));
        }
        for (page, rec) in self.ledger.recs.iter().enumerate() {
            let page = PageId::of_table(page as i32); // ids fit, which was checked when the pool was made
            out.extend(rec.node().map(|_| (page, Owner::Cache)));
            out.extend((0..rec.raw()).map(|_| (page, Owner::Raw)));
        }
        out.sort_by_key(|(page, _)| page.get()); // stable: rows stay in order, before the rest
        out
    }

    fn take_next(&mut self, pages: &[PageId]) -> Result<()> {
        let mut chosen = vec![false; self.ledger.recs.len()];
        for page in pages.iter().map(|p| p.get()) {
            in_range("page to take next", page, 1, i128::from(self.config.num_pages) - 1)?;
            let owners = self.ledger.recs[page as usize].refs;
            let twice = std::mem::replace(&mut chosen[page as usize], true);
            if owners > 0 || twice {
                let why = if twice { "it is given twice".into() } else { format!("it has {owners} owner(s)") };
                return Err(Error::Invalid { what: "page to take next", got: page.to_string(), why });
            }
        }
        let free = &mut self.ledger.free; // the next one to be taken last
        free.retain(|&page| !chosen[page as usize]);
        free.extend(pages.iter().rev().map(|p| p.get()));
        Ok(())
    }
}
