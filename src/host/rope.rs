//! Rotary positions (Su et al. 2021), and the fused step of a layer around attention.

use super::attention::{AttnView, Scores, attention, check_heads};
use super::kv::{KvCacheMut, check_slots, index};
use super::norm::{RmsNorm, norm_row};
use crate::error::{Error, Result};
use crate::simd;

/// Cosines and sines for every position: scaled variants of RoPE (linear, llama3, yarn, ...) differ in the
/// frequencies and the attention factor that they are made from, not in the kernel.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Pairs that are rotated: half the rotary dimensions; always > 0.
    half: usize,
    /// [positions, half].
    cos: Vec<f32>,
    /// [positions, half].
    sin: Vec<f32>,
}

impl RopeTable {
    /// A table for positions `0..positions`: `cos` and `sin` of `position * inv_freq` (an f32 product, as in
    /// `transformers`), times `attention_scaling` (1 but for yarn).
    pub fn new(inv_freq: &[f32], positions: usize, attention_scaling: f32) -> Result<Self> {
        let half = inv_freq.len();
        let Some(n) = half.checked_mul(positions).filter(|_| half > 0) else {
            return Err(Error::Mismatch {
                operand: "inv_freq",
                got: format!("{half} frequencies for {positions} positions"),
                want: "at least one, and a table that fits memory".into(),
            });
        };
        let (mut cos, mut sin) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for p in 0..positions {
            for f in inv_freq {
                let (s, c) = f64::from(p as f32 * f).sin_cos();
                cos.push(c as f32 * attention_scaling);
                sin.push(s as f32 * attention_scaling);
            }
        }
        Ok(Self { half, cos, sin })
    }

    /// A table from cosines and sines [positions, half] made elsewhere.
    pub fn from_tables(cos: &[f32], sin: &[f32], half: usize) -> Result<Self> {
        for (operand, table) in [("cos", cos), ("sin", sin)] {
            if half == 0 || !table.len().is_multiple_of(half) || table.len() != cos.len() {
                return Err(Error::Mismatch {
                    operand,
                    got: format!("{} elements", table.len()),
                    want: format!("[positions, {half}], half > 0, as the other table"),
                });
            }
        }
        let copy = |table: &[f32]| -> Result<Vec<f32>> {
            let mut copy = Vec::new();
            copy.try_reserve_exact(table.len()).map_err(|e| Error::Invalid {
                what: "rope table",
                got: format!("{} positions", table.len() / half),
                why: format!("no memory for {} bytes: {e}; a smaller context takes less", size_of_val(table)),
            })?;
            copy.extend_from_slice(table);
            Ok(copy)
        };
        Ok(Self { half, cos: copy(cos)?, sin: copy(sin)? })
    }

    /// Positions in the table.
    pub fn positions(&self) -> usize {
        self.cos.len() / self.half
    }

    /// Elements of a head that are rotated; the rest passes.
    pub fn rotary_dim(&self) -> usize {
        2 * self.half
    }

    /// Rotate one head at a position below [`positions`](Self::positions): element i is paired with element
    /// i + half.
    #[inline(always)]
    pub(crate) fn rotate(&self, position: usize, x: &mut [f32]) {
        let at = position * self.half..(position + 1) * self.half;
        let (low, rest) = x.split_at_mut(self.half);
        let pairs = low.iter_mut().zip(&mut rest[..self.half]);
        for ((a, b), (&c, &s)) in pairs.zip(self.cos[at.clone()].iter().zip(&self.sin[at])) {
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
}

/// Norms and rotation of the rows of q, k and v before attention.
#[derive(Debug, Clone, Copy)]
pub struct Rotary<'a> {
    /// Rotation by position.
    pub table: &'a RopeTable,
    /// RMSNorm of each query head, before the rotation (Qwen3); its weight has head_dim elements.
    pub q_norm: Option<RmsNorm<'a>>,
    /// RMSNorm of each key head, before the rotation.
    pub k_norm: Option<RmsNorm<'a>>,
}

impl Rotary<'_> {
    fn check(&self, kernel: &'static str, view: &AttnView<'_>, head_dim: usize) -> Result<()> {
        if self.table.rotary_dim() > head_dim {
            return Err(Error::Mismatch {
                operand: "rope table",
                got: format!("{} rotary dimensions", self.table.rotary_dim()),
                want: format!("at most head_dim = {head_dim}"),
            });
        }
        for (operand, norm) in [("q_norm", self.q_norm), ("k_norm", self.k_norm)] {
            if let Some(n) = norm.filter(|n| n.weight.len() != head_dim) {
                return Err(Error::Mismatch {
                    operand,
                    got: format!("{} elements", n.weight.len()),
                    want: format!("head_dim = {head_dim}"),
                });
            }
        }
        for (j, &p) in view.positions.iter().enumerate() {
            index(kernel, "rope table", -1, j as i64, i64::from(p), self.table.positions())?;
        }
        Ok(())
    }

    /// Norm and rotation of one head, `x` to `out`.
    #[inline(always)]
    fn head(&self, norm: Option<&RmsNorm<'_>>, position: usize, x: &[f32], out: &mut [f32]) {
        match norm {
            Some(norm) => norm_row(x, norm, out),
            None => out.copy_from_slice(x),
        }
        self.table.rotate(position, out);
    }
}

/// Make attention's output from the rows of a packed qkv projection: per-head norms and RoPE of queries and keys at the
/// plan's positions, keys and values to the plan's slots, attention.
///
/// `qkv` is [Q, (heads + 2 kv_heads) head_dim] (queries, keys, values), `out` [Q, heads, head_dim]. On an error
/// neither the cache nor `out` is written.
#[allow(clippy::too_many_arguments)]
pub fn rope_attention(
    cache: &mut KvCacheMut<'_>,
    layer: usize,
    view: &AttnView<'_>,
    qkv: &[f32],
    heads: usize,
    rotary: &Rotary<'_>,
    scores: Scores,
    out: &mut [f32],
) -> Result<()> {
    let (d, rows) = (cache.shape().head_dim, view.positions.len());
    check_heads(heads, cache.shape().kv_heads, d)?;
    check_elements("attention out", out.len(), rows, heads * d)?;
    let mut q = vec![0.0; rows * heads * d];
    write_rows("rope_attention", cache, layer, view, qkv, rotary, &mut q)?;
    attention(&cache.as_ref(), layer, view, &q, heads, scores, out)
}

/// The part of [`rope_attention`] that later rows need: keys of `kv` [Q, 2 kv_heads head_dim] (keys, values) are
/// normed and rotated, and go with the values to the plan's slots. On an error the cache is not written.
pub fn rope_write(
    cache: &mut KvCacheMut<'_>,
    layer: usize,
    view: &AttnView<'_>,
    kv: &[f32],
    rotary: &Rotary<'_>,
) -> Result<()> {
    let (kv_heads, head_dim) = (cache.shape().kv_heads, cache.shape().head_dim);
    check_heads(kv_heads, kv_heads, head_dim)?;
    write_rows("rope_write", cache, layer, view, kv, rotary, &mut [])
}

/// Queries of packed rows to `q` [Q, heads, head_dim] (empty: the rows have none), keys and values to the cache.
fn write_rows(
    kernel: &'static str,
    cache: &mut KvCacheMut<'_>,
    layer: usize,
    view: &AttnView<'_>,
    qkv: &[f32],
    rotary: &Rotary<'_>,
    q: &mut [f32],
) -> Result<()> {
    let shape = cache.shape();
    let (hkv, d, rows) = (shape.kv_heads, shape.head_dim, view.positions.len());
    let q_width = q.len() / rows.max(1);
    let width = q_width + 2 * hkv * d;
    check_elements("qkv", qkv.len(), rows, width)?;
    index(kernel, "kv layers", -1, -1, layer as i64, shape.layers)?;
    view.check(kernel, rows, shape.slots)?;
    rotary.check(kernel, view, d)?;
    check_slots(kernel, &shape, view.out_slots, view.qo_indptr)?;
    simd::dispatch(
        #[inline(always)]
        || {
            let mut key = vec![0.0; d];
            let per_row = qkv.chunks_exact(width).zip(view.positions.iter().zip(view.out_slots));
            for (row, (x, (&position, &slot))) in per_row.enumerate() {
                let (position, slot) = (position as usize, slot as usize); // checked above
                let (xq, xkv) = x.split_at(q_width);
                let (xk, xv) = xkv.split_at(hkv * d);
                let q = &mut q[row * q_width..][..q_width];
                for (x, q) in xq.chunks_exact(d).zip(q.chunks_exact_mut(d)) {
                    rotary.head(rotary.q_norm.as_ref(), position, x, q);
                }
                for (h, (k, v)) in xk.chunks_exact(d).zip(xv.chunks_exact(d)).enumerate() {
                    rotary.head(rotary.k_norm.as_ref(), position, k, &mut key);
                    cache.put(layer, slot, h, &key, v);
                }
            }
        },
    );
    Ok(())
}

fn check_elements(operand: &'static str, got: usize, rows: usize, columns: usize) -> Result<()> {
    if got == rows * columns {
        return Ok(());
    }
    Err(Error::Mismatch { operand, got: format!("{got} elements"), want: format!("[{rows}, {columns}]") })
}
