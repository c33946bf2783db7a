//! Launches of the operations on rows and of RoPE, on Python's tensors: a model's passes on a GPU are made of them
//! (`python/specrs/models/cuda.py`), and a round's copies. As for all launches, see the module above.

use pyo3::prelude::*;

use super::device::StreamArg;
use super::operands::{Arg, import};
use crate::device::{Activation, AddRmsNorm, RopeKvOperands};
use crate::py::arg::Int;

/// out [rows, hidden] = table[tokens], int32 tokens; zeros for a token of -1, and behind the live rows.
#[pyfunction]
#[pyo3(signature = (table, tokens, live, out, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_embed(
    py: Python<'_>,
    table: Arg<'_, '_>,
    tokens: Arg<'_, '_>,
    live: Option<Arg<'_, '_>>,
    out: Arg<'_, '_>,
    stream: StreamArg,
) -> PyResult<()> {
    let operands = import(&[("table", Some(table)), ("tokens", Some(tokens)), ("live", live)], &[("out", Some(out))])?;
    operands.launch(py, stream, |o, k, s, g| {
        k.rows.embed(s, &o.rows(0, g)?, &o.slice(1, g)?, o.maybe(2, g)?.as_ref(), &o.rows(3, g)?)
    })
}

/// out [rows, columns] = source[indices + shift], int32 indices; zeros for -1, and behind the live rows.
#[pyfunction]
#[pyo3(signature = (source, indices, shift, live, out, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_gather_rows(
    py: Python<'_>,
    source: Arg<'_, '_>,
    indices: Arg<'_, '_>,
    shift: Int,
    live: Option<Arg<'_, '_>>,
    out: Arg<'_, '_>,
    stream: StreamArg,
) -> PyResult<()> {
    let shift = shift.i32("shift")?;
    let operands =
        import(&[("source", Some(source)), ("indices", Some(indices)), ("live", live)], &[("out", Some(out))])?;
    operands.launch(py, stream, |o, k, s, g| {
        k.rows.gather(s, &o.rows(0, g)?, &o.slice(1, g)?, shift, o.maybe(2, g)?.as_ref(), &o.rows(3, g)?)
    })
}

/// residual += x (where x is given); copy[:, column:] = residual; out = RMSNorm(residual) * weight. All bf16 or f16 [rows, columns],
/// `copy` [rows, at least column + columns]; `weight` [columns] may be float32.
#[pyfunction]
#[pyo3(signature = (residual, x, weight, eps, copy, column, live, out, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_add_rms_norm(
    py: Python<'_>,
    residual: Arg<'_, '_>,
    x: Option<Arg<'_, '_>>,
    weight: Arg<'_, '_>,
    eps: f32,
    copy: Option<Arg<'_, '_>>,
    column: Int,
    live: Option<Arg<'_, '_>>,
    out: Option<Arg<'_, '_>>,
    stream: StreamArg,
) -> PyResult<()> {
    let column = column.usize("column")?;
    let operands = import(
        &[("x", x), ("weight", Some(weight)), ("live", live)],
        &[("residual", Some(residual)), ("copy", copy), ("out", out)],
    )?;
    operands.launch(py, stream, |o, k, s, g| {
        let residual = o.rows(3, g)?;
        let copy = o.maybe_rows(4, g)?.map(|c| c.part(column, residual.columns())).transpose()?;
        let (x, out, live) = (o.maybe_rows(0, g)?, o.maybe_rows(5, g)?, o.maybe(2, g)?);
        k.rows.add_rms_norm(
            s,
            &AddRmsNorm {
                residual: &residual,
                x: x.as_ref(),
                weight: &o.rows(1, g)?,
                eps,
                out: out.as_ref(),
                copy: copy.as_ref(),
                live: live.as_ref(),
            },
        )
    })
}

/// out [rows, columns] = activation(gate) * up of gate_up [rows, 2 * columns], all gates first, or interleaved pairs; the
/// activation is "silu" or "gelu_tanh".
#[pyfunction]
#[pyo3(signature = (gate_up, activation, interleaved, live, out, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_gated_up(
    py: Python<'_>,
    gate_up: Arg<'_, '_>,
    activation: &str,
    interleaved: bool,
    live: Option<Arg<'_, '_>>,
    out: Arg<'_, '_>,
    stream: StreamArg,
) -> PyResult<()> {
    let activation = activation.parse::<Activation>()?;
    let operands = import(&[("gate_up", Some(gate_up)), ("live", live)], &[("out", Some(out))])?;
    operands.launch(py, stream, |o, k, s, g| {
        k.rows.gated_up(s, activation, &o.rows(0, g)?, interleaved, o.maybe(1, g)?.as_ref(), &o.rows(2, g)?)
    })
}

/// Bias, per-head RMSNorm and rotation of the rows of qkv: queries to q, keys and values to the slots of a layer of the
/// cache. `table` is (cos, sin), float32 [positions, pairs]; the norms' weights may be float32, both or neither.
#[pyfunction]
#[pyo3(signature = (qkv, heads, kv_heads, bias, q_norm, k_norm, eps, table, positions, slots, q, cache, layer, stream))]
#[allow(clippy::too_many_arguments)]
pub(super) fn _device_rope_kv(
    py: Python<'_>,
    qkv: Arg<'_, '_>,
    heads: Int,
    kv_heads: Int,
    bias: Option<Arg<'_, '_>>,
    q_norm: Option<Arg<'_, '_>>,
    k_norm: Option<Arg<'_, '_>>,
    eps: f32,
    table: [Bound<'_, PyAny>; 2],
    positions: Arg<'_, '_>,
    slots: Arg<'_, '_>,
    q: Option<Arg<'_, '_>>,
    cache: Arg<'_, '_>,
    layer: Int,
    stream: StreamArg,
) -> PyResult<()> {
    let (heads, kv_heads, layer) = (heads.usize("heads")?, kv_heads.usize("kv_heads")?, layer.usize("layer")?);
    let operands = import(
        &[
            ("qkv", Some(qkv)),
            ("bias", bias),
            ("q_norm", q_norm),
            ("k_norm", k_norm),
            ("cos", Some(&table[0])),
            ("sin", Some(&table[1])),
            ("positions", Some(positions)),
            ("slots", Some(slots)),
        ],
        &[("cache", Some(cache)), ("q", q)],
    )?;
    operands.launch(py, stream, |o, k, s, g| {
        let (bias, q_norm, k_norm) = (o.maybe_rows(1, g)?, o.maybe_rows(2, g)?, o.maybe_rows(3, g)?);
        let q = o.maybe_rows(9, g)?;
        k.rope_kv.launch(
            s,
            &RopeKvOperands {
                qkv: &o.rows(0, g)?,
                heads,
                kv_heads,
                bias: bias.as_ref(),
                q_norm: q_norm.as_ref(),
                k_norm: k_norm.as_ref(),
                eps,
                cos: &o.rows(4, g)?,
                sin: &o.rows(5, g)?,
                positions: &o.slice(6, g)?,
                slots: &o.slice(7, g)?,
                q: q.as_ref(),
                cache: &o.cache(0, g)?,
                layer,
            },
        )
    })
}

/// dst[dst_rows[i]] = src[src_rows[i]] of rows of float32, bfloat16 or float16, int32 lists; `None` is row i. -1 in either list
/// is nothing, and so are rows behind the live ones; rows of dst that no index names stay as they are. None is named twice.
#[pyfunction]
#[pyo3(signature = (src, src_rows, dst, dst_rows, live, stream))]
pub(super) fn _device_copy_rows(
    py: Python<'_>,
    src: Arg<'_, '_>,
    src_rows: Option<Arg<'_, '_>>,
    dst: Arg<'_, '_>,
    dst_rows: Option<Arg<'_, '_>>,
    live: Option<Arg<'_, '_>>,
    stream: StreamArg,
) -> PyResult<()> {
    let operands = import(
        &[("src", Some(src)), ("src_rows", src_rows), ("dst_rows", dst_rows), ("live", live)],
        &[("dst", Some(dst))],
    )?;
    operands.launch(py, stream, |o, k, s, g| {
        let (from, to, live) = (o.maybe(1, g)?, o.maybe(2, g)?, o.maybe(3, g)?);
        k.rows.copy(s, (&o.rows(0, g)?, from.as_ref()), (&o.rows(4, g)?, to.as_ref()), live.as_ref())
    })
}
