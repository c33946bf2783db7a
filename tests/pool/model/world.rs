//! The plain model and the engine that uses the pool.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

use super::Op;
use super::mirror::{COPIED_IN_FLIGHT, Mirrors, RENEWED_IN_FLIGHT, Round, met};
use specrs::Error;
use specrs::bounds::{PageId, PageSize};
use specrs::pool::{Lease, Pool, PoolConfig, SeqId};

/// Cached pages that had draft KV only later, over all cases.
pub(super) static UPGRADED: AtomicU64 = AtomicU64::new(0);

pub(super) type Outcome = Result<(), String>;

/// KV of the position whose prefix, itself included, is `tokens`: depends on all of them, as real KV does.
pub(super) fn kv_of(tokens: &[u32]) -> u64 {
    tokens.iter().fold(0xcbf2_9ce4_8422_2325, |h, &t| (h ^ u64::from(t + 1)).wrapping_mul(0x100_0000_01b3))
}

#[derive(Debug, Clone)]
pub(super) struct Seq {
    pub(super) id: SeqId,
    /// Salt of the entries that it finds in the cache and leaves there.
    pub(super) salt: u64,
    /// Tokens of the committed positions.
    pub(super) tokens: Vec<u32>,
    /// Pages as the pool said at the last change that was checked.
    pub(super) pages: Vec<u32>,
}

pub(super) struct Reserved {
    pub(super) lease: Lease,
    /// Sequence, pages that a rollback leaves, and whether it may write.
    pub(super) entries: Vec<(SeqId, Vec<u32>, bool)>,
    /// Rounds that the device has run and the host has not committed.
    pub(super) flying: VecDeque<Round>,
}

struct Cached {
    salt: u64,
    /// All tokens from the first to this page's last.
    prefix: Vec<u32>,
    page: u32,
    /// True if the page has the draft's KV too.
    drafted: bool,
    /// Step at which it last had an owner besides the cache.
    used: u64,
}

/// Needs of a reservation: pages, copies of tails, pages that can be had; and whether a row is too short for it.
#[derive(Default)]
struct Asked {
    need: usize,
    copies: usize,
    can: usize,
    too_long: bool,
}

pub(super) struct World {
    pub(super) pool: Pool,
    pub(super) config: PoolConfig,
    pub(super) seqs: Vec<Seq>,
    pub(super) released: Vec<SeqId>,
    pub(super) leases: Vec<Reserved>,
    /// Raw pages, one entry per owner.
    pub(super) raw: Vec<u32>,
    cache: Vec<Cached>,
    /// Page -> KV of its positions.
    memory: HashMap<u32, Vec<u64>>,
    /// Page -> draft KV of its positions, where a sequence has written it since the page was free.
    drafts: HashMap<u32, Vec<u64>>,
    /// Values that no prefix has, for speculative KV.
    junk: u64,
    step: u64,
    pub(super) mirrors: Mirrors,
}

impl World {
    pub(super) fn new(pages: u32, page: u32, max_seqs: u32, row_pages: u32) -> Self {
        let page = PageSize::new(page).unwrap();
        let config = PoolConfig { num_pages: pages + 1, page, max_seqs, row_pages };
        let pool = Pool::with_history(config, 64).unwrap();
        let memory = (1..=pages).map(|p| (p, vec![0; page.get() as usize])).collect();
        Self {
            pool,
            config,
            seqs: Vec::new(),
            released: Vec::new(),
            leases: Vec::new(),
            raw: Vec::new(),
            cache: Vec::new(),
            drafts: HashMap::new(),
            memory,
            junk: 1 << 63,
            step: 0,
            mirrors: Mirrors::default(),
        }
    }

    // ---- what the model knows ----

    /// Owners of a page besides the cache.
    fn owners(&self, page: u32) -> usize {
        let rows = self.seqs.iter().filter(|s| s.pages.contains(&page)).count();
        let held = self
            .leases
            .iter()
            .flat_map(|l| &l.entries)
            .filter(|(id, before, _)| before.contains(&page) && !self.seq(*id).pages.contains(&page));
        rows + held.count() + self.raw.iter().filter(|&&p| p == page).count()
    }

    pub(super) fn cached(&self, page: u32) -> bool {
        self.cache.iter().any(|c| c.page == page)
    }

    pub(super) fn free_pages(&self) -> Vec<u32> {
        (1..self.config.num_pages).filter(|&p| self.owners(p) == 0 && !self.cached(p)).collect()
    }

    /// Cached pages without another owner, whatever continues them.
    fn evictable(&self) -> Vec<usize> {
        (0..self.cache.len()).filter(|&i| self.owners(self.cache[i].page) == 0).collect()
    }

    /// True if cached page `j` continues cached page `i`.
    fn below(&self, i: usize, j: usize) -> bool {
        if self.cache[i].salt != self.cache[j].salt {
            return false;
        }
        let (up, down) = (&self.cache[i].prefix, &self.cache[j].prefix);
        down.len() > up.len() && down.starts_with(up)
    }

    pub(super) fn seq(&self, id: SeqId) -> &Seq {
        self.seqs.iter().find(|s| s.id == id).expect("a live sequence of the model")
    }

    pub(super) fn index(&self, id: SeqId) -> usize {
        self.seqs.iter().position(|s| s.id == id).expect("a live sequence of the model")
    }

    fn leased(&self, id: SeqId) -> bool {
        self.leases.iter().any(|l| l.entries.iter().any(|(s, ..)| *s == id))
    }

    pub(super) fn needed(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.config.page.get() as usize)
    }

    /// True if a sequence that may write up to `positions` would write into a tail page with another owner.
    fn shared_tail(&self, id: SeqId, positions: u32) -> bool {
        let s = self.seq(id);
        let tail = !s.tokens.len().is_multiple_of(self.config.page.get() as usize);
        let shared = |&t: &u32| self.owners(t) + usize::from(self.cached(t)) > 1;
        tail && positions as usize > s.tokens.len() && shared(&s.pages[self.needed(s.tokens.len()) - 1])
    }

    /// Sequences by the bits of `who`, those with (or without) a lease.
    pub(super) fn chosen(&self, who: u16, leased: bool) -> Vec<SeqId> {
        let all = self.seqs.iter().map(|s| s.id).filter(|&id| self.leased(id) == leased);
        all.enumerate().filter(|(i, _)| who >> (i % 16) & 1 == 1).map(|(_, id)| id).collect()
    }

    pub(super) fn slot(&mut self, page: u32, pos: usize) -> &mut u64 {
        let p = self.config.page.get() as usize;
        &mut self.memory.get_mut(&page).expect("a page of the pool")[pos % p]
    }

    /// The pages that the pool took in a call that needed `fresh.len()` pages: free ones first, then idle cache
    /// entries: least recently used leaves first, and where only entries in use are leaves, idle ones below which none
    /// is idle. Entries below an entry that went are forgotten.
    fn took(&mut self, fresh: &[u32]) -> Outcome {
        let free: HashSet<u32> = self.free_pages().into_iter().collect();
        let distinct: HashSet<u32> = fresh.iter().copied().collect();
        ensure!(distinct.len() == fresh.len(), "a page twice in {fresh:?}");
        let evictable = self.evictable();
        let evicted: Vec<usize> = (0..self.cache.len()).filter(|&i| distinct.contains(&self.cache[i].page)).collect();
        let want = fresh.len().saturating_sub(free.len());
        ensure!(evicted.len() == want, "{} pages evicted, {want} were missing", evicted.len());
        ensure!(evicted.iter().all(|i| evictable.contains(i)), "a page in use was evicted, of {fresh:?}");
        for page in fresh {
            let known = free.contains(page) || evicted.iter().any(|&i| self.cache[i].page == *page);
            ensure!(known, "page {page} was not free");
        }
        // Entries go by the rule, one at a time; which of those that were left in one step goes first is not the
        // model's to say.
        let mut left: Vec<usize> = (0..self.cache.len()).collect();
        for _ in 0..want {
            let idle = || left.iter().copied().filter(|i| evictable.contains(i));
            let leaf = |&i: &usize| !left.iter().any(|&j| self.below(i, j));
            let lowest = |&i: &usize| !idle().any(|j| self.below(i, j));
            let leaves: Vec<usize> = idle().filter(leaf).collect();
            let choice = if leaves.is_empty() { idle().filter(lowest).collect() } else { leaves };
            let first = choice.iter().map(|&i| self.cache[i].used).min();
            let oldest = |i: &&usize| Some(self.cache[**i].used) == first && evicted.contains(i);
            let Some(&gone) = choice.iter().find(oldest) else {
                let pages: Vec<u32> = choice.iter().map(|&i| self.cache[i].page).collect();
                return Err(format!("of {pages:?}, the one used first, at {first:?}, stayed; {fresh:?} were taken"));
            };
            left.retain(|&i| i != gone && !self.below(gone, i));
        }
        let mut at = 0..self.cache.len();
        self.cache.retain(|_| at.next().is_some_and(|i| left.contains(&i)));
        Ok(())
    }

    /// Read the sequence's pages from the pool.
    fn look(&self, id: SeqId) -> Result<Vec<u32>, String> {
        Ok(self.pool.pages(id).map_err(|e| e.to_string())?.iter().map(|p| p.get()).collect())
    }

    // ---- operations ----

    pub(super) fn apply(&mut self, op: &Op) -> Outcome {
        self.step += 1;
        match op {
            Op::Create { salt } => self.create(u64::from(*salt)),
            Op::Fork { src, len } => self.fork(*src, *len),
            Op::Reserve { who, more } => self.reserve(*who, more),
            Op::ReserveRefused { who, twice } => self.reserve_refused(*who, *twice),
            Op::Renew { lease, more } => self.renew(*lease, more),
            Op::Launch { lease, accept, tokens } => self.launch(*lease, accept, *tokens),
            Op::Share { lease, more, tokens } => self.share(*lease, more, *tokens),
            Op::Land { lease } => self.land(*lease),
            Op::Look { which, anew } => self.late_look(*which, *anew),
            Op::Commit { lease, accept, tokens } => self.commit(*lease, accept, *tokens),
            Op::CommitRefused { lease, how } => self.commit_refused(*lease, *how),
            Op::Rollback { lease, explicit } => self.rollback(*lease, *explicit),
            Op::Remap { lease, entry, first, order, twice } => self.remap(*lease, *entry, *first, order, *twice),
            Op::Release { who } => self.release(*who),
            Op::ReleaseRefused { who, twice } => self.release_refused(*who, *twice),
            Op::Stale { which, call } => self.stale(*which, *call),
            Op::Alloc { n } => self.alloc(*n),
            Op::Retain { which } => self.retain(*which),
            Op::Free { which, n } => self.free(*which, *n),
            Op::FreeRefused { which, how } => self.free_refused(*which, *how),
            Op::CacheInsert { seq, len, drafted } => self.cache_insert(*seq, *len, *drafted),
            Op::CacheInsertRefused { seq } => self.cache_insert_refused(*seq),
            Op::CacheLookup { tokens, len, max } => {
                let tokens: Vec<u32> = (0..len % 24).map(|i| u32::from(tokens >> (i % 16) & 1)).collect();
                self.cache_lookup(&tokens, u32::from(*max) % 32, u64::from(max >> 15))
            }
            Op::CacheLookupOf { seq, len } => match pick(&self.seqs, *seq) {
                None => Ok(()),
                Some(s) => {
                    let tokens = s.tokens[..*len as usize % (s.tokens.len() + 1)].to_vec();
                    let salt = if *len >> 14 == 0 { 1 - s.salt } else { s.salt }; // now and then the other one
                    self.cache_lookup(&tokens, tokens.len() as u32, salt)
                }
            },
            Op::CacheClear => {
                let n = self.pool.cache_clear().map_err(|e| e.to_string())?;
                ensure!(n as usize == self.cache.len(), "cleared {n} of {}", self.cache.len());
                self.cache.clear();
                Ok(())
            }
        }?;
        self.check()
    }

    fn add(&mut self, made: specrs::Result<SeqId>, salt: u64, tokens: Vec<u32>, pages: Vec<u32>) -> Outcome {
        let full = self.seqs.len() == self.config.max_seqs as usize;
        match made {
            Err(Error::TooManySequences { limit }) if full && limit == u64::from(self.config.max_seqs) => Ok(()),
            Ok(id) if !full => {
                ensure!(!self.seqs.iter().any(|s| s.id.row() == id.row()), "row {} is in use", id.row());
                ensure!(!self.released.contains(&id), "handle {id} was used before");
                self.seqs.push(Seq { id, salt, tokens, pages });
                Ok(())
            }
            other => Err(format!("{other:?} with {} sequences of {}", self.seqs.len(), self.config.max_seqs)),
        }
    }

    fn create(&mut self, salt: u64) -> Outcome {
        let made = self.pool.create();
        self.add(made, salt, Vec::new(), Vec::new())
    }

    fn fork(&mut self, src: u16, len: u16) -> Outcome {
        let Some(s) = pick(&self.seqs, src).cloned() else { return Ok(()) };
        let len = len as usize % (s.tokens.len() + 2);
        let made = self.pool.fork(s.id, len as u32);
        if len > s.tokens.len() {
            ensure!(matches!(made, Err(Error::OutOfRange { what: "fork length", .. })), "{made:?}");
            return Ok(());
        }
        // Under a lease the pages from before it are the ones that hold committed KV.
        let lease = self.leases.iter().flat_map(|l| &l.entries).find(|(id, ..)| *id == s.id);
        let source = lease.map_or(&s.pages, |(_, before, _)| before);
        let pages = source[..self.needed(len)].to_vec();
        self.add(made, s.salt, s.tokens[..len].to_vec(), pages)
    }

    fn reserve(&mut self, who: u16, more: &[u16; 3]) -> Outcome {
        let wants = self.wants(self.chosen(who, false), more);
        let asked = self.asked(&wants);
        let Some(lease) = self.granted(self.pool.reserve(&wants), &asked)? else { return Ok(()) };
        let ids: Vec<SeqId> = wants.iter().map(|w| w.0).collect();
        ensure!(lease.seqs() == ids, "sequences {:?}", lease.seqs());
        let entries = ids.iter().map(|&id| (id, self.seq(id).pages.clone(), false)).collect();
        self.leases.push(Reserved { lease, entries, flying: VecDeque::new() });
        self.extended(self.leases.len() - 1, &wants, &asked)
    }

    fn renew(&mut self, lease: u16, more: &[u16; 3]) -> Outcome {
        if self.leases.is_empty() {
            return Ok(());
        }
        let at = lease as usize % self.leases.len();
        let wants = self.wants(self.leases[at].entries.iter().map(|e| e.0).collect(), more);
        let positions: Vec<u32> = wants.iter().map(|w| w.1).collect();
        let asked = self.asked(&wants);
        let copies = self.leases[at].lease.copies().to_vec();
        let renewed = self.leases[at].lease.renew(&positions);
        if self.granted(renewed, &asked)?.is_none() {
            ensure!(self.leases[at].lease.copies() == copies, "other copies after a renewal that was refused");
            return Ok(());
        }
        if !self.leases[at].flying.is_empty() {
            met(RENEWED_IN_FLIGHT);
            self.leases[at].lease.copies().iter().for_each(|_| met(COPIED_IN_FLIGHT));
        }
        self.extended(at, &wants, &asked)
    }

    fn share(&mut self, lease: u16, more: &[u16; 3], tokens: u16) -> Outcome {
        self.launch(lease, more, tokens)?;
        let Some(&(id, ..)) = pick(&self.leases, lease).and_then(|l| l.entries.first()) else { return Ok(()) };
        self.fork(self.index(id) as u16, self.seq(id).tokens.len() as u16)?;
        self.renew(lease, &more.map(|m| m | 1))
    }

    /// Positions to ask for.
    fn wants(&self, ids: Vec<SeqId>, more: &[u16; 3]) -> Vec<(SeqId, u32)> {
        let p = self.config.page.get();
        let wants = ids.into_iter().enumerate().map(|(i, id)| {
            // Often nothing more: then the lease may not write, and shared tails stay shared.
            let more = u32::from(more[i % 3]);
            (id, self.seq(id).tokens.len() as u32 + if more.is_multiple_of(4) { 0 } else { more % (p * 4 + 1) })
        });
        wants.collect()
    }

    fn asked(&self, wants: &[(SeqId, u32)]) -> Asked {
        let mut asked = Asked { can: self.free_pages().len() + self.evictable().len(), ..Asked::default() };
        for &(id, positions) in wants {
            let pages = self.needed(positions as usize);
            asked.need += pages.saturating_sub(self.seq(id).pages.len());
            asked.copies += usize::from(self.shared_tail(id, positions));
            asked.too_long |= pages > self.config.row_pages as usize;
        }
        asked
    }

    /// Checks that a call was right to give what was asked for: `None` where it was right to refuse.
    fn granted<T: std::fmt::Debug>(&self, got: specrs::Result<T>, asked: &Asked) -> Result<Option<T>, String> {
        let &Asked { need, copies, can, too_long } = asked;
        match got {
            Err(Error::Capacity { .. }) if too_long => Ok(None),
            Err(Error::PoolExhausted { need: n, free, total }) if !too_long && need + copies > can => {
                let told = (n as usize, free as usize, total as u32);
                let want = (need + copies, can, self.config.num_pages - 1);
                ensure!(told == want, "{told:?}, not {want:?}");
                Ok(None)
            }
            Ok(got) if !too_long && need + copies <= can => Ok(Some(got)),
            other => Err(format!("{other:?}: need {need} + {copies} of {can}, beyond the row: {too_long}")),
        }
    }

    /// Check the pages that a lease's sequences got, run its copies, and write where it may.
    fn extended(&mut self, at: usize, wants: &[(SeqId, u32)], asked: &Asked) -> Outcome {
        let p = self.config.page.get() as usize;
        let (need, copies) = (asked.need, self.leases[at].lease.copies().to_vec());
        let mut fresh = Vec::new();
        let mut now = Vec::new();
        for &(id, positions) in wants {
            let (before, after) = (&self.seq(id).pages, self.look(id)?);
            ensure!(after.len() == before.len().max(self.needed(positions as usize)), "{after:?} for {positions}");
            fresh.extend(after.iter().filter(|page| !before.contains(page)));
            let moved = before.iter().zip(&after).filter(|(b, a)| b != a).count();
            let copied = copies.iter().filter(|c| after.contains(&c.dst.get())).count();
            ensure!(moved == copied, "{moved} pages replaced, {copied} copied");
            now.push(after);
        }
        self.took(&fresh)?;
        // A tail that it shared with the cache alone needs no copy where the cache had to forget it.
        let shared = wants.iter().filter(|&&(id, positions)| self.shared_tail(id, positions)).count();
        ensure!(copies.len() == shared, "{} tails copied, not {shared}", copies.len());
        ensure!(fresh.len() == need + shared, "{} pages taken, need {need} and {shared} copies", fresh.len());
        for c in copies {
            for at in 0..c.len as usize {
                *self.slot(c.dst.get(), at) = *self.slot(c.src.get(), at);
            }
        }
        for (e, (&(id, positions), pages)) in wants.iter().zip(now).enumerate() {
            let i = self.index(id);
            let before = std::mem::replace(&mut self.seqs[i].pages, pages.clone()).len();
            let committed = self.seqs[i].tokens.len();
            if positions as usize > committed {
                // Speculative KV in every slot that the lease allows by now.
                let wrote = std::mem::replace(&mut self.leases[at].entries[e].2, true);
                let from = if wrote { before * p } else { committed };
                for pos in from..pages.len() * p {
                    self.junk += 1;
                    let value = self.junk;
                    *self.slot(pages[pos / p], pos) = value;
                }
            }
        }
        Ok(())
    }

    fn commit(&mut self, lease: u16, accept: &[u16; 3], bits: u16) -> Outcome {
        if self.leases.is_empty() {
            return Ok(());
        }
        let at = lease as usize % self.leases.len();
        let mut reserved = self.leases.swap_remove(at);
        while !reserved.flying.is_empty() {
            self.land_in(&mut reserved)?;
        }
        let Reserved { lease, entries, .. } = reserved;
        let p = self.config.page.get() as usize;
        let mut lengths = Vec::new();
        for (i, (id, _, writes)) in entries.iter().enumerate() {
            let k = self.index(*id);
            let (old, room) = (self.seqs[k].tokens.len(), self.seqs[k].pages.len() * p);
            let n = if *writes { old + accept[i % 3] as usize % (room - old + 1) } else { old };
            lengths.push(n as u32);
            for pos in old..n {
                // Few distinct tokens, so that sequences agree often and the cache has something to find.
                self.seqs[k].tokens.push(u32::from(bits >> (pos % 16) & 1));
                let value = kv_of(&self.seqs[k].tokens);
                let page = self.seqs[k].pages[pos / p];
                *self.slot(page, pos) = value;
            }
        }
        lease.commit(&lengths).map_err(|r| r.error.to_string())?;
        for ((id, before, _), &n) in entries.iter().zip(&lengths) {
            let k = self.index(*id);
            let mut pages = self.seqs[k].pages[..self.needed(n as usize)].to_vec();
            let was = before.len();
            if self.look(*id)? != pages {
                // If nothing was accepted, a copied tail may come back.
                pages[was - 1] = before[was - 1];
            }
            self.seqs[k].pages = pages;
        }
        Ok(())
    }

    fn rollback(&mut self, lease: u16, explicit: bool) -> Outcome {
        if self.leases.is_empty() {
            return Ok(());
        }
        let at = lease as usize % self.leases.len();
        let Reserved { lease, entries, .. } = self.leases.swap_remove(at);
        if explicit {
            lease.rollback().map_err(|e| e.to_string())?;
        } else {
            drop(lease);
        }
        for (id, before, _) in entries {
            let k = self.index(id);
            self.seqs[k].pages = before;
        }
        Ok(())
    }

    fn remap(&mut self, lease: u16, entry: u16, first: u16, order: &[u16], twice: bool) -> Outcome {
        if self.leases.is_empty() {
            return Ok(());
        }
        let at = lease as usize % self.leases.len();
        let mut reserved = self.leases.swap_remove(at);
        let outcome = self.remap_in(&mut reserved, entry, first, order, twice);
        self.leases.push(reserved);
        outcome
    }

    fn remap_in(&mut self, r: &mut Reserved, entry: u16, first: u16, order: &[u16], twice: bool) -> Outcome {
        let Some((id, before, _)) = pick(&r.entries, entry).filter(|_| r.flying.is_empty()) else { return Ok(()) };
        let (id, before) = (*id, before.len());
        let k = self.index(id);
        let pages = self.seqs[k].pages.clone();
        let first = before + first as usize % (pages.len() - before + 1);
        let range = &pages[first..];
        let mut seen = HashSet::new();
        let mut order: Vec<u32> = order
            .iter()
            .filter(|_| !range.is_empty())
            .map(|&o| u32::from(o) % range.len() as u32)
            .filter(|o| seen.insert(*o))
            .collect();
        let twice = twice && !order.is_empty();
        if twice {
            order.push(order[0]);
        }
        let got = r.lease.remap(id, first as u32, &order);
        if self.config.page.get() != 1 {
            ensure!(matches!(got, Err(Error::Invalid { what: "remap", .. })), "{got:?}");
            return Ok(());
        }
        if twice {
            ensure!(matches!(got, Err(Error::Invalid { what: "position to remap", .. })), "{got:?}");
            return Ok(());
        }
        got.map_err(|e| e.to_string())?;
        self.follow(&r.lease);
        let mut want = pages[..first].to_vec();
        want.extend(order.iter().map(|&o| range[o as usize]));
        want.extend((0..range.len()).filter(|&i| !order.contains(&(i as u32))).map(|i| range[i]));
        self.seqs[k].pages = want;
        Ok(())
    }

    fn release(&mut self, who: u16) -> Outcome {
        let ids = self.chosen(who, false);
        self.pool.release(&ids).map_err(|e| e.to_string())?;
        self.seqs.retain(|s| !ids.contains(&s.id));
        self.released.extend(ids);
        Ok(())
    }

    fn alloc(&mut self, n: u16) -> Outcome {
        let can = self.free_pages().len() + self.evictable().len();
        let n = n as usize % (can / 2 + 3);
        match self.pool.alloc_pages(n as u32) {
            Err(Error::PoolExhausted { need, free, .. }) if n > can => {
                ensure!((need as usize, free as usize) == (n, can), "{need} of {free}, not {n} of {can}");
                Ok(())
            }
            Ok(pages) if n <= can => {
                let pages: Vec<u32> = pages.iter().map(|p| p.get()).collect();
                ensure!(pages.len() == n, "{pages:?}");
                self.took(&pages)?;
                self.raw.extend(pages);
                Ok(())
            }
            other => Err(format!("{other:?}: {n} of {can}")),
        }
    }

    fn retain(&mut self, which: u16) -> Outcome {
        let Some(&page) = pick(&self.raw, which) else { return Ok(()) };
        self.pool.retain_pages(&[page_id(page)]).map_err(|e| e.to_string())?;
        self.raw.push(page);
        Ok(())
    }

    fn free(&mut self, which: u16, n: u16) -> Outcome {
        let mut pages = Vec::new();
        for _ in 0..n % 8 {
            if !self.raw.is_empty() {
                pages.push(self.raw.swap_remove(which as usize % self.raw.len()));
            }
        }
        let ids: Vec<PageId> = pages.into_iter().map(page_id).collect();
        self.pool.free_pages(&ids).map_err(|e| e.to_string())
    }

    fn cache_insert(&mut self, seq: u16, len: u16, drafted: u16) -> Outcome {
        let Some(s) = pick(&self.seqs, seq).cloned() else { return Ok(()) };
        let p = self.config.page.get() as usize;
        let tokens = &s.tokens[..len as usize % (s.tokens.len() + 1)];
        // Half of the claims are of no draft KV, or of all.
        let drafted = [0, tokens.len(), drafted as usize % (tokens.len() + 1)][(drafted as usize >> 8) % 3];
        let n = self.pool.cache_insert(s.id, tokens, drafted as u32, s.salt).map_err(|e| e.to_string())?;
        let mut new = 0;
        for (i, &page) in s.pages.iter().enumerate().take(tokens.len() / p) {
            let (prefix, drafted) = (&tokens[..(i + 1) * p], (i + 1) * p <= drafted);
            if drafted {
                let kv = (i * p..prefix.len()).map(|pos| kv_of(&tokens[..=pos])).collect();
                self.drafts.insert(page, kv);
            }
            match self.cache.iter_mut().find(|c| c.salt == s.salt && c.prefix == prefix) {
                None => {
                    let (salt, prefix) = (s.salt, prefix.to_vec());
                    self.cache.push(Cached { salt, prefix, page, drafted, used: self.step });
                    new += 1;
                }
                Some(c) if drafted && !c.drafted => {
                    new += u32::from(c.page != page);
                    (c.page, c.drafted) = (page, true);
                    UPGRADED.fetch_add(1, Ordering::Relaxed);
                }
                Some(_) => (),
            }
        }
        ensure!(n == new, "{n} new pages, not {new}");
        Ok(())
    }

    fn cache_lookup(&mut self, tokens: &[u32], max: u32, salt: u64) -> Outcome {
        let p = self.config.page.get() as usize;
        let (mut pages, mut drafted) = (Vec::new(), 0);
        while let Some(prefix) = tokens.get(..(pages.len() + 1) * p) {
            let found = self.cache.iter().find(|c| c.salt == salt && c.prefix == prefix);
            let fits = prefix.len() <= max as usize && pages.len() < self.config.row_pages as usize;
            let Some(c) = found.filter(|_| fits) else { break };
            if c.drafted {
                ensure!(drafted == pages.len() * p, "page {} is drafted, not all before it are", c.page);
                drafted += p;
                let kv: Vec<u64> = (prefix.len() - p..prefix.len()).map(|pos| kv_of(&tokens[..=pos])).collect();
                ensure!(self.drafts.get(&c.page) == Some(&kv), "page {} lacks its draft KV", c.page);
            }
            pages.push(c.page);
        }
        let got = self.pool.cache_lookup(tokens, max, salt);
        if let Ok((_, len, valid)) = got {
            let want = (pages.len() * p, drafted);
            ensure!((len as usize, valid as usize) == want, "({len}, {valid}) tokens found, not {want:?}");
        }
        self.add(got.map(|(id, ..)| id), salt, tokens[..pages.len() * p].to_vec(), pages)
    }

    // ---- checks ----

    fn check(&mut self) -> Outcome {
        let report = self.pool.audit().map_err(|e| e.to_string())?;
        let stats = self.pool.stats().map_err(|e| e.to_string())?;
        let (free, evictable) = (self.free_pages().len() as u32, self.evictable().len() as u32);
        let model = (free, self.cache.len() as u32, evictable, self.seqs.len() as u32);
        let pool = (stats.free_pages, stats.cached_pages, stats.evictable_pages, stats.live_sequences);
        ensure!(model == pool, "(free, cached, evictable, sequences): pool {pool:?}, model {model:?}");
        // With any content of the cache, each page is in use, or can be had.
        let in_use = (1..self.config.num_pages).filter(|&page| self.owners(page) > 0).count() as u32;
        ensure!(free + evictable + in_use == report.total_pages, "{free} + {evictable} + {in_use} pages");
        ensure!(report.free_pages == free, "audit says {} free, {free} are", report.free_pages);
        for page in self.free_pages() {
            self.drafts.remove(&page);
        }
        let used: Vec<bool> = self.cache.iter().map(|c| self.owners(c.page) > 0).collect();
        for (c, used) in self.cache.iter_mut().zip(used) {
            if used {
                c.used = self.step + 1; // it may go idle in the next step
            }
        }
        let p = self.config.page.get() as usize;
        for s in &self.seqs {
            let view = self.look(s.id)?;
            ensure!(view == s.pages, "sequence {}: pool {view:?}, model {:?}", s.id, s.pages);
            let committed = self.pool.committed(s.id).map_err(|e| e.to_string())?;
            ensure!(committed as usize == s.tokens.len(), "sequence {}: committed {committed}", s.id);
            let allocated = self.pool.allocated(s.id).map_err(|e| e.to_string())?;
            ensure!(allocated as usize == s.pages.len() * p, "sequence {}: allocated {allocated}", s.id);
            for pos in 0..s.tokens.len() {
                let (got, want) = (self.memory[&s.pages[pos / p]][pos % p], kv_of(&s.tokens[..=pos]));
                ensure!(got == want, "sequence {}: position {pos} reads another's KV", s.id);
            }
        }
        self.check_mirrors()
    }

    /// Give everything back: no page may be missing.
    pub(super) fn finish(mut self) -> Outcome {
        self.leases.clear();
        let ids: Vec<SeqId> = self.seqs.iter().map(|s| s.id).collect();
        self.pool.release(&ids).map_err(|e| e.to_string())?;
        let raw: Vec<PageId> = self.raw.iter().copied().map(page_id).collect();
        self.pool.free_pages(&raw).map_err(|e| e.to_string())?;
        self.pool.cache_clear().map_err(|e| e.to_string())?;
        let report = self.pool.audit().map_err(|e| e.to_string())?;
        ensure!(report.free_pages == report.total_pages, "{} pages leaked", report.total_pages - report.free_pages);
        Ok(())
    }
}

pub(super) fn page_id(page: u32) -> PageId {
    PageId::new(page).unwrap()
}

pub(super) fn pick<T>(from: &[T], n: u16) -> Option<&T> {
    (!from.is_empty()).then(|| &from[n as usize % from.len()])
}
