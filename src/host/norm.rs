//! RMSNorm of rows (Zhang and Sennrich, 2019).
//!
//! The sum of squares is sixteen interleaved FMA chains added up in a fixed order, on every machine: the width of
//! its vectors changes nothing.

use crate::error::{Error, Result};
use crate::simd;

/// The weight of an RMSNorm, to be fused into what follows it.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<'a> {
    /// One factor per column.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// Sum of squares of `x`.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut acc = [0.0f32; 16];
    let (chunks, tail) = x.as_chunks::<16>();
    for c in chunks {
        for (a, &v) in acc.iter_mut().zip(c) {
            *a = v.mul_add(v, *a);
        }
    }
    for (a, &v) in acc.iter_mut().zip(tail) {
        *a = v.mul_add(v, *a);
    }
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            acc[i] += acc[i + width];
        }
        width /= 2;
    }
    acc[0]
}

impl RmsNorm<'_> {
    /// The factor of one row: `1 / sqrt(mean(x^2) + eps)`.
    #[inline(always)]
    pub(crate) fn scale(&self, x: &[f32]) -> f32 {
        1.0 / (sum_of_squares(x) / x.len() as f32 + self.eps).sqrt()
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * weight` for one row.
#[inline(always)]
pub(crate) fn norm_row(x: &[f32], norm: &RmsNorm<'_>, out: &mut [f32]) {
    let scale = norm.scale(x);
    for ((o, &v), &w) in out.iter_mut().zip(x).zip(norm.weight) {
        *o = v * scale * w;
    }
}

/// RMSNorm of each row of `x` [m, k] into `out` [m, k]; `norm.weight` has k elements.
pub fn rms_norm(x: &[f32], norm: &RmsNorm<'_>, out: &mut [f32]) -> Result<()> {
    check(x, norm, out.len())?;
    if norm.weight.is_empty() {
        return Ok(());
    }
    let k = norm.weight.len();
    simd::dispatch(
        #[inline(always)]
        || {
            for (x, out) in x.chunks_exact(k).zip(out.chunks_exact_mut(k)) {
                norm_row(x, norm, out);
            }
        },
    );
    Ok(())
}

/// [`rms_norm`] in f64.
pub fn rms_norm_reference(x: &[f32], norm: &RmsNorm<'_>, out: &mut [f32]) -> Result<()> {
    check(x, norm, out.len())?;
    let k = norm.weight.len();
    for (x, out) in x.chunks_exact(k.max(1)).zip(out.chunks_exact_mut(k.max(1))) {
        let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / k as f64;
        let scale = 1.0 / (mean + f64::from(norm.eps)).sqrt();
        for ((o, &v), &w) in out.iter_mut().zip(x).zip(norm.weight) {
            *o = (f64::from(v) * scale * f64::from(w)) as f32;
        }
    }
    Ok(())
}

fn check(x: &[f32], norm: &RmsNorm<'_>, out: usize) -> Result<()> {
    let k = norm.weight.len();
    if (k == 0 && !x.is_empty()) || (k != 0 && !x.len().is_multiple_of(k)) {
        return Err(Error::Mismatch {
            operand: "rms_norm x",
            got: format!("{} elements", x.len()),
            want: format!("rows of {k} (the weight's length)"),
        });
    }
    if out != x.len() {
        return Err(Error::Mismatch {
            operand: "rms_norm out",
            got: format!("{out} elements"),
            want: format!("{} (as x)", x.len()),
        });
    }
    Ok(())
}
