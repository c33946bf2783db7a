//! General token trees: any parent array with `parent < child`, the root at node 0.

use crate::bounds::MAX_DRAFT_TOKENS;
use crate::error::{Error, Result, in_range};

/// 64-bit words that hold `bits` bits.
pub fn words_for(bits: u32) -> u32 {
    bits.div_ceil(64)
}

/// Ancestor bits of a tree: row i has bit j set where node j is node i or one of its ancestors. Bit j of a row is
/// bit `j % 64` of word `j / 64`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskWords {
    /// Row-major, `nodes * words` values.
    pub bits: Vec<u64>,
    /// Words per row; always `words_for(nodes)`.
    pub words: u32,
}

impl MaskWords {
    /// True if bit `j` of row `i` is set; `false` outside the mask.
    pub fn get(&self, i: u32, j: u32) -> bool {
        let w = j / 64;
        w < self.words && self.bits.get((i * self.words + w) as usize).is_some_and(|word| word >> (j % 64) & 1 == 1)
    }
}

/// A checked token tree of `1..=MAX_DRAFT_TOKENS` nodes.
///
/// Node 0 is the root; every other node's parent has a smaller index. Children of a node are linked in increasing
/// order of index through `next_child` and `next_sibling` (-1 ends a list).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Tree {
    parents: Vec<i32>,
    depths: Vec<u32>,
    next_child: Vec<i32>,
    next_sibling: Vec<i32>,
}

impl Tree {
    /// Check a parent array: `parents[0] == -1` and `0 <= parents[i] < i` for every other node.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for the node count, [`Error::Invalid`] with the first offending node.
    pub fn from_parents(parents: &[i32]) -> Result<Self> {
        in_range("tree nodes", parents.len() as i128, 1, MAX_DRAFT_TOKENS as i128)?;
        let n = parents.len();
        let mut depths = vec![0u32; n];
        let mut next_child = vec![-1i32; n];
        let mut next_sibling = vec![-1i32; n];
        for (i, &p) in parents.iter().enumerate() {
            let ok = if i == 0 { p == -1 } else { p >= 0 && (p as usize) < i };
            if !ok {
                let why = if i == 0 { "the root's parent is -1".to_string() } else { format!("must be in 0..{i}") };
                return Err(Error::Invalid { what: "tree parent", got: format!("parents[{i}] = {p}"), why });
            }
            if i > 0 {
                depths[i] = depths[p as usize] + 1;
            }
        }
        // From the back, so that each list comes out in increasing order.
        for i in (1..n).rev() {
            let p = parents[i] as usize;
            next_sibling[i] = next_child[p];
            next_child[p] = i as i32;
        }
        Ok(Self { parents: parents.to_vec(), depths, next_child, next_sibling })
    }

    /// Nodes, root included.
    pub fn len(&self) -> u32 {
        self.parents.len() as u32
    }

    /// Never: a tree has its root.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Parent of each node, -1 for the root.
    pub fn parents(&self) -> &[i32] {
        &self.parents
    }

    /// Depth of each node, 0 for the root.
    pub fn depths(&self) -> &[u32] {
        &self.depths
    }

    /// First child of each node, -1 for a leaf.
    pub fn next_child(&self) -> &[i32] {
        &self.next_child
    }

    /// Next child of the same parent, -1 for the last.
    pub fn next_sibling(&self) -> &[i32] {
        &self.next_sibling
    }

    /// Ancestor bits, each node its own ancestor.
    pub fn ancestor_bits(&self) -> MaskWords {
        let words = words_for(self.len());
        let w = words as usize;
        let mut bits = vec![0u64; self.parents.len() * w];
        for (i, &p) in self.parents.iter().enumerate() {
            if p >= 0 {
                let (head, tail) = bits.split_at_mut(i * w);
                tail[..w].copy_from_slice(&head[p as usize * w..][..w]);
            }
            bits[i * w + i / 64] |= 1 << (i % 64);
        }
        MaskWords { bits, words }
    }
}
