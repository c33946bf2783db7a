//! Tracks how far one request has come in its grammar.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::compile::{Grammar, LONGEST_FORCED};
use super::cursor::Cursor;
use crate::error::{Error, Result, in_range};
use crate::round::TokenMask;

/// Bytes of forced text that are looked at.
const MAX_FORCED: usize = 512;

/// State of one request in its grammar: behind its committed output, and at any path from there. Clones are the same
/// request.
///
/// Two parsers follow the output. The first goes where tokens are drawn and nowhere else, so that its limits are met
/// where plain decoding would meet them. The second one looks ahead, for drafts; where it meets a limit, nobody looks
/// ahead any more.
#[derive(Clone)]
pub struct Tracker(Arc<Request>);

struct Request {
    grammar: Grammar,
    endings: Vec<u32>,
    state: Mutex<State>,
}

struct State {
    drawing: Cursor,
    /// `None` once it has failed.
    ahead: Option<Cursor>,
    /// The mask behind the committed output, once it was asked for.
    here: Option<Option<TokenMask>>,
    /// Output that could not be followed: why.
    lost: Option<String>,
}

/// Text, or a token that stands for none, which must come next.
#[derive(Debug, Clone, PartialEq)]
pub enum Forced {
    /// Bytes of a text, and the longest tokens that spell it, from the left.
    Text(Vec<u8>, Vec<u32>),
    /// A special token, or the only one that ends the output.
    Token(u32),
}

impl Grammar {
    /// A request at the beginning of the grammar. `endings`: tokens that end its output.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for an ending outside the vocabulary.
    pub fn start(&self, endings: &[u32]) -> Result<Tracker> {
        let last = i128::from(self.vocab()) - 1;
        endings.iter().try_for_each(|&t| in_range("ending", t, 0, last).map(|_| ()))?;
        Ok(Tracker::new(self.clone(), endings))
    }
}

impl Tracker {
    fn new(grammar: Grammar, endings: &[u32]) -> Self {
        let (drawing, ahead) = (Cursor::new(grammar.matcher()), Some(Cursor::new(grammar.matcher())));
        let state = Mutex::new(State { drawing, ahead, here: None, lost: None });
        Self(Arc::new(Request { grammar, endings: endings.to_vec(), state }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tokens of its vocabulary.
    pub fn vocab(&self) -> u32 {
        self.0.grammar.vocab()
    }

    /// Tokens that may be drawn behind the output and `path`; `None` where all may, behind an ending.
    ///
    /// # Errors
    /// [`Error::GrammarFailed`], without request, row and position: no token is allowed, the path has one that is not,
    /// or a limit is met, from which nothing is drawn any more.
    pub fn mask(&self, path: &[i32]) -> Result<Option<TokenMask>> {
        self.find(path).map_err(failed)
    }

    /// The mask as of [`Tracker::mask`], with the reason alone as its error.
    pub(crate) fn find(&self, path: &[i32]) -> std::result::Result<Option<TokenMask>, String> {
        let Request { endings, .. } = &*self.0;
        let mut state = self.state();
        if let Some(why) = &state.lost {
            return Err(why.clone());
        }
        if path.is_empty()
            && let Some(mask) = &state.here
        {
            return Ok(mask.clone());
        }
        state.drawing.seek(path, endings)?;
        let mask = state.drawing.mask(self.vocab(), endings)?;
        if path.is_empty() {
            state.here = Some(mask.clone());
        }
        Ok(mask)
    }

    /// Add the output's next tokens.
    ///
    /// # Errors
    /// [`Error::GrammarFailed`] where one of them is not allowed, or a limit is met: then every mask from here on is
    /// this error.
    pub fn commit(&self, tokens: &[i32]) -> Result<()> {
        let Request { endings, .. } = &*self.0;
        let mut state = self.state();
        state.here = None;
        if state.ahead.as_mut().is_some_and(|a| a.commit(tokens, endings).is_err()) {
            state.ahead = None;
        }
        let state = &mut *state;
        if state.lost.is_none() {
            state.lost = state.drawing.commit(tokens, endings).err();
        }
        state.lost.clone().map_or(Ok(()), |why| Err(failed(why)))
    }

    /// True if the output is complete: nothing but an ending can follow.
    pub fn complete(&self) -> bool {
        let state = self.state();
        state.lost.is_none() && state.drawing.finished()
    }

    /// True if `token` may stand behind the output and `path`, as far as can be told: for drafts.
    pub fn allows(&self, path: &[i32], token: i32) -> bool {
        let Request { endings, .. } = &*self.0;
        let mut state = self.state();
        let Some(ahead) = &mut state.ahead else { return true };
        if ahead.seek(path, endings).is_err() {
            return false;
        }
        let longer: Vec<i32> = path.iter().copied().chain([token]).collect();
        ahead.seek(&longer, endings).is_ok()
    }

    /// The number of these tokens that may stand behind the output, one behind the other.
    pub fn allowed(&self, tokens: &[i32]) -> usize {
        (0..tokens.len()).find(|&i| !self.allows(&tokens[..i], tokens[i])).unwrap_or(tokens.len())
    }

    /// The mask as of [`Tracker::mask`] for a path that may never be walked, made by the parser that looks ahead.
    /// `None` where all tokens may follow, or nothing can be told.
    pub fn mask_ahead(&self, path: &[i32]) -> Option<TokenMask> {
        let Request { endings, .. } = &*self.0;
        let vocab = self.vocab();
        self.state().ahead.as_mut().and_then(|a| a.seek(path, endings).and_then(|()| a.mask(vocab, endings)).ok()?)
    }

    /// The tokens that must come next behind the output, in order; perhaps none.
    pub fn forced(&self) -> Vec<Forced> {
        let Request { endings, grammar, .. } = &*self.0;
        let vocabulary = grammar.vocabulary();
        let mut state = self.state();
        let Some(ahead) = &mut state.ahead else { return Vec::new() };
        if ahead.seek(&[], endings).is_err() || ahead.ended() {
            return Vec::new();
        }
        if ahead.finished() {
            return if let [end] = endings[..] { vec![Forced::Token(end)] } else { Vec::new() };
        }
        let mut bytes = ahead.forced();
        if bytes.len() > LONGEST_FORCED {
            state.ahead = None; // once, and never again
            return Vec::new();
        }
        bytes.truncate(MAX_FORCED);
        let mut found = Vec::new();
        for token in vocabulary.marked(&bytes) {
            if vocabulary.is_special(token) {
                found.push(Forced::Token(token));
            } else if let Some(Forced::Text(text, _)) = found.last_mut() {
                text.extend_from_slice(vocabulary.bytes(token));
            } else {
                found.push(Forced::Text(vocabulary.bytes(token).to_vec(), Vec::new()));
            }
        }
        for forced in &mut found {
            if let Forced::Text(text, tokens) = forced {
                *tokens = vocabulary.greedy(text);
            }
        }
        found
    }
}

fn failed(why: String) -> Error {
    Error::GrammarFailed { why, request: -1, row: -1, position: -1 }
}

impl std::fmt::Debug for Tracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tracker({} tokens)", self.vocab())
    }
}
