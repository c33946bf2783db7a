//! Drafts from texts that the operator gives: a static corpus, searched by suffix array.
//!
//! Source: He et al. 2023, REST (arXiv 2311.08252), retrieval of drafts from a datastore; suffix arrays by Manber and
//! Myers 1990. A request keeps the longest suffix of its text that occurs in the corpus as an interval of sorted
//! suffixes. One more token narrows it by binary search; where nothing is left, the longest shorter suffix is searched.
//! Nothing of a request enters the corpus.

use std::path::Path;
use std::sync::Arc;

use super::corpus_file::{CorpusFile, SORTED};
use super::mix::{self, Bounds, Contexts};
use super::proposal::{MAX_PROPOSED, Proposal};
use crate::bounds::MAX_DRAFT_TOKENS;
use crate::error::{Result, in_range};

/// Longest match: one token of the sorted ones tells what follows.
const LONGEST: usize = SORTED - 1;
/// Length to which a match that grew too long is cut.
const CUT: usize = SORTED / 2;
/// Intervals beyond this size are looked at here and there.
const WHOLE: usize = 256;
/// Paths less likely than this are not proposed.
const FLOOR: f32 = 1.0 / 128.0;

/// A corpus that any number of requests drafts from.
#[derive(Debug, Clone)]
pub struct Corpus {
    file: Arc<CorpusFile>,
}

/// A string of the corpus: ranks `from..to` of the sorted suffixes begin with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interval {
    from: usize,
    to: usize,
    length: usize,
}

impl Corpus {
    /// Map the file of a corpus, written by [`write_corpus`](super::write_corpus). It must not be changed in place
    /// while it is open; renaming another over it is safe. `verify` reads the whole file first: checksum, tokens,
    /// positions. Without, wrong positions are wrong drafts.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a file that cannot be read or is no sound corpus.
    pub fn open(path: &Path, verify: bool) -> Result<Self> {
        Ok(Self { file: Arc::new(CorpusFile::open(path, verify)?) })
    }

    /// Size of the vocabulary that its tokens are of.
    pub fn vocab(&self) -> u32 {
        self.file.vocab()
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.file.len() - self.file.documents() as usize
    }

    /// Never: a corpus has tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Documents.
    pub fn documents(&self) -> u64 {
        self.file.documents()
    }

    /// Bytes of the file, which are mapped.
    pub fn bytes(&self) -> usize {
        self.file.bytes()
    }

    /// Ranks in `within` whose suffix has `token` behind `skip` tokens that all of them share.
    fn narrow(&self, within: Interval, skip: usize, token: u32) -> Interval {
        let bound = |least: u32| {
            let (mut low, mut high) = (within.from, within.to);
            while low < high {
                let middle = usize::midpoint(low, high);
                if self.file.token(self.file.suffix(middle).saturating_add(skip)) < least {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            low
        };
        let from = bound(token);
        Interval { from, to: bound(token.saturating_add(1)).max(from), length: skip + 1 }
    }

    /// The interval of a string; empty where it does not occur.
    fn find(&self, string: impl Iterator<Item = u32>) -> Interval {
        string.enumerate().fold(self.all(), |at, (i, t)| if at.from < at.to { self.narrow(at, i, t) } else { at })
    }

    /// The longest suffix of a string that occurs. A suffix of length l occurs wherever a longer one does, so bisection
    /// finds it.
    fn longest(&self, string: &[u32]) -> Interval {
        let (mut least, mut most, mut best) = (0, string.len().min(LONGEST), self.all());
        while least < most {
            let middle = (least + most).div_ceil(2);
            let found = self.find(string[string.len() - middle..].iter().copied());
            if found.from < found.to {
                (least, best) = (middle, found);
            } else {
                most = middle - 1;
            }
        }
        best
    }

    fn all(&self) -> Interval {
        Interval { from: 0, to: self.file.len(), length: 0 }
    }

    /// The tokens of an interval's string.
    fn string(&self, of: Interval) -> impl DoubleEndedIterator<Item = u32> + ExactSizeIterator + '_ {
        let at = self.file.suffix(of.from);
        (0..of.length).map(move |i| self.file.token(at.saturating_add(i)))
    }
}

impl Contexts for Corpus {
    type State = Interval;

    fn length(&self, of: Interval) -> u32 {
        of.length as u32
    }

    fn shorter(&self, of: Interval) -> Interval {
        // Half as long: a search costs more here than a link.
        let length = of.length / 2;
        if length == 0 { self.all() } else { self.find(self.string(of).skip(of.length - length)) }
    }

    fn advance(&self, of: Interval, token: u32) -> Interval {
        if of.length < LONGEST {
            let found = self.narrow(of, of.length, token);
            if found.from < found.to {
                return found;
            }
        }
        let keep = of.length.min(CUT);
        let mut string: Vec<u32> = self.string(of).skip(of.length - keep).collect();
        string.push(token);
        self.longest(&string)
    }

    fn followers(&self, of: Interval, most: usize, found: &mut dyn FnMut(u32, u32)) -> bool {
        let token = |rank: usize| self.file.token(self.file.suffix(rank).saturating_add(of.length));
        let size = of.to - of.from;
        // A large interval gives the followers at ranks evenly apart: the frequent ones are among them.
        let (stride, mut rank, mut left) = (if size <= WHOLE { 1 } else { size.div_ceil(most.max(1)) }, of.from, most);
        while rank < of.to && left > 0 {
            let next = token(rank);
            if next >= self.vocab() {
                break; // boundaries are the last; and what is no token is no draft
            }
            let run = self.narrow(of, of.length, next);
            // In a file that is not sorted a run may lie elsewhere; then one is counted, and the search goes on.
            let count = if (run.from..run.to).contains(&rank) { run.to - run.from } else { 1 };
            found(next, count.min(u32::MAX as usize) as u32);
            let end = rank.max(run.to.min(of.to).max(rank + 1) - 1) + 1;
            rank = if stride == 1 { end } else { end.max(of.from + (end - of.from).div_ceil(stride) * stride) };
            left -= 1;
        }
        stride == 1 && left > 0
    }

    fn occurrences(&self, of: Interval) -> u32 {
        (of.to - of.from).min(u32::MAX as usize) as u32
    }
}

/// One request's place in a corpus.
#[derive(Debug, Clone)]
pub struct CorpusDrafts {
    corpus: Corpus,
    vocab: u32,
    at: Interval,
}

impl CorpusDrafts {
    /// A request without text yet, of a target whose vocabulary has `vocab` tokens.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] where that is smaller than the corpus's.
    pub fn new(corpus: &Corpus, vocab: u32) -> Result<Self> {
        in_range("vocab", vocab, corpus.vocab().into(), crate::round::MAX_VOCAB.into())?;
        Ok(Self { corpus: corpus.clone(), vocab, at: corpus.all() })
    }

    /// Append tokens of the request's text.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for a token; nothing is appended then.
    pub fn extend(&mut self, tokens: &[u32]) -> Result<()> {
        self.check(tokens)?;
        // If much came at once, such as a prompt, only its end can match.
        let last = tokens.len().saturating_sub(SORTED);
        if last > 0 {
            self.at = self.corpus.all();
        }
        self.at = tokens[last..].iter().fold(self.at, |at, &t| self.corpus.advance(at, t));
        Ok(())
    }

    /// At most `nodes` nodes of at most `depth` levels that may follow `path` behind the text, the likeliest first.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for a limit or a token of the path.
    pub fn propose_after(&self, path: &[u32], nodes: usize, depth: usize) -> Result<Proposal> {
        in_range("nodes", nodes as u64, 0, MAX_PROPOSED as i128)?;
        in_range("depth", depth as u64, 0, MAX_DRAFT_TOKENS.into())?;
        self.check(path)?;
        let at = path.iter().fold(self.at, |at, &t| self.corpus.advance(at, t));
        Ok(mix::propose(&[(&self.corpus, at)], &[], Bounds { nodes, depth, floor: FLOOR }))
    }

    /// Tokens of the longest suffix of the text that occurs in the corpus, of at most 63.
    pub fn matched(&self) -> u32 {
        self.at.length as u32
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        tokens.iter().try_for_each(|&t| in_range("token", t, 0, i128::from(self.vocab) - 1).map(drop))
    }
}
