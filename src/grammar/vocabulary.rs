//! The bytes of a model's tokens, as llguidance reads them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{ParserFactory, TokenParser};

use crate::error::{Error, Result, in_range};
use crate::round::MAX_VOCAB;

/// Bytes of a token at most; the trie has no room for longer ones, which are never drawn under a grammar.
const MAX_TOKEN: usize = 1000;
/// Bytes of all tokens at most: the trie's nodes have 22 bits.
const MAX_BYTES: usize = 1 << 22;
/// First byte of a special token's bytes, which no text has.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
/// One more token behind the vocabulary: its bit in a mask says that the text may end.
const END: &[u8] = b"\xff<|specrs_end|>";

/// The bytes of each token of a model. Clones share them.
#[derive(Clone)]
pub struct Vocabulary {
    factory: Arc<ParserFactory>,
    vocab: u32,
}

/// The tokenizer that llguidance asks. Forced text is not tokenised here: it is drafted, and drafts are verified.
struct Tokens(TokTrie);

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, s: &[u8]) -> Vec<TokenId> {
        self.0.greedy_tokenize(s)
    }

    /// With a canonical tokenizer, llguidance would force its tokens; here every spelling of a text is allowed.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// Limits of the work and memory of a request's parser.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000, // 1 to 2 kB each
        max_grammar_size: 500_000,
        precompute_large_lexemes: true,
        verbose_errors: false, // verbose errors would repeat the output
    }
}

impl Vocabulary {
    /// A vocabulary of so many tokens.
    ///
    /// Args: `tokens`, the bytes of each within a text; none for one that never stands in a text. `special`, those
    /// that stand for no text (EOS, marks of a chat): a grammar has them where it names them.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for no tokens, more than [`MAX_VOCAB`], more bytes than the trie holds, a special token
    /// outside; [`Error::Grammar`] where llguidance refuses them.
    pub fn new(tokens: &[impl AsRef<[u8]>], special: &[u32]) -> Result<Self> {
        let vocab = in_range("vocab", tokens.len() as i128, 1, i128::from(MAX_VOCAB))? as u32;
        special.iter().try_for_each(|&t| in_range("special token", t, 0, i128::from(vocab) - 1).map(|_| ()))?;
        let bytes: usize = tokens.iter().map(|t| t.as_ref().len()).filter(|&n| n <= MAX_TOKEN).sum();
        in_range("bytes of the vocabulary", bytes as i128, 0, MAX_BYTES as i128)?;
        let mut words: Vec<Vec<u8>> = tokens.iter().map(|t| text(t.as_ref())).collect();
        for &token in special {
            words[token as usize] = [&[SPECIAL], tokens[token as usize].as_ref()].concat();
        }
        for word in words.iter_mut().filter(|w| w.len() > MAX_TOKEN) {
            word.clear();
        }
        words.push(END.to_vec());
        let build = || -> anyhow::Result<ParserFactory> {
            let trie = TokTrie::from(&TokRxInfo::new(vocab + 1, vocab), &words);
            let env: TokEnv = Arc::new(Tokens(trie));
            let slices = SlicedBiasComputer::general_slices();
            let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)?;
            factory.quiet();
            *factory.limits_mut() = limits();
            Ok(factory)
        };
        let refused = |why: String| Error::Grammar { what: "vocabulary", why };
        match catch_unwind(AssertUnwindSafe(build)) {
            Ok(Ok(factory)) => Ok(Self { factory: Arc::new(factory), vocab }),
            Ok(Err(error)) => Err(refused(error.to_string())),
            Err(_) => Err(refused("llguidance cannot index these tokens".into())),
        }
    }

    /// Tokens.
    pub fn size(&self) -> u32 {
        self.vocab
    }

    /// A parser at the beginning of what `grammar` describes.
    pub(super) fn parser(&self, grammar: llguidance::api::TopLevelGrammar) -> anyhow::Result<TokenParser> {
        self.factory.create_parser(grammar)
    }

    /// True if a token stands for no text.
    pub(super) fn is_special(&self, token: u32) -> bool {
        self.trie().is_special_token(token)
    }

    /// A token's bytes within a text.
    pub(super) fn bytes(&self, token: u32) -> &[u8] {
        self.trie().token(token)
    }

    /// The longest tokens first, from the left: of some text, not what a tokenizer would make of it.
    pub(super) fn greedy(&self, text: &[u8]) -> Vec<u32> {
        self.trie().greedy_tokenize(text)
    }

    /// Tokens of forced bytes, which name special tokens by the mark.
    pub(super) fn marked(&self, bytes: &[u8]) -> Vec<u32> {
        self.factory.tok_env().tokenize_bytes_marker(bytes).0
    }

    fn trie(&self) -> &TokTrie {
        self.factory.tok_env().tok_trie()
    }
}

/// A token's bytes in the trie: none where they begin as a special token's do, which no UTF-8 does.
fn text(token: &[u8]) -> Vec<u8> {
    if token.first() == Some(&SPECIAL) { Vec::new() } else { token.to_vec() }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vocabulary({})", self.vocab)
    }
}
