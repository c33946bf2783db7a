//! Elementwise functions, for one `f32` and for the elements of a vector, with the same bits.

use pulp::Simd;

/// `e^x`, within 2 ulp over the normal range; 0 below -87.3 (no subnormal results), `inf` above 88.7, NaN for NaN,
/// exactly 1 at 0.
///
/// `x = n ln 2 + r`, a polynomial for `e^r` on `|r| <= ln2 / 2` (Cephes' `expf` coefficients), and `2^n` put together
/// in the exponent bits, in two factors so that `n = 128` is not lost.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Arguments beyond the limits are computed at 0 and replaced.
    let (under, over) = (x < UNDERFLOW, x > OVERFLOW);
    let x = if under || over { 0.0 } else { x };
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    let mut p = C[0];
    for c in &C[1..] {
        p = p.mul_add(r, *c);
    }
    p = p.mul_add(r * r, r) + 1.0;
    // 0 <= n + OFFSET, so that halving it by a shift is exact for either sign.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits() - OFFSET);
    let half = n >> 1;
    let y = p * pow2(half) * pow2(n.wrapping_sub(half));
    let y = if under { 0.0 } else { y };
    if over { f32::INFINITY } else { y }
}

use std::f32::consts::LOG2_E;

/// Below, `e^x` is taken as 0.
const UNDERFLOW: f32 = -87.3;
/// Above, `e^x` is taken as infinite.
const OVERFLOW: f32 = 88.72;
/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits.
const ROUND: f32 = 12_582_912.0;
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;
/// Cephes' `expf`, from the highest power down.
const C: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
/// Added to an exponent n to make it positive; even.
const OFFSET: u32 = 256;

/// `2^(half - OFFSET / 2)`.
#[inline(always)]
fn pow2(half: u32) -> f32 {
    f32::from_bits(half.wrapping_sub(OFFSET / 2 - 127) << 23)
}

/// [`exp`] of each element, with the same bits.
#[inline(always)]
pub(crate) fn exp_vector<S: Simd>(s: S, x: S::f32s) -> S::f32s {
    let (zero, round) = (s.splat_f32s(0.0), s.splat_f32s(ROUND));
    let (under, over) = (s.less_than_f32s(x, s.splat_f32s(UNDERFLOW)), s.greater_than_f32s(x, s.splat_f32s(OVERFLOW)));
    let x = s.select_f32s(over, zero, s.select_f32s(under, zero, x));
    let shifted = s.mul_add_f32s(x, s.splat_f32s(LOG2_E), round);
    let n = s.sub_f32s(shifted, round);
    let r = s.mul_add_f32s(n, s.splat_f32s(-LN2_LO), s.mul_add_f32s(n, s.splat_f32s(-LN2_HI), x));
    let mut p = s.splat_f32s(C[0]);
    for c in &C[1..] {
        p = s.mul_add_f32s(p, r, s.splat_f32s(*c));
    }
    p = s.add_f32s(s.mul_add_f32s(p, s.mul_f32s(r, r), r), s.splat_f32s(1.0));
    let n = s.sub_u32s(s.transmute_u32s_f32s(shifted), s.splat_u32s(ROUND.to_bits() - OFFSET));
    let half = s.wrapping_dyn_shr_u32s(n, s.splat_u32s(1));
    let pow2 = |half| {
        let exponent = s.sub_u32s(half, s.splat_u32s(OFFSET / 2 - 127));
        s.transmute_f32s_u32s(s.wrapping_dyn_shl_u32s(exponent, s.splat_u32s(23)))
    };
    let y = s.mul_f32s(s.mul_f32s(p, pow2(half)), pow2(s.sub_u32s(n, half)));
    s.select_f32s(over, s.splat_f32s(f32::INFINITY), s.select_f32s(under, zero, y))
}

/// [`silu`] of each element, with the same bits.
#[inline(always)]
pub(crate) fn silu_vector<S: Simd>(s: S, x: S::f32s) -> S::f32s {
    s.div_f32s(x, s.add_f32s(s.splat_f32s(1.0), exp_vector(s, s.neg_f32s(x))))
}

/// Hyperbolic tangent of each element, within 4 ulp: a polynomial near 0 (Cephes' `tanhf` coefficients), 1 - 2 / (e^2x + 1)
/// elsewhere; NaN for NaN.
#[inline(always)]
pub(crate) fn tanh_vector<S: Simd>(s: S, x: S::f32s) -> S::f32s {
    let square = s.mul_f32s(x, x);
    let mut p = s.splat_f32s(T[0]);
    for c in &T[1..] {
        p = s.mul_add_f32s(p, square, s.splat_f32s(*c));
    }
    let small = s.mul_add_f32s(s.mul_f32s(p, square), x, x);
    let e = s.add_f32s(exp_vector(s, s.add_f32s(x, x)), s.splat_f32s(1.0));
    let large = s.sub_f32s(s.splat_f32s(1.0), s.div_f32s(s.splat_f32s(2.0), e));
    s.select_f32s(s.less_than_f32s(s.abs_f32s(x), s.splat_f32s(TANH_SMALL)), small, large)
}

/// Cephes' `tanhf`, from the highest power down.
const T: [f32; 5] = [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];
/// Below, the polynomial.
const TANH_SMALL: f32 = 0.625;

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

    /// Both forms for every element of the vectors found.
    struct Both<'a>(&'a mut Vec<[f32; 2]>);

    impl pulp::WithSimd for Both<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, s: S) {
            for x in self.0.as_chunks_mut::<16>().0 {
                let mut each = [0.0; 16];
                x.iter().zip(&mut each).for_each(|(x, l)| *l = x[0]);
                for v in S::as_mut_simd_f32s(&mut each).0 {
                    *v = silu_vector(s, exp_vector(s, *v));
                }
                x.iter_mut().zip(&each).for_each(|(x, l)| x[1] = *l);
            }
        }
    }

    #[test]
    fn vectors_have_the_bits_of_the_scalar_form() {
        let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 88.72, 88.73, -87.3, -87.31, 1e30, -1e30, 1e-40];
        let mut x: Vec<[f32; 2]> = special.map(|x| [x, 0.0]).to_vec();
        x.extend((0..400_000u32).map(|i| [(i as f32 - 200_000.0) * 4.7e-4, 0.0]));
        x.truncate(x.len() / 16 * 16);
        crate::simd::run(Both(&mut x));
        for [x, got] in x {
            let want = silu(exp(x));
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{x}: {got} {want}");
        }
        let mut nan = vec![[f32::NAN, 0.0]; 16];
        crate::simd::run(Both(&mut nan));
        assert!(nan.iter().all(|x| x[1].is_nan()));
    }

    /// [`tanh_vector`] of the elements of vectors.
    struct Tanh<'a>(&'a mut [[f32; 16]]);

    impl pulp::WithSimd for Tanh<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, s: S) {
            for v in self.0.iter_mut().flat_map(|x| S::as_mut_simd_f32s(x).0) {
                *v = tanh_vector(s, *v);
            }
        }
    }

    #[test]
    fn tanh_is_close_everywhere() {
        let x: Vec<f32> = (0..160_000u32).map(|i| (i as f32 - 80_000.0) * 1.37e-4).chain([1e-30; 16]).collect();
        let mut got = x.as_chunks::<16>().0.to_vec();
        crate::simd::run(Tanh(&mut got));
        for (&x, &y) in x.iter().zip(got.as_flattened()) {
            let want = f64::from(x).tanh();
            assert!((f64::from(y) - want).abs() <= 4.0 * f64::from(f32::EPSILON) * want.abs(), "{x}: {y} {want}");
        }
        let mut ends = [[f32::INFINITY; 16], [f32::NEG_INFINITY; 16], [200.0; 16], [-200.0; 16], [f32::NAN; 16]];
        crate::simd::run(Tanh(&mut ends));
        assert_eq!(ends.map(|x| x[7])[..4], [1.0, -1.0, 1.0, -1.0]);
        assert!(ends[4].iter().all(|x| x.is_nan()));
    }

    #[test]
    fn silu_has_its_limits() {
        assert_eq!(silu(0.0), 0.0);
        assert_eq!(silu(-1000.0), 0.0);
        assert_eq!(silu(1000.0), 1000.0);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6);
    }
}
