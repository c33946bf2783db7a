//! Elementwise functions that vectorise: each is branch-free arithmetic on one `f32`, so that a loop over it compiles
//! to SIMD code whose lanes give the same bits as the scalar form does.

/// `e^x`, within 2 ulp over the normal range; 0 below -87.3 (no subnormal results), `inf` above 88.7, NaN for NaN,
/// exactly 1 at 0.
///
/// `x = n ln 2 + r`, a polynomial for `e^r` on `|r| <= ln2 / 2` (Cephes' `expf` coefficients), and `2^n` put together
/// in the exponent bits, in two factors so that `n = 128` is not lost.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    let mut p = 1.987_569_1e-4_f32;
    p = p.mul_add(r, 1.398_199_9e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r * r, r) + 1.0;
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let pow2 = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    let y = p * pow2(half) * pow2(n.wrapping_sub(half));
    let y = if x < -87.3 { 0.0 } else { y };
    if x > 88.72 { f32::INFINITY } else { y }
}

/// `x * sigmoid(x)`; -0 or 0 for very negative `x`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere_and_exact_at_zero() {
        let mut x = -87.2f32;
        let mut worst = 0.0f64;
        while x < 88.7 {
            let want = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - want) / want).abs());
            x += 0.000_37;
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1.0e30), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(1.0e30), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn silu_has_its_limits() {
        assert_eq!(silu(0.0), 0.0);
        assert_eq!(silu(-1000.0), 0.0);
        assert_eq!(silu(1000.0), 1000.0);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6);
    }
}
