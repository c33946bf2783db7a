//! Calls that must be refused and change nothing; the check after each step shows that they did not.

use specrs::Error;
use specrs::bounds::PageId;
use specrs::pool::SeqId;

use super::world::{Outcome, Reserved, World, page_id, pick};

impl World {
    pub(super) fn reserve_refused(&mut self, who: u16, twice: bool) -> Outcome {
        let mut wants: Vec<(SeqId, u32)> =
            self.chosen(u16::MAX, false).iter().map(|&id| (id, self.seq(id).tokens.len() as u32)).collect();
        let bad = if twice { wants.first().map(|w| w.0) } else { self.chosen(u16::MAX, true).first().copied() };
        let Some(bad) = bad else { return Ok(()) };
        wants.insert(who as usize % (wants.len() + 1), (bad, self.seq(bad).tokens.len() as u32));
        let got = self.pool.reserve(&wants);
        ensure!(matches!(got, Err(Error::Invalid { what: "reserve", .. })), "{got:?}");
        Ok(())
    }

    pub(super) fn commit_refused(&mut self, lease: u16, how: u8) -> Outcome {
        if self.leases.is_empty() {
            return Ok(());
        }
        let at = lease as usize % self.leases.len();
        let Reserved { mut lease, entries, flying } = self.leases.swap_remove(at);
        let p = self.config.page.get();
        let mut lengths: Vec<u32> = entries.iter().map(|(id, ..)| self.seq(*id).tokens.len() as u32).collect();
        let Some(last) = lengths.last_mut() else {
            self.leases.push(Reserved { lease, entries, flying });
            return Ok(());
        };
        let (id, _, writes) = &entries[entries.len() - 1];
        match how % 3 {
            0 if *last > 0 => *last -= 1,
            1 => *last = if *writes { self.seq(*id).pages.len() as u32 * p } else { *last } + 1,
            _ => lengths.push(0),
        }
        ensure!(lease.advance(&lengths).is_err(), "{lengths:?} was committed, under a lease that lives on");
        // Below what is committed, and too many, can't be reserved either.
        ensure!(how % 3 == 1 || lease.renew(&lengths).is_err(), "{lengths:?} was reserved");
        match lease.commit(&lengths) {
            Ok(()) => Err(format!("{lengths:?} was committed")),
            Err(r) => {
                let lease = r.lease;
                self.leases.push(Reserved { lease, entries, flying });
                Ok(())
            }
        }
    }

    pub(super) fn release_refused(&mut self, who: u16, twice: bool) -> Outcome {
        let mut ids = self.chosen(u16::MAX, false);
        let bad = if twice { ids.first().copied() } else { self.chosen(u16::MAX, true).first().copied() };
        let Some(bad) = bad else { return Ok(()) };
        ids.insert(who as usize % (ids.len() + 1), bad);
        let got = self.pool.release(&ids);
        ensure!(matches!(got, Err(Error::Invalid { what: "release", .. })), "{got:?}");
        Ok(())
    }

    pub(super) fn stale(&mut self, which: u16, call: u8) -> Outcome {
        let Some(&id) = pick(&self.released, which) else { return Ok(()) };
        let live = self.chosen(u16::MAX, false);
        let got = match call % 5 {
            0 => self.pool.release(&live.iter().copied().chain([id]).collect::<Vec<_>>()),
            1 => self
                .pool
                .reserve(&live.iter().map(|&s| (s, 1 << 20)).chain([(id, 1)]).rev().collect::<Vec<_>>())
                .map(drop),
            2 => self.pool.fork(id, 0).map(drop),
            3 => self.pool.cache_insert(id, &[], 0, 0).map(drop),
            _ => self.pool.version(id).map(drop),
        };
        ensure!(matches!(got, Err(Error::Dead { what: "sequence", .. })), "{got:?}");
        Ok(())
    }

    pub(super) fn free_refused(&mut self, which: u16, how: u8) -> Outcome {
        let mut ids: Vec<PageId> = self.raw.iter().copied().map(page_id).collect();
        let bad = match how % 3 {
            0 => pick(&self.raw, which).copied(),          // once more than it is owned
            1 => pick(&self.free_pages(), which).copied(), // free already
            _ => self.seqs.iter().flat_map(|s| &s.pages).copied().find(|p| !self.raw.contains(p)), // a sequence's
        };
        let Some(bad) = bad else { return Ok(()) };
        ids.insert(which as usize % (ids.len() + 1), page_id(bad));
        let owned = self.raw.iter().filter(|&&p| p == bad).count() as u32;
        match self.pool.free_pages(&ids) {
            Err(Error::DoubleFree { page, owners, frees, .. }) => {
                ensure!((page, owners, frees) == (bad, owned, owned + 1), "page {page}: {frees} of {owners}");
                Ok(())
            }
            other => Err(format!("{other:?}: page {bad} of {ids:?}")),
        }
    }

    pub(super) fn cache_insert_refused(&mut self, seq: u16) -> Outcome {
        let Some(s) = pick(&self.seqs, seq) else { return Ok(()) };
        let tokens = vec![7; s.tokens.len() + 1];
        let got = self.pool.cache_insert(s.id, &tokens, 0, 0);
        ensure!(matches!(got, Err(Error::OutOfRange { what: "tokens to cache", .. })), "{got:?}");
        // A page that is cached already, under tokens that no sequence has.
        let p = self.config.page.get() as usize;
        if s.tokens.len() >= p && self.cached(s.pages[0]) {
            let got = self.pool.cache_insert(s.id, &tokens[..p], p as u32, 0);
            ensure!(matches!(got, Err(Error::Invalid { what: "tokens to cache", .. })), "{got:?}");
            // A salt that no sequence has is refused too.
            let got = self.pool.cache_insert(s.id, &s.tokens[..p], 0, 2);
            ensure!(matches!(got, Err(Error::Invalid { what: "tokens to cache", .. })), "{got:?}");
        }
        let more = self.pool.cache_insert(s.id, &s.tokens, s.tokens.len() as u32 + 1, 0);
        ensure!(matches!(more, Err(Error::OutOfRange { what: "drafted tokens to cache", .. })), "{more:?}");
        Ok(())
    }
}
