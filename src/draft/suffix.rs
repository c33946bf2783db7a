//! Drafts from a request's own text: what followed its last tokens when they stood there before.
//!
//! The text is the prediction that the user gave, if any, then a boundary, the prompt and the output so far, all in one
//! [`Automaton`]. A proposal mixes contexts by length (`mix`), and follows a *copy*: a position whose tokens the output
//! has been repeating, at first the start of the prediction. Where the output departs from it by a token, the copy goes
//! on one token further, with little trust, until a match finds it anew; so an edit of one token costs a round, not a
//! match.
//!
//! **Bound.** Memory is bounded in bytes by two generations: tokens go into the recent automaton until the next one
//! would take it over half the limit; then it becomes the older one, which only matches, and the former older one is
//! dropped. The output's state in the older one is carried along. So at least the last quarter of the limit's tokens
//! can be matched.

use super::automaton::{Automaton, Match};
use super::mix::{self, Bounds, Contexts, Copied};
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
/// Tokens in a row that may disagree with a copy.
const MISSES: u32 = 3;
/// Paths less likely than this are not proposed.
const FLOOR: f32 = 1.0 / 128.0;

/// A position that the output repeats from.
#[derive(Debug, Clone, Copy)]
struct Copy {
    /// What follows it is expected next.
    position: usize,
    /// Tokens that agreed in a row; `None`: not yet tried, or the last disagreed.
    agreed: Option<u32>,
    /// Tokens that disagreed since one agreed.
    missed: u32,
}

/// One request's text, and what it drafts.
#[derive(Debug)]
pub struct SuffixDrafts {
    vocab: u32,
    limit: usize,
    recent: Automaton,
    /// The generation before, and the longest suffix of the text that occurs in it.
    older: Option<(Automaton, Match)>,
    copy: Option<Copy>,
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
        let mut drafts = Self { vocab, limit, recent: Automaton::new(), older: None, copy: None, dropped: 0 };
        if !prediction.is_empty() {
            drafts.extend(prediction)?;
            drafts.recent.boundary();
            let whole = drafts.dropped == 0 && drafts.older.is_none();
            drafts.copy = whole.then_some(Copy { position: 0, agreed: None, missed: 0 });
        }
        Ok(drafts)
    }

    /// Append the prompt: text that does not repeat the prediction from its start.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for a token; nothing is appended then.
    pub fn prompt(&mut self, tokens: &[u32]) -> Result<()> {
        let copy = self.copy.take();
        self.extend(tokens)?;
        if self.older.is_none() {
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
        self.copy = self.copy.and_then(|c| c.told(self.recent.token_at(c.position)?, token));
        self.recent.append(token);
        if self.copy.is_none_or(|c| c.agreed.is_none()) {
            let matched = self.recent.matched();
            if matched.length() >= ANCHOR {
                let at = self.recent.position_of(matched);
                let anew = at.map(|position| Copy { position, agreed: Some(matched.length()), missed: 0 });
                self.copy = anew.or(self.copy);
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
        let told = |copy: Option<Copy>, &t: &u32| copy.and_then(|c| c.told(self.recent.token_at(c.position)?, t));
        let copy = path.iter().fold(self.copy, told);
        let mut tokens = Vec::new();
        if let Some(c) = copy {
            tokens.extend((c.position..).map_while(|p| self.recent.token_at(p)).take(depth));
        }
        let copied =
            Copied { tokens: &tokens, agreed: copy.and_then(|c| c.agreed), missed: copy.map_or(0, |c| c.missed) };
        Ok(mix::propose(&contexts, copied, Bounds { nodes, depth, floor: FLOOR }))
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

    /// Whether nothing was appended.
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

impl Copy {
    /// The copy once `token` came where it has `expected`.
    fn told(self, expected: u32, token: u32) -> Option<Self> {
        let position = self.position + 1;
        if token == expected {
            return Some(Self { position, agreed: Some(self.agreed.unwrap_or(0) + 1), missed: 0 });
        }
        let missed = self.missed + 1;
        (missed <= MISSES).then_some(Self { position, agreed: None, missed })
    }
}
