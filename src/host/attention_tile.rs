//! A tile of attention: the rows (query, head) that share a key/value head, and the online softmax over their keys.
//!
//! Rows are the elements of vectors: scores are laid out [key][row], so that maxima, exponentials and sums are
//! elementwise. No element depends on another, which makes a row's bits a function of its own keys.

use half::bf16;
use pulp::Simd;

use super::act::{exp, exp_vector, tanh_vector};
use super::kv::KvData;

/// Logical keys of a block: the unit of the online softmax.
pub(crate) const BLOCK: usize = 32;
/// Blocks of a span: the unit that can be worked on apart and merged in order.
pub(crate) const SPAN_BLOCKS: usize = 4;
/// Rows are padded to a multiple of the longest vector.
const W: usize = 16;

/// Keys and values [slots, kv_heads, head_dim] of a layer.
pub(crate) struct Keys<'a> {
    k: KvData<'a>,
    v: KvData<'a>,
    kv_heads: usize,
    dim: usize,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(k: KvData<'a>, v: KvData<'a>, kv_heads: usize, dim: usize) -> Self {
        Self { k, v, kv_heads, dim }
    }

    /// Elements of a head.
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// One element of a key.
    pub(crate) fn key(&self, slot: usize, head: usize, j: usize) -> f32 {
        get(self.k, (slot * self.kv_heads + head) * self.dim + j)
    }

    /// One element of a value.
    pub(crate) fn value(&self, slot: usize, head: usize, j: usize) -> f32 {
        get(self.v, (slot * self.kv_heads + head) * self.dim + j)
    }

    /// Rows of a block's slots, from the cache itself where its elements are f32 in whole vectors, else by way of
    /// `scratch` [BLOCK, padded]. Past the last slot the last row is repeated.
    #[inline(always)]
    fn rows<'b>(&self, x: KvData<'a>, head: usize, slots: &[usize], scratch: &'b mut [f32]) -> [&'b [f32]; BLOCK]
    where
        'a: 'b,
    {
        let d = self.dim;
        let at = |n: usize| (slots[n.min(slots.len() - 1)] * self.kv_heads + head) * d;
        let padded = scratch.len() / BLOCK;
        match x {
            KvData::F32(x) if d == padded => {
                let mut rows = [x; BLOCK];
                for (n, row) in rows.iter_mut().enumerate() {
                    *row = &x[at(n)..at(n) + d];
                }
                return rows;
            }
            KvData::F32(x) => {
                for (n, row) in scratch.chunks_exact_mut(padded).take(slots.len()).enumerate() {
                    row[..d].copy_from_slice(&x[at(n)..at(n) + d]);
                }
            }
            KvData::Bf16(x) => {
                for (n, row) in scratch.chunks_exact_mut(padded).take(slots.len()).enumerate() {
                    for (o, v) in row.iter_mut().zip(&x[at(n)..at(n) + d]) {
                        *o = f32::from_bits(u32::from(v.to_bits()) << 16);
                    }
                }
            }
        }
        let scratch: &'b [f32] = scratch;
        let mut rows = [scratch; BLOCK];
        for (n, row) in rows.iter_mut().enumerate() {
            let n = n.min(slots.len() - 1);
            *row = &scratch[n * padded..(n + 1) * padded];
        }
        rows
    }
}

fn get(x: KvData<'_>, i: usize) -> f32 {
    match x {
        KvData::F32(x) => x[i],
        KvData::Bf16(x) => bf16::to_f32(x[i]),
    }
}

/// Softmax so far of each row: exponentials are relative to `max`.
struct State {
    /// Largest score, `-inf` while there is none [stride].
    max: Vec<f32>,
    /// Sum of exponentials [stride].
    sum: Vec<f32>,
    /// Weighted sum of values [rows, padded].
    acc: Vec<f32>,
}

impl State {
    fn new(stride: usize, acc: usize) -> Self {
        Self { max: vec![f32::NEG_INFINITY; stride], sum: vec![0.0; stride], acc: vec![0.0; acc] }
    }

    fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Rows `first..` of another state, as many as this has.
    fn copy_rows(&mut self, from: &State, first: usize, rows: usize, padded: usize) {
        self.max[..rows].copy_from_slice(&from.max[first..first + rows]);
        self.sum[..rows].copy_from_slice(&from.sum[first..first + rows]);
        self.acc.copy_from_slice(&from.acc[first * padded..(first + rows) * padded]);
    }

    /// Add a later span. Rows that have no keys in it stay as they are, to the bit.
    #[inline(always)] // into code compiled for FMA: `mul_add` is a call elsewhere
    fn merge(&mut self, later: &State, rows: usize, padded: usize) {
        for r in 0..rows {
            let (a, b) = (self.max[r], later.max[r]);
            if b == f32::NEG_INFINITY && later.sum[r] == 0.0 {
                continue;
            }
            let (mine, theirs) =
                (&mut self.acc[r * padded..(r + 1) * padded], &later.acc[r * padded..(r + 1) * padded]);
            if a == f32::NEG_INFINITY && self.sum[r] == 0.0 {
                (self.max[r], self.sum[r]) = (b, later.sum[r]);
                mine.copy_from_slice(theirs);
                continue;
            }
            let max = if b > a { b } else { a };
            let (fa, fb) = (exp(a - max), exp(b - max));
            self.max[r] = max;
            self.sum[r] = later.sum[r].mul_add(fb, self.sum[r] * fa);
            for (x, &y) in mine.iter_mut().zip(theirs) {
                *x = y.mul_add(fb, *x * fa);
            }
        }
    }
}

/// See the module.
pub(crate) struct Tile {
    rows: usize,
    /// Rows rounded up to whole vectors.
    stride: usize,
    dim: usize,
    /// `dim` rounded up to whole vectors; the rest of a row is zero.
    padded: usize,
    /// See `Scores`.
    cap: Option<f32>,
    /// Scaled queries [dim, stride].
    q: Vec<f32>,
    /// Scores, then weights, of a block [BLOCK, stride].
    scores: Vec<f32>,
    /// Factor that a block applies to what came before it [stride].
    factor: Vec<f32>,
    /// Keys of the block that each row attends: the first so many [stride].
    counts: Vec<u32>,
    /// Rows of keys and values that are not f32 in whole vectors.
    scratch: [Vec<f32>; 2],
    /// The span being worked on.
    span: State,
    /// The spans before it.
    total: State,
}

impl Tile {
    /// A tile of `rows` rows without keys so far.
    pub(crate) fn new(rows: usize, dim: usize, cap: Option<f32>) -> Self {
        let (stride, padded) = (rows.next_multiple_of(W), dim.next_multiple_of(W));
        Self {
            rows,
            stride,
            dim,
            padded,
            cap,
            q: vec![0.0; dim * stride],
            scores: vec![0.0; BLOCK * stride],
            factor: vec![0.0; stride],
            counts: vec![0; stride],
            scratch: [vec![0.0; BLOCK * padded], vec![0.0; BLOCK * padded]],
            span: State::new(stride, rows * padded),
            total: State::new(stride, rows * padded),
        }
    }

    /// Set row `row`'s query.
    #[inline(always)]
    pub(crate) fn load_query(&mut self, row: usize, q: &[f32], scale: f32) {
        for (column, &q) in self.q.chunks_exact_mut(self.stride).zip(q) {
            column[row] = q * scale;
        }
    }

    /// Take over the softmax so far of rows `first..` of another tile.
    pub(crate) fn copy_rows(&mut self, from: &Tile, first: usize) {
        self.span.copy_rows(&from.span, first, self.rows, self.padded);
        self.total.copy_rows(&from.total, first, self.rows, self.padded);
    }

    /// Add the span that another tile of the same rows has worked on.
    #[inline(always)]
    pub(crate) fn merge(&mut self, later: &Tile) {
        self.total.merge(&later.span, self.rows, self.padded);
    }

    /// The span is complete: add it to the total.
    #[inline(always)]
    pub(crate) fn end_span(&mut self) {
        self.total.merge(&self.span, self.rows, self.padded);
        self.span.clear();
    }

    /// Write rows `first..` to `out` [rows of out, dim]; rows without keys are 0.
    #[inline(always)]
    pub(crate) fn finish(&self, first: usize, out: &mut [f32]) {
        for (r, out) in (first..).zip(out.chunks_exact_mut(self.dim)) {
            let (sum, acc) = (self.total.sum[r], &self.total.acc[r * self.padded..]);
            let inverse = 1.0 / sum;
            for (o, &a) in out.iter_mut().zip(acc) {
                *o = if sum == 0.0 { 0.0 } else { a * inverse };
            }
        }
    }

    /// One block: the keys in `slots` (1..=32, in logical order), of which row r attends the first `count(r)`.
    #[inline(always)]
    pub(crate) fn block<S: Simd>(
        &mut self,
        s: S,
        keys: &Keys<'_>,
        head: usize,
        slots: &[usize],
        count: impl Fn(usize) -> usize,
    ) {
        let n = slots.len();
        for (r, c) in self.counts[..self.rows].iter_mut().enumerate() {
            *c = count(r).min(n) as u32;
        }
        let [k_scratch, v_scratch] = &mut self.scratch;
        let k = keys.rows(keys.k, head, slots, k_scratch);
        scores(s, &self.q, self.stride, self.rows, self.dim, &k, n, &mut self.scores);
        if let Some(cap) = self.cap {
            capped(s, &mut self.scores[..n * self.stride], cap);
        }
        softmax(s, &mut self.scores, self.stride, self.rows, n, &self.counts, &mut self.span, &mut self.factor);
        let v = keys.rows(keys.v, head, slots, v_scratch);
        let weights = Weights { p: &self.scores, stride: self.stride, factor: &self.factor, counts: &self.counts };
        weights.add(s, &v, self.rows, self.padded, &mut self.span.acc);
    }
}

/// `out[key][row] = q[.][row] . k[key]`: one chain of FMAs over the elements of the head, for `n` keys (and up to 7
/// repeated ones behind them).
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn scores<S: Simd>(
    s: S,
    q: &[f32],
    stride: usize,
    rows: usize,
    dim: usize,
    k: &[&[f32]; BLOCK],
    n: usize,
    out: &mut [f32],
) {
    let width = S::F32_LANES;
    let vectors = rows.div_ceil(width);
    let mut key = 0;
    while key < n {
        let mut v = 0;
        while v < vectors {
            // 16 registers hold 4 keys by 2 vectors, 32 hold 8 by 2.
            let (at, two) = (v * width, v + 2 <= vectors);
            match (width == 16, two) {
                (true, true) => dots::<S, 8, 2>(s, q, stride, at, dim, &k[key..], &mut out[key * stride..]),
                (true, false) => dots::<S, 8, 1>(s, q, stride, at, dim, &k[key..], &mut out[key * stride..]),
                (false, true) => dots::<S, 4, 2>(s, q, stride, at, dim, &k[key..], &mut out[key * stride..]),
                (false, false) => dots::<S, 4, 1>(s, q, stride, at, dim, &k[key..], &mut out[key * stride..]),
            }
            v += if two { 2 } else { 1 };
        }
        key += if width == 16 { 8 } else { 4 };
    }
}

/// `K` keys by `V` vectors of rows from row `at` on.
#[inline(always)]
fn dots<S: Simd, const K: usize, const V: usize>(
    s: S,
    q: &[f32],
    stride: usize,
    at: usize,
    dim: usize,
    k: &[&[f32]],
    out: &mut [f32],
) {
    let mut keys = [k[0]; K];
    for (key, k) in keys.iter_mut().zip(k) {
        *key = &k[..dim];
    }
    let mut acc = [[s.splat_f32s(0.0); V]; K];
    for (j, q) in q.chunks_exact(stride).take(dim).enumerate() {
        let q = &S::as_simd_f32s(&q[at..at + V * S::F32_LANES]).0[..V];
        for (acc, k) in acc.iter_mut().zip(&keys) {
            let k = s.splat_f32s(k[j]);
            for (acc, &q) in acc.iter_mut().zip(q) {
                *acc = s.mul_add_f32s(q, k, *acc);
            }
        }
    }
    for (acc, out) in acc.iter().zip(out.chunks_mut(stride)) {
        let out = &mut out[at..at + V * S::F32_LANES];
        S::as_mut_simd_f32s(out).0.copy_from_slice(acc);
    }
}

/// cap tanh(x / cap) of each score.
#[inline(always)]
fn capped<S: Simd>(s: S, scores: &mut [f32], cap: f32) {
    let cap = s.splat_f32s(cap);
    for x in S::as_mut_simd_f32s(scores).0 {
        *x = s.mul_f32s(cap, tanh_vector(s, s.div_f32s(*x, cap)));
    }
}

/// Turn a block's scores into weights: new maximum, factor for what came before, exponentials and their sum.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn softmax<S: Simd>(
    s: S,
    scores: &mut [f32],
    stride: usize,
    rows: usize,
    n: usize,
    counts: &[u32],
    state: &mut State,
    factor: &mut [f32],
) {
    let none = s.splat_f32s(f32::NEG_INFINITY);
    let whole = counts[..rows].iter().all(|&c| c as usize == n);
    let width = S::F32_LANES;
    for at in (0..rows).step_by(width) {
        let before = S::as_simd_f32s(&state.max[at..at + width]).0[0];
        let mut max = before;
        if whole {
            for row in scores.chunks_exact(stride).take(n) {
                let x = S::as_simd_f32s(&row[at..at + width]).0[0];
                max = s.select_f32s(s.greater_than_f32s(x, max), x, max);
            }
        } else {
            let counts = S::as_simd_u32s(&counts[at..at + width]).0[0];
            for (key, row) in scores.chunks_exact_mut(stride).take(n).enumerate() {
                let x = &mut S::as_mut_simd_f32s(&mut row[at..at + width]).0[0];
                *x = s.select_f32s(s.less_than_u32s(s.splat_u32s(key as u32), counts), *x, none);
                max = s.select_f32s(s.greater_than_f32s(*x, max), *x, max);
            }
        }
        let base = s.select_f32s(s.equal_f32s(max, none), s.splat_f32s(0.0), max);
        let scale = exp_vector(s, s.sub_f32s(before, base));
        let sum = &mut S::as_mut_simd_f32s(&mut state.sum[at..at + width]).0[0];
        let mut total = s.mul_f32s(*sum, scale);
        for row in scores.chunks_exact_mut(stride).take(n) {
            let x = &mut S::as_mut_simd_f32s(&mut row[at..at + width]).0[0];
            *x = exp_vector(s, s.sub_f32s(*x, base));
            total = s.add_f32s(total, *x);
        }
        *sum = total;
        S::as_mut_simd_f32s(&mut state.max[at..at + width]).0[0] = max;
        S::as_mut_simd_f32s(&mut factor[at..at + width]).0[0] = scale;
    }
}

/// The weights of a block.
struct Weights<'a> {
    p: &'a [f32],
    stride: usize,
    factor: &'a [f32],
    counts: &'a [u32],
}

impl Weights<'_> {
    /// `acc[row] = acc[row] * factor[row] + sum over keys of p[key][row] * v[key]`, one chain over the keys that the
    /// row attends, in order.
    #[inline(always)]
    fn add<S: Simd>(&self, s: S, v: &[&[f32]; BLOCK], rows: usize, padded: usize, acc: &mut [f32]) {
        let most = if S::F32_LANES == 8 { 2 } else { 6 };
        let tiles = rows.div_ceil(most);
        let mut r = 0;
        for t in 0..tiles {
            let size = rows / tiles + usize::from(t < rows % tiles);
            if self.counts[r..r + size].iter().all(|&c| c == self.counts[r]) {
                self.some(s, v, r, size, padded, acc);
            } else {
                (r..r + size).for_each(|r| self.some(s, v, r, 1, padded, acc));
            }
            r += size;
        }
    }

    /// Rows `r..r + size`, which attend equally many keys.
    #[inline(always)]
    fn some<S: Simd>(&self, s: S, v: &[&[f32]; BLOCK], r: usize, size: usize, padded: usize, acc: &mut [f32]) {
        match size {
            1 => self.columns::<S, 1>(s, v, r, padded, acc),
            2 => self.columns::<S, 2>(s, v, r, padded, acc),
            3 => self.columns::<S, 3>(s, v, r, padded, acc),
            4 => self.columns::<S, 4>(s, v, r, padded, acc),
            5 => self.columns::<S, 5>(s, v, r, padded, acc),
            6 => self.columns::<S, 6>(s, v, r, padded, acc),
            _ => {} // `add` makes no others
        }
    }

    /// All columns of `R` rows, four vectors at a time, then one.
    #[inline(always)]
    fn columns<S: Simd, const R: usize>(&self, s: S, v: &[&[f32]; BLOCK], r: usize, padded: usize, acc: &mut [f32]) {
        let (width, mut at) = (S::F32_LANES, 0);
        while at + 4 * width <= padded {
            self.chain::<S, R, 4>(s, v, r, at, padded, acc);
            at += 4 * width;
        }
        while at < padded {
            self.chain::<S, R, 1>(s, v, r, at, padded, acc);
            at += width;
        }
    }

    #[inline(always)]
    fn chain<S: Simd, const R: usize, const V: usize>(
        &self,
        s: S,
        v: &[&[f32]; BLOCK],
        r: usize,
        at: usize,
        padded: usize,
        acc: &mut [f32],
    ) {
        let width = V * S::F32_LANES;
        let mut sums = [[s.splat_f32s(0.0); V]; R];
        for (i, sums) in sums.iter_mut().enumerate() {
            let from = (r + i) * padded + at;
            let factor = s.splat_f32s(self.factor[r + i]);
            for (sum, &a) in sums.iter_mut().zip(S::as_simd_f32s(&acc[from..from + width]).0) {
                *sum = s.mul_f32s(a, factor);
            }
        }
        for (v, p) in v.iter().zip(self.p.chunks_exact(self.stride)).take(self.counts[r] as usize) {
            let v = &S::as_simd_f32s(&v[at..at + width]).0[..V];
            for (sums, &p) in sums.iter_mut().zip(&p[r..r + R]) {
                let p = s.splat_f32s(p);
                for (sum, &v) in sums.iter_mut().zip(v) {
                    *sum = s.mul_add_f32s(p, v, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            let to = (r + i) * padded + at;
            S::as_mut_simd_f32s(&mut acc[to..to + width]).0.copy_from_slice(sums);
        }
    }
}
