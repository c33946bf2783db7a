//! The integer weight of a token, from which host and device draw alike.
//!
//! The weight of logit x is `round(exp((x - max) / T) * 2^40)`: multiples of 2^-40 of the most probable token's weight.
//! Sums of integers are exact and associative, so a total, a nucleus and an inverse CDF do not depend on the order of
//! summation, on vector width or on threads, and an inverse CDF can never run past its last token. A vocabulary of 2^18
//! tokens times the quantum's half is 2^-23 in total variation: the size of the rounding of the f32 logits themselves.

/// Weight of the most probable token, `exp(0)`.
pub(crate) const ONE: u64 = 1 << 40;
/// One ulp of an f64 in `[2^12, 2^13)` is 2^-40: adding this rounds to the quantum, and the bits count the quanta.
pub(crate) const ROUNDER: f64 = 4096.0;

/// `exp(x)` for `x <= 0` to about one ulp of f32; results below `exp(-40)` are 0 in quanta. Only additions and fused
/// multiply-adds, each rounded once by IEEE 754, so every machine and vector width gives the same bits. Where the
/// instruction set lacks the fused form, each may be a call: the host keeps its loops over this in `dispatch`.
#[inline(always)]
fn exp_neg(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to an integer, which the low mantissa bits then hold.
    const MAGIC: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has few enough bits that its product with n is exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let x = if x > -40.0 { x } else { -40.0 };
    let t = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = t - MAGIC;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    // Minimax polynomial of (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2 (Cephes expf).
    let p = 1.987_569_1e-4f32.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    f32::from_bits((t.to_bits() << 23).wrapping_add(p.to_bits())) // p * 2^n
}

/// The softmax of one row before its division: the map from logits to weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Softmax {
    max: f32,
    inv_t: f32,
}

impl Softmax {
    /// `max` is the row's largest logit, finite.
    pub(crate) fn new(max: f32, temperature: f64) -> Self {
        Self { max, inv_t: (1.0 / effective_temperature(temperature)) as f32 }
    }

    /// The same from `inv_t`, as a device has it.
    #[cfg(test)]
    pub(crate) fn of(max: f32, inv_t: f32) -> Self {
        Self { max, inv_t }
    }

    /// `1 / T` in f32; never 0. With a maximum it makes [`Softmax`] on a device.
    #[cfg(feature = "cuda")]
    pub(crate) fn inv_t(self) -> f32 {
        self.inv_t
    }

    /// Log-weight of a logit, `(x - max) / T <= 0`; monotone in x.
    #[inline(always)]
    pub(crate) fn log_weight(self, x: f32) -> f32 {
        (x - self.max) * self.inv_t
    }

    /// Quanta of a logit.
    #[inline(always)]
    pub(crate) fn weight(self, x: f32) -> u64 {
        self.rounded(x).wrapping_sub(ROUNDER.to_bits())
    }

    /// [`Softmax::weight`] more than the bits of [`ROUNDER`]: what a sum subtracts once.
    #[inline(always)]
    pub(crate) fn rounded(self, x: f32) -> u64 {
        (f64::from(exp_neg(self.log_weight(x))) + ROUNDER).to_bits()
    }
}

/// The temperature that counts: one whose inverse leaves f32 becomes the nearest whose inverse does not, which keeps 0
/// * inf away. Below the least, only logits that differ by less than 1e-37 could tell.
pub(crate) fn effective_temperature(temperature: f64) -> f64 {
    temperature.clamp(1.0 / f64::from(f32::MAX), 1.0 / f64::from(f32::MIN_POSITIVE))
}

/// Smallest weight that min-p keeps.
pub(crate) fn min_weight(min_p: f64) -> u64 {
    (min_p * ONE as f64).ceil() as u64
}

/// Smallest integer mass that is at least `p` of `total`, and at least 1.
pub(crate) fn mass(p: f64, total: u64) -> u64 {
    ((p * total as f64).ceil() as u64).clamp(1, total)
}

/// `floor(u * 2^-53 * total)`, exactly; `< total`, since `u < 2^53`.
pub(crate) fn fraction(u: u64, total: u64) -> u64 {
    ((u128::from(u) * u128::from(total)) >> 53) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_libm_to_a_part_in_ten_million() {
        let softmax = Softmax::new(0.0, 1.0);
        for i in 0..300_000 {
            let x = -(i as f32) * 1e-4;
            let want = f64::from(x).exp() * ONE as f64;
            let got = softmax.weight(x) as f64;
            assert!((got - want).abs() <= want * 1.5e-7 + 0.51, "exp({x}): {got} against {want}");
        }
        assert_eq!(softmax.weight(0.0), ONE);
        assert_eq!(softmax.weight(-0.0), ONE);
        assert_eq!(softmax.weight(f32::NEG_INFINITY), 0);
        assert_eq!(softmax.weight(-3e38), 0);
        assert_eq!(softmax.weight(-29.0), 0);
    }

    #[test]
    fn extreme_temperatures_stay_finite() {
        for t in [f64::MIN_POSITIVE, 1e-45, 1e-30, 1e30, 1e300] {
            let softmax = Softmax::new(1.0, t);
            assert_eq!(softmax.weight(1.0), ONE, "T = {t}");
            assert_eq!(softmax.weight(f32::NEG_INFINITY), 0, "T = {t}");
            assert_eq!(softmax.weight(0.0), if t < 1.0 { 0 } else { ONE }, "T = {t}");
        }
    }

    #[test]
    fn the_inverse_of_the_temperature_that_counts_is_a_normal_number() {
        for (t, inverse) in
            [(f64::from_bits(1), f32::MAX), (1e-300, f32::MAX), (f64::MAX, f32::MIN_POSITIVE), (0.5, 2.0)]
        {
            assert_eq!((1.0 / effective_temperature(t)) as f32, inverse, "T = {t}");
        }
        assert_eq!([1e-38, 0.7, 1e37].map(effective_temperature), [1e-38, 0.7, 1e37], "those within stay as they are");
    }

    #[test]
    fn masses_are_rounded_up() {
        assert_eq!([mass(0.5, 3), mass(0.5, 4), mass(1e-300, 9), mass(1.0 - 1e-16, 9)], [2, 2, 1, 9]);
        assert_eq!([min_weight(0.0), min_weight(1e-30), min_weight(1.0)], [0, 1, ONE]);
    }
}
