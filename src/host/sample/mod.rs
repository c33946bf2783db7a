//! The one function that turns a row of target logits into a token.
//!
//! [`Sampler::draw`] serves plain decoding and every node of a tree alike: a token depends only on the logits, the
//! request's configuration and history, the path to the node, and the absolute position, which keys the random
//! number ([`crate::round::philox`]). That is why speculation cannot change a seeded output.
//!
//! Processors, in this order: allowed tokens and the grammar's mask, as a bias of -inf; logit bias; repetition penalty
//! (over prompt, output and path); frequency and presence penalties (over output and path); temperature; top-k; top-p
//! (the smallest set of mass >= p of what top-k kept); min-p (relative to the most probable token). Then the inverse CDF
//! in the order of token ids. Temperature 0 takes the largest logit after bias and penalties, the lowest id on ties.
//! Ranks (top-k, top-p) are by logit, ties by lower id.
//!
//! Probabilities are integers: a token's weight is `exp((logit - max) / T)` in multiples of 2^-40. Their sums are exact
//! in any order, so a draw does not depend on vector width, threads or machine, and top-p and the inverse CDF have no
//! rounding of their own; against the real softmax, a distribution is off by less than the rounding of f32 logits.
//!
//! ```
//! use specrs::host::sample::{Sampler, Scratch};
//! use specrs::round::SamplerConfig;
//! let config = SamplerConfig { temperature: 0.8, top_p: 0.9, seed: 7, ..SamplerConfig::default() };
//! let mut sampler = Sampler::new(4, &[1, 2], config)?;
//! let token = sampler.draw(&mut Scratch::default(), &[0.1, 3.0, 2.5, -1.0], 2, &[])?;
//! sampler.commit(&[token])?; // what was drawn is now history
//! # Ok::<(), specrs::Error>(())
//! ```

mod draw;
mod history;
pub mod reference;
pub(crate) mod scan;
#[cfg(test)]
mod twin;

pub use draw::Scratch;

use crate::error::{Error, Result, in_range};
use crate::grammar::Tracker;
use crate::round::{SamplerConfig, TokenEdits, TokenMask};
use history::History;
use scan::RowFault;

/// The operand that a fault names where the model's logits are at fault.
pub(crate) const MODEL_LOGITS: &str = "target logits";
/// The operand that a fault names where the model's logits can be sampled, but not what bias and penalties make of them.
pub(crate) const EDITED_LOGITS: &str = "target logits after logit_bias and penalties";

/// A checked configuration and the token history of one request.
#[derive(Debug, Clone)]
pub struct Sampler {
    vocab: u32,
    config: SamplerConfig,
    /// Empty where no penalty reads it.
    history: History,
    /// Grammar that the text must follow; other samplers of the request may have the same.
    grammar: Option<Tracker>,
}

/// The `count` largest logits of a row, the largest first, and among equal ones the lower token first; as many as there
/// are. Empty where the row has NaN or no finite value.
pub fn likeliest(scratch: &mut Scratch, row: &[f32], count: usize) -> Vec<u32> {
    scratch.likeliest(row, count.min(row.len()))
}

impl Sampler {
    /// A sampler for logits rows of `vocab` columns and a request whose prompt is `prompt` (token ids).
    ///
    /// # Errors
    /// [`Error::OutOfRange`] or [`Error::Invalid`] naming the parameter; a prompt token outside the vocabulary.
    pub fn new(vocab: u32, prompt: &[i32], config: SamplerConfig) -> Result<Self> {
        let config = config.checked(vocab)?;
        check_tokens("prompt token", prompt, vocab)?;
        let mut history = History::default();
        if config.repetition_penalty != 1.0 {
            history.add_prompt(prompt);
        }
        Ok(Self { vocab, config, history, grammar: None })
    }

    /// The same, under a grammar: tokens that it does not allow behind the path have no probability.
    ///
    /// The tracker is not this sampler's: commit the output to it too.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a grammar of another vocabulary.
    pub fn under(mut self, grammar: Tracker) -> Result<Self> {
        if grammar.vocab() != self.vocab {
            let (got, want) = (format!("{} tokens", grammar.vocab()), format!("{} (the sampler's)", self.vocab));
            return Err(Error::Mismatch { operand: "vocabulary of the grammar", got, want });
        }
        self.grammar = Some(grammar);
        Ok(self)
    }

    /// Columns of a logits row.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }

    /// The configuration.
    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// Add emitted tokens to the output. The tree's root counts as emitted: commit it before the round that
    /// verifies under it, as an engine does that commits all tokens of a round when the round ends.
    ///
    /// # Errors
    /// A token outside the vocabulary; nothing is committed then.
    pub fn commit(&mut self, tokens: &[i32]) -> Result<()> {
        check_tokens("output token", tokens, self.vocab)?;
        if self.config.penalises() {
            self.history.add_output(tokens);
        }
        Ok(())
    }

    /// Bias and history by token, for a device that draws by this sampler; without the [`Sampler::masks`].
    pub fn edits(&self) -> TokenEdits {
        self.history.edits(&self.config)
    }

    /// The same with the mask behind the output as a bias of -inf: for one draw, where a device reads no masks.
    pub fn masked_edits(&self) -> TokenEdits {
        let [mask] = self.masks(&[&[]]).try_into().unwrap_or([None]);
        mask.map_or_else(|| self.edits(), |mask| self.edits().masked(&mask))
    }

    /// True if tokens are drawn under masks.
    pub fn masked(&self) -> bool {
        self.grammar.is_some() || self.config.allowed.is_some()
    }

    /// Tokens that a device may draw behind each of these paths, which need not be walked; `None` for all. Where a
    /// path's grammar fails there is none: the device finds no token there, and the host says why.
    pub fn masks(&self, paths: &[&[i32]]) -> Vec<Option<TokenMask>> {
        let none = || TokenMask::of(self.vocab, []).ok();
        let of_grammar = |path: &[i32]| match &self.grammar {
            None => None,
            Some(grammar) if path.is_empty() => grammar.find(path).unwrap_or_else(|_| none()),
            Some(grammar) => grammar.mask_ahead(path),
        };
        let both = |mask: Option<TokenMask>| match (mask, &self.config.allowed) {
            (Some(mask), Some(allowed)) => mask.and(allowed),
            (mask, allowed) => mask.or_else(|| allowed.clone()),
        };
        paths.iter().map(|path| both(of_grammar(path))).collect()
    }

    /// The token at absolute `position`, given its `logits` (`[vocab]`, f32) and the `path`: the tokens between the
    /// committed output and this one (at a tree node: the drafts from below the root down to the node).
    ///
    /// # Errors
    /// [`Error::NonFinite`] (with the position; request and row -1) for NaN, +inf or no finite value: `what` is `target logits`, or
    /// `target logits after logit_bias and penalties` where only those made it so; [`Error::Mismatch`] for a row of another length; a path token outside the vocabulary.
    pub fn draw(&self, scratch: &mut Scratch, logits: &[f32], position: u32, path: &[i32]) -> Result<i32> {
        self.check_columns("logits row", logits.len())?;
        check_tokens("path token", path, self.vocab)?;
        self.draw_unchecked(scratch, logits, position, path).map_err(|f| f.at(-1, -1, position))
    }

    /// [`Sampler::draw`] after its checks of lengths and tokens.
    pub(crate) fn draw_unchecked(
        &self,
        scratch: &mut Scratch,
        logits: &[f32],
        position: u32,
        path: &[i32],
    ) -> std::result::Result<i32, DrawFault> {
        self.edited(scratch, logits, path, |row, pick| draw::token(&self.config, row, position, pick)).map(|t| t as i32) // < vocab, which fits i32
    }

    /// The distribution from which [`Sampler::draw`] draws: each logit, after masks, bias and penalties, less the
    /// largest of them; over the temperature where that is not 0; -inf for tokens that are banned, or that top-k, top-p
    /// and min-p leave out.
    ///
    /// Its softmax is the distribution of the draw up to the rounding of f32; that of a greedy draw is what the model
    /// says after the edits. Overwrites `out`.
    ///
    /// # Errors
    /// Those of [`Sampler::draw`], without a position; [`Error::Mismatch`] for an `out` of another length.
    pub fn processed(&self, scratch: &mut Scratch, logits: &[f32], path: &[i32], out: &mut [f32]) -> Result<()> {
        for (operand, len) in [("logits row", logits.len()), ("processed row", out.len())] {
            self.check_columns(operand, len)?;
        }
        check_tokens("path token", path, self.vocab)?;
        self.edited(scratch, logits, path, |row, pick| draw::processed(&self.config, row, pick, out))
            .map_err(|f| f.error(-1, -1, -1))
    }

    fn check_columns(&self, operand: &'static str, columns: usize) -> Result<()> {
        if columns == self.vocab as usize {
            return Ok(());
        }
        let (got, want) = (format!("{columns} columns"), format!("{} (the vocabulary)", self.vocab));
        Err(Error::Mismatch { operand, got, want })
    }

    /// Call `f` with the row after masks, bias and penalties.
    fn edited<T>(
        &self,
        scratch: &mut Scratch,
        logits: &[f32],
        path: &[i32],
        f: impl FnOnce(&[f32], &mut draw::Pick) -> std::result::Result<T, RowFault>,
    ) -> std::result::Result<T, DrawFault> {
        let Scratch { row, pick } = scratch;
        let mask = self.grammar.as_ref().map_or(Ok(None), |g| g.find(path)).map_err(DrawFault::Grammar)?;
        let edited = if self.config.edits_logits() || mask.is_some() {
            row.clear();
            row.extend_from_slice(logits);
            // Masks come before penalties: an overflow of a penalty on a banned token is no fault.
            let masks = || self.config.allowed.iter().chain(&mask);
            masks().for_each(|m| m.ban(row));
            let logit = |token: i32| {
                let banned = masks().any(|m| !m.contains(token as u32));
                logits[token as usize] + if banned { f32::NEG_INFINITY } else { 0.0 }
            };
            self.history.edit(&self.config, logit, path, row);
            row.as_slice()
        } else {
            logits
        };
        f(edited, pick).map_err(|fault| DrawFault::new(logits, fault, mask.is_some()))
    }
}

/// Reason why no token can be drawn: the fault, and the operand that has it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum DrawFault {
    /// The fault of an operand.
    Row(&'static str, RowFault),
    /// The fault of the grammar: the reason.
    Grammar(String),
}

impl DrawFault {
    /// `fault` is that of the row after bias and penalties; a fault of the model's own `logits` comes first.
    #[cold]
    fn new(logits: &[f32], fault: RowFault, grammar: bool) -> Self {
        match scan::fault(logits) {
            Some(fault) => Self::Row(MODEL_LOGITS, fault),
            None if grammar => Self::Grammar(
                "of the tokens that it allows here, none is left by bias, allowed tokens, bad words and min_tokens"
                    .into(),
            ),
            None => Self::Row(EDITED_LOGITS, fault),
        }
    }

    pub(crate) fn at(self, request: i64, row: i64, position: u32) -> Error {
        self.error(request, row, i64::from(position))
    }

    fn error(self, request: i64, row: i64, position: i64) -> Error {
        match self {
            Self::Row(what, fault) => fault.at(what, request, row, position),
            Self::Grammar(why) => Error::GrammarFailed { why, request, row, position },
        }
    }
}

/// Check that every token is in `0..vocab`.
pub(crate) fn check_tokens(what: &'static str, tokens: &[i32], vocab: u32) -> Result<()> {
    // The branch-free fold vectorises; the search for the culprit runs only when there is one.
    if tokens.iter().fold(true, |ok, &t| ok & ((t as u32) < vocab)) {
        return Ok(());
    }
    tokens.iter().try_for_each(|&t| in_range(what, t, 0, i128::from(vocab) - 1).map(|_| ()))
}
