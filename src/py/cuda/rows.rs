//! Launches of the operations on rows and of RoPE, on Python's tensors: a model's passes on a GPU are made of them
//! (`python/specrs/models/cuda.py`), and a round's copies. As for all launches, see the module above.

use pyo3::prelude::*;

use super::device::StreamArg;
use super::operands::{Arg, Operands};
use crate::device::{Activation, AddRmsNorm, RopeKvOperands, RowConv};
use crate::py::arg::Int;

register! {
    fn _device_add_rms_norm, _device_copy_rows, _device_embed, _device_gated_up, _device_gather_rows,
    _device_rope_kv, _device_row_conv;
}

/// out [rows, hidden] = table[tokens], int32 tokens; zeros for a token of -1, and behind the live rows.
#[pyfunction]
#[pyo3(signature = (table, tokens, live, out, stream))]
#[allow(clippy::too_many_arguments)]
fn _device_embed<'py>(
    py: Python<'py>,
    table: Arg<'_, 'py>,
    tokens: Arg<'_, 'py>,
    live: Option<Arg<'_, 'py>>,
    out: Arg<'_, 'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let mut call = Operands::named();
    let (table, tokens, live) = (call.reads("table", table), call.reads("tokens", tokens), call.reads("live", live));
    let out = call.writes("out", out);
    call.launch(py, stream, |o, k, s, g| {
        k.rows.embed(s, &o.rows(table, g)?, &o.slice(tokens, g)?, o.maybe(live, g)?.as_ref(), &o.rows(out, g)?)
    })
}

/// out [rows, columns] = source[indices + shift], int32 indices; zeros for -1, and behind the live rows.
#[pyfunction]
#[pyo3(signature = (source, indices, shift, live, out, stream))]
#[allow(clippy::too_many_arguments)]
fn _device_gather_rows<'py>(
    py: Python<'py>,
    source: Arg<'_, 'py>,
    indices: Arg<'_, 'py>,
    shift: Int,
    live: Option<Arg<'_, 'py>>,
    out: Arg<'_, 'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let shift = shift.i32("shift")?;
    let mut call = Operands::named();
    let (source, indices, live) =
        (call.reads("source", source), call.reads("indices", indices), call.reads("live", live));
    let out = call.writes("out", out);
    call.launch(py, stream, |o, k, s, g| {
        let (source, out) = (o.rows(source, g)?, o.rows(out, g)?);
        k.rows.gather(s, &source, &o.slice(indices, g)?, shift, o.maybe(live, g)?.as_ref(), &out)
    })
}

/// residual += x (where x is given); copy[:, column:] = residual; out = RMSNorm(residual) * weight. All bf16 or f16 [rows, columns],
/// `copy` [rows, at least column + columns]; `weight` [columns] may be float32.
#[pyfunction]
#[pyo3(signature = (residual, x, weight, eps, copy, column, live, out, stream))]
#[allow(clippy::too_many_arguments)]
fn _device_add_rms_norm<'py>(
    py: Python<'py>,
    residual: Arg<'_, 'py>,
    x: Option<Arg<'_, 'py>>,
    weight: Arg<'_, 'py>,
    eps: f32,
    copy: Option<Arg<'_, 'py>>,
    column: Int,
    live: Option<Arg<'_, 'py>>,
    out: Option<Arg<'_, 'py>>,
    stream: StreamArg,
) -> PyResult<()> {
    let column = column.usize("column")?;
    let mut call = Operands::named();
    let (x, weight, live) = (call.reads("x", x), call.reads("weight", weight), call.reads("live", live));
    let (residual, copy, out) = (call.writes("residual", residual), call.writes("copy", copy), call.writes("out", out));
    call.launch(py, stream, |o, k, s, g| {
        let residual = o.rows(residual, g)?;
        let copy = o.maybe_rows(copy, g)?.map(|c| c.part(column, residual.columns())).transpose()?;
        let (x, out, live) = (o.maybe_rows(x, g)?, o.maybe_rows(out, g)?, o.maybe(live, g)?);
        k.rows.add_rms_norm(
            s,
            &AddRmsNorm {
                residual: &residual,
                x: x.as_ref(),
                weight: &o.rows(weight, g)?,
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
fn _device_gated_up<'py>(
    py: Python<'py>,
    gate_up: Arg<'_, 'py>,
    activation: &str,
    interleaved: bool,
    live: Option<Arg<'_, 'py>>,
    out: Arg<'_, 'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let activation = activation.parse::<Activation>()?;
    let mut call = Operands::named();
    let (gate_up, live) = (call.reads("gate_up", gate_up), call.reads("live", live));
    let out = call.writes("out", out);
    call.launch(py, stream, |o, k, s, g| {
        let (gate_up, out) = (o.rows(gate_up, g)?, o.rows(out, g)?);
        k.rows.gated_up(s, activation, &gate_up, interleaved, o.maybe(live, g)?.as_ref(), &out)
    })
}

/// out [rows, columns] = (out +) sum over t of (base[t] + own[:, side, t]) * x, shifted by t rows within each request: x is
/// [rows, columns], base [taps, columns], own [rows, 2 * taps * groups] for groups of columns, starts int32 [requests + 1].
#[pyfunction]
#[pyo3(signature = (x, base, own, side, starts, adds, out, stream))]
#[allow(clippy::too_many_arguments)]
fn _device_row_conv<'py>(
    py: Python<'py>,
    x: Arg<'_, 'py>,
    base: Arg<'_, 'py>,
    own: Arg<'_, 'py>,
    side: Int,
    starts: Arg<'_, 'py>,
    adds: bool,
    out: Arg<'_, 'py>,
    stream: StreamArg,
) -> PyResult<()> {
    let side = side.within("side", 0, 1)? as usize;
    let mut call = Operands::named();
    let (x, base, own) = (call.reads("x", x), call.reads("base", base), call.reads("own", own));
    let starts = call.reads("starts", starts);
    let out = call.writes("out", out);
    call.launch(py, stream, |o, k, s, g| {
        let (x, base, own, starts, out) =
            (o.rows(x, g)?, o.rows(base, g)?, o.rows(own, g)?, o.slice(starts, g)?, o.rows(out, g)?);
        let half = own.columns() / 2;
        own.expect(own.rows(), 2 * half, own.float())?;
        let own = own.part(side * half, half)?;
        k.rows.conv(s, &RowConv { x: &x, base: &base, own: &own, starts: &starts, adds, out: &out })
    })
}

/// Bias, per-head RMSNorm and rotation of the rows of qkv: queries to q, keys and values to the slots of a layer of the
/// cache. `table` is (cos, sin), float32 [positions, pairs]; the norms' weights may be float32, both or neither.
#[pyfunction]
#[pyo3(signature = (qkv, heads, kv_heads, bias, q_norm, k_norm, eps, table, positions, slots, q, cache, layer, stream))]
#[allow(clippy::too_many_arguments)]
fn _device_rope_kv<'py>(
    py: Python<'py>,
    qkv: Arg<'_, 'py>,
    heads: Int,
    kv_heads: Int,
    bias: Option<Arg<'_, 'py>>,
    q_norm: Option<Arg<'_, 'py>>,
    k_norm: Option<Arg<'_, 'py>>,
    eps: f32,
    table: [Bound<'py, PyAny>; 2],
    positions: Arg<'_, 'py>,
    slots: Arg<'_, 'py>,
    q: Option<Arg<'_, 'py>>,
    cache: Arg<'_, 'py>,
    layer: Int,
    stream: StreamArg,
) -> PyResult<()> {
    let (heads, kv_heads, layer) = (heads.usize("heads")?, kv_heads.usize("kv_heads")?, layer.usize("layer")?);
    let [cos, sin] = &table;
    let mut call = Operands::named();
    let (qkv, bias) = (call.reads("qkv", qkv), call.reads("bias", bias));
    let (q_norm, k_norm) = (call.reads("q_norm", q_norm), call.reads("k_norm", k_norm));
    let (cos, sin) = (call.reads("cos", cos), call.reads("sin", sin));
    let (positions, slots) = (call.reads("positions", positions), call.reads("slots", slots));
    let (cache, q) = (call.writes("cache", cache), call.writes("q", q));
    call.launch(py, stream, |o, k, s, g| {
        let (bias, q_norm, k_norm) = (o.maybe_rows(bias, g)?, o.maybe_rows(q_norm, g)?, o.maybe_rows(k_norm, g)?);
        let q = o.maybe_rows(q, g)?;
        k.rope_kv.launch(
            s,
            &RopeKvOperands {
                qkv: &o.rows(qkv, g)?,
                heads,
                kv_heads,
                bias: bias.as_ref(),
                q_norm: q_norm.as_ref(),
                k_norm: k_norm.as_ref(),
                eps,
                cos: &o.rows(cos, g)?,
                sin: &o.rows(sin, g)?,
                positions: &o.slice(positions, g)?,
                slots: &o.slice(slots, g)?,
                q: q.as_ref(),
                cache: &o.cache(cache, g)?,
                layer,
            },
        )
    })
}

/// dst[dst_rows[i]] = src[src_rows[i]] of rows of float32, bfloat16 or float16, int32 lists; `None` is row i. -1 in either list
/// is nothing, and so are rows behind the live ones; rows of dst that no index names stay as they are. None is named twice.
#[pyfunction]
#[pyo3(signature = (src, src_rows, dst, dst_rows, live, stream))]
fn _device_copy_rows<'py>(
    py: Python<'py>,
    src: Arg<'_, 'py>,
    src_rows: Option<Arg<'_, 'py>>,
    dst: Arg<'_, 'py>,
    dst_rows: Option<Arg<'_, 'py>>,
    live: Option<Arg<'_, 'py>>,
    stream: StreamArg,
) -> PyResult<()> {
    let mut call = Operands::named();
    let (src, src_rows) = (call.reads("src", src), call.reads("src_rows", src_rows));
    let (dst_rows, live) = (call.reads("dst_rows", dst_rows), call.reads("live", live));
    let dst = call.writes("dst", dst);
    call.launch(py, stream, |o, k, s, g| {
        let (from, to, live) = (o.maybe(src_rows, g)?, o.maybe(dst_rows, g)?, o.maybe(live, g)?);
        k.rows.copy(s, (&o.rows(src, g)?, from.as_ref()), (&o.rows(dst, g)?, to.as_ref()), live.as_ref())
    })
}
