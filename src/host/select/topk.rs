//! Log-softmax and top-k of draft logits in one read from memory.

use crate::bounds::MAX_TOPK;
use crate::error::{Error, Result, in_range};
use crate::host::sample::scan::{self, RowFault, key_index, key_logit};
use crate::host::threads::{self, num_threads};
use crate::round::weight::{ONE, Softmax};

/// Time of a logit on one thread, in picoseconds: it decides whether threads pay.
const COST_PS: usize = 1000;

/// The k most probable entries of each row, with their log-probabilities; buffers are reused between calls.
#[derive(Debug, Default)]
pub struct TopK {
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    /// Rows that have no distribution, ascending.
    faults: Vec<(usize, RowFault)>,
    workers: Vec<Worker>,
}

#[derive(Debug, Default)]
struct Worker {
    chunk_max: Vec<f32>,
    chunk_sum: Vec<u64>,
    bounds: Vec<f32>,
    keys: Vec<u64>,
    faults: Vec<(usize, RowFault)>,
}

impl TopK {
    /// Compute for `logits` `[rows, vocab]`: ids and log-probabilities `[rows, k]`, best first, ties by lower id.
    ///
    /// A row with NaN, +inf or no finite value has no distribution: it gets the ids `0..k` with log-probability -inf,
    /// and is listed by [`TopK::faults`]. The other rows are what they are without it.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] unless `1 <= k <= min(vocab, 64)`; [`Error::Mismatch`] unless `logits` has whole rows.
    pub fn compute(&mut self, logits: &[f32], vocab: usize, k: usize) -> Result<()> {
        in_range("topk", k as i128, 1, i128::from(MAX_TOPK).min(vocab as i128))?;
        if !logits.len().is_multiple_of(vocab) {
            let want = format!("rows of {vocab} (the draft vocabulary)");
            return Err(Error::Mismatch { operand: "draft logits", got: format!("{} values", logits.len()), want });
        }
        let rows = logits.len() / vocab;
        self.faults.clear();
        self.ids.resize(rows * k, 0);
        self.log_probs.resize(rows * k, 0.0);
        let cost_ns = logits.len() * COST_PS / 1000;
        let threads = if cost_ns < threads::WORTH_A_REGION_NS { 1 } else { num_threads().min(rows) };
        if self.workers.len() < threads {
            self.workers.resize_with(threads, Worker::default);
        }
        let share = rows.div_ceil(threads).max(1);
        let ids = self.ids.chunks_mut(share * k);
        let log_probs = self.log_probs.chunks_mut(share * k);
        let parts = logits.chunks(share * vocab).zip(ids.zip(log_probs)).zip(&mut self.workers);
        if threads <= 1 {
            parts.for_each(|((logits, (ids, log_probs)), worker)| worker.rows(logits, vocab, k, ids, log_probs));
        } else {
            threads::for_each(parts.collect(), cost_ns, |((logits, (ids, log_probs)), worker)| {
                worker.rows(logits, vocab, k, ids, log_probs);
            });
        }
        let used = rows.div_ceil(share);
        for (w, worker) in self.workers[..used].iter().enumerate() {
            self.faults.extend(worker.faults.iter().map(|&(row, fault)| (w * share + row, fault)));
        }
        Ok(())
    }

    /// Rows of the last call that have no distribution, ascending, each with its error ([`Error::NonFinite`],
    /// `draft logits`, request -1).
    pub fn faults(&self) -> impl Iterator<Item = (usize, Error)> {
        self.faults.iter().map(|&(row, fault)| (row, fault.at("draft logits", -1, row as i64, -1)))
    }

    /// Column of each entry, `[rows, k]`.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Log-probability of each entry, `[rows, k]`; never above 0, never NaN.
    pub fn log_probs(&self) -> &[f32] {
        &self.log_probs
    }
}

impl Worker {
    fn rows(&mut self, logits: &[f32], vocab: usize, k: usize, ids: &mut [u32], log_probs: &mut [f32]) {
        let outputs = ids.chunks_exact_mut(k).zip(log_probs.chunks_exact_mut(k));
        self.faults.clear();
        for (row, (logits, (ids, log_probs))) in logits.chunks_exact(vocab).zip(outputs).enumerate() {
            if let Err(fault) = self.row(logits, ids, log_probs) {
                ids.iter_mut().enumerate().for_each(|(j, id)| *id = j as u32);
                log_probs.fill(f32::NEG_INFINITY);
                self.faults.push((row, fault));
            }
        }
    }

    fn row(&mut self, row: &[f32], ids: &mut [u32], log_probs: &mut [f32]) -> std::result::Result<(), RowFault> {
        let max = scan::scan(row, &mut self.chunk_max)?;
        scan::top_k(row, &self.chunk_max, ids.len(), &mut self.keys, &mut self.bounds);
        self.keys.sort_unstable();
        let softmax = Softmax::new(max, 1.0);
        let total = scan::sum_row(softmax, row, &self.chunk_max, &mut self.chunk_sum);
        let log_total = (total as f64 / ONE as f64).ln();
        for ((id, log_prob), &key) in ids.iter_mut().zip(log_probs).zip(&self.keys) {
            *id = key_index(key) as u32;
            // Never above 0, so that a child never scores above its parent: trees are closed under ancestors.
            *log_prob = ((f64::from(key_logit(key)) - f64::from(max) - log_total) as f32).min(0.0);
        }
        Ok(())
    }
}

/// The plain form of [`TopK::compute`] for one row: a sort, and a softmax in f64 (`log_probs` agree to about 1e-6).
pub fn reference_topk(row: &[f32], k: usize) -> Vec<(u32, f64)> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let log_total = row.iter().map(|&x| (f64::from(x) - f64::from(max)).exp()).sum::<f64>().ln();
    let mut ids: Vec<usize> = (0..row.len()).collect();
    ids.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap_or(std::cmp::Ordering::Equal));
    ids.iter().take(k).map(|&i| (i as u32, f64::from(row[i]) - f64::from(max) - log_total)).collect()
}
