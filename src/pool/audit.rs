//! The audit: recount every owner of every page from scratch and compare with the ledger.

use crate::error::{Error, Result};
use crate::pool::state::State;

/// Counts of an audit that found nothing wrong. Pages are without the sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AuditReport {
    /// Pages of the pool; always `free_pages + owned_pages`.
    pub total_pages: u32,
    /// Pages nobody owns.
    pub free_pages: u32,
    /// Pages with an owner.
    pub owned_pages: u32,
    /// Pages with more than one owner.
    pub shared_pages: u32,
    /// Pages the prefix cache owns.
    pub cached_pages: u32,
    /// Pages a raw caller owns.
    pub raw_pages: u32,
    /// Shared tail pages that live leases have replaced by copies.
    pub held_pages: u32,
    /// Columns of the page table in use, over all sequences.
    pub table_entries: u64,
    /// Live sequences.
    pub sequences: u32,
    /// Sequences under a live lease.
    pub leased_sequences: u32,
    /// Events so far.
    pub events: u64,
}

impl State {
    /// See [`Pool::audit`](crate::pool::Pool::audit).
    pub(super) fn audit(&self) -> Result<AuditReport> {
        let mut report = AuditReport {
            total_pages: self.config.num_pages - 1,
            cached_pages: self.cache.len(),
            events: self.ledger.events(),
            ..AuditReport::default()
        };
        // Owners of each page, recounted.
        let mut refs: Vec<u64> = self.ledger.recs.iter().map(|r| u64::from(r.raw())).collect();
        report.raw_pages = refs.iter().filter(|&&n| n > 0).count() as u32;
        self.audit_rows(&mut refs, &mut report)?;
        for (page, node) in self.cache.entries() {
            self.own(&mut refs, page, || format!("cache node {node}"))?;
            let kept = self.ledger.recs[page as usize].node();
            if kept != Some(node) {
                return Err(self.fault(page, format!("page {page} is in cache node {node}, the ledger says {kept:?}")));
            }
        }
        let noted = self.ledger.recs.iter().filter(|r| r.node().is_some()).count();
        if noted != self.cache.len() as usize {
            return Err(self.fault(0, format!("the ledger knows {noted} cached pages, the cache {}", self.cache.len())));
        }
        self.audit_pages(&refs, &mut report)?;
        self.cache.check(|page| refs[page as usize] > 1).map_err(|what| self.fault(0, what))?;
        self.audit_exclusive()?;
        Ok(report)
    }

    /// Count one owner of `page`, which must be a page of the pool and not the sink.
    fn own(&self, refs: &mut [u64], page: u32, who: impl Fn() -> String) -> Result<()> {
        match refs.get_mut(page as usize) {
            Some(n) if page != 0 => {
                *n += 1;
                Ok(())
            }
            _ => Err(self.fault(page, format!("{} has page {page}, outside 1..{}", who(), self.config.num_pages))),
        }
    }

    /// Rows against the table and the list of free rows.
    fn audit_rows(&self, refs: &mut [u64], report: &mut AuditReport) -> Result<()> {
        let (page, width) = (self.config.page, self.config.row_pages as usize);
        let mut seen = std::collections::HashSet::new();
        for (row, r) in self.rows.iter().enumerate() {
            let line = &self.table[row * width..][..width];
            let name = || format!("sequence {row}.{}", r.generation);
            if let Some(col) = line.iter().skip(r.pages as usize).position(|&p| p != 0) {
                let col = col + r.pages as usize;
                return Err(self.fault(line[col] as u32, format!("{}: dead column {col} holds {}", name(), line[col])));
            }
            self.changes.check(row, r.changed).map_err(|what| self.fault(0, what))?;
            if !r.live {
                let zero = (r.committed, r.pages, r.base_pages, r.held, r.lease, r.limit) == (0, 0, 0, 0, 0, 0);
                if !zero {
                    return Err(self.fault(0, format!("{} was released and still has {r:?}", name())));
                }
                continue;
            }
            let needed = page.pages_for(r.committed);
            let lengths = if r.lease == 0 {
                r.pages == needed && r.base_pages == needed && (r.held, r.limit) == (0, 0)
            } else {
                // The lease's limit is the end of the row's pages, or nothing beyond the committed length.
                let limits = [r.committed, r.pages * page.get()];
                r.base_pages == needed && r.pages >= needed && limits.contains(&r.limit) && r.lease <= self.leases
            };
            if !lengths || (r.held != 0 && r.tail_col(page).is_none()) {
                return Err(self.fault(r.held, format!("{} has {r:?}, {needed} pages are committed", name())));
            }
            seen.clear();
            for &p in &line[..r.pages as usize] {
                self.own(refs, p as u32, name)?;
                if !seen.insert(p) {
                    return Err(self.fault(p as u32, format!("{} has page {p} twice", name())));
                }
            }
            if r.held != 0 {
                self.own(refs, r.held, || format!("the lease on {}", name()))?;
                report.held_pages += 1;
            }
            report.sequences += 1;
            report.table_entries += u64::from(r.pages);
            report.leased_sequences += u32::from(r.lease != 0);
        }
        if report.leased_sequences != self.leased_rows {
            let (counted, kept) = (report.leased_sequences, self.leased_rows);
            return Err(self.fault(0, format!("{counted} rows have a lease, the leases have {kept}")));
        }
        let mut idle = vec![false; self.rows.len()];
        for &row in &self.free_rows {
            let r = self.rows.get(row as usize);
            if r.is_none_or(|r| r.live) || std::mem::replace(&mut idle[row as usize], true) {
                return Err(self.fault(0, format!("row {row} is wrongly on the list of free rows")));
            }
        }
        let retired = self.rows.iter().filter(|r| !r.live && r.generation == u32::MAX).count();
        if self.free_rows.len() + report.sequences as usize + retired != self.rows.len() {
            return Err(self.fault(0, format!("{} rows are neither live nor free", self.rows.len())));
        }
        Ok(())
    }

    /// Recounted owners against the ledger and the free list.
    fn audit_pages(&self, refs: &[u64], report: &mut AuditReport) -> Result<()> {
        let mut free = vec![false; refs.len()];
        for &page in &self.ledger.free {
            match free.get_mut(page as usize) {
                Some(f) if page != 0 && !*f => *f = true,
                _ => return Err(self.fault(page, format!("page {page} is wrongly or twice on the free list"))),
            }
        }
        let mut in_use = 0; // pages with an owner besides the cache
        for (page, (rec, &counted)) in self.ledger.recs.iter().zip(refs).enumerate() {
            let page = page as u32;
            if u64::from(rec.refs) != counted {
                let kept = rec.refs;
                return Err(self.fault(page, format!("page {page}: the ledger has {kept} owner(s), found {counted}")));
            }
            if page != 0 && free[page as usize] != (counted == 0) {
                let listed = free[page as usize];
                return Err(self.fault(page, format!("page {page} has {counted} owner(s), on the free list: {listed}")));
            }
            report.owned_pages += u32::from(counted > 0);
            report.shared_pages += u32::from(counted > 1);
            in_use += u32::from(counted > u64::from(rec.node().is_some()));
        }
        report.free_pages = self.ledger.free_len();
        let (can_be_had, unused) = (report.free_pages + self.cache.idle(), report.total_pages - in_use);
        if can_be_had != unused {
            let what = format!("{can_be_had} pages are free or evictable, {unused} are not in use");
            return Err(self.fault(0, what));
        }
        Ok(())
    }

    /// Check that no page behind the shared columns of a sequence, which are committed ones, has a second owner.
    fn audit_exclusive(&self) -> Result<()> {
        let width = self.config.row_pages as usize;
        for (row, r) in self.rows.iter().enumerate().filter(|(_, r)| r.live) {
            let own = r.shared.min(r.base_pages) as usize;
            for &page in &self.table[row * width..][own..r.pages as usize] {
                let refs = self.ledger.recs[page as usize].refs;
                if refs != 1 {
                    let what = format!("page {page} of row {row}, not among its shared ones, has {refs} owners");
                    return Err(self.fault(page as u32, what));
                }
            }
        }
        Ok(())
    }

    fn fault(&self, page: u32, what: String) -> Error {
        let history = if page == 0 { "no single page".into() } else { self.ledger.history_text(page) };
        Error::Audit { what, history }
    }
}
