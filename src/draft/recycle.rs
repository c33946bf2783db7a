//! Token recycling: after each token, what the target last ranked highest.
//!
//! Source: Luo et al. 2024, "Turning Trash into Treasure" (arXiv 2408.08696). The verification of a tree computes the
//! target's logits after every node, accepted or not; the best tokens of each row are kept by the row's token, and
//! drafts follow them. The paper holds a row for every token of the vocabulary; this table holds rows of tokens that
//! were seen, within a bound in bytes, in two generations: a row that is written or read goes to the younger one, and
//! when that is full the older one is dropped.
//!
//! A rank has a probability to start from; the rank is the bucket, so that
//! [`Calibration`](super::Calibration) learns what each is worth.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{BuildHasher, RandomState};

use super::proposal::{MAX_PROPOSED, Proposal};
use crate::bounds::MAX_DRAFT_TOKENS;
use crate::error::{Result, in_range};
use crate::round::MAX_VOCAB;

/// Tokens kept after each token.
pub const RANKS: usize = 8;
/// Smallest limit, in bytes.
pub const FEWEST_BYTES: usize = 4096;
/// Largest limit: no more rows than tokens are ever needed.
pub const MOST_BYTES: usize = 1 << 30;
/// Share of the tokens that a rank is expected to foretell.
const EXPECTED: [f32; RANKS] = [0.42, 0.14, 0.08, 0.05, 0.036, 0.027, 0.021, 0.017];
/// Paths less likely than this are not proposed.
const FLOOR: f32 = 1.0 / 256.0;
/// No token.
const NONE: u32 = u32::MAX;

/// Followers of a token, the likeliest first; [`NONE`] behind the last.
type Row = [u32; RANKS];

/// Rows by token: open addressing in arrays of a fixed size.
#[derive(Debug)]
struct Rows {
    /// [`NONE`] where a slot is free; a power of two, at most three quarters of them taken.
    tokens: Vec<u32>,
    rows: Vec<Row>,
    taken: usize,
}

impl Rows {
    /// Bytes of a slot.
    const SLOT: usize = size_of::<u32>() + size_of::<Row>();

    fn new(slots: usize) -> Self {
        Self { tokens: vec![NONE; slots], rows: vec![[NONE; RANKS]; slots], taken: 0 }
    }

    /// The slot of a token, or the free one that it would get.
    fn slot(&self, token: u32, factor: u64) -> usize {
        let mask = self.tokens.len() - 1;
        let mut slot = ((u64::from(token) + 1).wrapping_mul(factor) >> 32) as usize & mask;
        while self.tokens[slot] != token && self.tokens[slot] != NONE {
            slot = (slot + 1) & mask;
        }
        slot
    }

    fn get(&self, token: u32, factor: u64) -> Option<&Row> {
        let slot = self.slot(token, factor);
        (self.tokens[slot] == token).then(|| &self.rows[slot])
    }

    fn full(&self) -> bool {
        self.taken * 4 >= self.tokens.len() * 3
    }

    /// Set a row; there is room.
    fn set(&mut self, token: u32, row: Row, factor: u64) {
        let slot = self.slot(token, factor);
        self.taken += usize::from(self.tokens[slot] == NONE);
        (self.tokens[slot], self.rows[slot]) = (token, row);
    }

    fn bytes(&self) -> usize {
        self.tokens.capacity() * size_of::<u32>() + self.rows.capacity() * size_of::<Row>()
    }
}

/// The table of one request, or of all that share one.
#[derive(Debug)]
pub struct RecycledTokens {
    vocab: u32,
    /// Slots of a generation at most.
    most: usize,
    recent: Rows,
    older: Option<Rows>,
    factor: u64,
}

impl RecycledTokens {
    /// An empty table for a vocabulary of `vocab` tokens, in at most `limit` bytes.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for the vocabulary or the limit.
    pub fn new(vocab: u32, limit: usize) -> Result<Self> {
        in_range("vocab", vocab, 1, MAX_VOCAB.into())?;
        in_range("recycling bytes", limit as u64, FEWEST_BYTES as i128, MOST_BYTES as i128)?;
        // Two generations; while one grows, its old arrays and its new ones: half as many slots again.
        let slots = limit / Rows::SLOT / 2;
        let most = 1 << slots.ilog2();
        let factor = RandomState::new().hash_one(0u32) | 1;
        Ok(Self { vocab, most, recent: Rows::new(16), older: None, factor })
    }

    /// Note the target's best next tokens, `best`, after each of `tokens`, the likeliest first; those beyond [`RANKS`]
    /// are ignored.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for a token outside the vocabulary, [`crate::Error::Mismatch`] for lists of other
    /// lengths; nothing is kept then.
    pub fn observe<T: AsRef<[u32]>>(&mut self, tokens: &[u32], best: &[T]) -> Result<()> {
        crate::error::same_length("recycled rows", best.len(), tokens.len())?;
        self.check(tokens)?;
        best.iter().try_for_each(|row| self.check(row.as_ref()))?;
        for (&token, best) in tokens.iter().zip(best) {
            let mut row = [NONE; RANKS];
            row.iter_mut().zip(distinct(best.as_ref().iter().copied())).for_each(|(place, t)| *place = t);
            self.set(token, row);
        }
        Ok(())
    }

    /// Note that each token of the text but the first came behind the one before it: it is the first choice there now.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for a token outside the vocabulary; nothing is kept then.
    pub fn follow(&mut self, text: &[u32]) -> Result<()> {
        self.check(text)?;
        for pair in text.windows(2) {
            let before = self.row(pair[0]).copied().unwrap_or([NONE; RANKS]);
            if before[0] != pair[1] {
                let mut row = [NONE; RANKS];
                let all = std::iter::once(pair[1]).chain(before.into_iter().filter(|&t| t != NONE));
                row.iter_mut().zip(distinct(all)).for_each(|(place, t)| *place = t);
                self.set(pair[0], row);
            }
        }
        Ok(())
    }

    /// At most `nodes` nodes of at most `depth` levels that may follow `last`, the likeliest first.
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for a limit or the token.
    pub fn propose(&self, last: u32, nodes: usize, depth: usize) -> Result<Proposal> {
        in_range("nodes", nodes as u64, 0, MAX_PROPOSED as i128)?;
        in_range("depth", depth as u64, 0, MAX_DRAFT_TOKENS.into())?;
        self.check(&[last])?;
        let mut proposal = Proposal::default();
        // Probability as bits, which order as positive floats do; then the first met.
        let mut open: BinaryHeap<(u32, Reverse<u32>, i32, u32, usize)> = BinaryHeap::new();
        let (mut met, mut levels) = (0, Vec::new());
        let (mut at, mut token, mut path, mut level) = (-1, last, 1.0f32, 0);
        while proposal.len() < nodes {
            if level < depth {
                for (rank, &next) in self.row(token).into_iter().flatten().take_while(|&&t| t != NONE).enumerate() {
                    let path = path * EXPECTED[rank];
                    if path >= FLOOR {
                        open.push((path.to_bits(), Reverse(met), at, next, rank));
                        met += 1;
                    }
                }
            }
            let Some((bits, _, parent, next, rank)) = open.pop() else { break };
            at = proposal.push(parent, next, EXPECTED[rank], rank as u8) as i32;
            level = usize::try_from(parent).map_or(0, |p| levels[p]) + 1;
            levels.push(level);
            (token, path) = (next, f32::from_bits(bits));
        }
        Ok(proposal)
    }

    /// Rows held.
    pub fn len(&self) -> usize {
        self.recent.taken + self.older.as_ref().map_or(0, |o| o.taken)
    }

    /// True if nothing was kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.recent.bytes() + self.older.as_ref().map_or(0, Rows::bytes)
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        tokens.iter().try_for_each(|&t| in_range("token", t, 0, i128::from(self.vocab) - 1).map(drop))
    }

    fn row(&self, token: u32) -> Option<&Row> {
        self.recent.get(token, self.factor).or_else(|| self.older.as_ref()?.get(token, self.factor))
    }

    fn set(&mut self, token: u32, row: Row) {
        if self.recent.full() && self.recent.get(token, self.factor).is_none() {
            let slots = self.recent.tokens.len();
            if slots < self.most {
                let grown = Rows::new(slots * 2);
                let small = std::mem::replace(&mut self.recent, grown);
                let held = small.tokens.iter().zip(&small.rows).filter(|(t, _)| **t != NONE);
                held.for_each(|(&t, &r)| self.recent.set(t, r, self.factor));
            } else {
                self.older = None; // the older text goes before its successor comes
                self.older = Some(std::mem::replace(&mut self.recent, Rows::new(16)));
            }
        }
        self.recent.set(token, row, self.factor);
    }
}

/// The first of each token.
fn distinct(tokens: impl Iterator<Item = u32>) -> impl Iterator<Item = u32> {
    let mut seen = [NONE; RANKS];
    let mut count = 0;
    tokens.filter(move |t| {
        let new = count < RANKS && !seen[..count].contains(t);
        if new {
            seen[count] = *t;
            count += 1;
        }
        new
    })
}
