//! Parts that the tests of several layers share: random data here, then an allocator that counts, batches for the
//! attention kernels, pools and random settings for the planner.
#![allow(dead_code)] // each test binary uses its part

pub(crate) mod counting;
pub(crate) mod host;
pub(crate) mod plan;

/// splitmix64: bulk data for tests, reproducible from a seed.
pub(crate) struct Mix(pub(crate) u64);

impl Mix {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// A number in `0..n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in `[0, 1)`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (-53f64).exp2()
    }

    /// Standard normal, nearly (a sum of twelve uniforms).
    pub(crate) fn normal(&mut self) -> f32 {
        ((0..12).map(|_| self.unit()).sum::<f64>() - 6.0) as f32
    }
}

/// True if counts agree with probabilities: Pearson's chi-square below its 99.9 % quantile (Wilson and Hilferty's
/// approximation), cells expected fewer than 5 times pooled. A count where the probability is 0 never agrees.
pub(crate) fn chi_square_accepts(counts: &[u32], probabilities: &[f64]) -> bool {
    assert_eq!(counts.len(), probabilities.len());
    let n = f64::from(counts.iter().sum::<u32>());
    let (mut statistic, mut cells, mut rare) = (0.0, 0, (0.0, 0.0));
    for (&count, &p) in counts.iter().zip(probabilities) {
        let (observed, expected) = (f64::from(count), p * n);
        if p == 0.0 {
            if count > 0 {
                return false;
            }
        } else if expected < 5.0 {
            rare = (rare.0 + observed, rare.1 + expected);
        } else {
            statistic += (observed - expected).powi(2) / expected;
            cells += 1;
        }
    }
    if rare.1 >= 5.0 {
        statistic += (rare.0 - rare.1).powi(2) / rare.1;
        cells += 1;
    }
    let df = f64::from(cells - 1);
    if df == 0.0 {
        return true;
    }
    let z = 3.0902; // 99.9 % quantile of the normal distribution
    let quantile = df * (1.0 - 2.0 / (9.0 * df) + z * (2.0 / (9.0 * df)).sqrt()).powi(3);
    statistic < quantile
}

/// Parents of a random tree of `n` nodes, half of the time a deep one.
pub(crate) fn random_parents(mix: &mut Mix, n: usize) -> Vec<i32> {
    let deep = mix.below(2) == 0;
    let parent = |i: usize, mix: &mut Mix| if deep { i - 1 - mix.below(i.min(3)) } else { mix.below(i) };
    (0..n).map(|i| if i == 0 { -1 } else { parent(i, mix) as i32 }).collect()
}
