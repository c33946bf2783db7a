//! Random configurations and batches for the planner's tests.

use std::collections::BTreeSet;

use proptest::prelude::*;
use specrs::geometry::{Geometry, Layout};

use super::geometry;

/// A geometry, the committed lengths of a batch, and random words to draw trees, paths and masks from.
#[derive(Debug, Clone)]
pub struct Setting {
    pub g: Geometry,
    pub lens: Vec<u32>,
    pub random: Vec<u32>,
    pub seed: u64,
    /// Requests and queries of padding.
    pub pad: Option<(u32, u32)>,
}

/// Page sizes up to more than a chunk.
pub const PAGES: &[u32] = &[1, 2, 4, 8, 16, 32, 64, 128];

/// Settings whose page size is one of `pages`, of up to `max_batch` requests.
pub fn setting(pages: &'static [u32], max_batch: u32) -> impl Strategy<Value = Setting> {
    // Up to 90 draft slots and 130 nodes, so that masks have more than one word.
    let shape = (1u32..=9, 1u32..=10, 1u32..=130, prop::sample::select(pages), 1u32..=400, any::<bool>());
    let batch = (prop::collection::vec(any::<u32>(), 0..=max_batch as usize), prop::collection::vec(any::<u32>(), 64));
    (shape, batch, any::<u64>(), prop::option::of((0u32..4, 0u32..9))).prop_map(
        move |((k, s, v, page, context, holey), (lens, random), seed, pad)| {
            let layout = if holey { Layout::Holey } else { Layout::Dense };
            let g = geometry(k, s, v.min(1 + k + (s - 1) * k * k), page, max_batch, context, layout);
            // A third of the lengths at the wall or just before it.
            let near = |n: &u32| if n.is_multiple_of(3) { context - 1 - n / 3 % context.min(6) } else { n % context };
            Setting { lens: lens.iter().map(near).collect(), g, random, seed, pad }
        },
    )
}

impl Setting {
    /// The `i`-th random word below `n`.
    pub fn below(&self, i: usize, n: u32) -> u32 {
        let x = self.random[i % 64].wrapping_add(i as u32 / 64).wrapping_mul(2_654_435_761);
        ((x as u64 * n as u64) >> 32) as u32
    }

    /// Up to 5 tokens behind each prefix, as far as the context and a reservation reach.
    pub fn counts(&self) -> Vec<u32> {
        let room = |l: u32| (self.g.limits().max_context_len - l).min(self.g.alloc_len_per_decode());
        self.lens.iter().enumerate().map(|(i, &l)| self.below(i, 6).min(room(l))).collect()
    }

    /// A random tree for each request that stays inside the context, every other one a chain with branches: parents of
    /// each node.
    pub fn trees(&self) -> Vec<Vec<i32>> {
        let (v, context) = (self.g.shape().draft_tokens(), self.g.limits().max_context_len);
        let tree = |(i, &len): (usize, &u32)| {
            let (mut parents, mut depths) = (vec![-1i32], vec![0u32]);
            let deep = self.below(i * 13 + 5, 2) == 0;
            for j in 1..1 + self.below(i * 7 + 1, v) {
                let chained = deep && self.below(i + j as usize, 2) == 0;
                let p = if chained { j - 1 } else { self.below(i * 131 + j as usize, j) } as usize;
                // Behind the wall: a child of the root, if there is room for one.
                let p = if len + depths[p] + 1 < context { p } else { 0 };
                if len + depths[p] + 1 >= context {
                    break;
                }
                parents.push(p as i32);
                depths.push(depths[p] + 1);
            }
            parents
        };
        self.lens.iter().enumerate().map(tree).collect()
    }

    /// A path down each tree.
    pub fn paths(&self, trees: &[Vec<i32>]) -> Vec<Vec<u32>> {
        let end = |(i, tree): (usize, &Vec<i32>)| path_to(tree, self.below(i + 40, tree.len() as u32));
        trees.iter().enumerate().map(end).collect()
    }

    /// The beams of step `step`, `[B * K]` sets of draft slots: each goes on from any beam of the step before, with its
    /// slots, and adds its own. `thin`: some lose slots on the way, which the planner takes too.
    pub fn rerank(&self, beams: &mut Vec<BTreeSet<u32>>, step: u32, thin: bool) {
        let (k, steps) = (self.g.shape().topk(), self.g.shape().steps());
        let before = std::mem::take(beams);
        for x in 0..self.lens.len() as u32 * k {
            let parent = x / k * k + self.below((x + step * 17) as usize, k);
            let mut slots = before.get(parent as usize).cloned().unwrap_or_default();
            if thin && self.below((x + step * 5) as usize, 4) == 0 {
                slots.retain(|slot| slot % 3 != 0);
            }
            slots.insert(x % k * steps + step);
            beams.push(slots);
        }
    }

    /// Sets of draft slots as bits, `[B * K * words]`.
    pub fn bits(&self, beams: &[BTreeSet<u32>]) -> Vec<u64> {
        let words = self.g.draft_mask_words();
        let word = |set: &BTreeSet<u32>, w: u32| set.range(w * 64..(w + 1) * 64).map(|bit| 1u64 << (bit % 64)).sum();
        beams.iter().flat_map(|set| (0..words).map(move |w| word(set, w))).collect()
    }

    /// Ancestor bits of draft step `step`, `[K * words]` for each request: at most one slot of each earlier step, as a
    /// node's ancestors are, and the query's own.
    pub fn ancestors(&self, step: u32) -> Vec<u64> {
        let (k, s) = (self.g.shape().topk(), self.g.shape().steps());
        let beam = |x: u32| {
            let any = |t: u32| self.below((x * 89 + t) as usize, k + 1); // K names none
            let chosen = (0..step).filter(|&t| any(t) < k).map(|t| any(t) * s + t);
            chosen.chain([x % k * s + step]).collect()
        };
        self.bits(&(0..self.lens.len() as u32 * k).map(beam).collect::<Vec<_>>())
    }
}

/// The nodes from the root to `node`.
pub fn path_to(parents: &[i32], node: u32) -> Vec<u32> {
    let up = |&at: &u32| u32::try_from(parents[at as usize]).ok();
    let mut path: Vec<u32> = std::iter::successors(Some(node), up).collect();
    path.reverse();
    path
}
