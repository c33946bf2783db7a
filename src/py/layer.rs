//! Decoder layers in one call: [`crate::host::layer`].

use std::sync::Arc;

use pyo3::prelude::*;

use super::arg::{Int, detached};
use super::attention::{RopeTable, scores, view};
use super::dlpack::{Call, Tensor};
use super::kv::KvCache;
use super::linear::{PackedLinear, embed_rows, epsilon};
use super::plan::Plan;
use crate::error::{Result, in_range};
use crate::host::layer::{self, DecoderLayer, NormWeight, decoder_layers};

/// Everything of a decoder layer behind its projection of queries, keys and values, in one call: `rope_attention`, the
/// product `o` beside the residual stream, and a SwiGLU MLP. Weights of norms are copied.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct LayerTail(Arc<layer::LayerTail>);

/// A norm with a copy of its weight.
fn copied(weight: &Tensor, eps: f32) -> Result<NormWeight> {
    Ok(NormWeight { weight: weight.line()?.to_vec(), eps: epsilon(eps)? })
}

#[pymethods]
impl LayerTail {
    #[new]
    #[pyo3(signature = (o, gate_up, down, norm, eps, rope, num_heads, scale, q_norm=None, k_norm=None, cap=None))]
    #[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
    fn new(
        o: &Bound<'_, PackedLinear>,
        gate_up: &Bound<'_, PackedLinear>,
        down: &Bound<'_, PackedLinear>,
        norm: &Bound<'_, PyAny>,
        eps: f32,
        rope: &Bound<'_, RopeTable>,
        num_heads: Int,
        scale: f32,
        q_norm: Option<&Bound<'_, PyAny>>,
        k_norm: Option<&Bound<'_, PyAny>>,
        cap: Option<f32>,
    ) -> PyResult<Self> {
        let maybe = [("q_norm", q_norm), ("k_norm", k_norm)];
        let ([mlp], [q_norm, k_norm], []) = Call::on_host().take([("norm", norm)], maybe, [])?;
        let linear = |bound: &Bound<'_, PackedLinear>| bound.get().0.clone();
        Ok(Self(Arc::new(layer::LayerTail {
            o: linear(o),
            norm: copied(&mlp, eps)?,
            gate_up: linear(gate_up),
            down: linear(down),
            heads: num_heads.within("num_heads", 1, 1 << 16)? as usize,
            rope: rope.get().0.clone(),
            q_norm: q_norm.as_ref().map(|w| copied(w, eps)).transpose()?,
            k_norm: k_norm.as_ref().map(|w| copied(w, eps)).transpose()?,
            scores: scores(scale, cap)?,
        })))
    }

    /// out [R, h] = the residual stream behind layer `layer` of the cache, which gets the keys and values of all rows.
    /// qkv is [Q, (heads + 2 kv_heads) * head_dim], residual [Q, h] the stream before the layer, all float32. rows, int64
    /// [R]: the rows of `out`; without it R = Q, and `residual` may be `out` itself.
    #[pyo3(signature = (cache, layer, plan, qkv, residual, out, rows=None))]
    #[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
    fn forward(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, KvCache>,
        layer: Int,
        plan: &Bound<'_, Plan>,
        qkv: &Bound<'_, PyAny>,
        residual: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        rows: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (cache, plan, tail) = (cache.get(), plan.get(), &self.0);
        let layer = layer.usize("layer")?;
        let native = plan.native("LayerTail")?;
        let live = cache.to_write(py)?;
        let (lender, span) = cache.beside();
        let call = Call::on_host().writing(lender.as_slice(), &span);
        let apart = (!residual.is(out) || rows.is_some()).then_some(residual);
        let maybe = [("residual", apart), ("rows", rows)];
        let ([qkv], [residual, rows], [mut out]) = call.take([("qkv", qkv)], maybe, [("out", out)])?;
        let (queries, h) = (plan.plan.queries(), tail.o.n());
        let (d, kv_heads) = (cache.shape().head_dim, cache.shape().kv_heads);
        let qkv = qkv.input(&[queries, (tail.heads + 2 * kv_heads) * d])?;
        let residual = residual.as_ref().map(|r| r.input::<f32>(&[queries, h])).transpose()?;
        let rows = rows.as_ref().map(|r| r.line::<i64>()).transpose()?;
        let out = out.slice(&[rows.map_or(queries, <[i64]>::len), h])?;
        cache.check_plan(plan)?;
        detached(py, || {
            let mut tensor = live.write();
            let mut kv = cache.view_mut(&mut tensor)?;
            plan.pool
                .with_tables(|t| tail.forward(&mut kv, layer, &view(&native, plan, &t)?, qkv, residual, rows, out))?
        })
    }

    fn __repr__(&self) -> String {
        format!("LayerTail(hidden_size={}, num_heads={})", self.0.o.n(), self.0.heads)
    }
}

/// A layer, as `DecoderLayers` takes it.
type Layer<'py> = (Py<PackedLinear>, Bound<'py, PyAny>, f32, Py<LayerTail>);

/// Decoder layers in one call: each is (projection of queries, keys and values, weight of the norm before it, epsilon of
/// that norm, everything behind it).
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct DecoderLayers(Vec<DecoderLayer>);

#[pymethods]
impl DecoderLayers {
    #[new]
    fn new(layers: Vec<Layer<'_>>) -> PyResult<Self> {
        let each = layers.iter().map(|(qkv, norm, eps, tail)| {
            let norm = copied(&Tensor::import(norm, "norm", None)?, *eps)?;
            Ok(DecoderLayer { norm, qkv: qkv.get().0.clone(), tail: tail.get().0.clone() })
        });
        each.collect::<PyResult<_>>().map(Self)
    }

    /// out [Q, h] = the residual stream x [Q, h] behind layers `first` to `end`, float32. Each writes its keys and values
    /// to its layer of the cache. `x` may be `out` itself.
    #[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
    fn forward(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, KvCache>,
        first: Int,
        end: Int,
        plan: &Bound<'_, Plan>,
        x: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (cache, plan) = (cache.get(), plan.get());
        let (first, end) = (first.usize("first layer")?, end.usize("end of the layers")?);
        in_range("end of the layers", end as u64, first as i128 + 1, self.0.len() as i128)?;
        let layers = &self.0[first..end];
        let native = plan.native("DecoderLayers")?;
        let live = cache.to_write(py)?;
        let (lender, span) = cache.beside();
        let call = Call::on_host().writing(lender.as_slice(), &span);
        let ([], [x], [mut out]) = call.take([], [("x", (!x.is(out)).then_some(x))], [("out", out)])?;
        let shape = [plan.plan.queries(), layers[0].qkv.k()];
        let x = x.as_ref().map(|x| x.input::<f32>(&shape)).transpose()?;
        let out = out.slice(&shape)?;
        cache.check_plan(plan)?;
        detached(py, || {
            let mut tensor = live.write();
            let mut kv = cache.view_mut(&mut tensor)?;
            plan.pool.with_tables(|t| decoder_layers(layers, &mut kv, first, &view(&native, plan, &t)?, x, out))?
        })
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("DecoderLayers(layers={})", self.0.len())
    }
}

/// The one layer of an EAGLE-3 head, and the scores behind it, in one call: queries, keys and values of a feature and a
/// token's embedding, each normalised, everything behind them, and `lm_head` of the norm. Weights of norms are copied.
#[pyclass(frozen, module = "specrs._specrs")]
pub(super) struct Eagle3Layer(layer::Eagle3Layer);

#[pymethods]
impl Eagle3Layer {
    #[new]
    #[pyo3(signature = (feature_norm, of_feature, embedding_norm, of_embedding, tail, norm, lm_head, eps))]
    #[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
    fn new(
        feature_norm: &Bound<'_, PyAny>,
        of_feature: &Bound<'_, PackedLinear>,
        embedding_norm: &Bound<'_, PyAny>,
        of_embedding: &Bound<'_, PackedLinear>,
        tail: &Bound<'_, LayerTail>,
        norm: &Bound<'_, PyAny>,
        lm_head: &Bound<'_, PackedLinear>,
        eps: f32,
    ) -> PyResult<Self> {
        let norms = [("feature_norm", feature_norm), ("embedding_norm", embedding_norm), ("norm", norm)];
        let ([feature, embedding, last], [], []) = Call::on_host().take(norms, [], [])?;
        let linear = |bound: &Bound<'_, PackedLinear>| bound.get().0.clone();
        Ok(Self(layer::Eagle3Layer {
            feature_norm: copied(&feature, eps)?,
            of_feature: linear(of_feature),
            embedding_norm: copied(&embedding, eps)?,
            of_embedding: linear(of_embedding),
            tail: tail.get().0.clone(),
            norm: copied(&last, eps)?,
            lm_head: linear(lm_head),
        }))
    }

    /// hidden [R, h] = the residual stream behind the layer, which is layer 0 of the cache, and logits [R, V] its scores,
    /// all float32. `table` and `tokens` [Q] are those of `embed`; feature is [Q, h]. rows: as in `LayerTail.forward`;
    /// without them `feature` may be `hidden` itself.
    #[pyo3(signature = (cache, plan, table, tokens, feature, hidden, logits, rows=None))]
    #[allow(clippy::too_many_arguments, reason = "operands of an operation, by name")]
    fn forward(
        &self,
        py: Python<'_>,
        cache: &Bound<'_, KvCache>,
        plan: &Bound<'_, Plan>,
        table: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        feature: &Bound<'_, PyAny>,
        hidden: &Bound<'_, PyAny>,
        logits: &Bound<'_, PyAny>,
        rows: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (cache, plan) = (cache.get(), plan.get());
        let native = plan.native("Eagle3Layer")?;
        let live = cache.to_write(py)?;
        let (lender, span) = cache.beside();
        let call = Call::on_host().writing(lender.as_slice(), &span);
        let (given, written) = ([("table", table), ("tokens", tokens)], [("hidden", hidden), ("logits", logits)]);
        let maybe = [("feature", (!feature.is(hidden)).then_some(feature)), ("rows", rows)];
        let ([table, tokens], [feature, rows], [mut hidden, mut logits]) = call.take(given, maybe, written)?;
        let (queries, h) = (plan.plan.queries(), self.0.tail.o.n());
        let mut embedded = vec![0.0; queries * h];
        embed_rows(&table, &tokens, &mut embedded, &[queries, h])?;
        let feature = feature.as_ref().map(|f| f.input::<f32>(&[queries, h])).transpose()?;
        let rows = rows.as_ref().map(|r| r.line::<i64>()).transpose()?;
        let wanted = rows.map_or(queries, <[i64]>::len);
        let (hidden, logits) = (hidden.slice(&[wanted, h])?, logits.slice(&[wanted, self.0.lm_head.n()])?);
        cache.check_plan(plan)?;
        detached(py, || {
            let mut tensor = live.write();
            let mut kv = cache.view_mut(&mut tensor)?;
            plan.pool.with_tables(|t| {
                self.0.forward(&mut kv, &view(&native, plan, &t)?, &embedded, feature, rows, hidden, logits)
            })?
        })
    }

    fn __repr__(&self) -> String {
        format!("Eagle3Layer(hidden_size={}, vocab={})", self.0.tail.o.n(), self.0.lm_head.n())
    }
}
