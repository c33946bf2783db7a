//! Random configurations and batches for the planner's tests.

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

/// Settings whose page size is one of `pages`, of up to `max_batch` requests.
pub fn setting(pages: &'static [u32], max_batch: u32) -> impl Strategy<Value = Setting> {
    // Up to 90 draft slots and 130 nodes, so that masks have more than one word.
    let shape = (1u32..=9, 1u32..=10, 1u32..=130, prop::sample::select(pages), 1u32..=300, any::<bool>());
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

    /// A random tree for each request that stays inside the context: parents of each node.
    pub fn trees(&self) -> Vec<Vec<i32>> {
        let (v, context) = (self.g.shape().draft_tokens(), self.g.limits().max_context_len);
        let tree = |(i, &len): (usize, &u32)| {
            let (mut parents, mut depths) = (vec![-1i32], vec![0u32]);
            for j in 1..1 + self.below(i * 7 + 1, v) {
                let p = self.below(i * 131 + j as usize, j) as usize;
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

    /// Ancestor bits of draft step `step`, `[K * words]` for each request: at most one slot of each earlier step, as a
    /// node's ancestors are, and the query's own.
    pub fn ancestors(&self, step: u32) -> Vec<u64> {
        let (k, s, words) = (self.g.shape().topk(), self.g.shape().steps(), self.g.draft_mask_words() as usize);
        let mut all = Vec::new();
        for x in 0..self.lens.len() as u32 * k {
            let mut mask = vec![0u64; words];
            let any = |t: u32| self.below((x * 89 + t) as usize, k + 1); // K names none
            let chosen = (0..step).filter(|&t| any(t) < k).map(|t| any(t) * s + t);
            for bit in chosen.chain([x % k * s + step]) {
                mask[bit as usize / 64] |= 1 << (bit % 64);
            }
            all.extend(mask);
        }
        all
    }
}
