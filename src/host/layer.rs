//! Decoder layers in one call: products, norms and attention one behind the other, as separate calls of
//! [`linear`](super::linear) and [`rope`](super::rope) make them, to the same bits, so that Python is left and entered
//! once.

use std::sync::Arc;

use super::attention::{AttnView, Scores};
use super::kv::KvCacheMut;
use super::linear::{Add, PackedLinear};
use super::norm::RmsNorm;
use super::rope::{RopeTable, Rotary, rope_attention};
use crate::error::{Result, in_range};

/// An RMSNorm with a weight of its own.
#[derive(Debug, Clone)]
pub struct NormWeight {
    /// One factor per column.
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

impl NormWeight {
    fn of(&self) -> RmsNorm<'_> {
        RmsNorm { weight: &self.weight, eps: self.eps }
    }
}

/// Everything of a decoder layer behind its projection of queries, keys and values: attention, and a SwiGLU MLP.
#[derive(Debug)]
pub struct LayerTail {
    /// Product of what attention gives.
    pub o: Arc<PackedLinear>,
    /// Norm of what the MLP reads.
    pub norm: NormWeight,
    /// The MLP's first product, gate and up projection.
    pub gate_up: Arc<PackedLinear>,
    /// The MLP's last product.
    pub down: Arc<PackedLinear>,
    /// Query heads.
    pub heads: usize,
    /// Rotary table.
    pub rope: Arc<RopeTable>,
    /// Norm of each query head.
    pub q_norm: Option<NormWeight>,
    /// Norm of each key head.
    pub k_norm: Option<NormWeight>,
    /// Treatment of scores.
    pub scores: Scores,
}

/// A decoder layer.
#[derive(Debug, Clone)]
pub struct DecoderLayer {
    /// Norm of what the projection reads.
    pub norm: NormWeight,
    /// Projection of queries, keys and values.
    pub qkv: Arc<PackedLinear>,
    /// Everything behind it.
    pub tail: Arc<LayerTail>,
}

/// Memory of a layer's steps, for the layers of one call.
#[derive(Debug, Default)]
struct Scratch {
    attended: Vec<f32>,
    y: Vec<f32>,
    act: Vec<f32>,
}

/// The first `n` elements of `memory`, grown if need be.
fn first(memory: &mut Vec<f32>, n: usize) -> &mut [f32] {
    if memory.len() < n {
        *memory = vec![0.0; n];
    }
    &mut memory[..n]
}

impl LayerTail {
    /// `out` [R, h] = the residual stream behind layer `layer` of the cache, which gets the keys and values of all rows.
    /// qkv: [Q, (heads + 2 kv_heads) head_dim]. residual: the stream before the layer [Q, h]; `None`: it is in `out`.
    /// wanted: the rows of `out`, in this order; `None`: all.
    #[allow(clippy::too_many_arguments)]
    pub fn forward(
        &self,
        cache: &mut KvCacheMut<'_>,
        layer: usize,
        view: &AttnView<'_>,
        qkv: &[f32],
        residual: Option<&[f32]>,
        wanted: Option<&[i64]>,
        out: &mut [f32],
    ) -> Result<()> {
        self.run(cache, layer, view, qkv, residual, wanted, out, &mut Scratch::default())
    }

    #[allow(clippy::too_many_arguments)]
    fn run(
        &self,
        cache: &mut KvCacheMut<'_>,
        layer: usize,
        view: &AttnView<'_>,
        qkv: &[f32],
        residual: Option<&[f32]>,
        wanted: Option<&[i64]>,
        out: &mut [f32],
        Scratch { attended, y, act }: &mut Scratch,
    ) -> Result<()> {
        let (inner, h) = (self.o.k(), self.o.n());
        let rotary = Rotary {
            table: &self.rope,
            q_norm: self.q_norm.as_ref().map(NormWeight::of),
            k_norm: self.k_norm.as_ref().map(NormWeight::of),
        };
        let attended = first(attended, view.positions.len() * inner);
        rope_attention(cache, layer, view, qkv, self.heads, &rotary, self.scores, attended)?;
        let residual = residual.unwrap_or(out);
        // From here on rows are independent.
        let picked: Option<Result<_>> =
            wanted.map(|rows| Ok((gather(attended, inner, rows)?, gather(residual, h, rows)?)));
        let picked = picked.transpose()?;
        let (attended, residual) = picked.as_ref().map_or((&*attended, residual), |(a, r)| (a, r));
        let rows = attended.len() / inner;
        let (y, act) = (first(y, rows * h), first(act, rows * self.gate_up.out_width()));
        self.o.forward(attended, None, Add::Rows(residual), y)?;
        self.gate_up.forward_swiglu(y, Some(self.norm.of()), act)?;
        self.down.forward(act, None, Add::Rows(y), out)
    }
}

/// Run layers one behind the other, the first of them layer `layer` of the cache. `out` [Q, h] gets the residual stream
/// behind them; x: the stream before them; `None`: it is in `out`.
///
/// # Errors
/// Those of the layers' steps. Layers before the one that fails have written their keys and values.
pub fn decoder_layers(
    layers: &[DecoderLayer],
    cache: &mut KvCacheMut<'_>,
    layer: usize,
    view: &AttnView<'_>,
    mut x: Option<&[f32]>,
    out: &mut [f32],
) -> Result<()> {
    let (mut qkv, mut scratch) = (Vec::new(), Scratch::default());
    for (i, one) in layers.iter().enumerate() {
        let rows = first(&mut qkv, view.positions.len() * one.qkv.n());
        one.qkv.forward(x.unwrap_or(out), Some(one.norm.of()), Add::Nothing, rows)?;
        one.tail.run(cache, layer + i, view, rows, x.take(), None, out, &mut scratch)?;
    }
    Ok(())
}

/// The one layer of an EAGLE-3 head, and the scores behind it. Queries, keys and values are the sum of two products, of a
/// token's embedding and of a feature, which is also the residual stream.
#[derive(Debug)]
pub struct Eagle3Layer {
    /// Norm of features.
    pub feature_norm: NormWeight,
    /// Product of features.
    pub of_feature: Arc<PackedLinear>,
    /// Norm of embeddings.
    pub embedding_norm: NormWeight,
    /// Product of embeddings.
    pub of_embedding: Arc<PackedLinear>,
    /// Everything of the layer behind.
    pub tail: Arc<LayerTail>,
    /// Norm of what the last product reads.
    pub norm: NormWeight,
    /// Product that gives the scores.
    pub lm_head: Arc<PackedLinear>,
}

impl Eagle3Layer {
    /// `hidden` [R, h] = the residual stream behind the layer, which is layer 0 of the cache, and `logits` [R, V] its
    /// scores. embedded: [Q, h]. feature: [Q, h]; `None`: it is in `hidden`. wanted: as in [`LayerTail::forward`].
    #[allow(clippy::too_many_arguments)]
    pub fn forward(
        &self,
        cache: &mut KvCacheMut<'_>,
        view: &AttnView<'_>,
        embedded: &[f32],
        feature: Option<&[f32]>,
        wanted: Option<&[i64]>,
        hidden: &mut [f32],
        logits: &mut [f32],
    ) -> Result<()> {
        let n = view.positions.len() * self.of_feature.n();
        let (mut part, mut qkv) = (vec![0.0; n], vec![0.0; n]);
        let stream = feature.unwrap_or(hidden);
        self.of_feature.forward(stream, Some(self.feature_norm.of()), Add::Nothing, &mut part)?;
        self.of_embedding.forward(embedded, Some(self.embedding_norm.of()), Add::Rows(&part), &mut qkv)?;
        self.tail.forward(cache, 0, view, &qkv, feature, wanted, hidden)?;
        self.lm_head.forward(hidden, Some(self.norm.of()), Add::Nothing, logits)
    }
}

/// Rows of `x` [M, width].
///
/// # Errors
/// [`Error::OutOfRange`](crate::Error::OutOfRange) for a row that `x` does not have.
fn gather(x: &[f32], width: usize, rows: &[i64]) -> Result<Vec<f32>> {
    let count = (x.len() / width) as i128;
    let mut out = Vec::with_capacity(rows.len() * width);
    for &row in rows {
        let at = in_range("row", row, 0, count - 1)? as usize;
        out.extend_from_slice(&x[at * width..(at + 1) * width]);
    }
    Ok(out)
}
