//! The launch of paged attention on Python's tensors: every layer of the engine's passes on a GPU makes it.

use pyo3::prelude::*;

use super::device::StreamArg;
use crate::bounds::PageSize;
use crate::device::{AttentionBatch, AttentionCall, AttentionSize, Device};
use crate::error::Error;
use crate::py::arg::{Int, detached};
use crate::py::dlpack::Call;

register! { fn _device_attention, _device_attention_workspace; }

/// Bytes of workspace with which `_device_attention` keeps CUDA device `ordinal` busy: for `requests` of up to `max_queries`
/// queries and `max_keys` keys each, `kv_heads` heads with `group` query heads each, of `head_dim` elements.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "sizes, passed by name")]
#[pyo3(signature = (ordinal, *, requests, max_queries, kv_heads, group, head_dim, max_keys))]
fn _device_attention_workspace(
    py: Python<'_>,
    ordinal: Int,
    requests: Int,
    max_queries: Int,
    kv_heads: Int,
    group: Int,
    head_dim: Int,
    max_keys: Int,
) -> PyResult<u64> {
    let ordinal = ordinal.i32("CUDA device")?;
    let sizes = [
        requests.u32("requests")?,
        max_queries.u32("max_queries")?,
        kv_heads.u32("kv_heads")?,
        group.u32("group")?,
        head_dim.u32("head_dim")?,
        max_keys.u32("max_keys")?,
    ];
    detached(py, move || {
        let [requests, max_queries, kv_heads, group, head_dim, max_keys] = sizes;
        let size = AttentionSize { requests, max_queries, kv_heads, group, head_dim, max_keys };
        Device::get(ordinal)?.kernels().attention.workspace_bytes(&size)
    })
}

/// Launch paged attention over layer `layer` of `cache` on the raw stream `stream` of the cache's device.
///
/// Query j of request i is row `starts[i] + j` of `q` [queries, heads, head_dim]. It attends to positions `[0, lens[i])` of
/// row `rows[i]` (i without `rows`) of `table` [rows, width], whose pages hold `page_size` tokens, and then causally to
/// `lens[i] ..= lens[i] + j`, or, with a `mask`, to `lens[i] + b` of each bit b of its word. `draft = (K, S)`: bits are
/// `branch * S + step`. With `first_pages` no query of request i attends to a position before page `first_pages[i]` of its
/// row. `out` is of `q`'s type or `float32`. With a `cap` a scaled score x becomes `cap * tanh(x / cap)`.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "the operands of one launch, passed by name")]
#[pyo3(signature = (
    cache, layer, q, out, *, table, page_size, rows, lens, starts, mask, first_pages=None, draft, max_queries, scale, cap=None,
    workspace, stream
))]
fn _device_attention(
    cache: &Bound<'_, PyAny>,
    layer: Int,
    q: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    table: &Bound<'_, PyAny>,
    page_size: Int,
    rows: Option<&Bound<'_, PyAny>>,
    lens: &Bound<'_, PyAny>,
    starts: &Bound<'_, PyAny>,
    mask: Option<&Bound<'_, PyAny>>,
    first_pages: Option<&Bound<'_, PyAny>>,
    draft: Option<(Int, Int)>,
    max_queries: Int,
    scale: f64,
    cap: Option<f64>,
    workspace: &Bound<'_, PyAny>,
    stream: StreamArg,
) -> PyResult<()> {
    let (layer, page_size) = (layer.usize("layer")?, page_size.u32("page_size")?);
    let (max_queries, stream) = (max_queries.u32("max_queries")?, stream.get()?);
    let draft = draft.map(|(k, s)| Ok::<_, Error>((k.u32("draft branches")?, s.u32("draft steps")?))).transpose()?;
    let py = cache.py();
    let read = [("q", q), ("table", table), ("lens", lens), ("starts", starts), ("cache", cache)];
    let (read, [rows, mask, first_pages], [out, workspace]) = Call::on_device().take(
        read,
        [("rows", rows), ("mask", mask), ("first_pages", first_pages)],
        [("out", out), ("workspace", workspace)],
    )?;
    detached(py, || {
        let [q, table, lens, starts, cache_tensor] = &read;
        let ordinal = cache_tensor.cuda_ordinal()?;
        let layer = cache_tensor.device_kv_layer(ordinal, layer)?;
        let (queries, heads) = q.device_queries(&layer)?;
        let (table_slice, width) = table.device_table(ordinal)?;
        let target = out.device_attention_out(ordinal, q)?;
        let bytes = workspace.device_bytes(ordinal)?;
        let batch = AttentionBatch::new(
            table_slice,
            u32::try_from(width).unwrap_or(u32::MAX),
            PageSize::new(page_size)?,
            rows.as_ref().map(|r| r.device_slice(ordinal)).transpose()?,
            lens.device_slice(ordinal)?,
            starts.device_slice(ordinal)?,
            mask.as_ref().map(|m| m.device_slice(ordinal)).transpose()?,
            first_pages.as_ref().map(|p| p.device_slice(ordinal)).transpose()?,
            draft,
        )?;
        let call = AttentionCall {
            cache: layer,
            batch,
            q: queries,
            out: target,
            heads: u32::try_from(heads).unwrap_or(u32::MAX),
            max_queries,
            scale,
            cap,
            workspace: bytes,
        };
        Device::get(ordinal)?.kernels().attention.launch(stream, &call)
    })
}
