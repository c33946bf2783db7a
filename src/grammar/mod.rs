//! Structured output: which tokens may come next, so that a text follows a grammar.
//!
//! | type | what it is |
//! |---|---|
//! | [`Vocabulary`] | the bytes of a model's tokens, as a trie; one an engine |
//! | [`Form`], [`Mark`] | what users ask for: a JSON schema, a regular expression, texts, a grammar in Lark's syntax; and behind which text it begins |
//! | [`Grammar`] | a form compiled for a vocabulary; requests share it |
//! | [`Tracker`] | how far one request has come: the mask at a path behind its output |
//!
//! Parsing and masks are llguidance's (<https://github.com/guidance-ai/llguidance>): an Earley parser over a lexer of
//! derivatives of regular expressions, walked over the trie of the vocabulary. No table is made beforehand; a mask
//! takes tens of microseconds where the lexer has met its state.
//!
//! **Schemas.** llguidance's own compiler of JSON schemas rounds numbers, lets characters through that a pattern excludes,
//! and recurses without an end on some bounds. So schemas are read here (`schema`), also those within a grammar in
//! Lark's syntax (`lark`), and written as rules and terminals (`rules`, `numbers`, `strings`). What these cannot say
//! is refused by its place, keyword and value. llguidance sees one kind of schema alone, which is made here: integers
//! that are multiples of a number.
//!
//! **State by path.** A mask depends on the tokens before it alone: those that were committed, and the path behind
//! them. [`Tracker::mask`] goes to a path by rolling back what another one had, so whoever walks a tree asks at the
//! nodes that it reaches, in any order.
//!
//! **Ends.** The tokens that end an output (EOS, stop tokens) are the request's, not the grammar's. They are allowed
//! exactly where the text may end. Where nothing else may follow, they are all that is allowed. Behind one of them
//! everything is: nobody reads it.
//!
//! **Bounds.** Nesting, text and the parser's work have limits ([`MAX_TEXT`], [`MAX_NESTING`], `limits`). Grammars are
//! compiled in a thread whose stack has room for what those limits let through. A panic in the parser is an error of the
//! grammar alone. A request's parser may take so much work (`matcher`), counted in items, commits included: an ambiguous
//! grammar ends its own request.
//!
//! ```
//! use specrs::grammar::{Form, Grammar, Vocabulary};
//! let tokens: Vec<Vec<u8>> = ["yes", "no", "y", "es", " ", "<end>"].iter().map(|t| t.as_bytes().to_vec()).collect();
//! let vocabulary = Vocabulary::new(&tokens, &[5])?;
//! let grammar = Grammar::compile(&vocabulary, &Form::Choice(vec!["yes".into(), "no".into()]), None)?;
//! let tracker = grammar.start(&[5])?;
//! assert_eq!(tracker.mask(&[])?.map(|m| m.words()[0]), Some(0b0111)); // yes, no, y
//! assert_eq!(tracker.mask(&[2])?.map(|m| m.words()[0]), Some(0b1000)); // es
//! tracker.commit(&[2, 3])?;
//! assert_eq!(tracker.mask(&[])?.map(|m| m.words()[0]), Some(0b10_0000)); // the end
//! # Ok::<(), specrs::Error>(())
//! ```

mod compile;
mod cursor;
mod lark;
mod matcher;
mod numbers;
mod reason;
mod rules;
mod schema;
mod strings;
mod term;
mod tracker;
mod vocabulary;

pub use compile::{Form, Grammar, MAX_NESTING, MAX_TEXT, Mark};
pub use tracker::{Forced, Tracker};
pub use vocabulary::Vocabulary;
