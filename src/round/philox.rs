//! Philox4x32-10, the counter-based generator behind every drawn token.
//!
//! Counter-based: the uniform of a token is a pure function of (request seed, absolute position, purpose). So a
//! position that is drawn in a plain decode step, at a node of any tree, or twice, gets the same number, whatever else
//! the batch does; there is no generator state to keep in step.
//!
//! Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123).
//!
//! ```
//! use specrs::round::philox::{Purpose, uniform53};
//! let u = uniform53(7, 100, Purpose::TARGET);
//! assert!(u < 1 << 53);
//! assert_eq!(u, uniform53(7, 100, Purpose::TARGET));
//! ```

/// The use of a random number: numbers of different purposes at one position are independent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Purpose(pub u32);

impl Purpose {
    /// The target model's token at a position.
    pub const TARGET: Purpose = Purpose(0);
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// Ten rounds of Philox4x32: a bijection of `counter` for each `key`.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..ROUNDS {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(c0);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(c2);
        let (a_hi, b_hi) = ((a >> 32) as u32, (b >> 32) as u32);
        (c0, c1, c2, c3) = (b_hi ^ c1 ^ k0, b as u32, a_hi ^ c3 ^ k1, a as u32);
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [c0, c1, c2, c3]
}

/// A 53-bit uniform integer for the token at absolute `position` of a request with `seed`.
///
/// Key: the seed's low and high words. Counter: `(position, purpose, 0, 0)`. The result is the top 53 bits of
/// `word0 * 2^32 + word1`.
pub fn uniform53(seed: u64, position: u32, purpose: Purpose) -> u64 {
    let [w0, w1, _, _] = philox4x32_10([position, purpose.0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    (u64::from(w0) << 32 | u64::from(w1)) >> 11
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The three vectors of Random123's `tests/kat_vectors` for `philox4x32 10`.
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in cases {
            assert_eq!(philox4x32_10(counter, key), want);
        }
    }

    #[test]
    fn uniform_is_keyed_by_seed_position_and_purpose() {
        let base = uniform53(1, 2, Purpose::TARGET);
        assert_eq!(uniform53(0, 0, Purpose::TARGET), 0x6627_e8d5_e169_c58d >> 11);
        assert_ne!(base, uniform53(1 << 32, 2, Purpose::TARGET));
        assert_ne!(base, uniform53(1, 3, Purpose::TARGET));
        assert_ne!(base, uniform53(1, 2, Purpose(1)));
        assert!(uniform53(u64::MAX, u32::MAX, Purpose::TARGET) < 1 << 53);
    }

    #[test]
    fn uniform_has_the_mean_and_variance_of_a_uniform() {
        let n = 200_000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for p in 0..n {
            let u = uniform53(42, p, Purpose::TARGET) as f64 * (-53f64).exp2();
            sum += u;
            squares += u * u;
        }
        let mean = sum / f64::from(n);
        let var = squares / f64::from(n) - mean * mean;
        assert!((mean - 0.5).abs() < 4.0 * (1.0 / 12.0f64).sqrt() / f64::from(n).sqrt(), "{mean}");
        assert!((var - 1.0 / 12.0).abs() < 1e-3, "{var}");
    }
}
