//! Every element of a step as a pure function of plain integers, for one query or one element of an array.
//!
//! These functions are the definition. [`write`](crate::plan::write) says how a CPU writes whole arrays of such elements;
//! its fused loops are tested against the functions here, element by element. `cuda/form.cuh` has the same functions under
//! the same names for a device, and a test compiles it with the C++ compiler and compares the two.
//!
//! Each function describes a live request. It takes the committed length L (`len`), the line of page ids that the
//! pool's table has for the request (`row`), and a query's mask where it has one. Indices are the caller's to check. In
//! a padded batch the requests and queries behind the live ones are dead: their lengths, lists, positions, slots and
//! masks are 0.
//!
//! | module | arrays |
//! |---|---|
//! | this one | the native form, which every format is derived from |
//! | [`lists`] | `flashinfer` and `triton`: slot lists and masks over the context |
//! | [`tables`] | `flash_attention`: page tables in one pass or two |

pub mod lists;
pub mod tables;

use crate::geometry::{Geometry, Layout};
use crate::plan::Phase;

/// [`Step::phase`] of an extend.
pub const EXTEND: u32 = 0;
/// [`Step::phase`] of a decode.
pub const DECODE: u32 = 1;
/// [`Step::phase`] of a draft step.
pub const DRAFT: u32 = 2;
/// [`Step::phase`] of a verification.
pub const VERIFY: u32 = 3;

/// A step of a round and the geometry that places it, as a kernel's parameters hold them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Step {
    /// [`EXTEND`], [`DECODE`], [`DRAFT`] or [`VERIFY`].
    pub phase: u32,
    /// t: the draft's step, 0-based; 0 in other phases.
    pub step: u32,
    /// log2 of P.
    pub shift: u32,
    /// K.
    pub topk: u32,
    /// S.
    pub steps: u32,
    /// V.
    pub nodes: u32,
    /// `max_context_len`.
    pub context: u32,
    /// 1 where the layout in force is holey, else 0.
    pub holey: u32,
}

impl Step {
    /// The step `phase` of `geometry`.
    #[inline]
    pub fn new(geometry: &Geometry, phase: Phase) -> Self {
        let (name, step) = match phase {
            Phase::Extend => (EXTEND, 0),
            Phase::Decode => (DECODE, 0),
            Phase::Draft { step } => (DRAFT, step),
            Phase::Verify => (VERIFY, 0),
        };
        Self {
            phase: name,
            step,
            shift: geometry.page().get().trailing_zeros(),
            topk: geometry.shape().topk(),
            steps: geometry.shape().steps(),
            nodes: geometry.shape().draft_tokens(),
            context: geometry.limits().max_context_len,
            holey: (geometry.layout() == Layout::Holey) as u32,
        }
    }
}

/// Column of a row that holds the page of row position `pos`.
#[inline]
pub fn column(s: Step, pos: u32) -> u32 {
    pos >> s.shift
}

/// Slot of row position `pos`, which lies on page `page`.
#[inline]
pub fn slot(s: Step, page: i32, pos: u32) -> i32 {
    (page << s.shift) | (pos & ((1 << s.shift) - 1)) as i32
}

/// Slot of row position `pos`.
#[inline]
pub fn row_slot(s: Step, row: &[i32], pos: u32) -> i32 {
    slot(s, row[column(s, pos) as usize], pos)
}

/// Pages that hold `tokens` tokens.
#[inline]
pub fn pages(s: Step, tokens: u32) -> u32 {
    (tokens + (1 << s.shift) - 1) >> s.shift
}

/// r: tokens in the tail page of a prefix.
#[inline]
pub fn remainder(s: Step, len: u32) -> u32 {
    len & ((1 << s.shift) - 1)
}

/// Row positions from a branch's step to the same step of the next branch.
#[inline]
pub fn stride(s: Step, len: u32) -> u32 {
    if s.holey == 0 { s.steps } else { pages(s, remainder(s, len) + s.steps) << s.shift }
}

/// Row position of branch `b`, step `t` of the draft region.
#[inline]
pub fn draft_pos(s: Step, len: u32, b: u32, t: u32) -> u32 {
    len + b * stride(s, len) + t
}

/// Positions of the hole before branch `b`: a copy of the prefix's last `hole_len` positions ends where the branch starts.
#[inline]
pub fn hole_len(s: Step, len: u32, b: u32) -> u32 {
    if s.holey == 0 || b == 0 { 0 } else { remainder(s, len) }
}

/// True if the request's queries attend to anything: a draft step does nothing behind the context wall.
#[inline]
pub fn alive(s: Step, len: u32) -> bool {
    s.phase != DRAFT || len + s.step < s.context
}

/// Queries of a request that `n` tokens are appended to, or whose tree has `n` nodes.
#[inline]
pub fn queries(s: Step, n: u32) -> u32 {
    if s.phase == DRAFT {
        s.topk
    } else if s.phase == DECODE {
        1
    } else {
        n
    }
}

/// Positions of the prefix that every query attends to.
#[inline]
pub fn prefix(s: Step, len: u32) -> u32 {
    if alive(s, len) { len } else { 0 }
}

/// Row position that query `j` writes.
#[inline]
pub fn row_pos(s: Step, len: u32, j: u32) -> u32 {
    if s.phase == DRAFT { draft_pos(s, len, j, s.step) } else { len + j }
}

/// RoPE position of query `j`, which is `depth` below the root of its tree.
#[inline]
pub fn rope_pos(s: Step, len: u32, j: u32, depth: u32) -> u32 {
    if !alive(s, len) {
        0
    } else if s.phase == DRAFT {
        len + s.step
    } else if s.phase == VERIFY {
        len + depth
    } else {
        len + j
    }
}

/// Slot that query `j` writes; the sink where it does nothing.
#[inline]
pub fn out_slot(s: Step, len: u32, row: &[i32], j: u32) -> i32 {
    if alive(s, len) { row_slot(s, row, row_pos(s, len, j)) } else { 0 }
}

/// 64-bit words of a query's mask; 0 in the causal phases.
#[inline]
pub fn mask_words(s: Step) -> u32 {
    if s.phase == DRAFT {
        (s.topk * s.steps + 63) >> 6
    } else if s.phase == VERIFY {
        (s.nodes + 63) >> 6
    } else {
        0
    }
}

/// Word `w` of a mask whose bits `first..end` are set.
#[inline]
pub fn run_word(first: u32, end: u32, w: u32) -> u64 {
    let base = w * 64;
    let low = first.saturating_sub(base);
    let high = end.saturating_sub(base);
    let below = if high < 64 { (1 << high) - 1 } else { u64::MAX };
    if low < 64 { below & (u64::MAX << low) } else { 0 }
}

/// Bit of query `j` itself.
#[inline]
pub fn own_bit(s: Step, j: u32) -> u32 {
    if s.phase == DRAFT { j * s.steps + s.step } else { j }
}

/// Word `w` of the mask of branch `j` that attends to its own slots of the earlier steps and itself.
#[inline]
pub fn lane_word(s: Step, j: u32, w: u32) -> u64 {
    run_word(j * s.steps, own_bit(s, j) + 1, w)
}

/// Word `w` of the draft slots that earlier steps wrote: what a branch may attend to besides itself.
#[inline]
pub fn earlier_word(s: Step, w: u32) -> u64 {
    let mut word = 0;
    let mut b = 0;
    while b < s.topk {
        word |= run_word(b * s.steps, b * s.steps + s.step, w);
        b += 1;
    }
    word
}

/// Word `w` of the mask of node `j`: the node and its ancestors. `parents` are the tree's, each before its child.
#[inline]
pub fn node_word(parents: &[i32], j: u32, w: u32) -> u64 {
    let mut word = 0;
    let mut node = j as i32;
    while node >= 0 {
        word |= run_word(node as u32, node as u32 + 1, w);
        node = parents[node as usize];
    }
    word
}

/// Edges from node `j` up to the root.
#[inline]
pub fn node_depth(parents: &[i32], j: u32) -> u32 {
    let mut depth = 0;
    let mut node = parents[j as usize];
    while node >= 0 {
        depth += 1;
        node = parents[node as usize];
    }
    depth
}

/// Set bits of a mask.
#[inline]
pub fn bits(mask: &[u64], words: u32) -> u32 {
    let mut n = 0;
    let mut w = 0;
    while w < words {
        n += mask[w as usize].count_ones();
        w += 1;
    }
    n
}

/// Index of the `n`-th set bit of a mask, 0-based, which has more than `n`.
#[inline]
pub fn nth_bit(mask: &[u64], n: u32) -> u32 {
    let mut left = n;
    let mut w = 0;
    while mask[w as usize].count_ones() <= left {
        left -= mask[w as usize].count_ones();
        w += 1;
    }
    let mut word = mask[w as usize];
    while left > 0 {
        word &= word - 1;
        left -= 1;
    }
    w * 64 + word.trailing_zeros()
}

/// Row position that bit `bit` of a mask names.
#[inline]
pub fn bit_pos(s: Step, len: u32, bit: u32) -> u32 {
    if s.phase == DRAFT { draft_pos(s, len, bit / s.steps, bit % s.steps) } else { len + bit }
}

/// Keys that query `j` attends to; `mask` is its own.
#[inline]
pub fn keys(s: Step, len: u32, j: u32, mask: &[u64]) -> u32 {
    if mask_words(s) == 0 { len + j + 1 } else { prefix(s, len) + bits(mask, mask_words(s)) }
}

/// Row position of key `k` of a query whose mask is `mask`.
#[inline]
pub fn key_pos(s: Step, len: u32, mask: &[u64], k: u32) -> u32 {
    if k < len || mask_words(s) == 0 { k } else { bit_pos(s, len, nth_bit(mask, k - len)) }
}
