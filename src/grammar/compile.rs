//! Makes grammars of the forms that users ask for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::Value;

use super::lark;
use super::matcher::Matcher;
use super::reason::shortened;
use super::rules;
use super::vocabulary::Vocabulary;
use crate::error::{Error, Result, in_range};

/// Bytes of a form's texts together, at most.
pub const MAX_TEXT: usize = 1 << 20;
/// Brackets open at once in a grammar or a regular expression, at most; a schema has serde_json's limit, 128.
pub const MAX_NESTING: usize = 128;
/// Rules, terminals and brackets of a grammar at most: llguidance goes from rule to rule by recursion, 3 kB of stack each.
const MAX_DEPTH: usize = 40_000;
/// Tokens of a mark at most.
const MAX_MARK: usize = 256;
/// Stack of the thread that compiles; memory that is not touched is not taken.
const STACK: usize = 256 << 20;
/// Time limit of compiling.
const PATIENCE: Duration = Duration::from_secs(10);
/// Grammars that are compiled at once, including those that no request waits for any more.
const MAX_COMPILING: usize = 8;
/// Bytes that may follow without a choice. Looking for them takes a microsecond each, at every step.
pub(super) const LONGEST_FORCED: usize = 1 << 16;
/// Items that a row of the parser has, at most; llguidance's own limit.
const WIDEST: u64 = 2_000;
/// Items of a row from which on a grammar in Lark's syntax pays for them. Grammars of programming languages have less.
const AMBIGUOUS: u64 = 256;
/// The name of the form's grammar, where another one leads to it.
const BODY: &str = "specrs_body";

/// Form that a text must have.
#[derive(Debug, Clone, PartialEq)]
pub enum Form {
    /// JSON of this schema. Its tokens may be apart by text that the regular expression `whitespace` matches: `None`
    /// for a space, or a line break and indentation; "" for nothing.
    Json {
        /// The schema's own text.
        schema: String,
        /// Text that may stand between two tokens of JSON.
        whitespace: Option<String>,
    },
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// The text is one of these.
    Choice(Vec<String>),
    /// The text is derived by the rule `start` of this grammar, in Lark's syntax.
    Lark(String),
}

/// Text or tokens behind which a form begins: before them stands any text.
#[derive(Debug, Clone, PartialEq)]
pub enum Mark {
    /// A text, which may end within a token.
    Text(String),
    /// Tokens: all of them special, or all of them text.
    Tokens(Vec<u32>),
}

/// A form compiled for a vocabulary. Clones share it.
#[derive(Clone)]
pub struct Grammar(Arc<Compiled>);

struct Compiled {
    /// At the beginning; it is only ever copied.
    fresh: Mutex<Matcher>,
    vocabulary: Vocabulary,
}

impl Grammar {
    /// Compile a form, which begins behind a mark where one is given. Takes milliseconds; large schemas take longer.
    ///
    /// # Errors
    /// [`Error::Grammar`] for a form that is malformed, too large, or asks for what llguidance does not enforce.
    pub fn compile(vocabulary: &Vocabulary, form: &Form, mark: Option<&Mark>) -> Result<Self> {
        form.check()?;
        let mark = mark.map(|mark| text_of(vocabulary, mark)).transpose()?;
        let (own, wanted) = (vocabulary.clone(), form.clone());
        let fresh = in_time(move || {
            let (grammar, free) = wanted.grammar(mark.as_ref())?;
            let made = Matcher::new(own.parser(grammar), free)?;
            match made.deep_clone().forced().len() > LONGEST_FORCED {
                true => Err(format!("more than {LONGEST_FORCED} bytes of its text follow without a choice")),
                false => Ok(made),
            }
        });
        let fresh = fresh.map_err(|why| Error::Grammar { what: form.name(), why: shortened(&why) })?;
        Ok(Self(Arc::new(Compiled { fresh: Mutex::new(fresh), vocabulary: vocabulary.clone() })))
    }

    /// Tokens of its vocabulary.
    pub fn vocab(&self) -> u32 {
        self.0.vocabulary.size()
    }

    pub(super) fn vocabulary(&self) -> &Vocabulary {
        &self.0.vocabulary
    }

    /// A matcher of one's own.
    pub(super) fn matcher(&self) -> Matcher {
        self.0.fresh.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }
}

/// A matcher, made in a thread of its own, since the reader of grammars recurses: the thread's stack has room for the
/// depth that the limits of this module allow. A thread that takes too long is left alone: the bounds of its work end
/// it.
fn in_time(
    make: impl FnOnce() -> std::result::Result<Matcher, String> + Send + 'static,
) -> std::result::Result<Matcher, String> {
    static RUNNING: AtomicUsize = AtomicUsize::new(0);
    struct Turn;
    impl Drop for Turn {
        fn drop(&mut self) {
            RUNNING.fetch_sub(1, Ordering::Relaxed);
        }
    }
    if RUNNING.fetch_add(1, Ordering::Relaxed) >= MAX_COMPILING {
        drop(Turn);
        return Err(format!("{MAX_COMPILING} grammars are being compiled; try again later"));
    }
    let (turn, (tell, told)) = (Turn, mpsc::sync_channel(1));
    let compiling = thread::Builder::new().name("specrs-grammar".into()).stack_size(STACK);
    let spawned = compiling.spawn(move || {
        let made = make();
        drop(turn);
        _ = tell.send(made); // perhaps no longer awaited
    });
    let thread = spawned.map_err(|error| format!("no thread to compile it in: {error}"))?;
    let made = told.recv_timeout(PATIENCE);
    if made.is_ok() {
        _ = thread.join(); // the thread is at its end: its stack is free when the next one wants one
    }
    made.map_err(|error| match error {
        mpsc::RecvTimeoutError::Timeout => format!("takes longer than {} seconds to compile", PATIENCE.as_secs()),
        mpsc::RecvTimeoutError::Disconnected => "the parser of grammars failed".into(),
    })?
}

impl Form {
    /// Name of the form in errors.
    fn name(&self) -> &'static str {
        match self {
            Self::Json { .. } => "json",
            Self::Regex(_) => "regex",
            Self::Choice(_) => "choice",
            Self::Lark(_) => "grammar",
        }
    }

    fn check(&self) -> Result<()> {
        let size = match self {
            Self::Json { schema, whitespace } => schema.len() + whitespace.as_ref().map_or(0, String::len),
            Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
        };
        let refused = |why: String| Err(Error::Grammar { what: self.name(), why });
        if size > MAX_TEXT {
            return refused(format!("has {size} bytes; at most {MAX_TEXT}"));
        }
        match self {
            Self::Choice(texts) if texts.is_empty() || texts.iter().any(String::is_empty) => {
                refused("must be texts that are not empty, one at least".into())
            }
            Self::Regex(text) | Self::Lark(text) if nesting(text) > MAX_NESTING => {
                refused(format!("{} brackets are open at once; at most {MAX_NESTING}", nesting(text)))
            }
            _ => Ok(()),
        }
    }

    /// Grammars of llguidance for the form, behind the mark where there is one; and the most items that a row of their
    /// parser has where the grammar is not ambiguous.
    fn grammar(&self, mark: Option<&Before>) -> std::result::Result<(TopLevelGrammar, u64), String> {
        let mut free = WIDEST;
        let mut grammars = match self {
            Self::Json { schema, whitespace } => {
                let schema: Value = serde_json::from_str(schema).map_err(|e| e.to_string())?;
                if !schema.is_object() && schema != Value::Bool(true) {
                    return Err("a schema is a JSON object, or true".into());
                }
                rules::of_schema(schema, whitespace.as_deref(), None, BODY)?.grammars
            }
            Self::Regex(rx) => vec![GrammarWithLexer::from_regex(rx)],
            Self::Choice(texts) => {
                let quoted: Vec<String> = texts.iter().map(|t| quoted(t)).collect();
                vec![GrammarWithLexer::from_lark(format!("start: CHOICE\nCHOICE: {}", quoted.join(" | ")))]
            }
            Self::Lark(text) => {
                let mut widest = 0;
                let (text, schemas) = lark::apart(text, &mut widest)?;
                let brackets = text.bytes().filter(|b| matches!(b, b'(' | b'[' | b'{')).count();
                let depth = brackets + text.lines().filter(|line| line.contains(':')).count();
                if depth > MAX_DEPTH {
                    return Err(format!("has {depth} rules and brackets; at most {MAX_DEPTH}"));
                }
                free = (AMBIGUOUS + 4 * widest as u64).min(WIDEST);
                [vec![GrammarWithLexer::from_lark(text)], schemas].concat()
            }
        };
        if let Some(mark) = mark {
            grammars[0].name = Some(BODY.into());
            // A model thinks, and begins its answer on another line.
            let spaced = matches!(self, Form::Json { whitespace, .. } if whitespace.as_deref() != Some(""));
            grammars.insert(0, GrammarWithLexer::from_lark(mark.lark(spaced)));
        }
        Ok((TopLevelGrammar { grammars, max_tokens: None }, free))
    }
}

/// Text before a form: any text up to a given text, or up to special tokens.
enum Before {
    Text(String),
    Tokens(Vec<u32>),
}

impl Before {
    fn lark(&self, spaced: bool) -> String {
        let (space, rule) = if spaced { ("SPACE ", "\nSPACE: /[ \\r\\n]{0,4}/") } else { ("", "") };
        match self {
            Self::Text(text) => {
                format!("start: thought {space}@{BODY}\nthought[suffix={}]: /(?s:.*)/{rule}", quoted(text))
            }
            Self::Tokens(tokens) => {
                let tokens: Vec<String> = tokens.iter().map(|t| format!("<[{t}]>")).collect();
                format!("start: THOUGHT {} {space}@{BODY}\nTHOUGHT: /(?s:.*)/{rule}", tokens.join(" "))
            }
        }
    }
}

/// A text in Lark's syntax.
fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\x7f', "\\u007f")
}

/// A mark as the text that it is, or as special tokens.
fn text_of(vocabulary: &Vocabulary, mark: &Mark) -> Result<Before> {
    let refused = |why: &str| Err(Error::Grammar { what: "start_after", why: why.into() });
    match mark {
        Mark::Text(text) if text.is_empty() || text.len() > MAX_TEXT => refused("must be a text of some length"),
        Mark::Text(text) => Ok(Before::Text(text.clone())),
        Mark::Tokens(tokens) => {
            in_range("tokens of start_after", tokens.len() as i128, 1, MAX_MARK as i128)?;
            for &token in tokens {
                in_range("start_after", token, 0, i128::from(vocabulary.size()) - 1)?;
            }
            let special = tokens.iter().filter(|&&t| vocabulary.is_special(t)).count();
            if special == tokens.len() {
                return Ok(Before::Tokens(tokens.clone()));
            }
            let bytes: Vec<u8> = tokens.iter().flat_map(|&t| vocabulary.bytes(t)).copied().collect();
            match String::from_utf8(bytes) {
                Ok(text) if special == 0 && !text.is_empty() => Ok(Before::Text(text)),
                _ => refused("its tokens are neither all special nor a text together"),
            }
        }
    }
}

/// Most brackets that are open at once, wherever they stand: brackets within texts count too.
fn nesting(text: &str) -> usize {
    let (mut open, mut most) = (0usize, 0usize);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammar({} tokens)", self.vocab())
    }
}
