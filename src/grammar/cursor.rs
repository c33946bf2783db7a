//! A matcher that goes to any path behind what was committed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::matcher::Matcher;
use super::reason::shortened;
use crate::round::TokenMask;

/// Reason why a grammar has no next token.
pub(super) type Stuck = String;

const NOTHING: &str = "it allows no token here";

/// A matcher, and where it stands.
pub(super) struct Cursor {
    matcher: Matcher,
    /// Tokens behind the committed ones that it has consumed.
    path: Vec<i32>,
    /// Number of the path's tokens that the matcher has consumed: neither an ending nor tokens behind it count.
    consumed: usize,
    /// True if an ending was committed.
    ended: bool,
}

impl Cursor {
    pub(super) fn new(matcher: Matcher) -> Self {
        Self { matcher, path: Vec::new(), consumed: 0, ended: false }
    }

    /// True if an ending has been passed.
    pub(super) fn ended(&self) -> bool {
        self.ended || self.consumed < self.path.len()
    }

    /// Go to `path` behind what was committed.
    ///
    /// # Errors
    /// A token that the grammar does not allow, after which the cursor stands before it; or a limit, which it stays at.
    pub(super) fn seek(&mut self, path: &[i32], endings: &[u32]) -> Result<(), Stuck> {
        let common = self.path.iter().zip(path).take_while(|(a, b)| a == b).count();
        let back = self.consumed.saturating_sub(common);
        if back > 0 {
            guarded(|| self.matcher.rollback(back))?;
            self.consumed -= back;
        }
        self.path.truncate(common);
        for &token in &path[common..] {
            self.step(token, endings)?;
        }
        Ok(())
    }

    fn step(&mut self, token: i32, endings: &[u32]) -> Result<(), Stuck> {
        if !self.ended() {
            if self.is_end(token, endings)? {
                self.path.push(token);
                return Ok(());
            }
            let token = u32::try_from(token).map_err(|_| format!("token {token} is none"))?;
            if !guarded(|| self.matcher.consume(token))? {
                return Err(format!("token {token} is none that it allows here"));
            }
            self.consumed += 1;
        }
        self.path.push(token);
        Ok(())
    }

    /// True if a token ends the output here. A token that the grammar has as text counts as text, as long as the text
    /// cannot end.
    fn is_end(&mut self, token: i32, endings: &[u32]) -> Result<bool, Stuck> {
        Ok(u32::try_from(token).is_ok_and(|t| endings.contains(&t)) && self.accepting()?)
    }

    /// True if the text may end here.
    pub(super) fn accepting(&mut self) -> Result<bool, Stuck> {
        if self.ended() || self.finished() {
            return Ok(true);
        }
        guarded(|| self.matcher.accepting())
    }

    /// True if nothing but an ending can follow.
    pub(super) fn finished(&self) -> bool {
        self.ended() || self.matcher.finished()
    }

    /// Mask of the tokens that may follow, of `vocab` tokens; `None` behind an ending, where everything may.
    pub(super) fn mask(&mut self, vocab: u32, endings: &[u32]) -> Result<Option<TokenMask>, Stuck> {
        if self.ended() {
            return Ok(None);
        }
        let mut words = vec![0u32; TokenMask::words_of(vocab)];
        let mut accepting = self.finished();
        if !accepting {
            let found = guarded(|| self.matcher.mask())?;
            words.iter_mut().zip(&found).for_each(|(word, &f)| *word = f);
            accepting = found.get(vocab as usize / 32).is_some_and(|w| w >> (vocab % 32) & 1 != 0);
        }
        if accepting {
            endings.iter().for_each(|&t| words[t as usize / 32] |= 1 << (t % 32));
        }
        let mask = TokenMask::from_words(vocab, &words).map_err(|e| e.to_string())?;
        match mask.is_empty() {
            false => Ok(Some(mask)),
            true if accepting => Err("the text is complete, and no token ends the output".into()),
            true => Err(NOTHING.into()),
        }
    }

    /// Add tokens to the output.
    pub(super) fn commit(&mut self, tokens: &[i32], endings: &[u32]) -> Result<(), Stuck> {
        self.seek(tokens, endings)?;
        self.ended = self.ended();
        self.path.clear();
        self.consumed = 0;
        Ok(())
    }

    /// The bytes that must follow, special tokens by their marks.
    pub(super) fn forced(&self) -> Vec<u8> {
        if self.finished() {
            return Vec::new();
        }
        catch_unwind(AssertUnwindSafe(|| self.matcher.forced())).unwrap_or_default()
    }
}

/// The result of a call of llguidance, with its panics turned into errors.
fn guarded<T>(call: impl FnOnce() -> anyhow::Result<T>) -> Result<T, Stuck> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => match shortened(&error.to_string()) {
            dead if dead == "NoExtensionBias" => Err(NOTHING.into()),
            why => Err(why),
        },
        Err(_) => Err("its parser failed".into()),
    }
}
