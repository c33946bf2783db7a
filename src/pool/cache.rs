//! The prefix cache: full pages that outlive their sequence, found again by their tokens.
//!
//! A tree of nodes, one full page each. A node's key is its parent and the page's tokens, so that a chain of nodes
//! spells out a prefix from its first token. The hash only finds candidates; a match is a comparison of the parent
//! and of every token, so colliding prompts can't read each other's KV.
//!
//! A chain has a *salt*, which its key holds too: prompts of different salts share no page, so that nobody can tell by
//! the time to a first token what another salt's prompts said (vLLM's `cache_salt`).
//!
//! A page has slots in every KV cache over the pool, and a draft model may lag behind its target: a node says whether the
//! draft's KV is valid in its page too (*drafted*). Draft KV attends to all before it, so a drafted node's parent is
//! drafted. A sequence that has it where the cache does not gives the cache its own page instead.
//!
//! The cache is one owner of each of its pages. A node is *idle* while its page has no other owner, and *pinned*
//! otherwise. The invariant, which [`Pool::audit`](crate::pool::Pool::audit) recounts: **every idle page can be had**.
//! At any time, whatever hangs from what,
//!
//! ```text
//! free pages + idle pages = all pages - pages that a sequence, a lease or a raw caller owns
//! ```
//!
//! So the cache can keep no call from pages, and a sequence that is alone has the whole pool.
//!
//! Eviction takes idle leaves, the one whose last user left longest ago first. Where no idle node is a leaf, pinned
//! nodes hang from every idle one: two sequences computed the same prefix, the cache has the first one's pages of it,
//! and behind them what only the second one went on to. Then eviction *cuts*: it takes an idle node below which none
//! is idle, and forgets what hangs from it. The forgotten pages stay with their owners. No lookup could reach them
//! without the page that went.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};

/// Index of no node: the parent of a chain's first node, and the end of a bucket.
const NONE: u32 = u32::MAX;

/// Place in the tree where a chain goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cursor {
    /// The node of the chain's last page, `NONE` before the first one.
    node: u32,
    /// Salt of the whole chain.
    salt: u64,
}

impl Cursor {
    /// The place before the first page of chains with this salt.
    pub(super) const fn root(salt: u64) -> Self {
        Self { node: NONE, salt }
    }

    /// The place behind node `node` of the same chain.
    const fn to(self, node: u32) -> Self {
        Self { node, ..self }
    }
}

#[derive(Debug, Clone)]
struct Node {
    /// The cached page; 0 while the node is unused.
    page: u32,
    /// Parent node, `NONE` for the first page of a chain.
    parent: u32,
    /// Next node of the same hash.
    next: u32,
    hash: u64,
    /// Salt of the parent, where there is one.
    salt: u64,
    /// Nodes whose parent this is.
    children: u32,
    /// True if the page has an owner besides the cache.
    pinned: bool,
    /// True if the page holds the draft's KV of its tokens.
    drafted: bool,
    /// Time when the last such owner left; a larger tick is more recent. Unique among idle nodes.
    tick: u64,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct PrefixCache {
    /// Tokens per page.
    page_len: usize,
    nodes: Vec<Node>,
    /// Tokens of node n at `n * page_len ..`.
    tokens: Vec<u32>,
    /// Unused entries of `nodes`.
    spare: Vec<u32>,
    /// First node of each hash.
    buckets: HashMap<u64, u32>,
    /// Idle nodes without children, the next victim first.
    victims: BTreeSet<(u64, u32)>,
    /// Nodes that are not pinned.
    idle: u32,
    live: u32,
    tick: u64,
    seed: RandomState,
    /// Bits of the hash that are used: all of them, fewer in tests that want collisions.
    hash_mask: u64,
}

impl PrefixCache {
    pub(super) fn new(page_len: u32) -> Self {
        Self {
            page_len: page_len as usize,
            nodes: Vec::new(),
            tokens: Vec::new(),
            spare: Vec::new(),
            buckets: HashMap::new(),
            victims: BTreeSet::new(),
            idle: 0,
            live: 0,
            tick: 0,
            seed: RandomState::new(),
            hash_mask: u64::MAX,
        }
    }

    #[cfg(test)]
    pub(super) fn with_hash_mask(page_len: u32, hash_mask: u64) -> Self {
        Self { hash_mask, ..Self::new(page_len) }
    }

    /// Cached pages.
    pub(super) fn len(&self) -> u32 {
        self.live
    }

    /// Pages that only the cache owns; [`Self::evict`] gives as many.
    pub(super) fn idle(&self) -> u32 {
        self.idle
    }

    #[cfg(test)]
    pub(super) fn spoil_idle(&mut self) {
        self.idle += 1;
    }

    fn hash(&self, at: Cursor, tokens: &[u32]) -> u64 {
        self.seed.hash_one((at.node, at.salt, tokens)) & self.hash_mask
    }

    fn tokens_of(&self, node: u32) -> &[u32] {
        &self.tokens[node as usize * self.page_len..][..self.page_len]
    }

    /// The node behind `at` that holds exactly these tokens (`page_len` of them), and its page.
    pub(super) fn find(&self, at: Cursor, tokens: &[u32]) -> Option<(Cursor, u32)> {
        let mut n = self.buckets.get(&self.hash(at, tokens)).copied().unwrap_or(NONE);
        while n != NONE {
            let node = &self.nodes[n as usize];
            if (node.parent, node.salt) == (at.node, at.salt) && self.tokens_of(n) == tokens {
                return Some((at.to(n), node.page));
            }
            n = node.next;
        }
        None
    }

    /// Add a node behind `at` for a page that another owner holds too, so it starts pinned. The caller has seen
    /// that no such node exists, adds the cache's reference, and stores the returned index with the page. `drafted`:
    /// whether the draft's KV is valid in it; only behind a node that is drafted.
    pub(super) fn insert(&mut self, at: Cursor, tokens: &[u32], page: u32, drafted: bool) -> (Cursor, u32) {
        let hash = self.hash(at, tokens);
        let n = match self.spare.pop() {
            Some(n) => n,
            None => {
                let n = self.nodes.len() as u32; // below the number of pages, each cached once
                self.nodes.push(Node {
                    page: 0,
                    parent: NONE,
                    next: NONE,
                    hash: 0,
                    salt: 0,
                    children: 0,
                    pinned: false,
                    drafted: false,
                    tick: 0,
                });
                self.tokens.resize(self.nodes.len() * self.page_len, 0);
                n
            }
        };
        self.tokens[n as usize * self.page_len..][..self.page_len].copy_from_slice(tokens);
        let next = self.buckets.insert(hash, n).unwrap_or(NONE);
        let (parent, salt) = (at.node, at.salt);
        let fresh = Node { page, parent, next, hash, salt, children: 0, pinned: true, drafted, tick: 0 };
        self.nodes[n as usize] = fresh;
        self.live += 1;
        if let Some(parent) = self.nodes.get_mut(at.node as usize) {
            parent.children += 1;
            let key = (parent.tick, at.node);
            self.victims.remove(&key); // the node has a child now
        }
        (at.to(n), n)
    }

    /// True if the draft's KV is valid in the page of the node at `at`, which is not the root.
    pub(super) fn drafted(&self, at: Cursor) -> bool {
        self.nodes[at.node as usize].drafted
    }

    /// The node at `at` has the draft's KV from now on, in `page`, which another owner holds too; returns its index and
    /// the page that it had. Where the two differ, the caller moves the cache's reference from one to the other.
    pub(super) fn draft(&mut self, at: Cursor, page: u32) -> (u32, u32) {
        self.pin(at.node);
        let node = &mut self.nodes[at.node as usize];
        node.drafted = true;
        (at.node, std::mem::replace(&mut node.page, page))
    }

    /// The page of node `n` got an owner besides the cache.
    pub(super) fn pin(&mut self, n: u32) {
        let node = &mut self.nodes[n as usize];
        if !node.pinned {
            node.pinned = true;
            let key = (node.tick, n);
            self.idle -= 1;
            self.victims.remove(&key);
        }
    }

    /// The last owner of node `n`'s page besides the cache left.
    pub(super) fn unpin(&mut self, n: u32) {
        self.tick += 1;
        let node = &mut self.nodes[n as usize];
        if node.pinned {
            (node.pinned, node.tick) = (false, self.tick);
            self.idle += 1;
            if node.children == 0 {
                self.victims.insert((self.tick, n));
            }
        }
    }

    /// Remove an idle node and return its page; `None` where there is none. Where that takes a cut, the pages that it
    /// forgets are added to `forgotten`. The caller drops the cache's reference to each.
    pub(super) fn evict(&mut self, forgotten: &mut Vec<u32>) -> Option<u32> {
        if self.victims.is_empty() {
            self.cut(forgotten);
        }
        let (_, n) = self.victims.pop_first()?;
        Some(self.remove(n))
    }

    /// Make a leaf of the idle node that was used longest ago among those below which none is idle. Linear in the
    /// cache.
    #[cold]
    fn cut(&mut self, forgotten: &mut Vec<u32>) {
        let mut above_idle = vec![false; self.nodes.len()];
        let idle = || self.entries().map(|(_, n)| n).filter(|&n| !self.nodes[n as usize].pinned);
        for n in idle() {
            let mut p = self.nodes[n as usize].parent;
            while let Some(above) = above_idle.get_mut(p as usize).filter(|above| !**above) {
                *above = true;
                p = self.nodes[p as usize].parent;
            }
        }
        let lowest = idle().filter(|&n| !above_idle[n as usize]).min_by_key(|&n| self.nodes[n as usize].tick);
        let Some(top) = lowest else { return };
        for n in self.below(top) {
            forgotten.push(self.remove(n));
        }
    }

    /// The nodes that hang from `top`, directly or not.
    fn below(&self, top: u32) -> Vec<u32> {
        let mut hangs: Vec<Option<bool>> = vec![None; self.nodes.len()];
        hangs[top as usize] = Some(true);
        let mut path = Vec::new();
        for (_, mut n) in self.entries() {
            let known = loop {
                match hangs.get(n as usize) {
                    None => break false, // above a first page
                    Some(&Some(known)) => break known,
                    Some(None) => path.push(n),
                }
                n = self.nodes[n as usize].parent;
            };
            path.drain(..).for_each(|n| hangs[n as usize] = Some(known));
        }
        let below = self.entries().map(|(_, n)| n).filter(|&n| n != top && hangs[n as usize] == Some(true));
        below.collect()
    }

    /// Take node `n` out, whose children have been or will be, and return its page.
    fn remove(&mut self, n: u32) -> u32 {
        self.unlink(n);
        let node = &mut self.nodes[n as usize];
        let (page, parent, pinned) = (std::mem::take(&mut node.page), node.parent, node.pinned);
        self.live -= 1;
        self.idle -= u32::from(!pinned);
        self.spare.push(n);
        if let Some(p) = self.nodes.get_mut(parent as usize) {
            p.children -= 1;
            if p.children == 0 && !p.pinned && p.page != 0 {
                let key = (p.tick, parent);
                self.victims.insert(key);
            }
        }
        page
    }

    fn unlink(&mut self, n: u32) {
        let (hash, next) = (self.nodes[n as usize].hash, self.nodes[n as usize].next);
        let mut at = self.buckets.get(&hash).copied().unwrap_or(NONE);
        if at == n {
            if next == NONE {
                self.buckets.remove(&hash);
            } else {
                self.buckets.insert(hash, next);
            }
            return;
        }
        while at != NONE {
            let node = &mut self.nodes[at as usize];
            if node.next == n {
                node.next = next;
                return;
            }
            at = node.next;
        }
    }

    /// Forget everything; returns the pages, whose references the caller drops.
    pub(super) fn clear(&mut self) -> Vec<u32> {
        let pages = self.entries().map(|(page, _)| page).collect();
        self.nodes.clear();
        self.tokens.clear();
        self.spare.clear();
        self.buckets.clear();
        self.victims.clear();
        (self.idle, self.live) = (0, 0);
        pages
    }

    /// Page and index of every live node.
    pub(super) fn entries(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.nodes.iter().enumerate().filter(|(_, n)| n.page != 0).map(|(i, n)| (n.page, i as u32))
    }

    /// Recount everything that is kept incrementally; `shared` says whether a page has an owner besides the cache.
    /// Returns the first disagreement.
    pub(super) fn check(&self, shared: impl Fn(u32) -> bool) -> Result<(), String> {
        let mut children = vec![0u32; self.nodes.len()];
        let (mut live, mut idle) = (0, 0);
        for (page, n) in self.entries() {
            let node = &self.nodes[n as usize];
            live += 1;
            idle += u32::from(!node.pinned);
            if node.pinned != shared(page) {
                return Err(format!("cache node {n} of page {page}: pinned is {}", node.pinned));
            }
            if let Some(p) = self.nodes.get(node.parent as usize) {
                if p.page == 0 {
                    return Err(format!("cache node {n} of page {page} hangs from the unused node {}", node.parent));
                }
                if node.salt != p.salt {
                    return Err(format!(
                        "cache node {n} of page {page} has another salt than its parent {}",
                        node.parent
                    ));
                }
                if node.drafted && !p.drafted {
                    let parent = node.parent;
                    return Err(format!("cache node {n} of page {page} is drafted, its parent {parent} is not"));
                }
                children[node.parent as usize] += 1;
            }
            let above = Cursor { node: node.parent, salt: node.salt };
            if self.find(above, self.tokens_of(n)) != Some((above.to(n), page)) {
                return Err(format!("cache node {n} of page {page} is not found by its tokens"));
            }
        }
        for (page, n) in self.entries() {
            let node = &self.nodes[n as usize];
            let (kept, counted) = (node.children, children[n as usize]);
            if kept != counted {
                return Err(format!("cache node {n} of page {page}: {kept} children, counted {counted}"));
            }
            let victim = !node.pinned && node.children == 0;
            if self.victims.contains(&(node.tick, n)) != victim {
                return Err(format!("cache node {n} of page {page}: on the victim list is {}", !victim));
            }
        }
        let spare = self.nodes.len() - self.spare.len();
        if (self.live, self.idle) != (live, idle) || spare != live as usize {
            let kept = (self.live, self.idle, spare);
            return Err(format!("cache keeps (live, idle, used nodes) {kept:?}, counted {:?}", (live, idle, live)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: Cursor = Cursor::root(0);

    /// With one hash for everything, tokens and parents alone tell nodes apart.
    #[test]
    fn colliding_hashes_do_not_match() {
        let mut c = PrefixCache::with_hash_mask(2, 0);
        let (a, a_node) = c.insert(ROOT, &[1, 2], 10, false);
        let (b, b_node) = c.insert(ROOT, &[3, 4], 11, false);
        let (aa, aa_node) = c.insert(a, &[1, 2], 12, false);
        assert_eq!(c.find(ROOT, &[1, 2]), Some((a, 10)));
        assert_eq!(c.find(ROOT, &[3, 4]), Some((b, 11)));
        assert_eq!(c.find(a, &[1, 2]), Some((aa, 12)));
        assert_eq!(c.find(b, &[1, 2]), None);
        assert_eq!(c.find(ROOT, &[1, 3]), None);
        c.check(|_| true).unwrap();
        // Evict out of the middle of the one bucket.
        for n in [b_node, aa_node, a_node] {
            c.unpin(n);
        }
        c.check(|_| false).unwrap();
        let evict = |c: &mut PrefixCache| c.evict(&mut Vec::new());
        assert_eq!(evict(&mut c), Some(11));
        c.check(|_| false).unwrap();
        assert_eq!((c.find(ROOT, &[1, 2]), c.find(ROOT, &[3, 4])), (Some((a, 10)), None));
        assert_eq!((evict(&mut c), evict(&mut c), evict(&mut c)), (Some(12), Some(10), None));
        assert_eq!((c.len(), c.idle()), (0, 0));
    }

    /// Chains of two salts share nothing, with one hash for everything too.
    #[test]
    fn salts_keep_equal_tokens_apart() {
        let mut c = PrefixCache::with_hash_mask(1, 0);
        let (mine, theirs) = (Cursor::root(1), Cursor::root(2));
        let (a, _) = c.insert(mine, &[5], 10, false);
        let (aa, _) = c.insert(a, &[6], 11, false);
        assert_eq!((c.find(theirs, &[5]), c.find(ROOT, &[5])), (None, None));
        let (b, _) = c.insert(theirs, &[5], 12, false);
        assert_eq!((c.find(mine, &[5]), c.find(theirs, &[5])), (Some((a, 10)), Some((b, 12))));
        assert_eq!((c.find(a, &[6]), c.find(b, &[6])), (Some((aa, 11)), None));
        c.check(|_| true).unwrap();
        c.nodes[1].salt = 2;
        assert!(c.check(|_| true).unwrap_err().contains("another salt than its parent 0"));
    }

    /// Idle nodes above pinned ones (two sequences computed the same prefix) go last, from the bottom, and nodes below
    /// one that goes are forgotten.
    #[test]
    fn an_idle_page_can_be_had_whatever_hangs_from_it() {
        let mut c = PrefixCache::new(1);
        let (a, an) = c.insert(ROOT, &[1], 1, false);
        let (b, bn) = c.insert(a, &[2], 2, false);
        let (d, _) = c.insert(b, &[3], 3, false);
        let (_, _) = c.insert(d, &[4], 4, false);
        let (_, en) = c.insert(a, &[5], 5, false);
        let (_, other) = c.insert(ROOT, &[6], 6, false);
        for n in [an, bn, en, other] {
            c.unpin(n);
        }
        let used = |p| p == 3 || p == 4;
        c.check(used).unwrap();
        assert_eq!((c.len(), c.idle()), (6, 4));
        let mut forgotten = Vec::new();
        // Leaves first, the one that was left first before the other.
        assert_eq!((c.evict(&mut forgotten), c.evict(&mut forgotten)), (Some(5), Some(6)));
        assert!(forgotten.is_empty());
        c.check(used).unwrap();
        // Page 1 was left before page 2, but page 2 hangs from it.
        assert_eq!(c.evict(&mut forgotten), Some(2));
        assert_eq!((forgotten.as_slice(), c.len(), c.idle()), (&[3, 4][..], 1, 1));
        c.check(used).unwrap();
        assert_eq!((c.find(ROOT, &[1]), c.find(a, &[2])), (Some((a, 1)), None));
        assert_eq!((c.evict(&mut forgotten), c.evict(&mut forgotten)), (Some(1), None));
        assert_eq!((forgotten.len(), c.len(), c.idle()), (2, 0, 0));
        c.check(|_| false).unwrap();
    }

    /// A pinned node between idle ones: the lower idle node goes first and takes only what hangs from itself.
    #[test]
    fn a_cut_forgets_no_more_than_it_must() {
        let mut c = PrefixCache::new(1);
        let mut at = ROOT;
        let nodes: Vec<u32> = (1..=5)
            .map(|page| {
                let (next, n) = c.insert(at, &[page], page, false);
                at = next;
                n
            })
            .collect();
        c.unpin(nodes[0]);
        c.unpin(nodes[3]);
        let mut forgotten = Vec::new();
        assert_eq!((c.evict(&mut forgotten), forgotten.as_slice()), (Some(4), &[5][..]));
        c.check(|p| p == 2 || p == 3).unwrap();
        forgotten.clear();
        assert_eq!((c.evict(&mut forgotten), forgotten.as_slice()), (Some(1), &[2, 3][..]));
        assert_eq!((c.len(), c.evict(&mut forgotten)), (0, None));
    }
}
