//! Structured output: [`crate::grammar`].

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use super::arg::{Int, detached, guarded, i32s, u32s};
use crate::error::{Error, Result, in_range};
use crate::grammar::{self, Form, Mark};
use crate::round;

/// Set of the tokens that may be drawn, one bit a token; made once and shared by samplers.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct TokenMask(pub(super) round::TokenMask);

#[pymethods]
impl TokenMask {
    /// The set of these `tokens` from a vocabulary of `vocab`.
    #[new]
    fn new(vocab: Int, tokens: Vec<Int>) -> PyResult<Self> {
        let vocab = vocab.within("vocab", 1, round::MAX_VOCAB.into())? as u32;
        Ok(Self(round::TokenMask::of(vocab, u32s("allowed token", &tokens)?)?))
    }

    /// Tokens of the vocabulary.
    #[getter]
    fn vocab(&self) -> u32 {
        self.0.vocab()
    }

    /// Returns the tokens of the set, ascending.
    fn tokens(&self) -> Vec<u32> {
        (0..self.0.vocab()).filter(|&t| self.0.contains(t)).collect()
    }

    fn __len__(&self) -> usize {
        self.0.count() as usize
    }

    fn __contains__(&self, token: Int) -> bool {
        token.u32("token").is_ok_and(|t| self.0.contains(t))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// The bytes of a model's tokens, by which its grammars are compiled; one for each engine. Making it takes a second for
/// 128k tokens.
///
/// `tokens` has the bytes of each token within a text, none for a token that never occurs in a text. `special` are the
/// tokens that stand for no text (EOS, marks of a chat): a grammar allows them only where it names them.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct GrammarVocabulary(grammar::Vocabulary);

#[pymethods]
impl GrammarVocabulary {
    #[new]
    fn new(py: Python<'_>, tokens: Vec<PyBackedBytes>, special: Vec<Int>) -> PyResult<Self> {
        let special = u32s("special token", &special)?;
        detached(py, || grammar::Vocabulary::new(&tokens, &special)).map(Self)
    }

    /// Compile a grammar that texts must follow. `kind` is `json` (a schema's text; between JSON's tokens comes
    /// whitespace that the regular expression `whitespace` matches, `""` for none), `regex`, `choice` (each of `texts`)
    /// or `grammar` (Lark's syntax). The grammar begins after the text, or the tokens, `start_after`, before which any
    /// text may come. Raises `GrammarError`.
    #[pyo3(signature = (kind, texts, whitespace=None, start_after=None))]
    fn compile(
        &self,
        py: Python<'_>,
        kind: &str,
        texts: Vec<String>,
        whitespace: Option<String>,
        start_after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Grammar> {
        let form = form(kind, texts, whitespace)?;
        let mark = match start_after {
            None => None,
            Some(mark) => Some(match mark.extract::<String>() {
                Ok(text) => Mark::Text(text),
                Err(_) => Mark::Tokens(u32s("start_after", &mark.extract::<Vec<Int>>()?)?),
            }),
        };
        detached(py, || grammar::Grammar::compile(&self.0, &form, mark.as_ref())).map(Grammar)
    }

    fn __len__(&self) -> usize {
        self.0.size() as usize
    }

    fn __repr__(&self) -> String {
        format!("GrammarVocabulary({} tokens)", self.0.size())
    }
}

fn form(kind: &str, mut texts: Vec<String>, whitespace: Option<String>) -> Result<Form> {
    if kind == "choice" {
        return Ok(Form::Choice(texts));
    }
    let invalid = |what, got: &str, why: &str| Err(Error::Invalid { what, got: got.into(), why: why.into() });
    in_range("texts", texts.len() as u64, 1, 1)?;
    let text = texts.pop().unwrap_or_default();
    match kind {
        "json" => Ok(Form::Json { schema: text, whitespace }),
        "regex" => Ok(Form::Regex(text)),
        "grammar" => Ok(Form::Lark(text)),
        other => invalid("kind", other, "must be json, regex, choice or grammar"),
    }
}

/// A compiled grammar that requests share.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct Grammar(grammar::Grammar);

#[pymethods]
impl Grammar {
    /// Returns the tracker of a request at its beginning; `endings` are tokens that end its output, which are allowed
    /// where the text may end.
    fn start(&self, py: Python<'_>, endings: Vec<Int>) -> PyResult<GrammarTracker> {
        let endings = u32s("ending", &endings)?;
        detached(py, || self.0.start(&endings)).map(GrammarTracker)
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// Tracks how far one request has come in its grammar. Samplers that hold it draw under its masks; each output token is
/// committed to it once.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct GrammarTracker(pub(super) grammar::Tracker);

#[pymethods]
impl GrammarTracker {
    /// Commit the output's next tokens. Raises `GrammarFailedError` if the grammar cannot follow them; then every
    /// later mask raises it, too.
    fn commit(&self, py: Python<'_>, tokens: Vec<Int>) -> PyResult<()> {
        let tokens = i32s("output token", &tokens)?;
        detached(py, || self.0.commit(&tokens))
    }

    /// Returns the tokens that may be drawn after the output and `path`; `None`, after an ending, for every token.
    /// Raises `GrammarFailedError`.
    #[pyo3(signature = (path=None))]
    fn mask(&self, py: Python<'_>, path: Option<Vec<Int>>) -> PyResult<Option<TokenMask>> {
        let path = i32s("path token", &path.unwrap_or_default())?;
        Ok(detached(py, || self.0.mask(&path))?.map(TokenMask))
    }

    /// True if only an ending can follow.
    #[getter]
    fn complete(&self) -> bool {
        self.0.complete()
    }

    /// Returns how many of these tokens the grammar accepts, one after another, after the output.
    fn allowed(&self, py: Python<'_>, tokens: Vec<Int>) -> PyResult<usize> {
        let tokens = i32s("token", &tokens)?;
        detached(py, || Ok(self.0.allowed(&tokens)))
    }

    /// Returns the pieces that must come next, in order: special tokens and endings as tokens, texts as `(bytes,
    /// tokens)`, where the tokens are one spelling of the bytes.
    fn forced(&self, py: Python<'_>) -> PyResult<Vec<Forced>> {
        let found = guarded(py, || Ok(self.0.forced()))?;
        Ok(found
            .into_iter()
            .map(|f| match f {
                grammar::Forced::Token(token) => Forced::Token(token),
                grammar::Forced::Text(bytes, tokens) => Forced::Text((bytes, tokens)),
            })
            .collect())
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// A member of `GrammarTracker.forced`.
#[derive(IntoPyObject)]
pub(super) enum Forced {
    Token(u32),
    Text((Vec<u8>, Vec<u32>)),
}
