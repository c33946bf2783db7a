//! Token history of a request, and the processors that read it: bias and penalties.

use crate::round::{SamplerConfig, TokenEdits};
use std::collections::HashMap;

/// A token that occurred.
#[derive(Debug, Clone, Copy)]
struct Seen {
    token: i32,
    /// Occurrences in the output; 0 for a token of the prompt alone.
    outputs: u32,
}

/// The distinct tokens of prompt and output.
#[derive(Debug, Clone, Default)]
pub(super) struct History {
    seen: Vec<Seen>,
    /// Token -> index into `seen`.
    index: HashMap<i32, usize>,
}

impl History {
    pub(super) fn add_prompt(&mut self, tokens: &[i32]) {
        for &token in tokens {
            self.entry(token);
        }
    }

    pub(super) fn add_output(&mut self, tokens: &[i32]) {
        for &token in tokens {
            self.entry(token).outputs += 1;
        }
    }

    fn entry(&mut self, token: i32) -> &mut Seen {
        let Self { seen, index } = self;
        let i = *index.entry(token).or_insert_with(|| {
            seen.push(Seen { token, outputs: 0 });
            seen.len() - 1
        });
        &mut seen[i]
    }

    /// Bias and history together, by token.
    pub(super) fn edits(&self, config: &SamplerConfig) -> TokenEdits {
        let mut tokens: Vec<i32> = config.logit_bias.iter().map(|&(token, _)| token).collect();
        tokens.extend(self.seen.iter().map(|s| s.token));
        tokens.sort_unstable();
        tokens.dedup();
        let bias = |&token: &i32| {
            let at = config.logit_bias.binary_search_by_key(&token, |&(t, _)| t);
            at.map_or(0.0, |i| config.logit_bias[i].1)
        };
        let outputs = |token: &i32| {
            let count = |&i: &usize| self.seen[i].outputs.min(i32::MAX as u32) as i32;
            self.index.get(token).map_or(-1, count)
        };
        TokenEdits { biases: tokens.iter().map(bias).collect(), outputs: tokens.iter().map(outputs).collect(), tokens }
    }

    /// Apply bias and penalties to `row`, which holds `logit` of each token, as if `path` were already in the output.
    pub(super) fn edit(&self, config: &SamplerConfig, logit: impl Fn(i32) -> f32, path: &[i32], row: &mut [f32]) {
        for &(token, bias) in &config.logit_bias {
            row[token as usize] += bias;
        }
        if !config.penalises() {
            return;
        }
        let penalty = Penalty::new(config);
        for s in &self.seen {
            let x = &mut row[s.token as usize];
            *x = penalty.apply(*x, s.outputs);
        }
        // Tokens of the path, at their first occurrence: start again from the logit, with the whole count.
        for (i, &token) in path.iter().enumerate() {
            if path[..i].contains(&token) {
                continue;
            }
            let on_path = path[i..].iter().filter(|&&t| t == token).count() as u32;
            let outputs = self.index.get(&token).map_or(0, |&i| self.seen[i].outputs);
            let bias = config.logit_bias.binary_search_by_key(&token, |&(t, _)| t);
            let bias = bias.map_or(0.0, |i| config.logit_bias[i].1);
            row[token as usize] = penalty.apply(logit(token) + bias, outputs + on_path);
        }
    }
}

/// The three penalties in f32, the type of the logits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Penalty {
    repetition: f32,
    presence: f32,
    frequency: f32,
}

impl Penalty {
    pub(super) fn new(config: &SamplerConfig) -> Self {
        Self {
            repetition: config.repetition_penalty as f32,
            presence: config.presence_penalty as f32,
            frequency: config.frequency_penalty as f32,
        }
    }

    /// The logit of a token seen in prompt or output, `outputs` times in the output.
    pub(super) fn apply(self, x: f32, outputs: u32) -> f32 {
        let x = if x > 0.0 { x / self.repetition } else { x * self.repetition };
        if outputs == 0 { x } else { x - self.frequency * outputs as f32 - self.presence }
    }
}
