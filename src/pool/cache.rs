//! The prefix cache: full pages that outlive their sequence, found again by their tokens.
//!
//! A tree of nodes, one full page each. A node's key is its parent and the page's tokens, so that a chain of nodes
//! spells out a prefix from its first token. The hash only finds candidates; a match is a comparison of the parent
//! and of every token, so colliding prompts can't read each other's KV.
//!
//! The cache is one owner of each of its pages. A node is *pinned* while its page has another owner, *busy* while it
//! or a descendant is pinned, and *idle* otherwise. Idle nodes are what eviction may take, leaf by leaf, the one
//! whose last user left longest ago first. Their count is kept, so that a reservation knows whether eviction will
//! be enough before it evicts anything.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};

/// Index of no node: the parent of a chain's first node, and the end of a bucket.
const NONE: u32 = u32::MAX;

/// Place in the tree where a chain goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cursor(u32);

impl Cursor {
    /// Before the first page.
    pub(super) const ROOT: Cursor = Cursor(NONE);
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
    /// Nodes whose parent this is.
    children: u32,
    /// Children that are busy.
    busy_children: u32,
    /// Whether the page has an owner besides the cache.
    pinned: bool,
    /// When the last such owner left; a larger tick is more recent. Unique among idle nodes.
    tick: u64,
}

impl Node {
    fn busy(&self) -> bool {
        self.pinned || self.busy_children > 0
    }
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

    /// Pages that eviction could free now.
    pub(super) fn idle(&self) -> u32 {
        self.idle
    }

    fn hash(&self, parent: u32, tokens: &[u32]) -> u64 {
        self.seed.hash_one((parent, tokens)) & self.hash_mask
    }

    fn tokens_of(&self, node: u32) -> &[u32] {
        &self.tokens[node as usize * self.page_len..][..self.page_len]
    }

    /// The node behind `at` that holds exactly these tokens (`page_len` of them), and its page.
    pub(super) fn find(&self, at: Cursor, tokens: &[u32]) -> Option<(Cursor, u32)> {
        let mut n = self.buckets.get(&self.hash(at.0, tokens)).copied().unwrap_or(NONE);
        while n != NONE {
            let node = &self.nodes[n as usize];
            if node.parent == at.0 && self.tokens_of(n) == tokens {
                return Some((Cursor(n), node.page));
            }
            n = node.next;
        }
        None
    }

    /// Add a node behind `at` for a page that another owner holds too, so it starts pinned. The caller has seen
    /// that no such node exists, adds the cache's reference, and stores the returned index with the page.
    pub(super) fn insert(&mut self, at: Cursor, tokens: &[u32], page: u32) -> (Cursor, u32) {
        let hash = self.hash(at.0, tokens);
        let n = match self.spare.pop() {
            Some(n) => n,
            None => {
                let n = self.nodes.len() as u32; // below the number of pages, each cached once
                self.nodes.push(Node {
                    page: 0,
                    parent: NONE,
                    next: NONE,
                    hash: 0,
                    children: 0,
                    busy_children: 0,
                    pinned: false,
                    tick: 0,
                });
                self.tokens.resize(self.nodes.len() * self.page_len, 0);
                n
            }
        };
        self.tokens[n as usize * self.page_len..][..self.page_len].copy_from_slice(tokens);
        let next = self.buckets.insert(hash, n).unwrap_or(NONE);
        let fresh = Node { page, parent: at.0, next, hash, children: 0, busy_children: 0, pinned: true, tick: 0 };
        self.nodes[n as usize] = fresh;
        self.live += 1;
        if let Some(parent) = self.nodes.get_mut(at.0 as usize) {
            parent.children += 1;
            let key = (parent.tick, at.0);
            self.victims.remove(&key); // it has a child now
        }
        self.child_became_busy(at.0);
        (Cursor(n), n)
    }

    /// The page of node `n` got an owner besides the cache.
    pub(super) fn pin(&mut self, n: u32) {
        let node = &mut self.nodes[n as usize];
        let was_busy = node.busy();
        node.pinned = true;
        if !was_busy {
            let (key, parent) = ((node.tick, n), node.parent);
            self.idle -= 1;
            self.victims.remove(&key);
            self.child_became_busy(parent);
        }
    }

    /// The last owner of node `n`'s page besides the cache left.
    pub(super) fn unpin(&mut self, n: u32) {
        self.tick += 1;
        let node = &mut self.nodes[n as usize];
        node.pinned = false;
        node.tick = self.tick;
        if !node.busy() {
            let parent = node.parent;
            if node.children == 0 {
                self.victims.insert((self.tick, n));
            }
            self.idle += 1;
            self.child_became_idle(parent);
        }
    }

    /// Stops at the first ancestor that was busy already: one step for all but the odd chain.
    fn child_became_busy(&mut self, mut p: u32) {
        while let Some(node) = self.nodes.get_mut(p as usize) {
            let was_busy = node.busy();
            node.busy_children += 1;
            if was_busy {
                break;
            }
            self.idle -= 1;
            p = node.parent;
        }
    }

    fn child_became_idle(&mut self, mut p: u32) {
        while let Some(node) = self.nodes.get_mut(p as usize) {
            node.busy_children -= 1;
            if node.busy() {
                break;
            }
            self.idle += 1;
            p = node.parent;
        }
    }

    /// Remove the idle leaf that was used longest ago and return its page, whose reference the caller drops.
    pub(super) fn evict(&mut self) -> Option<u32> {
        let (_, n) = self.victims.pop_first()?;
        let (page, parent) = (self.nodes[n as usize].page, self.nodes[n as usize].parent);
        self.unlink(n);
        self.idle -= 1;
        self.live -= 1;
        self.nodes[n as usize].page = 0;
        self.spare.push(n);
        if let Some(p) = self.nodes.get_mut(parent as usize) {
            p.children -= 1;
            if p.children == 0 && !p.busy() {
                self.victims.insert((p.tick, parent));
            }
        }
        Some(page)
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
        let mut busy_children = vec![0u32; self.nodes.len()];
        let (mut live, mut idle) = (0, 0);
        for (page, n) in self.entries() {
            let node = &self.nodes[n as usize];
            live += 1;
            idle += u32::from(!node.busy());
            if node.pinned != shared(page) {
                return Err(format!("cache node {n} of page {page}: pinned is {}", node.pinned));
            }
            if let Some(p) = self.nodes.get(node.parent as usize) {
                if p.page == 0 {
                    return Err(format!("cache node {n} of page {page} hangs from the unused node {}", node.parent));
                }
                children[node.parent as usize] += 1;
                busy_children[node.parent as usize] += u32::from(node.busy());
            }
            let cursor = Cursor(node.parent);
            if self.find(cursor, self.tokens_of(n)) != Some((Cursor(n), page)) {
                return Err(format!("cache node {n} of page {page} is not found by its tokens"));
            }
        }
        for (page, n) in self.entries() {
            let node = &self.nodes[n as usize];
            let counted = (children[n as usize], busy_children[n as usize]);
            if (node.children, node.busy_children) != counted {
                let kept = (node.children, node.busy_children);
                return Err(format!("cache node {n} of page {page}: (children, busy) {kept:?}, counted {counted:?}"));
            }
            let victim = !node.busy() && node.children == 0;
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

    /// With one hash for everything, tokens and parents alone tell nodes apart.
    #[test]
    fn colliding_hashes_do_not_match() {
        let mut c = PrefixCache::with_hash_mask(2, 0);
        let (a, a_node) = c.insert(Cursor::ROOT, &[1, 2], 10);
        let (b, b_node) = c.insert(Cursor::ROOT, &[3, 4], 11);
        let (aa, aa_node) = c.insert(a, &[1, 2], 12);
        assert_eq!(c.find(Cursor::ROOT, &[1, 2]), Some((a, 10)));
        assert_eq!(c.find(Cursor::ROOT, &[3, 4]), Some((b, 11)));
        assert_eq!(c.find(a, &[1, 2]), Some((aa, 12)));
        assert_eq!(c.find(b, &[1, 2]), None);
        assert_eq!(c.find(Cursor::ROOT, &[1, 3]), None);
        c.check(|_| true).unwrap();
        // Evict out of the middle of the one bucket.
        for n in [b_node, aa_node, a_node] {
            c.unpin(n);
        }
        c.check(|_| false).unwrap();
        assert_eq!(c.evict(), Some(11));
        c.check(|_| false).unwrap();
        assert_eq!((c.find(Cursor::ROOT, &[1, 2]), c.find(Cursor::ROOT, &[3, 4])), (Some((a, 10)), None));
        assert_eq!((c.evict(), c.evict(), c.evict()), (Some(12), Some(10), None));
        assert_eq!((c.len(), c.idle()), (0, 0));
    }

    /// A pinned child under an idle parent (two sequences computed the same prefix) keeps the parent.
    #[test]
    fn busy_descendants_protect_their_ancestors() {
        let mut c = PrefixCache::new(1);
        let (a, an) = c.insert(Cursor::ROOT, &[1], 1);
        let (b, bn) = c.insert(a, &[2], 2);
        let (_, cn) = c.insert(b, &[3], 3);
        c.unpin(an);
        c.unpin(bn);
        assert_eq!((c.idle(), c.evict()), (0, None));
        c.check(|p| p == 3).unwrap();
        c.unpin(cn);
        assert_eq!(c.idle(), 3);
        c.pin(bn);
        assert_eq!(c.idle(), 1);
        c.check(|p| p == 2).unwrap();
        assert_eq!((c.evict(), c.evict()), (Some(3), None));
    }
}
