//! Matrix products with packed weights, and RMSNorm: [`crate::host::linear`], [`crate::host::norm`].

use std::sync::Arc;

use pyo3::prelude::*;

use super::arg::{detached, guarded};
use super::dlpack::{Call, DType, Tensor};
use crate::error::{Error, Result};
use crate::host::linear::{Add, Storage, Weight};
use crate::host::norm::RmsNorm;
use crate::host::{linear, norm};

/// A linear layer whose weight [N, K] (float32, bfloat16 or float16) and optional bias [N] (float32) are packed once;
/// the originals may be freed then. `storage` is `"bf16"` or `"f16"` (2 bytes a weight; exact if the weight has that
/// type, else rounded to nearest) or `"f32"`. `gated` says that the first N / 2 rows are a gate and the others an up
/// projection, which only `forward_swiglu` takes.
///
/// A row of the output depends, to the bit, on its own row of x alone: not on the other rows, nor on the threads.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct PackedLinear(pub(super) Arc<linear::PackedLinear>);

#[pymethods]
impl PackedLinear {
    #[new]
    #[pyo3(signature = (weight, bias=None, storage="bf16", gated=false))]
    fn new(
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        storage: &str,
        gated: bool,
    ) -> PyResult<Self> {
        let ([weight], [bias], []) = Call::on_host().take([("weight", weight)], [("bias", bias)], [])?;
        let storage = match storage {
            "bf16" => Storage::Bf16,
            "f16" => Storage::F16,
            "f32" => Storage::F32,
            _ => {
                let why = "want \"bf16\", \"f16\" or \"f32\"".into();
                return Err(Error::Invalid { what: "storage", got: format!("{storage:?}"), why }.into());
            }
        };
        let shape @ [n, k] = weight.dims("shape [N, K]")?;
        let bias = bias.as_ref().map(|b| b.input::<f32>(&[n])).transpose()?;
        let rows = self::weight(&weight, &shape)?;
        let pack = if gated { linear::PackedLinear::new_gated } else { linear::PackedLinear::new };
        detached(py, || pack(rows, n, k, bias, storage)).map(|made| Self(Arc::new(made)))
    }

    /// K: elements of a row of x.
    #[getter]
    fn in_features(&self) -> usize {
        self.0.k()
    }

    /// N: rows of the weight.
    #[getter]
    fn out_features(&self) -> usize {
        self.0.n()
    }

    /// `"bf16"`, `"f16"` or `"f32"`.
    #[getter]
    fn storage(&self) -> &'static str {
        match self.0.storage() {
            Storage::Bf16 => "bf16",
            Storage::F16 => "f16",
            Storage::F32 => "f32",
        }
    }

    /// Bytes of the packed weight.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes()
    }

    /// out [M, N] = residual + linear(rms_norm(x [M, K], norm [K], eps)), all float32; residual [M, N] and norm may be
    /// absent. `residual` may be `out` itself: then the product is added to what it holds.
    #[pyo3(signature = (x, out, residual=None, norm=None, eps=0.0))]
    fn forward(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        residual: Option<&Bound<'_, PyAny>>,
        norm: Option<&Bound<'_, PyAny>>,
        eps: f32,
    ) -> PyResult<()> {
        let in_place = residual.is_some_and(|r| r.is(out));
        let maybe = [("residual", residual.filter(|_| !in_place)), ("norm", norm)];
        let ([x], [residual, norm], [mut out]) = Call::on_host().take([("x", x)], maybe, [("out", out)])?;
        let m = self.rows(&x)?;
        let out = out.slice(&[m, self.0.n()])?;
        let add = match &residual {
            Some(r) => Add::Rows(r.input(&[m, self.0.n()])?),
            None if in_place => Add::Out,
            None => Add::Nothing,
        };
        let (x, norm) = (x.input(&[m, self.0.k()])?, self.norm(norm.as_ref(), eps)?);
        detached(py, || self.0.forward(x, norm, add, out))
    }

    /// For a gated weight: out [M, N / 2] = silu(gate) * up of rms_norm(x [M, K], norm [K], eps), all float32.
    #[pyo3(signature = (x, out, norm=None, eps=0.0))]
    fn forward_swiglu(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        norm: Option<&Bound<'_, PyAny>>,
        eps: f32,
    ) -> PyResult<()> {
        let ([x], [norm], [mut out]) = Call::on_host().take([("x", x)], [("norm", norm)], [("out", out)])?;
        let m = self.rows(&x)?;
        let out = out.slice(&[m, self.0.out_width()])?;
        let (x, norm) = (x.input(&[m, self.0.k()])?, self.norm(norm.as_ref(), eps)?);
        detached(py, || self.0.forward_swiglu(x, norm, out))
    }

    fn __repr__(&self) -> String {
        format!("PackedLinear(in_features={}, out_features={}, storage={:?})", self.0.k(), self.0.n(), self.storage())
    }
}

impl PackedLinear {
    fn rows(&self, x: &Tensor) -> Result<usize> {
        let [m, _] = x.dims("shape [M, K]")?;
        Ok(m)
    }

    fn norm<'a>(&self, weight: Option<&'a Tensor>, eps: f32) -> Result<Option<RmsNorm<'a>>> {
        weight.map(|w| Ok(RmsNorm { weight: w.input(&[self.0.k()])?, eps: epsilon(eps)? })).transpose()
    }
}

/// The elements of a matrix of weights.
fn weight<'a>(tensor: &'a Tensor, shape: &[usize; 2]) -> Result<Weight<'a>> {
    Ok(match tensor.dtype() {
        DType::F32 => Weight::F32(tensor.input(shape)?),
        DType::BF16 => Weight::Bf16(tensor.input(shape)?),
        DType::F16 => Weight::F16(tensor.input(shape)?),
        other => return Err(tensor.mismatch(other, "float32, bfloat16 or float16")),
    })
}

/// Check the epsilon of a norm.
pub(super) fn epsilon(eps: f32) -> Result<f32> {
    if eps.is_finite() && eps >= 0.0 {
        return Ok(eps);
    }
    Err(Error::Invalid { what: "eps", got: eps.to_string(), why: "must be finite and >= 0".into() })
}

/// out [M, K] = weight [K] * x [M, K] / sqrt(mean(x^2) + eps), all float32.
#[pyfunction]
#[pyo3(signature = (x, weight, eps, out))]
pub(super) fn rms_norm(
    py: Python<'_>,
    x: &Bound<'_, PyAny>,
    weight: &Bound<'_, PyAny>,
    eps: f32,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let ([x, weight], [], [mut out]) = Call::on_host().take([("x", x), ("weight", weight)], [], [("out", out)])?;
    let shape @ [_, k] = x.dims("shape [M, K]")?;
    let out = out.slice(&shape)?;
    let (x, rms) = (x.input(&shape)?, RmsNorm { weight: weight.input(&[k])?, eps: epsilon(eps)? });
    detached(py, || norm::rms_norm(x, &rms, out))
}

/// out [Q, K] = rows of `table` [vocab, K] (float32, bfloat16 or float16) for `tokens` (int32 or int64 [Q]), as float32.
/// A token outside the vocabulary is a `ConfigError`, and nothing is written then.
#[pyfunction]
#[pyo3(signature = (table, tokens, out))]
pub(super) fn embed(
    py: Python<'_>,
    table: &Bound<'_, PyAny>,
    tokens: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let given = [("table", table), ("tokens", tokens)];
    let ([table, tokens], [], [mut out]) = Call::on_host().take(given, [], [("out", out)])?;
    let ([_, width], [queries]) = (table.dims("shape [vocab, K]")?, tokens.dims("shape [Q]")?);
    let shape = [queries, width];
    let out = out.slice(&shape)?;
    guarded(py, || embed_rows(&table, &tokens, out, &shape))
}

/// Fill `out` of a shape [Q, K] with the rows of a table for tokens.
pub(super) fn embed_rows(
    table: &Tensor,
    tokens: &Tensor,
    out: &mut [f32],
    &[queries, width]: &[usize; 2],
) -> Result<()> {
    let [vocab, _] = table.dims("shape [vocab, K]")?;
    let table = weight(table, &[vocab, width])?;
    match tokens.dtype() {
        DType::I32 => crate::host::embed::embed(table, width, tokens.input::<i32>(&[queries])?, out),
        _ => crate::host::embed::embed(table, width, tokens.input::<i64>(&[queries])?, out),
    }
}

/// Whether no element of `x`, float32, is NaN or an infinity.
#[pyfunction]
pub(super) fn all_finite(x: &Bound<'_, PyAny>) -> PyResult<bool> {
    let x = Tensor::import(x, "x", None)?;
    Ok(x.input::<f32>(x.shape())?.iter().all(|v| v.is_finite()))
}
