//! A suffix automaton over tokens, built token by token, with the number of occurrences of every state.
//!
//! Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". A state stands for the
//! strings that end at the same positions; its suffix link leads to the longest suffix that ends at more of them. So
//! the link of the state of the whole text is the longest suffix that occurred before: drafting needs no search.
//!
//! **Memory.** A text of n tokens has n + 1 *prefix* states, one a position, and at most n *clones*. Prefix state i is
//! `i`; its length is i, and its edge to i + 1 is not stored: the state holds the token. Clone j is `CLONE | j`. Both
//! take 16 bytes; an explicit edge takes 16 and 5.3 to 10.7 of index. Source code has about 0.4 clones and 1 explicit
//! edge a token.
//!
//! **Occurrences.** A new position is one more occurrence of every state on the suffix-link path of the whole text.
//! Paths are short but in runs (`a a a a`), where one has as many states as the run has tokens. So at most `WALK`
//! states are counted at once; the rest is *owed* from there on: a debt of k at a state is k occurrences that it and
//! all states above it lack. A position that makes no debt pays `PAY` steps of what is owed, the longest state first,
//! where debts meet and go on as one. So a run leaves a debt at each of its states, and paying all of them takes a step
//! a state; counting takes a bounded number of steps a token, always. A count is never too large, and exact where
//! nothing is owed: count(s) + debts in the tree of links below and at s = occurrences of s. [`Automaton::settle`] pays
//! everything.
//!
//! **Many sequences.** A boundary is a token that no other is equal to, so no match runs across one.

use std::collections::BinaryHeap;

use super::edges::{Edge, Edges, MAX_EDGES, NONE, grow, grown};
use super::mix::Contexts;

/// Marks a clone.
const CLONE: u32 = 1 << 31;
/// Stands in the place of a token: a boundary between sequences follows.
const BOUNDARY: u32 = u32::MAX - 1;
/// Smallest number that is no token.
pub(super) const NO_TOKEN: u32 = BOUNDARY;
/// States that are counted at once.
const WALK: usize = 32;
/// Steps of debts that a position pays.
const PAY: usize = 32;
const ROOT: u32 = 0;

/// Data that the automaton holds of a state.
#[derive(Debug, Clone, Copy)]
struct Node {
    /// For a prefix, the token that follows it ([`NONE`] at the text's end); for a clone, its length.
    own: u32,
    link: u32,
    count: u32,
    /// First explicit edge.
    head: u32,
}

/// Occurrences that a state and those above it lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Debt {
    length: u32,
    state: u32,
    occurrences: u32,
}

/// A string that occurs: its state, and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match {
    pub(super) state: u32,
    pub(super) length: u32,
}

impl Match {
    /// The empty string.
    pub const EMPTY: Match = Match { state: ROOT, length: 0 };

    /// Tokens that match.
    pub fn length(self) -> u32 {
        self.length
    }
}

/// The automaton of one text, or of several with boundaries between.
#[derive(Debug)]
pub struct Automaton {
    /// Never empty: the root is the first.
    prefixes: Vec<Node>,
    clones: Vec<Node>,
    edges: Edges,
    /// The longest state on top; states that owe twice are merged as they come up.
    owed: BinaryHeap<Debt>,
    owed_room: usize,
}

impl Default for Automaton {
    fn default() -> Self {
        Self::new()
    }
}

impl Automaton {
    /// The automaton of the empty text.
    pub fn new() -> Self {
        let root = Node { own: NONE, link: NONE, count: 0, head: NONE };
        let (clones, owed) = (Vec::new(), BinaryHeap::new());
        Self { prefixes: vec![root], clones, edges: Edges::new(), owed, owed_room: 0 }
    }

    /// Positions: tokens and boundaries.
    pub fn len(&self) -> usize {
        self.prefixes.len() - 1
    }

    /// True if nothing was appended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The longest suffix of the text, within its last sequence, that ends at an earlier position too.
    pub fn matched(&self) -> Match {
        let link = self.prefixes[self.len()].link;
        if link == NONE { Match::EMPTY } else { Match { state: link, length: self.length_of(link) } }
    }

    /// Number of a string's occurrences; of the empty one, 0. It may be too small by the debts not yet paid.
    pub fn count(&self, of: Match) -> u32 {
        self.node(of.state).count
    }

    /// The string `of` with a token behind it; `None` where that does not occur.
    pub fn step(&self, of: Match, token: u32) -> Option<Match> {
        self.target(of.state, token).map(|state| Match { state, length: of.length + 1 })
    }

    /// Tokens that follow a string, and how often; the same reservation as [`Automaton::count`].
    pub fn followers_of(&self, of: Match) -> Vec<(u32, u32)> {
        let mut all = Vec::new();
        self.followers(of, usize::MAX, &mut |token, count| all.push((token, count)));
        all
    }

    /// States whose occurrences are not all counted.
    pub fn owing(&self) -> usize {
        self.owed.len()
    }

    /// Append a token.
    ///
    /// # Panics
    /// In builds with assertions, for a token of `u32::MAX - 1` or more.
    pub fn append(&mut self, token: u32) {
        debug_assert!(token < NO_TOKEN);
        let last = self.len() as u32;
        let current = last + 1;
        self.prefixes[last as usize].own = token;
        grow(&mut self.prefixes);
        self.prefixes.push(Node { own: NONE, link: ROOT, count: 1, head: NONE });
        let mut at = self.node(last).link;
        let mut target = None;
        while at != NONE {
            target = self.target(at, token);
            if target.is_some() {
                break;
            }
            self.add_edge(at, token, current);
            at = self.node(at).link;
        }
        if let Some(state) = target {
            let length = self.length_of(at) + 1;
            let link = if self.length_of(state) == length { state } else { self.split(at, token, state, length) };
            self.prefixes[current as usize].link = link;
        }
        self.count_path(self.node(current).link);
    }

    /// End a sequence: what follows is another one.
    pub fn boundary(&mut self) {
        let last = self.len();
        self.prefixes[last].own = BOUNDARY;
        grow(&mut self.prefixes);
        self.prefixes.push(Node { own: NONE, link: ROOT, count: 1, head: NONE });
        self.pay();
    }

    /// The token behind a position; `None` at the end of a sequence.
    pub fn token_at(&self, position: usize) -> Option<u32> {
        self.prefixes.get(position).map(|p| p.own).filter(|&t| t < NO_TOKEN)
    }

    /// A position at which a string ends and a token of its sequence follows.
    pub(super) fn position_of(&self, of: Match) -> Option<usize> {
        if of.state & CLONE == 0 {
            return self.token_at(of.state as usize).map(|_| of.state as usize);
        }
        let mut edge = self.node(of.state).head;
        while edge != NONE {
            let Edge { target, next, .. } = self.edges.get(edge);
            if target & CLONE == 0 {
                return Some(target as usize - 1);
            }
            edge = next;
        }
        None
    }

    /// Bytes held, to the byte as far as vectors tell.
    pub fn bytes(&self) -> usize {
        self.bytes_with(0, 0, 0)
    }

    /// True if the automaton is sure to hold at most `limit` bytes once `token` has been appended.
    pub fn fits(&self, token: u32, limit: usize) -> bool {
        // No append adds more edges than there are states and edges: each state of a path one, a clone a copy of each.
        let most = self.edges.len() + self.prefixes.len() + self.clones.len();
        if self.edges.len() + most <= MAX_EDGES && self.bytes_with(1, 1, most) <= limit {
            return true;
        }
        let (clones, edges) = self.growth(token);
        self.edges.len() + edges <= MAX_EDGES && self.bytes_with(1, clones, edges) <= limit
    }

    /// Pay all debts of counts; takes a step for each state above a debt.
    pub fn settle(&mut self) {
        while !self.owed.is_empty() {
            self.pay();
        }
    }

    /// Clones and edges that appending `token` adds.
    fn growth(&self, token: u32) -> (usize, usize) {
        let last = self.len() as u32;
        let (mut at, mut edges) = (self.node(last).link, 0);
        while at != NONE {
            if let Some(state) = self.target(at, token) {
                if self.length_of(state) == self.length_of(at) + 1 {
                    return (0, edges);
                }
                self.each_edge(state, usize::MAX, &mut |_, _| edges += 1);
                // This append may have given an edge to the copied state: if that is the text's end, or a state on the
                // way from there.
                let on_the_way = |&s: &u32| s != at;
                let above = |&s: &u32| Some(self.node(s).link);
                let copied = std::iter::successors(Some(last), above).take_while(on_the_way).any(|s| s == state);
                return (1, edges + usize::from(copied));
            }
            edges += 1;
            at = self.node(at).link;
        }
        (0, edges)
    }

    fn bytes_with(&self, prefixes: usize, clones: usize, edges: usize) -> usize {
        let nodes = grown(&self.prefixes, prefixes) + grown(&self.clones, clones);
        let owed =
            if self.owed.len() + prefixes > self.owed_room { owed_room(self.owed.len()) } else { self.owed_room };
        nodes * size_of::<Node>() + self.edges.bytes_with(edges) + owed * size_of::<Debt>()
    }

    /// A clone of `state` for its strings of `length` and shorter, which `at` and the states above reach by `token`.
    fn split(&mut self, mut at: u32, token: u32, state: u32, length: u32) -> u32 {
        let clone = CLONE | self.clones.len() as u32;
        let node = *self.node(state);
        grow(&mut self.clones);
        self.clones.push(Node { own: length, link: node.link, count: node.count, head: NONE });
        // The edge that a prefix does not store, then the others in their order.
        let mut tail = NONE;
        if state & CLONE == 0 && node.own < NO_TOKEN {
            tail = self.copy_edge(clone, tail, node.own, state + 1);
        }
        let mut edge = node.head;
        while edge != NONE {
            let Edge { token, target, next, .. } = self.edges.get(edge);
            tail = self.copy_edge(clone, tail, token, target);
            edge = next;
        }
        // Such edges are explicit: implicit ones lead to a state that is longer by one.
        while at != NONE {
            match self.edges.find(at, token) {
                Some(edge) if self.edges.get(edge).target == state => self.edges.set_target(edge, clone),
                _ => break,
            }
            at = self.node(at).link;
        }
        self.node_mut(state).link = clone;
        clone
    }

    /// Add an edge of `clone` behind `tail`.
    fn copy_edge(&mut self, clone: u32, tail: u32, token: u32, target: u32) -> u32 {
        let edge = self.edges.add(Edge { state: clone, token, target, next: NONE });
        if tail == NONE {
            self.node_mut(clone).head = edge;
        } else {
            self.edges.set_next(tail, edge);
        }
        edge
    }

    fn add_edge(&mut self, state: u32, token: u32, target: u32) {
        let next = self.node(state).head;
        let edge = self.edges.add(Edge { state, token, target, next });
        self.node_mut(state).head = edge;
    }

    /// Count one more occurrence of `state` and all above it.
    fn count_path(&mut self, mut state: u32) {
        for _ in 0..WALK {
            if state == ROOT {
                break;
            }
            let node = self.node_mut(state);
            node.count += 1;
            state = node.link;
        }
        if state != ROOT {
            self.owe(state, 1);
        } else if !self.owed.is_empty() {
            self.pay();
        }
    }

    fn owe(&mut self, state: u32, occurrences: u32) {
        let debt = Debt { length: self.length_of(state), state, occurrences };
        if self.owed.len() == self.owed_room {
            self.owed_room = owed_room(self.owed.len());
            self.owed.reserve_exact(self.owed_room - self.owed.len());
        }
        self.owed.push(debt);
    }

    /// Pay at most [`PAY`] steps of the debts.
    fn pay(&mut self) {
        for _ in 0..PAY {
            let Some(Debt { state, mut occurrences, .. }) = self.owed.pop() else { break };
            while let Some(same) = self.owed.peek().filter(|d| d.state == state) {
                occurrences += same.occurrences;
                self.owed.pop();
            }
            let node = self.node_mut(state);
            node.count += occurrences;
            let above = node.link;
            if above != ROOT {
                self.owe(above, occurrences);
            }
        }
    }

    #[inline]
    fn node(&self, state: u32) -> &Node {
        if state & CLONE == 0 { &self.prefixes[state as usize] } else { &self.clones[(state & !CLONE) as usize] }
    }

    #[inline]
    fn node_mut(&mut self, state: u32) -> &mut Node {
        if state & CLONE == 0 {
            &mut self.prefixes[state as usize]
        } else {
            &mut self.clones[(state & !CLONE) as usize]
        }
    }

    /// Length of the longest string of a state.
    #[inline]
    fn length_of(&self, state: u32) -> u32 {
        if state & CLONE == 0 { state } else { self.clones[(state & !CLONE) as usize].own }
    }

    /// The state where an edge leads.
    #[inline]
    fn target(&self, state: u32, token: u32) -> Option<u32> {
        if state & CLONE == 0 && self.prefixes[state as usize].own == token {
            return Some(state + 1);
        }
        self.edges.find(state, token).map(|edge| self.edges.get(edge).target)
    }

    /// Tokens that follow a state, and where they lead; at most so many. Whether that was all.
    fn each_edge(&self, state: u32, most: usize, found: &mut dyn FnMut(u32, u32)) -> bool {
        let mut left = most;
        let node = self.node(state);
        if state & CLONE == 0 && node.own < NO_TOKEN && left > 0 {
            found(node.own, state + 1);
            left -= 1;
        }
        let mut edge = node.head;
        while edge != NONE && left > 0 {
            let Edge { token, target, next, .. } = self.edges.get(edge);
            found(token, target);
            (edge, left) = (next, left - 1);
        }
        edge == NONE
    }
}

impl Contexts for Automaton {
    type State = Match;

    fn length(&self, of: Match) -> u32 {
        of.length
    }

    fn shorter(&self, of: Match) -> Match {
        let link = self.node(of.state).link;
        if link == NONE { Match::EMPTY } else { Match { state: link, length: self.length_of(link) } }
    }

    fn advance(&self, of: Match, token: u32) -> Match {
        let mut at = of;
        loop {
            match self.step(at, token) {
                Some(found) => return found,
                None if at.length == 0 => return Match::EMPTY,
                None => at = self.shorter(at),
            }
        }
    }

    fn followers(&self, of: Match, most: usize, found: &mut dyn FnMut(u32, u32)) -> bool {
        self.each_edge(of.state, most, &mut |token, target| found(token, self.node(target).count))
    }

    fn occurrences(&self, of: Match) -> u32 {
        self.count(of)
    }
}

/// Room for so many debts.
fn owed_room(debts: usize) -> usize {
    debts + debts / 2 + 16
}
