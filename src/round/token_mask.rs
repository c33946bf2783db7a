//! Sets of tokens as bits: which ones may be drawn.

use std::sync::Arc;

use crate::error::{Error, Result, in_range};

/// Largest vocabulary: the sum of all weights of a row (see `round::weight`) stays far inside u64.
pub const MAX_VOCAB: u32 = 1 << 22;

/// Tokens that may be drawn, a bit a token; clones share the bits.
///
/// Word w has the tokens `32 * w ..`, the lowest bit first; bits behind the vocabulary are 0. This is the layout that
/// a device reads.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Arc<[u32]>,
    vocab: u32,
}

impl TokenMask {
    /// Words of a mask over `vocab` tokens.
    pub fn words_of(vocab: u32) -> usize {
        vocab.div_ceil(32) as usize
    }

    /// The mask of these tokens alone.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a vocabulary beyond [`MAX_VOCAB`] and a token outside of it.
    pub fn of(vocab: u32, tokens: impl IntoIterator<Item = u32>) -> Result<Self> {
        in_range("vocab", vocab, 1, i128::from(MAX_VOCAB))?;
        let mut words = vec![0u32; Self::words_of(vocab)];
        for token in tokens {
            in_range("allowed token", token, 0, i128::from(vocab) - 1)?;
            words[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(Self { words: words.into(), vocab })
    }

    /// The mask of words in this layout; bits behind the vocabulary are dropped.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a vocabulary beyond [`MAX_VOCAB`]; [`Error::Mismatch`] for too few words.
    pub fn from_words(vocab: u32, words: &[u32]) -> Result<Self> {
        in_range("vocab", vocab, 1, i128::from(MAX_VOCAB))?;
        let Some(words) = words.get(..Self::words_of(vocab)) else {
            let (got, want) = (format!("{} words", words.len()), format!("{}", Self::words_of(vocab)));
            return Err(Error::Mismatch { operand: "token mask", got, want });
        };
        let mut words = words.to_vec();
        if let (Some(last), 1..) = (words.last_mut(), vocab % 32) {
            *last &= (1 << (vocab % 32)) - 1;
        }
        Ok(Self { words: words.into(), vocab })
    }

    /// Tokens of the vocabulary.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }

    /// The bits.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// True if the token is in the mask; a token outside the vocabulary is not.
    pub fn contains(&self, token: u32) -> bool {
        token < self.vocab && self.words[token as usize / 32] >> (token % 32) & 1 != 0
    }

    /// Tokens in it.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|w| w.count_ones()).sum()
    }

    /// True if the mask has no tokens.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&w| w == 0)
    }

    /// Tokens that are in both, of one vocabulary; `None` of two.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let words = self.words.iter().zip(other.words.iter()).map(|(a, b)| a & b).collect();
        (self.vocab == other.vocab).then_some(Self { words, vocab: self.vocab })
    }

    /// Give the logits of all other tokens no probability: -inf is added to them, so that NaN and +inf are still found.
    /// `row` is `[vocab]`.
    pub(crate) fn ban(&self, row: &mut [f32]) {
        for (&word, part) in self.words.iter().zip(row.chunks_mut(32)) {
            if word == u32::MAX {
                continue;
            }
            for (i, x) in part.iter_mut().enumerate() {
                *x = if word >> i & 1 != 0 { *x } else { *x + f32::NEG_INFINITY };
            }
        }
    }
}

impl std::fmt::Debug for TokenMask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenMask({} of {})", self.count(), self.vocab)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_sets_of_the_vocabulary() {
        for vocab in [1, 31, 32, 33, 64, 100] {
            let odd = TokenMask::of(vocab, (0..vocab).filter(|t| t % 2 == 1)).unwrap();
            assert_eq!(odd.count(), vocab / 2);
            assert_eq!(TokenMask::from_words(vocab, odd.words()).unwrap(), odd);
            assert!((0..vocab + 70).all(|t| odd.contains(t) == (t < vocab && t % 2 == 1)));
            let mut row: Vec<f32> = (0..vocab).map(|t| t as f32).collect();
            odd.ban(&mut row);
            assert!(row.iter().enumerate().all(|(t, &x)| x == if t % 2 == 1 { t as f32 } else { f32::NEG_INFINITY }));
            let all = TokenMask::from_words(vocab, &vec![u32::MAX; TokenMask::words_of(vocab)]).unwrap();
            assert_eq!((all.count(), all.is_empty()), (vocab, false), "no bits behind the vocabulary");
            assert!(TokenMask::from_words(vocab, &vec![0; TokenMask::words_of(vocab) - 1]).is_err());
            assert!(TokenMask::of(vocab, [vocab]).is_err());
        }
        assert!(TokenMask::of(0, []).is_err());
        assert!(TokenMask::of(MAX_VOCAB + 1, []).is_err());
    }

    /// A token that cannot be sampled stays so, allowed or not.
    #[test]
    fn faults_show_through_a_mask() {
        let mut row = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0];
        TokenMask::of(4, [3]).unwrap().ban(&mut row);
        assert!(row[0].is_nan() && row[1].is_nan() && row[2] == f32::NEG_INFINITY && row[3] == 1.0);
    }
}
