//! Sampling and verification: [`crate::host::sample`], [`crate::host::verify`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{RwLock, TryLockError};

use pyo3::prelude::*;

use super::arg::{Int, detached, i32s, same_len, u32s};
use super::dlpack::{Call, Tensor};
use super::grammar::{GrammarTracker, TokenMask};
use super::trees::TreeBatch;
use crate::error::{Error, Result};
use crate::host::sample::{self, Scratch};
use crate::host::verify::Verifier;
use crate::round::{self, SamplerConfig};

thread_local! {
    // Buffers of the calling thread, so that only its first draws allocate memory.
    static SCRATCH: RefCell<(Scratch, Verifier)> = RefCell::default();
}

/// Sampling parameters and token history of one request. The token at absolute position p depends on the logits, the
/// parameters, the history, the path and `(seed, p)` alone, so plain and speculative decoding draw the same.
///
/// `vocab` is the length of a logits row. `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, a repetition
/// penalty of 1 and presence and frequency penalties of 0 do nothing. `logit_bias` maps token ids to a finite bias, or
/// -inf to forbid the token. `allowed` are the tokens that may be drawn at all; `grammar` tells which may be drawn
/// after the output and a path, and the caller commits the output to it. A parameter that cannot be honoured raises
/// `ConfigError` with its name.
///
/// Logits are edited in float32. Limits: |bias| <= 1e30, |penalty| <= 1e20, repetition penalty in [1e-6, 1e6]; within
/// them no logit of magnitude up to 1e30 overflows, however often a token occurs.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct Sampler {
    // No call waits for this lock: a sampler belongs to one request, so its use by two threads at once is the caller's
    // error.
    state: RwLock<sample::Sampler>,
}

fn busy<T>(_: TryLockError<T>) -> Error {
    let why = "a sampler belongs to one request; finish the other call first".into();
    Error::Invalid { what: "sampler", got: "in use by another thread".into(), why }
}

#[pymethods]
impl Sampler {
    #[new]
    #[pyo3(signature = (
        vocab, prompt_tokens, temperature=0.0, top_k=Int::ZERO, top_p=1.0, min_p=0.0, seed=Int::ZERO,
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None, allowed=None,
        grammar=None,
    ))]
    #[pyo3(text_signature = "(vocab, prompt_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, \
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=None, allowed=None, grammar=None)")]
    #[allow(clippy::too_many_arguments, reason = "the parameters of a request, by name")]
    fn new(
        py: Python<'_>,
        vocab: Int,
        prompt_tokens: Vec<Int>,
        temperature: f64,
        top_k: Int,
        top_p: f64,
        min_p: f64,
        seed: Int,
        repetition_penalty: f64,
        presence_penalty: f64,
        frequency_penalty: f64,
        logit_bias: Option<HashMap<Int, f64>>,
        allowed: Option<&Bound<'_, TokenMask>>,
        grammar: Option<&Bound<'_, GrammarTracker>>,
    ) -> PyResult<Self> {
        let config = SamplerConfig {
            temperature,
            top_k: top_k.within("top_k", 0, i64::MAX.into())? as i64,
            top_p,
            min_p,
            seed: seed.u64("seed")?,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias: logit_bias.into_iter().flatten().map(|(t, b)| bias(t, b)).collect::<Result<_>>()?,
            allowed: allowed.map(|a| a.get().0.clone()),
        };
        let grammar = grammar.map(|g| g.get().0.clone());
        let (vocab, prompt) = (vocab.u32("vocab")?, i32s("prompt token", &prompt_tokens)?);
        let sampler = detached(py, || {
            let sampler = sample::Sampler::new(vocab, &prompt, config)?;
            grammar.map_or(Ok(sampler.clone()), |g| sampler.under(g))
        })?;
        Ok(Self { state: RwLock::new(sampler) })
    }

    /// Length of a logits row.
    #[getter]
    fn vocab(&self) -> PyResult<u32> {
        Ok(self.state.try_read().map_err(busy)?.vocab())
    }

    /// Add emitted tokens to the history.
    fn commit(&self, py: Python<'_>, tokens: Vec<Int>) -> PyResult<()> {
        let tokens = i32s("output token", &tokens)?;
        detached(py, || self.state.try_write().map_err(busy)?.commit(&tokens))
    }

    /// Draw the token at absolute `position` from its `logits` (float32 [vocab]); `path` are the tokens between the
    /// committed history and that position. Raises `NonFiniteError` for NaN, +inf, or no finite value; its `what` says
    /// whether the logits were given so, or bias and penalties made them so. Raises `GrammarFailedError` if the grammar
    /// allows no token.
    #[pyo3(signature = (logits, position, path=None))]
    fn draw(&self, py: Python<'_>, logits: &Bound<'_, PyAny>, position: Int, path: Option<Vec<Int>>) -> PyResult<i32> {
        let logits = Tensor::import(logits, "logits", None)?;
        let (position, path) = (position.u32("position")?, i32s("path token", &path.unwrap_or_default())?);
        let [columns] = logits.dims("shape [vocab]")?;
        let row = logits.input(&[columns])?;
        detached(py, || {
            let sampler = self.state.try_read().map_err(busy)?;
            SCRATCH.with_borrow_mut(|(scratch, _)| sampler.draw(scratch, row, position, &path))
        })
    }

    /// Write the scores that a token is drawn from to `out`, float32 [vocab]: each of its `logits` after masks, bias
    /// and penalties, minus the largest of them, divided by the temperature if that is not 0. Tokens that are banned,
    /// or that top-k, top-p and min-p leave out, get -inf. `path` and errors are those of `draw`.
    #[pyo3(signature = (logits, out, path=None))]
    fn processed(
        &self,
        py: Python<'_>,
        logits: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        path: Option<Vec<Int>>,
    ) -> PyResult<()> {
        let ([logits], [], [mut out]) = Call::on_host().take([("logits", logits)], [], [("out", out)])?;
        let path = i32s("path token", &path.unwrap_or_default())?;
        let [columns] = logits.dims("shape [vocab]")?;
        let (row, out) = (logits.input(&[columns])?, out.slice(&[columns])?);
        detached(py, || {
            let sampler = self.state.try_read().map_err(busy)?;
            SCRATCH.with_borrow_mut(|(scratch, _)| sampler.processed(scratch, row, &path, out))
        })
    }
}

/// Call `f` with each sampler.
pub(super) fn with_samplers(
    samplers: &[Bound<'_, Sampler>],
    mut f: impl FnMut(&sample::Sampler) -> Result<()>,
) -> Result<()> {
    samplers.iter().try_for_each(|s| s.get().state.try_read().map_err(busy).and_then(|s| f(&s)))
}

/// A pair of `logit_bias` in the core's types.
fn bias(token: Int, value: f64) -> Result<(i32, f32)> {
    if value.is_finite() && value.abs() > round::MAX_BIAS.into() {
        let why = "must be in [-1e30, 1e30], or -inf to forbid the token".into();
        return Err(Error::Invalid { what: "logit_bias", got: value.to_string(), why });
    }
    Ok((token.i32("logit_bias token")?, value as f32))
}

/// Accepted paths and emitted tokens of a round.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct Accepts(pub(super) round::Accepts);

#[pymethods]
impl Accepts {
    /// Accepted paths from the arrays of a device, on the host: int32 `offsets` [B + 1], int32 `paths` and `tokens` of
    /// at least as many entries; entries after the last are not read. No request has an error.
    #[staticmethod]
    fn from_arrays(
        py: Python<'_>,
        offsets: &Bound<'_, PyAny>,
        paths: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let given = [("offsets", offsets), ("paths", paths), ("tokens", tokens)];
        let ([offsets, paths, tokens], [], []) = Call::on_host().take(given, [], [])?;
        let (offsets, paths, tokens) = (offsets.line()?, paths.line()?, tokens.line()?);
        detached(py, || round::Accepts::from_arrays(offsets, paths, tokens)).map(Self)
    }

    /// Accepted nodes of each request, the root (0) first.
    #[getter]
    fn paths(&self) -> Vec<Vec<u32>> {
        (0..self.0.len()).map(|i| self.0.path(i).to_vec()).collect()
    }

    /// Tokens that each request emits: the accepted drafts and one more, drawn at the last accepted node. If `errors`
    /// has an error for the request, only the accepted drafts: one token less than its path has nodes.
    #[getter]
    fn tokens(&self) -> Vec<Vec<i32>> {
        (0..self.0.len()).map(|i| self.0.tokens(i).to_vec()).collect()
    }

    /// For each request `None`, or the error that says why no token could be drawn at the last node of its path: the
    /// `NonFiniteError` of the row of logits, or a `GrammarFailedError`. Its `request` is the row of the batch, its
    /// `row` the row of logits.
    #[getter]
    fn errors(&self) -> Vec<Option<PyErr>> {
        (0..self.0.len()).map(|i| self.0.fault(i).cloned().map(PyErr::from)).collect()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("Accepts(paths={:?}, tokens={:?})", self.paths(), self.tokens())
    }
}

/// Tokens of a tree's nodes, and for each node the likeliest next tokens.
type Likeliest = (Vec<i32>, Vec<Vec<u32>>);

/// Returns, for some `requests` (rows of the batch), the tokens of their trees' nodes, and for each node the tokens of
/// its `count` largest logits (of all, if there are fewer). The largest comes first; of equal logits the lower token
/// comes first. A row of logits with NaN or without a finite value gives none. `logits` is float32 [sum of sizes,
/// vocab], one row a node. Raises `ConfigError` for a request that is named twice, so that no more tokens come back
/// than there are logits.
#[pyfunction]
#[pyo3(signature = (trees, logits, requests, count))]
pub(super) fn likeliest(
    py: Python<'_>,
    trees: &Bound<'_, TreeBatch>,
    logits: &Bound<'_, PyAny>,
    requests: Vec<Int>,
    count: Int,
) -> PyResult<Vec<Likeliest>> {
    let trees = &trees.get().0;
    let logits = Tensor::import(logits, "logits", None)?;
    let [_, vocab] = logits.dims("shape [nodes, vocab]")?;
    let (rows, count) = (logits.input::<f32>(&[trees.nodes(), vocab])?, count.usize("count")?);
    let last = trees.len() as i128 - 1;
    let requests = requests.iter().map(|r| r.within("requests", 0, last)).collect::<Result<Vec<_>>>()?;
    let mut asked = vec![false; trees.len()];
    for &request in &requests {
        if std::mem::replace(&mut asked[request as usize], true) {
            let why = "named twice; a request's tokens are told once".into();
            return Err(Error::Invalid { what: "requests", got: request.to_string(), why }.into());
        }
    }
    detached(py, || {
        SCRATCH.with_borrow_mut(|(scratch, _)| {
            let each = |request: &i128| {
                let nodes = trees.range(*request as usize);
                let best = |n: usize| sample::likeliest(scratch, &rows[n * vocab..(n + 1) * vocab], count);
                (trees.tokens()[nodes.clone()].to_vec(), nodes.map(best).collect())
            };
            Ok(requests.iter().map(each).collect())
        })
    })
}

/// Walk each tree along the tokens that plain decoding would draw. `logits` is float32 [sum of sizes, vocab], one row a
/// node; `samplers` and `lens` (committed lengths: the roots' positions) have one entry a request. Samplers are not
/// changed. A row of logits that cannot be sampled ends only the walk of the request that reads it: see
/// `Accepts.errors`.
#[pyfunction]
#[pyo3(signature = (trees, logits, samplers, lens))]
pub(super) fn verify(
    py: Python<'_>,
    trees: &Bound<'_, TreeBatch>,
    logits: &Bound<'_, PyAny>,
    samplers: Vec<Bound<'_, Sampler>>,
    lens: Vec<Int>,
) -> PyResult<Accepts> {
    let trees = &trees.get().0;
    let logits = Tensor::import(logits, "logits", None)?;
    let [_, vocab] = logits.dims("shape [nodes, vocab]")?;
    let rows = logits.input(&[trees.nodes(), vocab])?;
    same_len("samplers", samplers.len(), "trees", trees.len())?;
    same_len("lens", lens.len(), "trees", trees.len())?;
    let lens = u32s("committed length", &lens)?;
    let samplers: Vec<&RwLock<sample::Sampler>> = samplers.iter().map(|s| &s.get().state).collect();
    detached(py, || {
        let held = samplers.iter().map(|s| s.try_read().map_err(busy)).collect::<Result<Vec<_>>>()?;
        let samplers: Vec<&sample::Sampler> = held.iter().map(|s| &**s).collect();
        // The core takes the vocabulary's size from the samplers; without a sampler there is nothing to compare.
        if let Some(s) = samplers.iter().find(|s| s.vocab() as usize != vocab) {
            return Err(
                logits.mismatch(format_args!("{vocab} columns"), format_args!("{} (the vocabulary)", s.vocab()))
            );
        }
        let mut accepts = round::Accepts::default();
        SCRATCH.with_borrow_mut(|(_, v)| v.verify(trees, rows, &samplers, &lens, &mut accepts))?;
        Ok(Accepts(accepts))
    })
}
