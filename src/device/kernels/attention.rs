//! The launch of `cuda/attention.cu`: paged attention of every phase, whose bits depend on a row's keys alone.
//!
//! Two kernels in stream order: `attend` computes splits of the keys, `merge` folds what was left in the workspace. On Hopper
//! clusters take the place of `attend` where a batch can have only a few items of low tiles. The grid follows from capacities
//! and lengths are read on the device, so that a captured launch serves every batch of its bucket.

use std::sync::{Arc, Mutex, OnceLock};

use super::attention_tiling::{
    AttentionSize, BOX_TOKENS, CLUSTER, Gpu, THREADS, TILE_ROWS, clusters, threads_of, tiling,
};
use crate::device::attention_view::{AttentionBatch, AttentionOut, HalfType, KvLayerView};
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Relaxed, Stream};
use crate::device::images;
use crate::device::params::attention::AttentionParams;
use crate::device::tensor_map::{BOX_COLUMNS, TensorMap};
use crate::device::view::{DeviceSlice, device_mismatch};
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, disjoint};

/// Caps of scores. The kernel's tanh is within 2^-22 or so, in units of the cap: beyond, scores near 0 would be wrong.
const CAPS: std::ops::RangeInclusive<f64> = 1e-4..=1e4;
/// An image each: element type, head_dim, whether scores are capped, name.
const IMAGES: [(HalfType, u32, bool, &str); 12] = [
    (HalfType::Bf16, 64, false, "attention_bf16_64"),
    (HalfType::Bf16, 96, false, "attention_bf16_96"),
    (HalfType::Bf16, 128, false, "attention_bf16_128"),
    (HalfType::Bf16, 256, false, "attention_bf16_256"),
    (HalfType::F16, 64, false, "attention_f16_64"),
    (HalfType::F16, 96, false, "attention_f16_96"),
    (HalfType::F16, 128, false, "attention_f16_128"),
    (HalfType::F16, 256, false, "attention_f16_256"),
    (HalfType::Bf16, 128, true, "attention_bf16_128_capped"),
    (HalfType::Bf16, 256, true, "attention_bf16_256_capped"),
    (HalfType::F16, 128, true, "attention_f16_128_capped"),
    (HalfType::F16, 256, true, "attention_f16_256_capped"),
];
/// One launch.
#[derive(Debug, Clone, Copy)]
pub struct AttentionCall {
    /// Keys and values of the layer.
    pub cache: KvLayerView,
    /// What the rows attend to.
    pub batch: AttentionBatch,
    /// Queries `[queries, heads, head_dim]` of the cache's element type; query head h belongs to key and value head
    /// `h / group`.
    pub q: DeviceSlice<u16>,
    /// Output, of the shape of `q`. Every element is written: 0 for rows that attend to nothing and for queries behind
    /// the last request.
    pub out: AttentionOut,
    /// Query heads; a multiple of the cache's heads.
    pub heads: u32,
    /// Largest number of queries of one request; a request with more is recorded, and its output is 0.
    pub max_queries: u32,
    /// Factor of the scores, usually `head_dim^-0.5`; positive and finite.
    pub scale: f64,
    /// c in `c * tanh(x / c)` of a scaled score x, from 1e-4 to 1e4; `None` where scores have no cap. There are kernels
    /// with one for head_dims of 128 and 256.
    pub cap: Option<f64>,
    /// At least one slot for each block of the grid; [`Attention::workspace_bytes`] says how much keeps the GPU busy at any
    /// length. Launches that may run at the same time need one each. Contents need not be kept between launches.
    pub workspace: DeviceSlice<u8>,
}

/// Parameters of the kernels for which the copy engine loads, as they declare them.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct BoxCall {
    /// Keys and values, in boxes of [`BOX_TOKENS`] and [`BOX_COLUMNS`].
    boxes: [TensorMap; 2],
    /// The same, token by token.
    lines: [TensorMap; 2],
    /// Values, in boxes of as many columns as a block of a cluster multiplies.
    slices: TensorMap,
    params: AttentionParams,
}

impl BoxCall {
    fn new(params: AttentionParams, head_dim: u32) -> Result<Self> {
        let tokens = (params.pages as u32) << params.page_shift; // no more than the cache's slots
        let map = |plane: u64, box_size: [u32; 2]| {
            TensorMap::of_16_bits(plane, [tokens, params.kv_heads as u32 * head_dim], box_size)
        };
        let planes = [params.k, params.v];
        let [boxes, lines] =
            [[BOX_TOKENS, BOX_COLUMNS], [1, BOX_COLUMNS]].map(|size| planes.map(|plane| map(plane, size)));
        let [[k, v], [k_line, v_line]] = [boxes, lines];
        let slices = map(params.v, [BOX_TOKENS, head_dim / CLUSTER])?;
        Ok(Self { boxes: [k?, v?], lines: [k_line?, v_line?], slices, params })
    }
}

/// Kernels of one element type and head_dim.
#[derive(Debug)]
struct Image {
    /// By [`TILE_ROWS`].
    attend: [Function; 3],
    /// By `CLUSTER_ROWS` of the tiling, with the clusters that run at once, where there are such.
    clusters: Option<[(Function, u32); 2]>,
    /// For tiles of 128 rows, where there is one.
    wide: Option<Function>,
    merge: Function,
    _module: Module,
}

/// The kernels of `cuda/attention.cu` on one device; those of an element type and head_dim are loaded at their first use.
#[derive(Debug)]
pub struct Attention {
    /// By [`IMAGES`].
    images: [OnceLock<Image>; IMAGES.len()],
    /// Held while an image is loaded, so that it is loaded once.
    loading: Mutex<()>,
    gpu: Gpu,
    context: Arc<Context>,
}

impl Attention {
    /// For `context`, which is current.
    pub(super) fn new(context: Arc<Context>) -> Result<Self> {
        // All images of attention are compiled for the same architectures.
        let warpgroups = images::select("attention_bf16_128", context.capability()).is_ok_and(|image| image.exact);
        let (multiprocessors, shared) = (context.multiprocessors(), context.shared_memory()?);
        let gpu = Gpu { multiprocessors, shared, warpgroups, wide_pages: true };
        Ok(Self { images: Default::default(), loading: Mutex::new(()), gpu, context })
    }

    /// Load the kernels of `element` and `head_dim` (64, 96, 128 or 256), with capped scores or without, which
    /// [`launch`](Self::launch) does at its first use: a matter of milliseconds, and of seconds on a GPU that the images
    /// hold no machine code for.
    pub fn prepare(&self, element: HalfType, head_dim: u32, capped: bool) -> Result<()> {
        self.image(element, head_dim, capped).map(|_| ())
    }

    /// Bytes of workspace with which a batch of `size` keeps the GPU busy at any length.
    pub fn workspace_bytes(&self, size: &AttentionSize) -> Result<u64> {
        let bytes = |gpu| tiling(size, gpu).map(|tiling| tiling.header + tiling.slots * tiling.slot);
        // A launch with small pages is cut into lower tiles, of which a request may have more rows.
        Ok(bytes(self.gpu)?.max(bytes(Gpu { wide_pages: false, ..self.gpu })?))
    }

    /// Attend: one launch of `attend` and one of `merge` on `stream`, or none for a batch without queries. Allocates nothing
    /// and waits for nothing, so it can be captured, best after [`prepare`](Self::prepare). `out` and `workspace` overlap
    /// neither each other nor anything that is read.
    ///
    /// A page id, length, first page, query start, table row or mask outside its bounds is recorded for
    /// [`Device::check`](crate::device::Device::check): of a page the keys count as zeros, of the others the request's (a
    /// mask: the query's) output is 0. The batch ends in front of the first request whose query starts decrease.
    pub fn launch(&self, stream: Stream, call: &AttentionCall) -> Result<()> {
        let context = &self.context;
        let (cache, batch) = (&call.cache, &call.batch);
        let (out, out_len, out_device) = call.out.parts();
        let on = [
            ("cache", cache.device()),
            ("lens", batch.device()),
            ("q", call.q.device()),
            ("out", out_device),
            ("workspace", call.workspace.device()),
        ];
        for (operand, device) in on {
            if device != context.ordinal() {
                return Err(device_mismatch(operand, device, context.ordinal(), "the kernel is launched"));
            }
        }
        in_range("query heads", call.heads, 1, i128::from(u16::MAX))?;
        if !call.heads.is_multiple_of(cache.kv_heads()) {
            return Err(Error::Mismatch {
                operand: "q",
                got: format!("{} heads", call.heads),
                want: format!("a multiple of the cache's {} heads", cache.kv_heads()),
            });
        }
        let line = call.heads as usize * cache.head_dim() as usize;
        let queries = call.q.len() / line;
        if call.q.len() != queries * line || out_len != call.q.len() {
            return Err(Error::Mismatch {
                operand: if out_len == call.q.len() { "q" } else { "out" },
                got: format!("{} elements", if out_len == call.q.len() { call.q.len() } else { out_len }),
                want: format!("{queries} queries of {} heads of {}", call.heads, cache.head_dim()),
            });
        }
        if queries == 0 {
            return Ok(());
        }
        in_range("queries", queries as u64, 1, i128::from(i32::MAX) / 64)?;
        if batch.mask().is_some_and(|m| m.len() != queries) {
            return Err(Error::Mismatch {
                operand: "mask",
                got: format!("{} words", batch.mask().map_or(0, DeviceSlice::len)),
                want: format!("one for each of {queries} queries"),
            });
        }
        if let Some(cap) = call.cap.filter(|cap| !CAPS.contains(cap)) {
            let why = format!("must be positive and finite, from {} to {}", CAPS.start(), CAPS.end());
            return Err(Error::Invalid { what: "cap", got: cap.to_string(), why });
        }
        let Some((scale, cap)) = factors(call.scale, call.cap) else {
            let why = "must be positive and finite, in float32 too".into();
            return Err(Error::Invalid { what: "scale", got: call.scale.to_string(), why });
        };
        for (operand, address) in [("q", call.q.address()), ("out", out), ("workspace", call.workspace.address())] {
            if !address.is_multiple_of(16) {
                return Err(Error::Mismatch {
                    operand,
                    got: format!("device address {address:#x}"),
                    want: "an address aligned to 16 bytes".into(),
                });
            }
        }
        let size = AttentionSize {
            requests: batch.requests(),
            max_queries: call.max_queries.min(queries as u32),
            kv_heads: cache.kv_heads(),
            group: call.heads / cache.kv_heads(),
            head_dim: cache.head_dim(),
            max_keys: batch.capacity() as u32,
        };
        let [keys, values] = cache.spans();
        let read = [
            call.q.span(),
            keys,
            values,
            batch.table().span(),
            batch.rows().span(),
            batch.lens().span(),
            batch.starts().span(),
            batch.mask().span(),
            batch.first_pages().span(),
        ];
        disjoint(&[&[call.out.span(), call.workspace.span()]], &[&read])?;
        let page = batch.page().get();
        let wide_pages = page >= BOX_TOKENS && cache.num_slots() as u32 >= page;
        let gpu = Gpu { wide_pages, ..self.gpu };
        let tiling = tiling(&size, gpu)?;
        let slots = (call.workspace.len() as u64).saturating_sub(tiling.header) / tiling.slot;
        let least = u64::from(tiling.grid);
        if slots < least {
            return Err(Error::Mismatch {
                operand: "workspace",
                got: format!("{} bytes", call.workspace.len()),
                want: format!(
                    "at least {}, better {}",
                    tiling.header + least * tiling.slot,
                    tiling.header + tiling.slots * tiling.slot
                ),
            });
        }
        let slots = slots.min(i32::MAX as u64); // more than there can be items
        let slot_pieces = size.kv_heads * size.head_dim / 8; // of 16 bytes; both factors are below 2^16
        if u64::from(slot_pieces) * cache.num_slots() as u64 >= u32::MAX.into() {
            return Err(Error::Overflow {
                what: "pieces of 16 bytes of a cache's plane",
                expr: format!("{} slots * {slot_pieces}", cache.num_slots()),
                ty: "uint32",
                limit: u32::MAX.into(),
            });
        }
        let image = self.image(cache.element(), cache.head_dim(), call.cap.is_some())?;
        let _current = context.enter()?;
        let clusters = clusters(&size, gpu, &tiling, slots).zip(image.clusters).map(|(found, kernels)| {
            let (kernel, at_once) = kernels[found.height];
            (found, kernel, found.most.min(at_once.into()) as u32)
        });
        let clusters = clusters.filter(|(found, _, number)| found.items <= u64::from(number * CLUSTER));
        let report = context.report(stream)?;
        let partials = call.workspace.address() + tiling.header;
        let (k, v) = cache.addresses();
        let draft = batch.draft().unwrap_or((0, 0));
        let params = AttentionParams {
            q: call.q.address(),
            k,
            v,
            out,
            table: batch.table().address(),
            rows: batch.rows().map_or(0, DeviceSlice::address),
            lens: batch.lens().address(),
            starts: batch.starts().address(),
            mask: batch.mask().map_or(0, DeviceSlice::address),
            first_pages: batch.first_pages().map_or(0, DeviceSlice::address),
            schedule: call.workspace.address(),
            partials,
            states: partials + slots * u64::from(tiling.slot_rows * size.head_dim) * 4,
            report,
            requests: size.requests as i32,
            queries: queries as i32,
            max_queries: size.max_queries as i32,
            kv_heads: size.kv_heads as i32,
            group: size.group as i32,
            table_rows: batch.table_rows(),
            table_width: batch.width() as i32,
            capacity: batch.capacity(),
            page_shift: batch.page().get().trailing_zeros() as i32,
            pages: cache.num_slots() >> batch.page().get().trailing_zeros(),
            draft_slots: (draft.0 * draft.1) as i32,
            draft_steps: draft.1 as i32,
            out_f32: matches!(call.out, AttentionOut::F32(_)) as i32,
            slots: slots as i32,
            slot_rows: tiling.slot_rows as i32,
            tile_rows: tiling.rows as i32,
            clusters: clusters.map_or(0, |(.., number)| number as i32),
            stages: tiling.stages as i32,
            scale_bits: scale.to_bits(),
            slot_pieces,
            cap_bits: cap.to_bits(),
            reserved: 0,
        };
        let attend = TILE_ROWS.into_iter().zip(image.attend).find(|(rows, _)| *rows == tiling.rows).map(|(_, f)| f);
        let (grid, threads) = ((tiling.grid, 1, 1), threads_of(tiling.rows));
        match (attend, image.wide) {
            // SAFETY: the module is loaded for the process and its context is current. Addresses and capacities come from views,
            // whose constructors' callers promised them; `slots` slots lie within the workspace. The fault record lives as
            // long as the process.
            (Some(attend), _) => unsafe {
                if let Some((found, kernel, number)) = clusters {
                    let params = AttentionParams { stages: found.stages as i32, ..params };
                    let call = BoxCall::new(params, size.head_dim)?;
                    let (grid, shared) = ((number * CLUSTER, 1, 1), (found.shared, CLUSTER));
                    kernel.launch_in_clusters(grid, THREADS, shared, stream, &call)?;
                } else {
                    attend.launch_with_shared(grid, threads, tiling.shared, stream, &params)?;
                }
            },
            (None, Some(wide)) => {
                let call = BoxCall::new(params, size.head_dim)?;
                // SAFETY: as above; the maps are of the cache's two planes.
                unsafe { wide.launch_with_shared(grid, threads, tiling.shared, stream, &call)? }
            }
            (None, None) => {
                let (what, got) = ("rows of a tile", tiling.rows.to_string());
                return Err(Error::Invalid { what, got, why: "no such kernel".into() });
            }
        }
        // SAFETY: as above.
        unsafe { image.merge.launch((tiling.merge_grid, 1, 1), THREADS, stream, &params) }
    }

    fn image(&self, element: HalfType, head_dim: u32, capped: bool) -> Result<&Image> {
        let found =
            IMAGES.iter().zip(&self.images).find(|((e, d, c, _), _)| (*e, *d, *c) == (element, head_dim, capped));
        let Some((&(.., name), cell)) = found else {
            let takes = if capped { "128 or 256 where scores are capped" } else { "64, 96, 128 or 256" };
            let why = format!("attention on a GPU takes {takes}");
            return Err(Error::Invalid { what: "head_dim", got: head_dim.to_string(), why });
        };
        if let Some(image) = cell.get() {
            return Ok(image);
        }
        let _one = self.loading.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(image) = cell.get() {
            return Ok(image); // another thread was first
        }
        let _relaxed = Relaxed::enter()?;
        let _current = self.context.enter()?;
        let module = Module::load(images::select(name, self.context.capability())?)?;
        let attend =
            [module.function("attention_16")?, module.function("attention_32")?, module.function("attention_64")?];
        let wide = if self.gpu.wide(head_dim) { Some(module.function("attention_128")?) } else { None };
        for function in attend.into_iter().chain(wide) {
            function.allow_shared(self.gpu.shared.0)?;
        }
        let mut clusters = None;
        if self.gpu.wide(head_dim) {
            let kernel = |name| -> Result<(Function, u32)> {
                let (function, shared) = (module.function(name)?, self.gpu.cluster_shared());
                function.allow_shared(shared)?;
                Ok((function, function.clusters_at_once(THREADS, CLUSTER, shared)?))
            };
            clusters = Some([kernel("attention_cluster_16")?, kernel("attention_cluster_32")?]);
        }
        let image = Image { attend, clusters, wide, merge: module.early_function("attention_merge")?, _module: module };
        Ok(cell.get_or_init(|| image))
    }
}

/// What the kernel multiplies by: a score's factor in the exponent of 2, and, of a score that is in units of its cap
/// (`tanh(x / cap)`, by e^2x), the one before the tanh, else 0. `None` where float32 has no such factor.
fn factors(scale: f64, cap: Option<f64>) -> Option<(f32, f32)> {
    let factor = |x: f64| Some((x * std::f64::consts::LOG2_E) as f32).filter(|x| x.is_finite() && *x > 0.0);
    match cap {
        None => Some((factor(scale)?, 0.0)),
        Some(cap) => Some((factor(cap)?, factor(scale / cap * 2.0)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_that_float32_does_not_have_are_none() {
        let log2e = std::f64::consts::LOG2_E;
        assert_eq!(factors(0.125, None), Some(((0.125 * log2e) as f32, 0.0)));
        assert_eq!(factors(0.125, Some(50.0)), Some(((50.0 * log2e) as f32, (0.125 / 50.0 * 2.0 * log2e) as f32)));
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e41, 1e-50] {
            assert_eq!((factors(scale, None), factors(scale, Some(50.0))), (None, None), "{scale}");
        }
        assert_eq!((factors(1e39, None), factors(1e36, Some(1e-4))), (None, None));
    }
}
