//! Sampling parameters and their check.

use super::token_mask::{MAX_VOCAB, TokenMask};
use crate::error::{Error, Result, in_range};

/// Largest magnitude of a finite `logit_bias`.
///
/// The logits are edited in f32: `x + bias`, then times or over the repetition penalty, then less presence penalty and
/// count times frequency penalty. Within this limit and the next two no model logit of magnitude up to 1e30 overflows,
/// whatever the history: `(1e30 + 1e30) * 1e6 + 1e20 * 2^32 + 1e20 < 3e36`, and f32 ends at 3.4e38.
pub const MAX_BIAS: f32 = 1e30;
/// Largest magnitude of `presence_penalty` and `frequency_penalty`; a count is below 2^32.
pub const MAX_PENALTY: f64 = 1e20;
/// Largest `repetition_penalty`; the smallest is `1 / MAX_REPETITION`.
pub const MAX_REPETITION: f64 = 1e6;

/// Sampling parameters of a request. `SamplerConfig::default()` is greedy.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerConfig {
    /// 0 is greedy; otherwise logits are divided by it. Finite, >= 0; a value below 2.9e-39 counts as that, one above
    /// 8.5e37 as that.
    pub temperature: f64,
    /// Keep the k largest logits; 0 keeps all.
    pub top_k: i64,
    /// Keep the smallest set of most probable tokens whose mass is >= this, in `(0, 1]`.
    pub top_p: f64,
    /// Drop tokens less probable than this times the most probable one's probability, in `[0, 1]`.
    pub min_p: f64,
    /// Key of the random numbers.
    pub seed: u64,
    /// Positive logits of seen tokens are divided by it, others multiplied (CTRL, arXiv:1909.05858). In
    /// `[1 / MAX_REPETITION, MAX_REPETITION]`.
    pub repetition_penalty: f64,
    /// Subtracted from the logit of each token of the output. Magnitude up to [`MAX_PENALTY`].
    pub presence_penalty: f64,
    /// Subtracted as often as the token occurs in the output. Magnitude up to [`MAX_PENALTY`].
    pub frequency_penalty: f64,
    /// Added to the logits of these tokens: (token, bias). Magnitude up to [`MAX_BIAS`], or -inf to forbid a token; each
    /// token once.
    pub logit_bias: Vec<(i32, f32)>,
    /// Tokens that may be drawn; `None` allows all. Of the vocabulary of the logits.
    pub allowed: Option<TokenMask>,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed: None,
        }
    }
}

impl SamplerConfig {
    /// The configuration with its bias sorted by token, if every parameter can be honoured.
    pub(crate) fn checked(mut self, vocab: u32) -> Result<Self> {
        in_range("vocab", vocab, 1, i128::from(MAX_VOCAB))?;
        check("temperature", self.temperature, |t| (0.0..=f64::MAX).contains(&t), "must be finite and >= 0")?;
        in_range("top_k", self.top_k, 0, i128::from(i64::MAX))?;
        check("top_p", self.top_p, |p| p > 0.0 && p <= 1.0, "must be in (0, 1]")?;
        check("min_p", self.min_p, |p| (0.0..=1.0).contains(&p), "must be in [0, 1]")?;
        let repetition = |r: f64| (1.0 / MAX_REPETITION..=MAX_REPETITION).contains(&r);
        check("repetition_penalty", self.repetition_penalty, repetition, "must be in [1e-6, 1e6]")?;
        let penalty = |x: f64| x.abs() <= MAX_PENALTY;
        check("presence_penalty", self.presence_penalty, penalty, "must be in [-1e20, 1e20]")?;
        check("frequency_penalty", self.frequency_penalty, penalty, "must be in [-1e20, 1e20]")?;
        for &(token, bias) in &self.logit_bias {
            in_range("logit_bias token", token, 0, i128::from(vocab) - 1)?;
            let usable = |b: f64| b.abs() <= f64::from(MAX_BIAS) || b == f64::NEG_INFINITY;
            check("logit_bias", f64::from(bias), usable, "must be in [-1e30, 1e30], or -inf to forbid the token")?;
        }
        if let Some(allowed) = self.allowed.as_ref().filter(|a| a.vocab() != vocab) {
            let (got, want) = (format!("{} tokens", allowed.vocab()), format!("{vocab} (the vocabulary)"));
            return Err(Error::Mismatch { operand: "allowed tokens", got, want });
        }
        self.logit_bias.sort_unstable_by_key(|&(token, _)| token);
        if let Some(pair) = self.logit_bias.windows(2).find(|w| w[0].0 == w[1].0) {
            let got = format!("token {} twice", pair[0].0);
            return Err(Error::Invalid { what: "logit_bias", got, why: "give each token one bias".into() });
        }
        Ok(self)
    }

    /// True if a penalty reads the history.
    pub(crate) fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// True if any logit is changed before temperature.
    pub(crate) fn edits_logits(&self) -> bool {
        self.penalises() || !self.logit_bias.is_empty() || self.allowed.is_some()
    }
}

fn check(what: &'static str, got: f64, ok: impl Fn(f64) -> bool, why: &str) -> Result<()> {
    if ok(got) { Ok(()) } else { Err(Error::Invalid { what, got: got.to_string(), why: why.into() }) }
}
