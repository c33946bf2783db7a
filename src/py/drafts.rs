//! Sources of drafts: a request's own text, recycled tokens, a corpus; over [`crate::draft`].

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use super::arg::{Int, check_entries, detached, guarded, u32s};
use super::dlpack::Tensor;
use super::draft_merge::DraftProposal;
use crate::draft;
use crate::error::{Error, Result, in_range};
use crate::round::MAX_VOCAB;

/// Lock `state` even after a panic of another holder: every call checks the guarded data.
fn held<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Source of drafts from one request's own text: an automaton over its prediction, prompt and output, in at most
/// `limit` bytes. Half of the bytes hold the recent text and half the text before that; older text is forgotten.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct SuffixDrafts(Mutex<draft::SuffixDrafts>);

#[pymethods]
impl SuffixDrafts {
    /// `vocab` is the size of the target's vocabulary; `prediction` is text that may come in the output, from its start
    /// on or in parts.
    #[new]
    #[pyo3(signature = (vocab, limit, prediction=Vec::new()))]
    #[pyo3(text_signature = "(vocab, limit, prediction=())")]
    fn new(py: Python<'_>, vocab: Int, limit: Int, prediction: Vec<Int>) -> PyResult<Self> {
        let (vocab, limit) = (vocab.u32("vocab")?, limit.usize("suffix bytes")?);
        let prediction = u32s("token", &prediction)?;
        detached(py, || draft::SuffixDrafts::new(vocab, limit, &prediction)).map(|d| Self(Mutex::new(d)))
    }

    /// Append the prompt, or a part of it.
    fn prompt(&self, py: Python<'_>, tokens: Vec<Int>) -> PyResult<()> {
        let tokens = u32s("token", &tokens)?;
        detached(py, || held(&self.0).prompt(&tokens))
    }

    /// Append tokens of the output.
    fn extend(&self, py: Python<'_>, tokens: Vec<Int>) -> PyResult<()> {
        let tokens = u32s("token", &tokens)?;
        guarded(py, || held(&self.0).extend(&tokens))
    }

    /// Propose at most `nodes` nodes of at most `depth` levels that may follow the text and then the tokens `after`;
    /// the likeliest first.
    #[pyo3(signature = (nodes, depth, after=Vec::new()))]
    #[pyo3(text_signature = "($self, nodes, depth, after=())")]
    fn propose(&self, py: Python<'_>, nodes: Int, depth: Int, after: Vec<Int>) -> PyResult<DraftProposal> {
        let (nodes, depth, after) = (nodes.usize("nodes")?, depth.usize("depth")?, u32s("token", &after)?);
        guarded(py, || held(&self.0).propose_after(&after, nodes, depth)).map(DraftProposal)
    }

    /// Length in tokens of the longest suffix of the text that occurred before.
    #[getter]
    fn matched(&self) -> u32 {
        held(&self.0).matched()
    }

    /// Bytes held.
    #[getter]
    fn bytes(&self) -> usize {
        held(&self.0).bytes()
    }

    /// Number of positions that can be matched.
    fn __len__(&self) -> usize {
        held(&self.0).len()
    }

    fn __repr__(&self) -> String {
        let state = held(&self.0);
        format!("SuffixDrafts(positions={}, bytes={})", state.len(), state.bytes())
    }
}

/// Source of drafts from recycled tokens: after each token, the tokens that the target last ranked highest, 8 a row, in
/// at most `limit` bytes. Rows that were not written for long are forgotten.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct RecycledTokens(Mutex<draft::RecycledTokens>);

#[pymethods]
impl RecycledTokens {
    /// `vocab` is the size of the target's vocabulary.
    #[new]
    fn new(py: Python<'_>, vocab: Int, limit: Int) -> PyResult<Self> {
        let (vocab, limit) = (vocab.u32("vocab")?, limit.usize("recycling bytes")?);
        guarded(py, || draft::RecycledTokens::new(vocab, limit)).map(|d| Self(Mutex::new(d)))
    }

    /// Learn that after each of `tokens` the target's likeliest next tokens were those of `best`, the likeliest first;
    /// tokens beyond 8 are ignored.
    fn observe(&self, py: Python<'_>, tokens: Vec<Int>, best: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = u32s("token", &tokens)?;
        check_entries("recycled tokens", best)?;
        let best: Vec<Vec<Int>> = best.extract()?;
        let best: Vec<Vec<u32>> = best.iter().map(|row| u32s("token", row)).collect::<Result<_>>()?;
        guarded(py, || held(&self.0).observe(&tokens, &best))
    }

    /// Learn a text: each of its tokens becomes the likeliest after the token before it.
    fn follow(&self, py: Python<'_>, text: Vec<Int>) -> PyResult<()> {
        let text = u32s("token", &text)?;
        guarded(py, || held(&self.0).follow(&text))
    }

    /// Propose at most `nodes` nodes of at most `depth` levels that may follow `last`; the likeliest first.
    fn propose(&self, py: Python<'_>, last: Int, nodes: Int, depth: Int) -> PyResult<DraftProposal> {
        let (last, nodes, depth) = (last.u32("token")?, nodes.usize("nodes")?, depth.usize("depth")?);
        guarded(py, || held(&self.0).propose(last, nodes, depth)).map(DraftProposal)
    }

    /// Bytes held.
    #[getter]
    fn bytes(&self) -> usize {
        held(&self.0).bytes()
    }

    /// Rows held.
    fn __len__(&self) -> usize {
        held(&self.0).len()
    }

    fn __repr__(&self) -> String {
        let state = held(&self.0);
        format!("RecycledTokens(rows={}, bytes={})", state.len(), state.bytes())
    }
}

/// Source of drafts from texts that the operator gives, sorted in a file that is mapped into memory. The file must not
/// be changed in place while it is open; renaming another file over it is safe.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct DraftCorpus(draft::Corpus);

#[pymethods]
impl DraftCorpus {
    /// Open the file of a corpus. With `verify` all of it is read first, and a damaged file is refused; without, damage
    /// can only cause wrong drafts.
    #[new]
    #[pyo3(signature = (path, verify=true))]
    #[pyo3(text_signature = "(path, verify=True)")]
    fn new(py: Python<'_>, path: PathBuf, verify: bool) -> PyResult<Self> {
        detached(py, || draft::Corpus::open(&path, verify)).map(Self)
    }

    /// Write the file of a corpus: int32 `tokens` [n] of all documents, one document after another, and the position
    /// where each document `ends`, ascending; the last one is n. Takes 8 bytes of memory a token. An existing file is
    /// replaced by renaming.
    #[staticmethod]
    fn build(py: Python<'_>, path: PathBuf, vocab: Int, tokens: &Bound<'_, PyAny>, ends: Vec<Int>) -> PyResult<()> {
        let vocab = vocab.within("vocab", 1, MAX_VOCAB.into())? as u32;
        let tokens = Tensor::import(tokens, "corpus tokens", None)?;
        let [n] = tokens.dims("shape [n]")?;
        let given = tokens.input::<i32>(&[n])?;
        given.iter().try_for_each(|&t| in_range("corpus token", t, 0, i128::from(vocab) - 1).map(drop))?;
        let ends: Vec<usize> = ends.iter().map(|e| e.usize("end of a document")).collect::<Result<_>>()?;
        let mut from = 0;
        let mut documents: Vec<&[u32]> = Vec::new();
        for &end in &ends {
            let Some(document) = given.get(from..end) else {
                let why = format!("ends ascend from 0 to {n}, the number of tokens; this one follows {from}");
                return Err(Error::Invalid { what: "end of a document", got: end.to_string(), why }.into());
            };
            documents.push(bytemuck::cast_slice(document));
            from = end;
        }
        if from != n {
            let (got, want) = (from.to_string(), format!("{n}, the number of tokens"));
            return Err(Error::Mismatch { operand: "end of the last document", got, want }.into());
        }
        detached(py, || draft::write_corpus(&path, vocab, &documents))
    }

    /// Size of the vocabulary of its tokens.
    #[getter]
    fn vocab(&self) -> u32 {
        self.0.vocab()
    }

    /// Documents.
    #[getter]
    fn documents(&self) -> u64 {
        self.0.documents()
    }

    /// Size of the mapped file in bytes.
    #[getter]
    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Tokens.
    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("DraftCorpus(tokens={}, documents={})", self.0.len(), self.0.documents())
    }
}

/// One request's place in a corpus; `vocab` is the size of the target's vocabulary.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct CorpusDrafts(Mutex<draft::CorpusDrafts>);

#[pymethods]
impl CorpusDrafts {
    #[new]
    fn new(py: Python<'_>, corpus: &Bound<'_, DraftCorpus>, vocab: Int) -> PyResult<Self> {
        let vocab = vocab.u32("vocab")?;
        guarded(py, || draft::CorpusDrafts::new(&corpus.get().0, vocab)).map(|d| Self(Mutex::new(d)))
    }

    /// Append tokens of the request's text.
    fn extend(&self, py: Python<'_>, tokens: Vec<Int>) -> PyResult<()> {
        let tokens = u32s("token", &tokens)?;
        guarded(py, || held(&self.0).extend(&tokens))
    }

    /// Propose at most `nodes` nodes of at most `depth` levels that may follow the text and then the tokens `after`;
    /// the likeliest first.
    #[pyo3(signature = (nodes, depth, after=Vec::new()))]
    #[pyo3(text_signature = "($self, nodes, depth, after=())")]
    fn propose(&self, py: Python<'_>, nodes: Int, depth: Int, after: Vec<Int>) -> PyResult<DraftProposal> {
        let (nodes, depth, after) = (nodes.usize("nodes")?, depth.usize("depth")?, u32s("token", &after)?);
        guarded(py, || held(&self.0).propose_after(&after, nodes, depth)).map(DraftProposal)
    }

    /// Length in tokens, at most 63, of the longest suffix of the text that occurs in the corpus.
    #[getter]
    fn matched(&self) -> u32 {
        held(&self.0).matched()
    }

    fn __repr__(&self) -> String {
        format!("CorpusDrafts(matched={})", self.matched())
    }
}
