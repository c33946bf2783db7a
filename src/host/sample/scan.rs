//! Passes over a row of logits: maxima, weights and gathers, in forms that the compiler vectorises.
//!
//! A row is read in chunks. [`scan`] stores the maximum of each chunk, so that later steps (top-k, nucleus, min-p)
//! touch only the few chunks that can hold what they look for.

use crate::round::weight::{ROUNDER, Softmax};
use crate::simd::dispatch;

/// Elements of a chunk.
pub(crate) const CHUNK: usize = 128;
/// Vector elements that the loops below are written for; the compiler maps them to what the machine has.
const WIDTH: usize = 16;

/// Reason why a row cannot be sampled from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RowFault {
    /// `NaN`, `+inf` or `all -inf`.
    pub(crate) value: &'static str,
    /// First offending column.
    pub(crate) index: usize,
}

impl RowFault {
    pub(crate) fn at(self, what: &'static str, request: i64, row: i64, position: i64) -> crate::Error {
        crate::Error::NonFinite { what, value: self.value, request, row, position, index: self.index as i64 }
    }
}

/// Maximum of a chunk, and whether it holds a NaN (which the maximum ignores).
#[inline(always)]
fn max_and_nan(chunk: &[f32]) -> (f32, bool) {
    let (blocks, tail) = chunk.as_chunks::<WIDTH>();
    let mut max = [f32::NEG_INFINITY; WIDTH];
    let mut nan = [0u32; WIDTH]; // as wide as the floats, so that both loops vectorise together
    for block in blocks {
        for l in 0..WIDTH {
            let x = block[l];
            max[l] = if x > max[l] { x } else { max[l] };
            nan[l] |= u32::from(x.is_nan());
        }
    }
    let (mut m, mut n) = (f32::NEG_INFINITY, nan.iter().fold(0, |a, b| a | b) != 0);
    for &x in max.iter().chain(tail) {
        m = if x > m { x } else { m };
        n |= x.is_nan();
    }
    (m, n)
}

/// The fault of a row, if it has one: NaN first, then +inf, then no finite value at all.
#[cold]
pub(crate) fn fault(row: &[f32]) -> Option<RowFault> {
    let at = |value, index| Some(RowFault { value, index });
    if let Some(i) = row.iter().position(|x| x.is_nan()) {
        return at("NaN", i);
    }
    if let Some(i) = row.iter().position(|&x| x == f32::INFINITY) {
        return at("+inf", i);
    }
    if row.iter().all(|&x| x == f32::NEG_INFINITY) { at("all -inf", 0) } else { None }
}

fn checked_max(row: &[f32], max: f32, nan: bool) -> Result<f32, RowFault> {
    if !nan && max.is_finite() {
        return Ok(max);
    }
    fault(row).map_or(Ok(max), Err)
}

/// Index of the largest value, the lowest on ties.
pub(crate) fn argmax(row: &[f32]) -> Result<usize, RowFault> {
    const BLOCK: usize = 1024; // re-read once, from L1, to find the index
    let (max, nan, start) = dispatch(
        #[inline(always)]
        || {
            let (mut max, mut nan, mut start) = (f32::NEG_INFINITY, false, 0);
            for (i, block) in row.chunks(BLOCK).enumerate() {
                let (m, n) = max_and_nan(block);
                nan |= n;
                if m > max {
                    (max, start) = (m, i * BLOCK);
                }
            }
            (max, nan, start)
        },
    );
    let max = checked_max(row, max, nan)?;
    let block = &row[start..row.len().min(start + BLOCK)];
    // A comparison of whole vectors first: a search that may stop at each element does not vectorise.
    let near = block.chunks(WIDTH).position(|b| b.iter().fold(false, |any, &x| any | (x == max))).unwrap_or(0) * WIDTH;
    Ok(start + near + block[near..].iter().position(|&x| x == max).unwrap_or(0))
}

/// Maximum of the row; fills `chunk_max` with the maximum of each [`CHUNK`].
pub(crate) fn scan(row: &[f32], chunk_max: &mut Vec<f32>) -> Result<f32, RowFault> {
    chunk_max.resize(row.len().div_ceil(CHUNK), 0.0);
    let (max, nan) = dispatch(
        #[inline(always)]
        || {
            let (mut max, mut nan) = (f32::NEG_INFINITY, false);
            for (chunk, out) in row.chunks(CHUNK).zip(chunk_max.iter_mut()) {
                let (m, n) = max_and_nan(chunk);
                nan |= n;
                max = if m > max { m } else { max };
                *out = m;
            }
            (max, nan)
        },
    );
    checked_max(row, max, nan)
}

/// Total weight of a scanned row; `chunk_sum` gets the weight of each [`CHUNK`].
pub(crate) fn sum_row(softmax: Softmax, row: &[f32], chunk_max: &[f32], chunk_sum: &mut Vec<u64>) -> u64 {
    chunk_sum.resize(chunk_max.len(), 0);
    dispatch(
        #[inline(always)]
        || {
            let mut total = 0;
            for ((chunk, &max), out) in row.chunks(CHUNK).zip(chunk_max).zip(chunk_sum.iter_mut()) {
                *out = if vanishes(softmax, max) { 0 } else { sum(softmax, chunk) };
                total += *out;
            }
            total
        },
    )
}

/// The weight of each logit.
pub(crate) fn weigh(softmax: Softmax, logits: impl ExactSizeIterator<Item = f32> + Clone, weights: &mut Vec<u64>) {
    weights.resize(logits.len(), 0);
    dispatch(
        #[inline(always)]
        || {
            for (weight, x) in weights.iter_mut().zip(logits.clone()) {
                *weight = softmax.weight(x);
            }
        },
    );
}

/// Sum of the weights of a chunk.
#[inline(always)]
fn sum(softmax: Softmax, chunk: &[f32]) -> u64 {
    let (blocks, tail) = chunk.as_chunks::<WIDTH>();
    let mut acc = [0u64; WIDTH];
    for block in blocks {
        for l in 0..WIDTH {
            acc[l] = acc[l].wrapping_add(softmax.rounded(block[l]));
        }
    }
    let total = acc.iter().fold(0u64, |a, &b| a.wrapping_add(b));
    let base = ROUNDER.to_bits().wrapping_mul((blocks.len() * WIDTH) as u64);
    tail.iter().fold(total.wrapping_sub(base), |a, &x| a + softmax.weight(x))
}

/// True if every logit up to `x` surely has weight 0: `exp(-29) * 2^40 < 1/3`.
#[inline(always)]
fn vanishes(softmax: Softmax, x: f32) -> bool {
    softmax.log_weight(x) < -29.0
}

/// A sort key: ascending keys are descending logits, lower index first on ties (0.0 and -0.0 tie).
#[inline(always)]
pub(crate) fn rank_key(x: f32, index: usize) -> u64 {
    let bits = (x + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!ascending) << 32 | index as u64
}

/// The logit of a key, with -0.0 as 0.0.
#[inline(always)]
pub(crate) fn key_logit(key: u64) -> f32 {
    let ascending = !((key >> 32) as u32);
    f32::from_bits(if ascending >> 31 == 1 { ascending & !(1 << 31) } else { !ascending })
}

/// The index of a key.
#[inline(always)]
pub(crate) fn key_index(key: u64) -> usize {
    key as u32 as usize
}

/// Append the keys of all logits that satisfy `keep`, in index order. `keep` must be monotone (true for every value
/// above one for which it is true), so that a chunk is skipped by its maximum.
pub(crate) fn gather(row: &[f32], chunk_max: &[f32], keep: impl Fn(f32) -> bool, keys: &mut Vec<u64>) {
    dispatch(
        #[inline(always)]
        || {
            for (c, (chunk, &max)) in row.chunks(CHUNK).zip(chunk_max).enumerate() {
                if keep(max) {
                    gather_chunk(chunk, c * CHUNK, &keep, keys);
                }
            }
        },
    );
}

#[inline(always)]
fn gather_chunk(chunk: &[f32], start: usize, keep: impl Fn(f32) -> bool, keys: &mut Vec<u64>) {
    for (b, block) in chunk.chunks(WIDTH).enumerate() {
        // Most blocks hold nothing: one vector comparison instead of a branch an element.
        if block.iter().fold(false, |any, &x| any | keep(x)) {
            let start = start + b * WIDTH;
            keys.extend(block.iter().enumerate().filter(|&(_, &x)| keep(x)).map(|(i, &x)| rank_key(x, start + i)));
        }
    }
}

/// Leave the keys of the `k` best logits of a scanned row in `keys`, in no particular order; `1 <= k <= row.len()`.
///
/// A bound from below on the k-th largest logit tells what to look at: at first the k-th largest chunk maximum, then
/// the k-th largest of what was found so far, whenever that has grown to a few times k. `bounds` is scratch.
pub(crate) fn top_k(row: &[f32], chunk_max: &[f32], k: usize, keys: &mut Vec<u64>, bounds: &mut Vec<f32>) {
    let mut cut = if k <= chunk_max.len() {
        bounds.clear();
        bounds.extend_from_slice(chunk_max);
        *bounds.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    } else {
        f32::NEG_INFINITY
    };
    keys.clear();
    let limit = 4 * k + CHUNK;
    dispatch(
        #[inline(always)]
        || {
            for (c, (chunk, &max)) in row.chunks(CHUNK).zip(chunk_max).enumerate() {
                if max >= cut {
                    gather_chunk(chunk, c * CHUNK, |x| x >= cut, keys);
                    if keys.len() > limit {
                        cut = key_logit(*keys.select_nth_unstable(k - 1).1);
                        keys.truncate(k);
                    }
                }
            }
        },
    );
    if keys.len() > k {
        keys.select_nth_unstable(k - 1);
        keys.truncate(k);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::round::weight::ONE;

    /// Holds for every length, and for chunks of every magnitude, down to those that are skipped.
    #[test]
    fn sums_equal_the_sum_of_weights() {
        let softmax = Softmax::new(3.0, 0.7);
        let row: Vec<f32> = (0..40 * CHUNK).map(|i| 3.0 - (i * 37 % 101) as f32 * 0.01 - (i / CHUNK) as f32).collect();
        let (mut chunk_max, mut chunk_sum) = (Vec::new(), Vec::new());
        for n in (1..2 * CHUNK + 2).chain([row.len() - 1, row.len()]) {
            scan(&row[..n], &mut chunk_max).unwrap();
            let total = sum_row(softmax, &row[..n], &chunk_max, &mut chunk_sum);
            assert_eq!(total, row[..n].iter().map(|&x| softmax.weight(x)).sum::<u64>());
            for (chunk, &sum) in row[..n].chunks(CHUNK).zip(&chunk_sum) {
                assert_eq!(sum, chunk.iter().map(|&x| softmax.weight(x)).sum::<u64>());
            }
        }
    }

    /// A chunk is skipped only where each of its weights is 0, to the last logit that still has one.
    #[test]
    fn chunks_at_the_edge_of_vanishing_count() {
        let softmax = Softmax::new(0.0, 1.0);
        let (mut chunk_max, mut chunk_sum) = (Vec::new(), Vec::new());
        let mut row = vec![f32::NEG_INFINITY; 3 * CHUNK];
        row[0] = 0.0;
        let mut counted = 0;
        for i in 0..3000 {
            let x = -27.5 - i as f32 * 1e-3; // to -30.5: exp(-28.42) * 2^40 is a half
            row[CHUNK..2 * CHUNK].fill(x);
            scan(&row, &mut chunk_max).unwrap();
            let total = sum_row(softmax, &row, &chunk_max, &mut chunk_sum);
            assert_eq!(total, ONE + CHUNK as u64 * softmax.weight(x), "{x}");
            counted += softmax.weight(x);
        }
        assert_eq!(counted, 920, "a weight of 1 down to -28.419 = ln(2^-41)");
    }

    #[test]
    fn keys_order_by_value_then_index_and_give_the_value_back() {
        let values = [f32::MAX, 1.5, 1e-45, 0.0, -0.0, -1e-45, -2.0, f32::MIN, f32::NEG_INFINITY];
        for (i, &a) in values.iter().enumerate() {
            assert_eq!(key_logit(rank_key(a, 9)), a);
            assert_eq!(key_index(rank_key(a, 9)), 9);
            for &b in &values[i + 1..] {
                assert_eq!(rank_key(a, 5) < rank_key(b, 4), a > b, "{a} {b}");
            }
            assert!(rank_key(a, 4) < rank_key(a, 5));
        }
    }

    #[test]
    fn faults_name_the_first_offender() {
        let mut row = vec![0.5f32; 3000];
        assert_eq!(argmax(&row), Ok(0));
        row[2999] = 1.0;
        assert_eq!(argmax(&row), Ok(2999));
        row[2500] = f32::INFINITY;
        assert_eq!(argmax(&row), Err(RowFault { value: "+inf", index: 2500 }));
        row[2700] = f32::NAN;
        row[2701] = f32::NAN;
        assert_eq!(argmax(&row), Err(RowFault { value: "NaN", index: 2700 }));
        assert_eq!(scan(&row, &mut Vec::new()), Err(RowFault { value: "NaN", index: 2700 }));
        let row = vec![f32::NEG_INFINITY; 300];
        assert_eq!(argmax(&row), Err(RowFault { value: "all -inf", index: 0 }));
        assert_eq!(scan(&row, &mut Vec::new()), Err(RowFault { value: "all -inf", index: 0 }));
        let mut row = vec![f32::NEG_INFINITY; 300];
        row[299] = f32::MIN;
        assert_eq!(argmax(&row), Ok(299));
    }
}
