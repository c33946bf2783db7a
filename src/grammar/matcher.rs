//! llguidance's parser of one grammar, and the work that it may take for one request.

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::panic_utils::catch_unwind;
use std::panic::AssertUnwindSafe;

/// Steps of the parser that a request may take beside what every grammar takes: one to two seconds. An unambiguous grammar
/// whose lists are left-recursive takes none.
const MAX_WORK: u64 = 1 << 32;

/// A parser at some place of a text. Once something failed, everything does.
pub(super) struct Matcher {
    parser: TokenParser,
    failed: Option<String>,
    /// Items of a row that cost nothing.
    free: u64,
    work: u64,
}

impl Matcher {
    /// # Errors
    /// A grammar that llguidance refuses.
    pub(super) fn new(parser: anyhow::Result<TokenParser>, free: u64) -> Result<Self, String> {
        let mut parser = parser.map_err(|error| error.to_string())?;
        if parser.is_fresh() {
            parser.start_without_prompt();
        }
        Ok(Self { parser, failed: None, free, work: 0 })
    }

    /// A copy that shares no cache with this one.
    pub(super) fn deep_clone(&self) -> Self {
        Self { parser: self.parser.deep_clone(), failed: self.failed.clone(), ..*self }
    }

    /// Take one step, with the parser's own panics as errors. A row of the parser is one set of items, n of which cost
    /// up to n^3 steps where the grammar is ambiguous: completed ones go through earlier rows, and every item that they
    /// add through its own row.
    fn step<T>(&mut self, call: impl FnOnce(&mut TokenParser) -> anyhow::Result<T>) -> anyhow::Result<T> {
        if let Some(why) = &self.failed {
            anyhow::bail!("{why}");
        }
        let count = |parser: &TokenParser| (parser.parser_stats().rows as u64, parser.parser_stats().all_items as u64);
        let before = count(&self.parser);
        let found = catch_unwind(AssertUnwindSafe(|| call(&mut self.parser)));
        let after = count(&self.parser);
        let (rows, items) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
        let beyond = (items / rows.max(1)).saturating_sub(self.free);
        self.work = self.work.saturating_add(rows.saturating_mul(beyond.saturating_pow(3)));
        let found = match found {
            Ok(_) if self.work > MAX_WORK => Err(format!(
                "its parser has taken all the work that a request may: {} readings of the text are open at once. What works is \
                 an unambiguous grammar, with left-recursive lists",
                items / rows.max(1)
            )),
            Ok(value) => Ok(value),
            Err(error) => Err(self.parser.augment_err(error)),
        };
        found.map_err(|why| {
            self.failed = Some(why.clone());
            anyhow::anyhow!("{why}")
        })
    }

    /// Consume a token if it may come here, and tell whether it did.
    pub(super) fn consume(&mut self, token: u32) -> anyhow::Result<bool> {
        self.step(|parser| {
            if !parser.validate_token(token)? {
                return Ok(false);
            }
            let back = parser.consume_token(token)?;
            parser.check_stop()?;
            anyhow::ensure!(back == 0, "unexpected backtracking");
            Ok(true)
        })
    }

    pub(super) fn rollback(&mut self, tokens: usize) -> anyhow::Result<()> {
        self.step(|parser| parser.rollback(tokens))
    }

    /// Mask with a bit for each token that may come next.
    pub(super) fn mask(&mut self) -> anyhow::Result<Vec<u32>> {
        self.step(|parser| Ok(parser.compute_mask()?.as_slice().to_vec()))
    }

    pub(super) fn accepting(&mut self) -> anyhow::Result<bool> {
        self.step(|parser| Ok(parser.is_accepting()))
    }

    /// True if nothing can follow.
    pub(super) fn finished(&self) -> bool {
        let ends = matches!(self.parser.stop_reason(), StopReason::NoExtension | StopReason::EndOfSentence);
        self.failed.is_none() && ends
    }

    /// The bytes that must follow; found in a copy, since finding them moves the parser.
    pub(super) fn forced(&self) -> Vec<u8> {
        let mut copy = self.parser.clone();
        catch_unwind(AssertUnwindSafe(|| Ok(copy.force_bytes()))).unwrap_or_default()
    }
}
