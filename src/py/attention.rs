//! Attention over the paged cache, and the fused step of a layer around it: [`crate::host::attention`],
//! [`crate::host::rope`].

use std::sync::Arc;

use pyo3::prelude::*;

use super::arg::{Int, detached};
use super::dlpack::{Call, Tensor};
use super::kv::KvCache;
use super::linear::epsilon;
use super::plan::Plan;
use crate::error::{Error, Result};
use crate::host::attention::{AttnView, Scores};
use crate::host::norm::RmsNorm;
use crate::host::rope::Rotary;
use crate::host::{attention as kernel, rope};
use crate::plan::AuditedPlan;
use crate::pool::Tables;

/// The plan in the form that the kernels take.
pub(super) fn view<'a>(p: &'a AuditedPlan, plan: &'a Plan, tables: &Tables<'a>) -> Result<AttnView<'a>> {
    p.check_rows(tables)?;
    let (mask, mask_words) = plan.masks();
    Ok(AttnView {
        qo_indptr: p.qo_indptr(),
        prefix_lens: p.prefix_lens(),
        first_pages: &plan.first_pages,
        mask,
        mask_words,
        rows: bytemuck::cast_slice(p.rows()), // a dead row, -1, becomes one that the kernel refuses
        table: tables.table(),
        row_pages: tables.row_pages() as usize,
        page: p.page(),
        positions: p.positions(),
        out_slots: p.out_slots(),
    })
}

type Kernel = fn(&crate::host::kv::KvCache<'_>, usize, &AttnView<'_>, &[f32], usize, Scores, &mut [f32]) -> Result<()>;

/// The operands of both forms of attention, checked; then `run`.
#[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
fn attend(
    py: Python<'_>,
    run: Kernel,
    cache: &KvCache,
    layer: Int,
    plan: &Plan,
    q: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    scores: Result<Scores>,
) -> PyResult<()> {
    let layer = layer.usize("layer")?;
    let native = plan.native("attention")?;
    let live = cache.to_read(py)?;
    let (lender, span) = cache.beside();
    let call = Call::on_host().reading(lender.as_slice(), &span);
    let ([q], [], [mut out]) = call.take([("q", q)], [], [("out", out)])?;
    let [_, heads, _] = q.dims("shape [Q, heads, head_dim]")?;
    let shape = [plan.plan.queries(), heads, cache.shape().head_dim];
    let qs = q.input(&shape)?;
    let scores = scores?;
    cache.check_plan(plan)?;
    detached(py, || {
        let tensor = live.read();
        let out = out.slice(&shape)?;
        let kv = cache.view(&tensor)?;
        plan.pool.with_tables(|t| run(&kv, layer, &view(&native, plan, &t)?, qs, heads, scores, out))?
    })
}

pub(super) fn scores(scale: f32, cap: Option<f32>) -> Result<Scores> {
    let invalid = |what, got: f32, why: &str| Err(Error::Invalid { what, got: got.to_string(), why: why.into() });
    if !scale.is_finite() {
        return invalid("scale", scale, "must be finite");
    }
    match cap {
        Some(cap) if !(cap > 0.0 && cap.is_finite()) => invalid("cap", cap, "must be positive and finite"),
        _ => Ok(Scores { scale, cap }),
    }
}

/// Compute attention of q, float32 [Q, heads, head_dim], over a layer of the cache by the plan, into out of the same
/// shape. Query heads are grouped over the cache's heads in order; scores are multiplied by `scale`, and with a `cap` x
/// becomes cap * tanh(x / cap). A query that attends nothing gives 0.
#[pyfunction]
#[pyo3(signature = (cache, layer, plan, q, out, scale, cap=None))]
#[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
pub(super) fn attention(
    py: Python<'_>,
    cache: &Bound<'_, KvCache>,
    layer: Int,
    plan: &Bound<'_, Plan>,
    q: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    scale: f32,
    cap: Option<f32>,
) -> PyResult<()> {
    attend(py, kernel::attention, cache.get(), layer, plan.get(), q, out, scores(scale, cap))
}

/// `attention` computed by a plain softmax in float64, as a reference.
#[pyfunction]
#[pyo3(signature = (cache, layer, plan, q, out, scale, cap=None))]
#[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
pub(super) fn attention_reference(
    py: Python<'_>,
    cache: &Bound<'_, KvCache>,
    layer: Int,
    plan: &Bound<'_, Plan>,
    q: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    scale: f32,
    cap: Option<f32>,
) -> PyResult<()> {
    attend(py, kernel::attention_reference, cache.get(), layer, plan.get(), q, out, scores(scale, cap))
}

/// Cosines and sines of RoPE's angles, float32 [positions, half] each. Angle d rotates the elements d and d + half of a
/// head; the first 2 * half elements of a head are rotated.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct RopeTable(pub(super) Arc<rope::RopeTable>);

#[pymethods]
impl RopeTable {
    #[new]
    #[pyo3(signature = (cos, sin))]
    fn new(cos: &Bound<'_, PyAny>, sin: &Bound<'_, PyAny>) -> PyResult<Self> {
        let ([cos, sin], [], []) = Call::on_host().take([("cos", cos), ("sin", sin)], [], [])?;
        let shape @ [_, half] = cos.dims("shape [positions, half]")?;
        Ok(Self(Arc::new(rope::RopeTable::from_tables(cos.input(&shape)?, sin.input(&shape)?, half)?)))
    }

    /// Positions.
    #[getter]
    fn positions(&self) -> usize {
        self.0.positions()
    }

    /// Elements of a head that are rotated.
    #[getter]
    fn rotary_dim(&self) -> usize {
        self.0.rotary_dim()
    }

    fn __repr__(&self) -> String {
        format!("RopeTable(positions={}, rotary_dim={})", self.0.positions(), self.0.rotary_dim())
    }
}

/// Run a layer's step around attention: norms each head of q and k (`q_norm`, `k_norm` [head_dim], optional), rotates
/// them at the plan's positions, writes k and v to the plan's slots, attends as `attention` does. `qkv` is float32 [Q,
/// (num_heads + 2 kv_heads) * head_dim], `out` float32 [Q, num_heads * head_dim].
#[pyfunction]
#[pyo3(signature = (cache, layer, plan, qkv, rope, num_heads, out, scale, q_norm=None, k_norm=None, eps=0.0, cap=None))]
#[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
pub(super) fn rope_attention(
    py: Python<'_>,
    cache: &Bound<'_, KvCache>,
    layer: Int,
    plan: &Bound<'_, Plan>,
    qkv: &Bound<'_, PyAny>,
    rope: &Bound<'_, RopeTable>,
    num_heads: Int,
    out: &Bound<'_, PyAny>,
    scale: f32,
    q_norm: Option<&Bound<'_, PyAny>>,
    k_norm: Option<&Bound<'_, PyAny>>,
    eps: f32,
    cap: Option<f32>,
) -> PyResult<()> {
    let (cache, plan, table) = (cache.get(), plan.get(), &rope.get().0);
    let layer = layer.usize("layer")?;
    let native = plan.native("rope_attention")?;
    let heads = num_heads.within("num_heads", 1, 1 << 16)? as usize;
    let live = cache.to_write(py)?;
    let (lender, span) = cache.beside();
    let call = Call::on_host().writing(lender.as_slice(), &span);
    let norms = [("q_norm", q_norm), ("k_norm", k_norm)];
    let ([qkv], [q_norm, k_norm], [mut out]) = call.take([("qkv", qkv)], norms, [("out", out)])?;
    let (d, kv_heads, queries) = (cache.shape().head_dim, cache.shape().kv_heads, plan.plan.queries());
    let rows = qkv.input(&[queries, (heads + 2 * kv_heads) * d])?;
    let norms = Norms::of(q_norm.as_ref(), k_norm.as_ref(), eps, d)?;
    let scores = scores(scale, cap)?;
    cache.check_plan(plan)?;
    detached(py, || {
        let mut tensor = live.write();
        let out = out.slice(&[queries, heads * d])?;
        let mut kv = cache.view_mut(&mut tensor)?;
        plan.pool.with_tables(|t| {
            rope::rope_attention(
                &mut kv,
                layer,
                &view(&native, plan, &t)?,
                rows,
                heads,
                &norms.rotary(table),
                scores,
                out,
            )
        })?
    })
}

/// The part of `rope_attention` that later rows need: norms each head of k (`k_norm` [head_dim], optional), rotates it
/// at the plan's positions, writes k and v to the plan's slots. `kv` is float32 [Q, 2 * kv_heads * head_dim], keys
/// and values.
#[pyfunction]
#[pyo3(signature = (cache, layer, plan, kv, rope, k_norm=None, eps=0.0))]
#[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
pub(super) fn rope_write(
    py: Python<'_>,
    cache: &Bound<'_, KvCache>,
    layer: Int,
    plan: &Bound<'_, Plan>,
    kv: &Bound<'_, PyAny>,
    rope: &Bound<'_, RopeTable>,
    k_norm: Option<&Bound<'_, PyAny>>,
    eps: f32,
) -> PyResult<()> {
    let (cache, plan, table) = (cache.get(), plan.get(), &rope.get().0);
    let layer = layer.usize("layer")?;
    let native = plan.native("rope_write")?;
    let live = cache.to_write(py)?;
    let (lender, span) = cache.beside();
    let call = Call::on_host().writing(lender.as_slice(), &span);
    let ([kv], [k_norm], []) = call.take([("kv", kv)], [("k_norm", k_norm)], [])?;
    let (d, kv_heads) = (cache.shape().head_dim, cache.shape().kv_heads);
    let rows = kv.input(&[plan.plan.queries(), 2 * kv_heads * d])?;
    let norms = Norms::of(None, k_norm.as_ref(), eps, d)?;
    cache.check_plan(plan)?;
    detached(py, || {
        let mut tensor = live.write();
        let mut cache = cache.view_mut(&mut tensor)?;
        plan.pool.with_tables(|t| {
            rope::rope_write(&mut cache, layer, &view(&native, plan, &t)?, rows, &norms.rotary(table))
        })?
    })
}

/// Weights of per-head norms.
struct Norms<'t> {
    q: Option<&'t [f32]>,
    k: Option<&'t [f32]>,
    eps: f32,
}

impl<'t> Norms<'t> {
    fn of(q_norm: Option<&'t Tensor>, k_norm: Option<&'t Tensor>, eps: f32, head_dim: usize) -> Result<Self> {
        let norm = |weight: Option<&'t Tensor>| weight.map(|t| t.input::<f32>(&[head_dim])).transpose();
        Ok(Self { q: norm(q_norm)?, k: norm(k_norm)?, eps: epsilon(eps)? })
    }

    fn rotary<'a>(&'a self, table: &'a rope::RopeTable) -> Rotary<'a> {
        let norm = |weight: Option<&'a [f32]>| weight.map(|weight| RmsNorm { weight, eps: self.eps });
        Rotary { table, q_norm: norm(self.q), k_norm: norm(self.k) }
    }
}
