//! Sequences: creating, forking and releasing them, and their shares in the prefix cache.

use crate::error::{Error, Result, in_range};
use crate::pool::cache::Cursor;
use crate::pool::changes::ChangeKind;
use crate::pool::ledger::{EventKind, Owner};
use crate::pool::row::{Row, SeqId};
use crate::pool::state::State;

impl State {
    pub(super) fn create(&mut self) -> Result<SeqId> {
        let row = self.free_rows.pop().ok_or(Error::TooManySequences { limit: self.config.max_seqs.into() })?;
        let r = &mut self.rows[row as usize];
        r.generation += 1; // a row at u32::MAX is never put back on the list
        r.live = true;
        r.version += 1;
        Ok(SeqId::new(self.id, row, r.generation))
    }

    pub(super) fn fork(&mut self, src: SeqId, len: u32) -> Result<SeqId> {
        let s = self.live_row(src)?;
        let from = self.rows[s];
        in_range("fork length", len, 0, from.committed.into())?;
        let seq = self.create()?;
        let (n, width) = (self.config.page.pages_for(len) as usize, self.config.row_pages as usize);
        let (d, owner) = (seq.row as usize, Owner::of(seq));
        for col in 0..n {
            // Under a lease that copies the tail, the old tail page is the one whose KV is certainly there.
            let copied = from.held != 0 && from.tail_col(self.config.page) == Some(col as u32);
            let page = if copied { from.held } else { self.table[s * width + col] as u32 };
            self.ledger.add_ref(page, EventKind::Share, owner)?;
            self.table[d * width + col] = page as i32;
        }
        let r = &mut self.rows[d];
        (r.committed, r.pages, r.base_pages, r.shared) = (len, n as u32, n as u32, n as u32);
        self.changes.note(&mut r.changed, d, ChangeKind::Pages, 0, n);
        let r = &mut self.rows[s];
        r.shared = from.shared.max(n as u32);
        r.version += u64::from(n > 0); // a plan that writes those pages was made when they had one owner
        self.settle();
        Ok(seq)
    }

    pub(super) fn release(&mut self, seqs: &[SeqId]) -> Result<()> {
        self.call += 1;
        for &seq in seqs {
            let row = self.live_row(seq)?;
            if self.rows[row].lease != 0 {
                return Err(Self::leased("release", seq));
            }
            self.stamp("release", seq, row)?;
        }
        let width = self.config.row_pages as usize;
        for &seq in seqs {
            let row = seq.row as usize;
            let r = &mut self.rows[row];
            let pages = r.pages as usize;
            let (generation, version) = (r.generation, r.version + 1);
            *r = Row { generation, version, changed: r.changed, stamp: r.stamp, ..Row::default() };
            self.changes.note(&mut r.changed, row, ChangeKind::Pages, 0, pages);
            self.ledger.give_back(&mut self.table[row * width..][..pages], Owner::of(seq))?;
            if seq.generation < u32::MAX {
                self.free_rows.push(seq.row);
            }
        }
        self.settle();
        Ok(())
    }

    pub(super) fn cache_lookup(&mut self, tokens: &[u32], max: u32, salt: u64) -> Result<(SeqId, u32, u32)> {
        let (page_len, width) = (self.config.page.get() as usize, self.config.row_pages as usize);
        let full = (tokens.len().min(max as usize) / page_len).min(width);
        let seq = self.create()?;
        let (row, owner) = (seq.row() as usize, Owner::of(seq));
        let (mut at, mut n, mut drafted) = (Cursor::root(salt), 0, 0);
        for chunk in tokens[..full * page_len].chunks_exact(page_len) {
            let Some((next, page)) = self.cache.find(at, chunk) else { break };
            self.ledger.add_ref(page, EventKind::Share, owner)?;
            self.table[row * width + n] = page as i32;
            (at, n) = (next, n + 1);
            drafted += usize::from(self.cache.drafted(at)); // drafted pages are the first of the chain
        }
        let len = (n * page_len) as u32; // at most max
        let r = &mut self.rows[row];
        (r.committed, r.pages, r.base_pages, r.shared) = (len, n as u32, n as u32, n as u32);
        self.changes.note(&mut r.changed, row, ChangeKind::Pages, 0, n);
        self.settle();
        Ok((seq, len, (drafted * page_len) as u32))
    }

    pub(super) fn cache_insert(&mut self, seq: SeqId, tokens: &[u32], drafted: u32, salt: u64) -> Result<u32> {
        let row = self.live_row(seq)?;
        let committed = self.rows[row].committed;
        if tokens.len() > committed as usize {
            let (got, max) = (tokens.len() as i128, committed.into());
            return Err(Error::OutOfRange { what: "tokens to cache", got, min: 0, max });
        }
        let (page_len, width) = (self.config.page.get() as usize, self.config.row_pages as usize);
        in_range("drafted tokens to cache", drafted, 0, tokens.len() as i128)?;
        let (full, drafted) = (tokens.len() / page_len, drafted as usize / page_len);
        let (mut at, mut have, mut taken) = (Cursor::root(salt), 0, 0);
        for (col, chunk) in tokens.chunks_exact(page_len).enumerate() {
            let found = if have == col { self.cache.find(at, chunk) } else { None };
            let page = self.table[row * width + col] as u32;
            if let Some((next, cached)) = found {
                (at, have) = (next, have + 1);
                if col >= drafted || self.cache.drafted(at) || cached == page {
                    continue; // the cache keeps the page that it has
                }
            }
            taken += 1;
            if self.ledger.recs[page as usize].node().is_some() {
                return Err(Error::Invalid {
                    what: "tokens to cache",
                    got: format!("sequence {seq}, page {page} of positions {}..", col * page_len),
                    why: "the page is in the cache under other tokens, or another salt".into(),
                });
            }
        }
        let r = &mut self.rows[row];
        r.shared = r.shared.max(full as u32);
        r.version += u64::from(taken > 0); // counts up as in `fork`
        at = Cursor::root(salt);
        for (col, chunk) in tokens.chunks_exact(page_len).enumerate() {
            let (page, drafted) = (self.table[row * width + col] as u32, col < drafted);
            let (next, node, old) = match self.cache.find(at, chunk) {
                Some((next, _)) if !drafted || self.cache.drafted(next) => {
                    at = next;
                    continue;
                }
                Some((next, _)) => {
                    let (node, old) = self.cache.draft(next, page);
                    (next, node, Some(old))
                }
                None => {
                    let (next, node) = self.cache.insert(at, chunk, page, drafted);
                    (next, node, None)
                }
            };
            at = next;
            if old != Some(page) {
                self.ledger.add_ref(page, EventKind::Cache, Owner::Cache)?;
                self.ledger.recs[page as usize].aux = node + 1;
                old.map_or(Ok(()), |old| self.uncache(old))?;
            }
        }
        Ok(taken)
    }

    pub(super) fn cache_clear(&mut self) -> Result<u32> {
        let pages = self.cache.clear();
        for &page in &pages {
            self.uncache(page)?;
        }
        Ok(pages.len() as u32)
    }
}
