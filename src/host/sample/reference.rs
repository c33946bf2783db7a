//! The plain form of [`super::Sampler::draw`]: whole-vocabulary sorts, counts by looking. Slow; it states the meaning
//! and the fast form is tested to be equal to it.

use super::scan::RowFault;
use super::{DrawFault, MODEL_LOGITS, check_tokens};
use crate::error::Result;
use crate::round::SamplerConfig;
use crate::round::philox::{Purpose, uniform53};
use crate::round::weight::{Softmax, fraction, mass, min_weight};

/// Logits after bias and penalties.
pub fn processed(config: &SamplerConfig, prompt: &[i32], output: &[i32], logits: &[f32]) -> Vec<f32> {
    let mut row = logits.to_vec();
    for (id, x) in row.iter_mut().enumerate() {
        let id = id as i32;
        if config.allowed.as_ref().is_some_and(|a| !a.contains(id as u32)) {
            *x += f32::NEG_INFINITY;
        }
        for &(token, bias) in &config.logit_bias {
            if token == id {
                *x += bias;
            }
        }
        let outputs = output.iter().filter(|&&t| t == id).count();
        if outputs > 0 || prompt.contains(&id) {
            let r = config.repetition_penalty as f32;
            *x = if *x > 0.0 { *x / r } else { *x * r };
        }
        if outputs > 0 {
            *x = *x - config.frequency_penalty as f32 * outputs as f32 - config.presence_penalty as f32;
        }
    }
    row
}

/// Each token's integer weight after temperature, top-k, top-p and min-p: its probability is its weight over the sum.
/// Temperature 0 gives the argmax all the weight.
///
/// # Errors
/// The faults of a row, as [`super::Sampler::draw`] reports them of the model's logits.
pub fn weights(config: &SamplerConfig, processed: &[f32]) -> Result<Vec<u64>> {
    weigh(config, processed).map_err(|f| f.at(MODEL_LOGITS, -1, -1, -1))
}

fn weigh(config: &SamplerConfig, row: &[f32]) -> std::result::Result<Vec<u64>, RowFault> {
    if let Some(index) = row.iter().position(|x| x.is_nan()) {
        return Err(RowFault { value: "NaN", index });
    }
    if let Some(index) = row.iter().position(|&x| x == f32::INFINITY) {
        return Err(RowFault { value: "+inf", index });
    }
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return Err(RowFault { value: "all -inf", index: 0 });
    }
    let mut ranking: Vec<usize> = (0..row.len()).collect();
    ranking.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap_or(std::cmp::Ordering::Equal)); // stable: lower id first
    let mut weights = vec![0u64; row.len()];
    if config.temperature == 0.0 {
        weights[ranking[0]] = 1;
        return Ok(weights);
    }
    let softmax = Softmax::new(max, config.temperature);
    if config.top_k > 0 {
        ranking.truncate(usize::try_from(config.top_k).unwrap_or(usize::MAX));
    }
    let total: u64 = ranking.iter().map(|&i| softmax.weight(row[i])).sum();
    let target = if config.top_p < 1.0 { mass(config.top_p, total) } else { u64::MAX };
    let mut above = 0;
    for i in ranking {
        let w = softmax.weight(row[i]);
        if above < target && w >= min_weight(config.min_p) {
            weights[i] = w;
        }
        above += w;
    }
    Ok(weights)
}

/// The token that [`super::Sampler::draw`] gives for a request with this prompt and these outputs so far.
///
/// # Errors
/// Those of [`super::Sampler::draw`].
pub fn draw(
    config: &SamplerConfig,
    prompt: &[i32],
    output: &[i32],
    logits: &[f32],
    position: u32,
    path: &[i32],
) -> Result<i32> {
    check_tokens("path token", path, logits.len() as u32)?;
    let output = [output, path].concat();
    let weights = weigh(config, &processed(config, prompt, &output, logits));
    let weights = weights.map_err(|fault| DrawFault::new(logits, fault, false).at(-1, -1, position))?;
    let mut target = fraction(uniform53(config.seed, position, Purpose::TARGET), weights.iter().sum());
    for (id, &w) in weights.iter().enumerate() {
        if target < w {
            return Ok(id as i32);
        }
        target -= w;
    }
    Ok(logits.len() as i32 - 1) // unreachable: the target is less than the sum
}
