//! Edges of an automaton: a dense list, found by (state, token) through an open-addressed index of `u32`.
//!
//! An index slot holds the place of an edge, plus one, in its low 26 bits and six bits of the key's hash above, so that
//! a probe nearly never reads an edge in vain. Hashing is multiply-shift with a random odd factor (Dietzfelbinger et
//! al. 1997): tokens that a user picks cannot be made to collide.

use std::hash::{BuildHasher, RandomState};

/// No edge.
pub(super) const NONE: u32 = u32::MAX;
/// Most edges: what a slot can name.
pub(super) const MAX_EDGES: usize = (1 << PLACE_BITS) - 2;

const PLACE_BITS: u32 = 26;
const PLACE: u32 = (1 << PLACE_BITS) - 1;
/// Slots of the smallest index.
const FEWEST: usize = 16;
/// Entries that a list grows by at least; beyond that it grows by a quarter.
const STEP: usize = 64;

/// An edge of an automaton.
#[derive(Debug, Clone, Copy)]
pub(super) struct Edge {
    pub(super) state: u32,
    pub(super) token: u32,
    pub(super) target: u32,
    /// The next edge of the same state, or [`NONE`].
    pub(super) next: u32,
}

/// All explicit edges of an automaton.
#[derive(Debug)]
pub(super) struct Edges {
    edges: Vec<Edge>,
    /// A power of two; 0 is an empty slot; at most three quarters are taken.
    index: Vec<u32>,
    factor: u64,
}

impl Edges {
    pub(super) fn new() -> Self {
        Self { edges: Vec::new(), index: vec![0; FEWEST], factor: RandomState::new().hash_one(0u32) | 1 }
    }

    pub(super) fn len(&self) -> usize {
        self.edges.len()
    }

    pub(super) fn get(&self, edge: u32) -> Edge {
        self.edges[edge as usize]
    }

    /// The edge that leaves `state` with `token`.
    #[inline]
    pub(super) fn find(&self, state: u32, token: u32) -> Option<u32> {
        let (mut slot, tag) = self.hash(state, token);
        loop {
            let held = self.index[slot];
            if held == 0 {
                return None;
            }
            if held & !PLACE == tag {
                let place = (held & PLACE) - 1;
                let edge = &self.edges[place as usize];
                if edge.state == state && edge.token == token {
                    return Some(place);
                }
            }
            slot = (slot + 1) & (self.index.len() - 1);
        }
    }

    /// Add an edge that is not there; returns its place.
    pub(super) fn add(&mut self, edge: Edge) -> u32 {
        grow(&mut self.edges);
        let place = self.edges.len() as u32;
        self.edges.push(edge);
        let want = slots(self.edges.len());
        if want > self.index.len() {
            self.index = Vec::new(); // the old one goes before the new one comes
            self.index = vec![0; want];
            (0..=place).for_each(|p| self.enter(p));
        } else {
            self.enter(place);
        }
        place
    }

    pub(super) fn set_target(&mut self, edge: u32, target: u32) {
        self.edges[edge as usize].target = target;
    }

    pub(super) fn set_next(&mut self, edge: u32, next: u32) {
        self.edges[edge as usize].next = next;
    }

    /// Bytes held once `more` edges have been added.
    pub(super) fn bytes_with(&self, more: usize) -> usize {
        let index = slots(self.edges.len() + more).max(self.index.len());
        grown(&self.edges, more) * size_of::<Edge>() + index * size_of::<u32>()
    }

    fn enter(&mut self, place: u32) {
        let edge = self.edges[place as usize];
        let (mut slot, tag) = self.hash(edge.state, edge.token);
        while self.index[slot] != 0 {
            slot = (slot + 1) & (self.index.len() - 1);
        }
        self.index[slot] = tag | (place + 1);
    }

    /// The first slot of a key, and its tag.
    #[inline]
    fn hash(&self, state: u32, token: u32) -> (usize, u32) {
        let key = u64::from(state) << 32 | u64::from(token);
        let mixed = (key ^ key >> 29).wrapping_mul(self.factor);
        let slot = mixed >> (64 - self.index.len().trailing_zeros());
        (slot as usize, (mixed as u32) & !PLACE)
    }
}

/// Slots of the index of so many edges.
fn slots(edges: usize) -> usize {
    (edges * 4).div_ceil(3).next_power_of_two().max(FEWEST)
}

/// Capacity of a list once `more` entries have been added to it, one after another, by [`grow`].
pub(super) fn grown<T>(list: &Vec<T>, more: usize) -> usize {
    let mut room = list.capacity();
    while room < list.len() + more {
        room += room / 4 + STEP;
    }
    room
}

/// Make room for one more entry.
#[inline]
pub(super) fn grow<T>(list: &mut Vec<T>) {
    if list.len() == list.capacity() {
        list.reserve_exact(grown(list, 1) - list.len());
    }
}
