//! Matrix products with a packed weight: `y = x W^T`, row-invariant to the last bit.
//!
//! Each element of y is one chain of fused multiply-adds over k = 0, 1, 2, ..., whatever the number of rows, the tile
//! or the thread it falls to. So a row's result has the same bits alone (plain decoding) and among sixteen (verifying
//! a tree), which neither torch's `F.linear` nor oneDNN's prepacked product gives, and which makes speculative output
//! *identical* to plain output rather than probably identical.
//!
//! The weight is packed once into panels of 32 rows, one k after the other, as bf16 or f16 (exact where the checkpoint
//! is the same, as most are; widened on the way into the registers, bf16 by a shift, f16 by an instruction) or as f32.
//! A decode pass reads every weight once and is bound by memory: halving the bytes nearly halves the time.
//!
//! ```
//! use specrs::host::linear::{Add, PackedLinear, Storage, Weight};
//! let w = PackedLinear::new(Weight::F32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), 3, 2, None, Storage::F32)?;
//! let mut y = [0.0; 3];
//! w.forward(&[1.0, 10.0], None, Add::Nothing, &mut y)?; // [1, 2] times the transpose of [3, 2]
//! assert_eq!(y, [21.0, 43.0, 65.0]);
//! # Ok::<(), specrs::Error>(())
//! ```

use half::{bf16, f16};
use pulp::{Simd, WithSimd};

use super::act::{silu, silu_vector};
use super::linear_memory::Memory;
use super::linear_tile::{
    Bf16Line, F16Line, F32Line, Line, PANEL, max_rows, panel_times_tile, row_tiles, two_panels_times_tile, widen,
};
use super::norm::{RmsNorm, norm_row};
use super::threads;
use crate::error::{Error, Result};
use crate::simd;

/// A weight [n, k] as a checkpoint holds it, row-major.
#[derive(Debug, Clone, Copy)]
pub enum Weight<'a> {
    /// float32.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// float16.
    F16(&'a [f16]),
}

impl Weight<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Weight::F32(w) => w.len(),
            Weight::Bf16(w) => w.len(),
            Weight::F16(w) => w.len(),
        }
    }

    fn get(&self, i: usize) -> f32 {
        match self {
            Weight::F32(w) => w[i],
            Weight::Bf16(w) => w[i].to_f32(),
            Weight::F16(w) => w[i].to_f32(),
        }
    }
}

/// The element type of a packed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// 2 bytes a weight; rounds f32 and f16 weights to nearest even, keeps bf16 weights exact.
    Bf16,
    /// 2 bytes a weight; rounds f32 and bf16 weights to nearest even, keeps f16 weights exact.
    F16,
    /// 4 bytes a weight, exact.
    F32,
}

/// The addend of each row of a product.
#[derive(Debug, Clone, Copy)]
pub enum Add<'a> {
    /// Nothing.
    Nothing,
    /// A residual [m, n].
    Rows(&'a [f32]),
    /// The content of `out`.
    Out,
}

/// A weight packed for [`forward`](Self::forward) or, where it stacks gate and up projection, for
/// [`forward_swiglu`](Self::forward_swiglu).
#[derive(Debug)]
pub struct PackedLinear {
    /// Rows of the weight.
    n: usize,
    /// Columns of the weight; always > 0.
    k: usize,
    storage: Storage,
    /// [`Line`]s of that type: panel p is `p * k..(p + 1) * k`; columns past the last row are zero.
    panels: Memory,
    /// n elements, in the weight's order.
    bias: Option<Vec<f32>>,
    /// True if column c < 16 of a panel is gate row `16 p + c` and column 16 + c the up row of the same channel.
    gated: bool,
}

impl PackedLinear {
    /// Pack a weight [n, k] with an optional bias `[n]`.
    pub fn new(weight: Weight<'_>, n: usize, k: usize, bias: Option<&[f32]>, storage: Storage) -> Result<Self> {
        Self::build(weight, n, k, bias, storage, false)
    }

    /// Pack a weight [n, k] whose first n / 2 rows are the gate and whose other rows are the up projection.
    pub fn new_gated(weight: Weight<'_>, n: usize, k: usize, bias: Option<&[f32]>, storage: Storage) -> Result<Self> {
        if !n.is_multiple_of(2) {
            return Err(Error::Invalid {
                what: "gate_up weight rows",
                got: n.to_string(),
                why: "gate and up have equally many rows: the number must be even".into(),
            });
        }
        Self::build(weight, n, k, bias, storage, true)
    }

    fn build(w: Weight<'_>, n: usize, k: usize, bias: Option<&[f32]>, storage: Storage, gated: bool) -> Result<Self> {
        if k == 0 || n.checked_mul(k) != Some(w.len()) {
            return Err(Error::Mismatch {
                operand: "weight",
                got: format!("{} elements", w.len()),
                want: format!("{n} x {k}, k > 0"),
            });
        }
        if let Some(b) = bias.filter(|b| b.len() != n) {
            return Err(Error::Mismatch {
                operand: "bias",
                got: format!("{} elements", b.len()),
                want: format!("{n} (the weight's rows)"),
            });
        }
        let panels = match storage {
            Storage::Bf16 => pack::<Bf16Line>(w, n, k, gated),
            Storage::F16 => pack::<F16Line>(w, n, k, gated),
            Storage::F32 => pack::<F32Line>(w, n, k, gated),
        };
        Ok(Self { n, k, storage, panels, bias: bias.map(<[f32]>::to_vec), gated })
    }

    /// Rows of the weight.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns of the weight: elements of a row of x.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Elements of a row of the output: n, or n / 2 where gate and up are stacked.
    pub fn out_width(&self) -> usize {
        if self.gated { self.n / 2 } else { self.n }
    }

    /// Form in which the weight is stored.
    pub fn storage(&self) -> Storage {
        self.storage
    }

    /// Bytes of the packed weight.
    pub fn bytes(&self) -> usize {
        self.panels.bytes().len()
    }

    fn lines<L: Line>(&self) -> &[L] {
        bytemuck::cast_slice(self.panels.bytes())
    }

    /// `out = norm(x) W^T + bias + add`: x [m, k], out [m, n]. Every element of `out` is written.
    pub fn forward(&self, x: &[f32], norm: Option<RmsNorm<'_>>, add: Add<'_>, out: &mut [f32]) -> Result<()> {
        if self.gated {
            return Err(Error::Mismatch {
                operand: "weight",
                got: "a gate_up weight".into(),
                want: "a plain one (or forward_swiglu)".into(),
            });
        }
        let m = self.check(x, norm.as_ref(), add, out.len())?;
        self.dispatch(x, m, norm.as_ref(), add, out);
        Ok(())
    }

    /// `out = silu(gate) * up` where `[gate, up] = norm(x) W^T + bias`: x [m, k], out [m, n / 2]. Every element of
    /// `out` is written.
    pub fn forward_swiglu(&self, x: &[f32], norm: Option<RmsNorm<'_>>, out: &mut [f32]) -> Result<()> {
        if !self.gated {
            return Err(Error::Mismatch {
                operand: "weight",
                got: "a plain weight".into(),
                want: "a gate_up weight (new_gated)".into(),
            });
        }
        let m = self.check(x, norm.as_ref(), Add::Nothing, out.len())?;
        self.dispatch(x, m, norm.as_ref(), Add::Nothing, out);
        Ok(())
    }

    /// [`forward`](Self::forward) or [`forward_swiglu`](Self::forward_swiglu) as plain loops over the same chains:
    /// equal to the fast path bit for bit.
    pub fn reference(&self, x: &[f32], norm: Option<RmsNorm<'_>>, add: Add<'_>, out: &mut [f32]) -> Result<()> {
        let m = self.check(x, norm.as_ref(), add, out.len())?;
        let width = self.out_width();
        for r in 0..m {
            let mut row = x[r * self.k..(r + 1) * self.k].to_vec();
            if let Some(norm) = &norm {
                norm_row(&x[r * self.k..(r + 1) * self.k], norm, &mut row);
            }
            for c in 0..width {
                let out = &mut out[r * width + c];
                if self.gated {
                    *out = silu(self.element(&row, c)) * self.element(&row, width + c);
                } else {
                    let y = self.element(&row, c);
                    *out = match add {
                        Add::Nothing => y,
                        Add::Rows(rows) => y + rows[r * width + c],
                        Add::Out => y + *out,
                    };
                }
            }
        }
        Ok(())
    }

    /// The weight as stored, at row `n` and column `k`.
    pub fn weight(&self, n: usize, k: usize) -> Option<f32> {
        if n >= self.n || k >= self.k {
            return None;
        }
        let half = self.n / 2;
        let (p, c) = match self.gated {
            false => (n / PANEL, n % PANEL),
            true if n < half => (n / 16, n % 16),
            true => ((n - half) / 16, 16 + (n - half) % 16),
        };
        let at = p * self.k + k;
        Some(match self.storage {
            Storage::Bf16 => self.lines::<Bf16Line>()[at].get(c),
            Storage::F16 => self.lines::<F16Line>()[at].get(c),
            Storage::F32 => self.lines::<F32Line>()[at].get(c),
        })
    }

    /// One element before activation and addition.
    fn element(&self, x: &[f32], n: usize) -> f32 {
        let mut acc = 0.0f32;
        for (k, &x) in x.iter().enumerate() {
            acc = x.mul_add(self.weight(n, k).unwrap_or(f32::NAN), acc);
        }
        self.bias.as_ref().map_or(acc, |b| acc + b[n])
    }

    /// Shapes; the number of rows.
    fn check(&self, x: &[f32], norm: Option<&RmsNorm<'_>>, add: Add<'_>, out: usize) -> Result<usize> {
        let (k, width) = (self.k, self.out_width());
        let wrong = |operand, got: usize, want: String| Err(Error::Mismatch { operand, got: got.to_string(), want });
        if !x.len().is_multiple_of(k) {
            return wrong("x elements", x.len(), format!("rows of {k}"));
        }
        let m = x.len() / k;
        if out != m * width {
            return wrong("out elements", out, format!("{m} x {width}"));
        }
        if let Some(norm) = norm.filter(|n| n.weight.len() != k) {
            return wrong("norm weight elements", norm.weight.len(), k.to_string());
        }
        match add {
            Add::Rows(rows) if rows.len() != m * width => {
                wrong("residual elements", rows.len(), format!("{m} x {width}"))
            }
            _ => Ok(m),
        }
    }

    fn dispatch(&self, x: &[f32], m: usize, norm: Option<&RmsNorm<'_>>, add: Add<'_>, out: &mut [f32]) {
        if m == 0 || self.n == 0 {
            return;
        }
        let x = pack_rows(x, m, self.k, norm);
        match self.storage {
            Storage::Bf16 => self.run(self.lines::<Bf16Line>(), &x, m, add, out),
            Storage::F16 => self.run(self.lines::<F16Line>(), &x, m, add, out),
            Storage::F32 => self.run(self.lines::<F32Line>(), &x, m, add, out),
        }
    }

    /// Split the output into parts and work on them in parallel.
    fn run<L: Line>(&self, lines: &[L], x: &[f32], m: usize, add: Add<'_>, out: &mut [f32]) {
        let width = self.out_width();
        let panels = lines.len() / self.k;
        let per_panel = if self.gated { PANEL / 2 } else { PANEL };
        // One thread reads about 20 bytes and does about 30 multiply-adds a nanosecond.
        let cost = (size_of_val(lines) / 20).max(m * self.n * self.k / 30);
        let threads = if cost < threads::WORTH_A_REGION_NS { 1 } else { threads::num_threads() };
        // Parts of a few microseconds each let a thread that was late do less.
        let parts = threads * (cost / threads / 8_000).clamp(1, 4);
        // Few rows: split the columns. Many: whole rows too, in blocks that leave a part's x and panel in the caches.
        let row_block = if m <= 2 * ROW_BLOCK { m } else { ROW_BLOCK };
        let col_parts = parts.div_ceil(m.div_ceil(row_block)).clamp(1, panels);
        let mut tasks: Vec<Part<'_>> = Vec::new();
        for (block, rows) in out.chunks_mut(row_block * width).enumerate() {
            let first = tasks.len();
            for p in 0..col_parts {
                let range = p * panels / col_parts..(p + 1) * panels / col_parts;
                tasks.push(Part { panels: range, row0: block * row_block, rows: Vec::with_capacity(row_block) });
            }
            for row in rows.chunks_mut(width) {
                let mut rest = row;
                for part in &mut tasks[first..] {
                    let (mine, others) = rest.split_at_mut((part.panels.len() * per_panel).min(rest.len()));
                    part.rows.push(mine);
                    rest = others;
                }
            }
        }
        threads::for_each(tasks, if threads == 1 { 0 } else { cost }, |part| {
            simd::run(Work { linear: self, lines, x, add, part });
        });
    }
}

/// Rows of x in one part where there are many; a multiple of every row tile's size limit.
const ROW_BLOCK: usize = 48;

/// Pack a weight into panels.
fn pack<L: Line>(w: Weight<'_>, n: usize, k: usize, gated: bool) -> Memory {
    let half = n / 2;
    let (rows, panels) = if gated { (half, half.div_ceil(16)) } else { (n, n.div_ceil(PANEL)) };
    let mut memory = Memory::new(panels * k * size_of::<L>());
    let lines: &mut [L] = bytemuck::cast_slice_mut(memory.bytes_mut());
    let panels = lines.chunks_exact_mut(k).enumerate().collect();
    threads::for_each(panels, n * k, |(p, panel)| {
        for c in 0..PANEL {
            let row = if gated { p * 16 + c % 16 } else { p * PANEL + c };
            if row < rows {
                let row = if gated && c >= 16 { half + row } else { row };
                panel.iter_mut().enumerate().for_each(|(i, line)| line.set(c, w.get(row * k + i)));
            }
        }
    });
    memory
}

/// Lay rows out tile by tile, all rows of a tile for one k together, normalised on the way.
fn pack_rows(x: &[f32], m: usize, k: usize, norm: Option<&RmsNorm<'_>>) -> Vec<f32> {
    let mut packed = vec![0.0; m * k];
    simd::dispatch(
        #[inline(always)]
        || {
            let mut row0 = 0;
            // Blocks of rows must start at tiles, so tiles are cut within blocks.
            for tile in tiles(m) {
                let dst = &mut packed[row0 * k..(row0 + tile) * k];
                let src = &x[row0 * k..(row0 + tile) * k];
                match tile {
                    1 => interleave::<1>(src, k, norm, dst),
                    2 => interleave::<2>(src, k, norm, dst),
                    3 => interleave::<3>(src, k, norm, dst),
                    4 => interleave::<4>(src, k, norm, dst),
                    5 => interleave::<5>(src, k, norm, dst),
                    6 => interleave::<6>(src, k, norm, dst),
                    7 => interleave::<7>(src, k, norm, dst),
                    _ => interleave::<8>(src, k, norm, dst),
                }
                row0 += tile;
            }
        },
    );
    packed
}

/// `dst[i][r] = src[r][i]`, normalised, for a tile of `R` rows.
#[inline(always)]
fn interleave<const R: usize>(src: &[f32], k: usize, norm: Option<&RmsNorm<'_>>, dst: &mut [f32]) {
    // Plain loops: the closures of `array::from_fn` are not inlined for certain, and then not compiled for FMA.
    let mut rows = [src; R];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = &src[r * k..(r + 1) * k];
    }
    let dst = &mut dst.as_chunks_mut::<R>().0[..k];
    match norm {
        None => {
            for (i, dst) in dst.iter_mut().enumerate() {
                for (d, row) in dst.iter_mut().zip(&rows) {
                    *d = row[i];
                }
            }
        }
        Some(norm) => {
            let mut scales = [0.0; R];
            for (scale, row) in scales.iter_mut().zip(&rows) {
                *scale = norm.scale(row);
            }
            for ((i, dst), &w) in dst.iter_mut().enumerate().zip(norm.weight) {
                for ((d, row), scale) in dst.iter_mut().zip(&rows).zip(&scales) {
                    *d = row[i] * scale * w;
                }
            }
        }
    }
}

/// Row tiles of `m` rows, cut so that none crosses a multiple of [`ROW_BLOCK`] where rows are split into blocks.
fn tiles(m: usize) -> impl Iterator<Item = usize> {
    let block = if m <= 2 * ROW_BLOCK { m } else { ROW_BLOCK };
    (0..m.div_ceil(block)).flat_map(move |b| row_tiles(block.min(m - b * block)))
}

/// A block of the output.
struct Part<'a> {
    panels: std::ops::Range<usize>,
    /// First row of the block.
    row0: usize,
    /// The block's columns of each of its rows.
    rows: Vec<&'a mut [f32]>,
}

struct Work<'a, 'o, L> {
    linear: &'a PackedLinear,
    lines: &'a [L],
    /// All rows, packed by [`pack_rows`].
    x: &'a [f32],
    add: Add<'a>,
    part: Part<'o>,
}

impl<L: Line> WithSimd for Work<'_, '_, L> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, s: S) {
        let Work { linear, lines, x, add, mut part } = self;
        let k = linear.k;
        let mut acc = [[[0.0f32; PANEL]; 8]; 2];
        debug_assert!(max_rows() <= acc[0].len());
        let mut panels = part.panels.clone();
        let widens = L::widens(s, part.rows.len());
        let mut wide: Vec<F32Line> = Vec::with_capacity(if widens { k } else { 0 });
        while let Some(p) = panels.next() {
            let panel = &lines[p * k..(p + 1) * k];
            let [acc, acc2] = &mut acc;
            if let (true, Some(q)) = (part.rows.len() <= 3, panels.clone().next()) {
                let two = [panel, &lines[q * k..(q + 1) * k]];
                let rows = part.rows.len();
                let x = &x[part.row0 * k..(part.row0 + rows) * k];
                if two_panels_times_tile(s, two, x, rows, [acc, acc2]) {
                    panels.next();
                    finish_tile(s, linear, add, &mut part, p, 0, &mut acc[..rows]);
                    finish_tile(s, linear, add, &mut part, q, 0, &mut acc2[..rows]);
                    continue;
                }
            }
            if widens {
                widen(s, panel, &mut wide);
            }
            let mut r0 = 0;
            for tile in row_tiles(part.rows.len()) {
                let at = part.row0 + r0;
                let x = &x[at * k..(at + tile) * k];
                if widens {
                    panel_times_tile(s, &wide, x, tile, acc);
                } else {
                    panel_times_tile(s, panel, x, tile, acc);
                }
                finish_tile(s, linear, add, &mut part, p, r0, &mut acc[..tile]);
                r0 += tile;
            }
        }
    }
}

/// Bias, addend and activation behind the sums of panel `p`, for the rows from `r0` of a part on.
#[inline(always)]
fn finish_tile<S: Simd>(
    s: S,
    linear: &PackedLinear,
    add: Add<'_>,
    part: &mut Part<'_>,
    p: usize,
    r0: usize,
    acc: &mut [[f32; PANEL]],
) {
    let i = p - part.panels.start;
    for (r, acc) in (r0..).zip(acc) {
        if linear.gated {
            finish_gated(s, linear, p, i, acc, part.rows[r]);
        } else {
            finish(linear, p, i, add, part.row0 + r, acc, part.rows[r]);
        }
    }
}

/// Bias, addition and store of one row of panel `p`, the `i`th of the part.
#[inline(always)]
fn finish(w: &PackedLinear, p: usize, i: usize, add: Add<'_>, row: usize, acc: &mut [f32; PANEL], out: &mut [f32]) {
    let cols = p * PANEL..((p + 1) * PANEL).min(w.n);
    let out = &mut out[i * PANEL..i * PANEL + cols.len()];
    if let Some(bias) = &w.bias {
        for (a, b) in acc.iter_mut().zip(&bias[cols.clone()]) {
            *a += b;
        }
    }
    match add {
        Add::Nothing => out.copy_from_slice(&acc[..cols.len()]),
        Add::Rows(rows) => {
            let rows = &rows[row * w.n..][cols];
            for ((o, a), b) in out.iter_mut().zip(acc.iter()).zip(rows) {
                *o = a + b;
            }
        }
        Add::Out => {
            for (o, a) in out.iter_mut().zip(acc.iter()) {
                *o += a;
            }
        }
    }
}

/// Bias and SwiGLU of one row of panel `p`, the `i`th of the part.
#[inline(always)]
fn finish_gated<S: Simd>(s: S, w: &PackedLinear, p: usize, i: usize, acc: &mut [f32; PANEL], out: &mut [f32]) {
    let half = w.n / 2;
    let cols = p * 16..((p + 1) * 16).min(half);
    let out = &mut out[i * 16..i * 16 + cols.len()];
    let (gate, up) = acc.split_at_mut(16);
    if let Some(bias) = &w.bias {
        for (c, n) in cols.enumerate() {
            gate[c] += bias[n];
            up[c] += bias[half + n];
        }
    }
    let (gate, up) = (S::as_mut_simd_f32s(gate).0, S::as_simd_f32s(up).0);
    for (g, &u) in gate.iter_mut().zip(up) {
        *g = s.mul_f32s(silu_vector(s, *g), u);
    }
    out.copy_from_slice(&acc[..out.len()]);
}
