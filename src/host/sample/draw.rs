//! The fast draw: one pass for the maximum, and from there only what the parameters need.

use super::scan::{self, CHUNK, RowFault, key_index, key_logit};
use crate::round::SamplerConfig;
use crate::round::philox::{Purpose, uniform53};
use crate::round::weight::{ONE, Softmax, effective_temperature, fraction, mass, min_weight};

/// Reusable buffers of [`super::Sampler::draw`]; grows to the largest vocabulary seen, then allocates nothing.
#[derive(Debug, Default)]
pub struct Scratch {
    /// The row after bias and penalties.
    pub(super) row: Vec<f32>,
    pub(super) pick: Pick,
}

#[derive(Debug, Default)]
pub(super) struct Pick {
    chunk_max: Vec<f32>,
    chunk_sum: Vec<u64>,
    bounds: Vec<f32>,
    keys: Vec<u64>,
    weights: Vec<u64>,
    /// Tokens that can still be drawn, in order of id.
    kept: Vec<Weighted>,
    /// The same, while the nucleus is searched.
    ranked: Vec<Weighted>,
}

/// A token with its rank key and its weight.
#[derive(Debug, Clone, Copy)]
struct Weighted {
    key: u64,
    weight: u64,
}

impl Scratch {
    /// [`super::likeliest`] for at most `count` tokens, no more than the row has.
    pub(super) fn likeliest(&mut self, row: &[f32], count: usize) -> Vec<u32> {
        let Pick { chunk_max, bounds, keys, .. } = &mut self.pick;
        if count == 0 || scan::scan(row, chunk_max).is_err() {
            return Vec::new();
        }
        scan::top_k(row, chunk_max, count, keys, bounds);
        keys.sort_unstable();
        keys.iter().map(|&key| key_index(key) as u32).collect()
    }
}

/// The token of a row whose bias and penalties are applied.
pub(super) fn token(config: &SamplerConfig, row: &[f32], position: u32, s: &mut Pick) -> Result<usize, RowFault> {
    if config.temperature == 0.0 {
        return scan::argmax(row);
    }
    let max = scan::scan(row, &mut s.chunk_max)?;
    let softmax = Softmax::new(max, config.temperature);
    let u = uniform53(config.seed, position, Purpose::TARGET);
    if !s.cut(config, softmax, row) {
        let total = scan::sum_row(softmax, row, &s.chunk_max, &mut s.chunk_sum);
        return Ok(s.invert_row(softmax, row, fraction(u, total)));
    }
    let total = s.kept.iter().map(|w| w.weight).sum();
    Ok(invert(s.kept.iter().map(|w| (key_index(w.key), w.weight)), fraction(u, total)))
}

/// The distribution from which [`token`] draws: each logit of such a row less the largest, over the temperature where
/// there is one, and -inf for tokens that top-k, top-p and min-p leave out.
pub(super) fn processed(config: &SamplerConfig, row: &[f32], s: &mut Pick, out: &mut [f32]) -> Result<(), RowFault> {
    let max = scan::scan(row, &mut s.chunk_max)?;
    let greedy = config.temperature == 0.0;
    let over = if greedy { 1.0 } else { effective_temperature(config.temperature) };
    let scaled = |x: f32| ((f64::from(x) - f64::from(max)) / over) as f32;
    if greedy || !s.cut(config, Softmax::new(max, config.temperature), row) {
        out.iter_mut().zip(row).for_each(|(o, &x)| *o = scaled(x));
        return Ok(());
    }
    out.fill(f32::NEG_INFINITY);
    for token in s.kept.iter().map(|w| key_index(w.key)) {
        out[token] = scaled(row[token]);
    }
    Ok(())
}

/// The first token whose cumulative weight exceeds `target`. There is one where `target` is less than the total.
fn invert(weights: impl Iterator<Item = (usize, u64)>, mut target: u64) -> usize {
    let mut last = 0;
    for (token, weight) in weights {
        if target < weight {
            return token;
        }
        target -= weight;
        last = token;
    }
    last
}

impl Pick {
    /// `kept` := the tokens of a scanned row that top-k, top-p and min-p leave; whether these leave any out.
    fn cut(&mut self, config: &SamplerConfig, softmax: Softmax, row: &[f32]) -> bool {
        let floor = min_weight(config.min_p);
        if config.top_k > 0 && config.top_k < row.len() as i64 {
            scan::top_k(row, &self.chunk_max, config.top_k as usize, &mut self.keys, &mut self.bounds);
            self.keys.sort_unstable_by_key(|&k| key_index(k));
            self.weigh(softmax);
            if config.top_p < 1.0 {
                let total = self.kept.iter().map(|w| w.weight).sum();
                self.cut_to_nucleus(mass(config.top_p, total));
            }
        } else if config.top_p < 1.0 {
            let total = scan::sum_row(softmax, row, &self.chunk_max, &mut self.chunk_sum);
            let target = mass(config.top_p, total);
            // Tokens lighter than (total - target) / V cannot be needed: all of them together weigh less than
            // total - target, so the others reach the target.
            self.gather(softmax, row, (total - target) / row.len() as u64);
            if self.kept.iter().map(|w| w.weight).sum::<u64>() < target {
                self.gather(softmax, row, 0);
            }
            self.cut_to_nucleus(target);
        } else if floor > 0 {
            self.gather(softmax, row, floor);
        } else {
            return false;
        }
        self.kept.retain(|w| w.weight >= floor);
        true
    }

    /// [`invert`] over a whole row that was summed.
    fn invert_row(&mut self, softmax: Softmax, row: &[f32], target: u64) -> usize {
        let mut left = target;
        for (c, (chunk, &sum)) in row.chunks(CHUNK).zip(&self.chunk_sum).enumerate() {
            if left < sum {
                scan::weigh(softmax, chunk.iter().copied(), &mut self.weights);
                return c * CHUNK + invert(self.weights.iter().copied().enumerate(), left);
            }
            left -= sum;
        }
        row.len() - 1
    }

    /// `kept` := every token of at least this weight and perhaps some lighter ones, whole ranks, by id.
    fn gather(&mut self, softmax: Softmax, row: &[f32], weight: u64) {
        // Half a quantum for the rounding of weights; the rest covers exponential and logarithm by far.
        let cut = |w: f64| (((w - 0.5) / ONE as f64).ln() - 1e-3) as f32;
        let cut = if weight == 0 { f32::NEG_INFINITY } else { cut(weight as f64) };
        self.keys.clear();
        scan::gather(row, &self.chunk_max, |x| softmax.log_weight(x) >= cut, &mut self.keys);
        self.weigh(softmax);
    }

    /// `kept` := `keys` with their weights.
    fn weigh(&mut self, softmax: Softmax) {
        scan::weigh(softmax, self.keys.iter().map(|&key| key_logit(key)), &mut self.weights);
        self.kept.clear();
        self.kept.extend(self.keys.iter().zip(&self.weights).map(|(&key, &weight)| Weighted { key, weight }));
    }

    /// Keep the shortest prefix of the ranking whose weight reaches `target`; `kept` must weigh that much.
    ///
    /// A quickselect by weight: halve at the median rank, go on in the half where the target is reached.
    fn cut_to_nucleus(&mut self, mut target: u64) {
        self.ranked.clear();
        self.ranked.extend_from_slice(&self.kept);
        let mut range = self.ranked.as_mut_slice();
        while range.len() > 32 {
            let half = range.len() / 2;
            range.select_nth_unstable_by_key(half, |w| w.key);
            let (upper, lower) = range.split_at_mut(half);
            let above = upper.iter().map(|w| w.weight).sum();
            if target <= above {
                range = upper;
            } else {
                target -= above;
                range = lower;
            }
        }
        range.sort_unstable_by_key(|w| w.key);
        for w in range {
            if target <= w.weight {
                let last = w.key;
                self.kept.retain(|w| w.key <= last);
                return;
            }
            target -= w.weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inverse_cdf_gives_each_token_exactly_its_weight() {
        let weights = [0, 3, 0, 0, 2, 1, 0];
        let token = |target| invert(weights.into_iter().enumerate(), target);
        assert_eq!((0..6).map(token).collect::<Vec<_>>(), [1, 1, 1, 4, 4, 5]);
        assert_eq!(fraction((1 << 53) - 1, 6), 5, "the largest random number stays below the total");
        assert_eq!(fraction(0, u64::MAX), 0);
    }

    /// Down to single quanta, where rounding is largest.
    #[test]
    fn gathers_miss_no_token_of_the_weight_asked_for() {
        let row: Vec<f32> = (0..60_000).map(|i| -(i as f32) * 5e-4).collect();
        let softmax = Softmax::new(0.0, 1.0);
        let mut pick = Pick::default();
        scan::scan(&row, &mut pick.chunk_max).unwrap();
        for weight in (0..40).chain([1000, 123_456_789, ONE / 3, ONE]) {
            pick.gather(softmax, &row, weight);
            let kept: Vec<usize> = pick.kept.iter().map(|w| key_index(w.key)).collect();
            let heavy = row.iter().filter(|&&x| softmax.weight(x) >= weight).count();
            assert_eq!(kept, (0..kept.len()).collect::<Vec<_>>(), "whole ranks, by id");
            assert!((heavy..=heavy + 4000).contains(&kept.len()), "{weight}: {} of {heavy}", kept.len());
        }
    }
}
