//! Drafts from a request's own text: what followed its last tokens when they stood there before.
//!
//! The text is the prediction that the user gave, if any, then a boundary, the prompt and the output so far, all in one
//! [`Automaton`]. A proposal mixes contexts by length (`mix`), and follows a *copy* (`copy`): a position whose tokens the
//! output has been repeating, at first the start of the prediction, with the edits that it has been making to them.
//!
//! **Bound.** Memory is bounded in bytes by two generations: tokens go into the recent automaton until the next one
//! would take it over half the limit; then it becomes the older one, which only matches, and the former older one is
//! dropped. The output's state in the older one is carried along. So at least the last quarter of the limit's tokens
//! can be matched.

use super::automaton::{Automaton, Match};
use super::copy::{Copy, Habits};
use super::mix::{self, Bounds, Contexts};
use super::proposal::{MAX_PROPOSED, Proposal};
use crate::bounds::MAX_DRAFT_TOKENS;
use crate::error::{Result, in_range};
use crate::round::MAX_VOCAB;

/// Smallest limit, in bytes.
pub const FEWEST_BYTES: usize = 1 << 16;
/// Largest limit: the edges of half of it can be named.
pub const MOST_BYTES: usize = 1 << 31;
/// Matches from this length on find a copy.
const ANCHOR: u32 = 6;
/// Tokens for which an output may have departed from a copy before a match finds another.
const ASTRAY: usize = 3;
/// Paths less likely than this are not proposed.
const FLOOR: f32 = 1.0 / 128.0;

/// One request's text, and what it drafts.
#[derive(Debug)]
pub struct SuffixDrafts {
    vocab: u32,
    limit: usize,
    recent: Automaton,
    /// The generation before, and the longest suffix of the text that occurs in it.
    older: Option<(Automaton, Match)>,
    copy: Option<Copy>,
    habits: Habits,
    dropped: usize,
}

impl SuffixDrafts {
    /// An empty text of a vocabulary of `vocab` tokens, in at most `limit` bytes; `prediction` may come in the output.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for the vocabulary, the limit or a token.
    pub fn new(vocab: u32, limit: usize, prediction: &[u32]) -> Result<Self> {
        in_range("vocab", vocab, 1, MAX_VOCAB.into())?;
        in_range("suffix bytes", limit as u64, FEWEST_BYTES as i128, MOST_BYTES as i128)?;
        let mut drafts = Self {
            vocab,
            limit,
            recent: Automaton::new(),
            older: None,
            copy: None,
            habits: Habits::default(),
            dropped: 0,
        };
        if !prediction.is_empty() {
            drafts.extend(prediction)?;
            drafts.recent.boundary();
            let whole = drafts.dropped == 0 && drafts.older.is_none();
            drafts.copy = whole.then_some(Copy::new(0, 0));
            drafts.habits = Habits::default();
        }
        Ok(drafts)
    }

    /// Append the prompt: text that does not repeat the prediction from its start. Where it ends within a passage that
    /// stands earlier, the output goes on with that rather than with the prediction.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for a token; nothing is appended then.
    pub fn prompt(&mut self, tokens: &[u32]) -> Result<()> {
        let (copy, habits) = (self.copy.take(), self.habits);
        if let Err(refused) = self.extend(tokens) {
            self.copy = copy;
            return Err(refused);
        }
        self.habits = habits; // the output's habits count
        if self.older.is_none() && self.copy.is_none_or(|c| c.astray() > 0) {
            self.copy = copy.or(self.copy);
        }
        Ok(())
    }

    /// Append tokens.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for a token; nothing is appended then.
    pub fn extend(&mut self, tokens: &[u32]) -> Result<()> {
        let last = i128::from(self.vocab) - 1;
        tokens.iter().try_for_each(|&t| in_range("token", t, 0, last).map(drop))?;
        tokens.iter().for_each(|&t| self.append(t));
        Ok(())
    }

    fn append(&mut self, token: u32) {
        if !self.recent.fits(token, self.limit / 2) {
            let full = std::mem::take(&mut self.recent);
            let at = full.matched();
            self.dropped += self.older.replace((full, at)).map_or(0, |(old, _)| old.len());
            self.copy = None;
        }
        if let Some((older, at)) = &mut self.older {
            *at = older.advance(*at, token);
        }
        let source = |p: usize| self.recent.token_at(p);
        self.copy = self.copy.and_then(|c| c.told(token, source, Some(&mut self.habits)));
        self.recent.append(token);
        if self.copy.is_none_or(|c| !c.tried() || c.astray() > ASTRAY) {
            let matched = self.recent.matched();
            if matched.length() >= ANCHOR {
                let at = self.recent.position_of(matched);
                self.copy = at.map(|position| Copy::new(position, matched.length())).or(self.copy);
            }
        }
    }

    /// At most `nodes` nodes of at most `depth` levels that may follow the text, the likeliest first.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for a limit.
    pub fn propose(&self, nodes: usize, depth: usize) -> Result<Proposal> {
        self.propose_after(&[], nodes, depth)
    }

    /// [`SuffixDrafts::propose`] below a path that may follow the text, such as a leaf of another source's tree.
    ///
    /// # Errors
    /// As [`SuffixDrafts::propose`], and for a token of the path.
    pub fn propose_after(&self, path: &[u32], nodes: usize, depth: usize) -> Result<Proposal> {
        in_range("nodes", nodes as u64, 0, MAX_PROPOSED as i128)?;
        in_range("depth", depth as u64, 0, MAX_DRAFT_TOKENS.into())?;
        let last = i128::from(self.vocab) - 1;
        path.iter().try_for_each(|&t| in_range("token", t, 0, last).map(drop))?;
        let along = |source: &Automaton, from: Match| path.iter().fold(from, |at, &t| source.advance(at, t));
        let mut contexts = vec![(&self.recent, along(&self.recent, self.recent.matched()))];
        if let Some((older, at)) = &self.older {
            contexts.push((older, along(older, *at)));
        }
        let source = |p: usize| self.recent.token_at(p);
        let copy = path.iter().fold(self.copy, |copy, &t| copy.and_then(|c| c.told(t, source, None)));
        let mut copied = Vec::new();
        if let Some(c) = copy {
            c.expected(depth, source, &self.habits, |run| mix::weight(run, 1.0, 1), &mut copied);
        }
        Ok(mix::propose(&contexts, &copied, Bounds { nodes, depth, floor: FLOOR }))
    }

    /// Tokens of the longest suffix of the text that occurred before.
    pub fn matched(&self) -> u32 {
        let older = self.older.as_ref().map_or(0, |(_, at)| at.length());
        self.recent.matched().length().max(older)
    }

    /// Positions that can be matched.
    pub fn len(&self) -> usize {
        self.recent.len() + self.older.as_ref().map_or(0, |(old, _)| old.len())
    }

    /// True if nothing was appended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.recent.bytes() + self.older.as_ref().map_or(0, |(old, _)| old.bytes())
    }

    /// Most bytes that are held.
    pub fn limit(&self) -> usize {
        self.limit
    }
}
