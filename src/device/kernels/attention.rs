//! The launch of `cuda/attention.cu`: paged attention of every phase, whose bits depend on a row's keys alone.
//!
//! Two kernels in stream order: `attend` computes splits of the keys, `merge` folds what was left in the workspace. The
//! grid follows from capacities and lengths are read on the device, so that a captured launch serves every batch of its
//! bucket.

use std::sync::{Arc, Mutex, OnceLock};

use crate::device::attention_view::{AttentionBatch, AttentionOut, HalfType, KvLayerView, MAX_GROUP};
use crate::device::context::Context;
use crate::device::driver::{Function, Module, Relaxed, Stream};
use crate::device::images;
use crate::device::params::attention::{ATTENTION_BLOCK, ATTENTION_SPLIT, AttentionParams};
use crate::device::view::{DeviceSlice, device_mismatch};
use crate::error::{Error, Result, in_range};
use crate::overlap::{Operand, disjoint};

/// Threads that share a tile, or load for others; `THREADS` of the kernel.
const THREADS: u32 = 128;
/// Blocks of `attend` that share a multiprocessor; `__launch_bounds__` leaves registers for two, but for tiles of
/// [`WIDE_ROWS`].
const RESIDENT: u32 = 2;
/// Entries of the ring that the kernel can count.
const MAX_STAGES: u32 = 6;
/// Shared memory that the driver keeps of each block.
const RESERVED_SHARED: u32 = 1024;
/// Heights of a tile, for which there are kernels in every image.
const TILE_ROWS: [u32; 3] = [16, 32, 64];
/// And one that only Hopper's own image has, for head_dims of a warpgroup ([`by_warpgroups`]): two share the keys that a
/// third loads.
const WIDE_ROWS: u32 = 128;
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
/// Blocks of `merge` for each multiprocessor, at most.
const MERGE_RESIDENT: u32 = 16;
/// Tiles for each block of the grid, up to which the workspace holds every split of each. Beyond, tiles fill the GPU.
const PARALLEL_WAVES: u64 = 2;

/// Sizes that a launch's workspace follows from: capacities, not what a batch holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionSize {
    /// Requests.
    pub requests: u32,
    /// Largest number of queries of one request.
    pub max_queries: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Query heads of a key and value head.
    pub group: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Keys that a request may have.
    pub max_keys: u32,
}

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

/// How a launch is cut: a function of capacities and of the GPU alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiling {
    /// Rows of a tile: one of [`TILE_ROWS`], or [`WIDE_ROWS`].
    rows: u32,
    /// Rows of a slot: no more than a request has.
    slot_rows: u32,
    /// Entries of the ring.
    stages: u32,
    /// Bytes of shared memory of a block.
    shared: u32,
    /// Blocks of `attend`.
    grid: u32,
    /// Blocks of `merge`.
    merge_grid: u32,
    /// Bytes before the first slot.
    header: u64,
    /// Bytes of a slot.
    slot: u64,
    /// Slots with which every split of [`PARALLEL_WAVES`] tiles a block has its own.
    slots: u64,
}

/// What of a GPU a tiling depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Gpu {
    multiprocessors: u32,
    /// Shared memory of a block, and of a multiprocessor.
    shared: (u32, u32),
    /// Whether the images are Hopper's own: the highest tiles by a warpgroup's products, an early merge.
    warpgroups: bool,
}

impl Gpu {
    /// Whether there are tiles of [`WIDE_ROWS`].
    fn wide(self, head_dim: u32) -> bool {
        self.warpgroups && by_warpgroups(head_dim)
    }
}

/// Whether a warpgroup's products take a head: whole panels of 64 columns, as many as a thread has registers for.
fn by_warpgroups(head_dim: u32) -> bool {
    head_dim.is_multiple_of(64) && head_dim <= 128
}

/// Threads of a block of `attend` for tiles of `rows`.
fn threads_of(rows: u32) -> u32 {
    if rows == WIDE_ROWS { 3 * THREADS } else { THREADS } // two warpgroups compute, one loads
}

/// Kernels of one element type and head_dim.
#[derive(Debug)]
struct Image {
    /// By [`TILE_ROWS`].
    attend: [Function; 3],
    /// For [`WIDE_ROWS`], where there is one.
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
        let gpu = Gpu { multiprocessors: context.multiprocessors(), shared: context.shared_memory()?, warpgroups };
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
        let tiling = tiling(size, self.gpu)?;
        Ok(tiling.header + tiling.slots * tiling.slot)
    }

    /// Attend: one launch of `attend` and one of `merge` on `stream`, or none for a batch without queries. Allocates nothing
    /// and waits for nothing, so it can be captured, best after [`prepare`](Self::prepare). `out` and `workspace` overlap
    /// neither each other nor anything that is read.
    ///
    /// A page id, length, first page, query start, table row or mask outside its bounds is recorded for
    /// [`Device::check`](crate::device::Device::check): of a page the keys count as zeros, of the others the request's (a
    /// mask: the query's) output is 0.
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
        let tiling = tiling(&size, self.gpu)?;
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
            stages: tiling.stages as i32,
            scale_bits: scale.to_bits(),
            slot_pieces,
            cap_bits: cap.to_bits(),
        };
        let image = self.image(cache.element(), cache.head_dim(), call.cap.is_some())?;
        let attend = TILE_ROWS.into_iter().zip(image.attend).find(|(rows, _)| *rows == tiling.rows).map(|(_, f)| f);
        let Some(attend) = attend.or(image.wide.filter(|_| tiling.rows == WIDE_ROWS)) else {
            return Err(Error::Invalid {
                what: "rows of a tile",
                got: tiling.rows.to_string(),
                why: "no such kernel".into(),
            });
        };
        let _current = context.enter()?;
        // SAFETY: the module is loaded for the process and its context is current. Addresses and capacities come from views,
        // whose constructors' callers promised them; `slots` slots lie within the workspace. The fault record lives as
        // long as the process.
        unsafe {
            attend.launch_with_shared((tiling.grid, 1, 1), threads_of(tiling.rows), tiling.shared, stream, &params)?
        };
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
        let image = Image { attend, wide, merge: module.early_function("attention_merge")?, _module: module };
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

/// Bytes of shared memory of a block of `attend`: the ring, the weights' tile, the queries' where it does not share that, and
/// the lists.
fn shared_bytes(rows: u32, stages: u32, head_dim: u32, requests: u32, warpgroups: bool) -> u32 {
    let block = ATTENTION_BLOCK as u32;
    let ring = stages * block * head_dim * 2;
    // A warpgroup keeps weights in registers; the queries of one begin in the ring, those of two lie behind it.
    let tiles = match rows {
        WIDE_ROWS => rows * head_dim * 2,
        64 if warpgroups && by_warpgroups(head_dim) => 0,
        16 | 32 if head_dim <= block => rows * block * 2,
        _ => rows * block * 2 + rows * head_dim * 2,
    };
    // `Shared` of the kernel: 76 bytes a row (16 of bits, cut and last, 32 of four warps' maxima and sums, 28 of the row's
    // state), 8 a key of a block, 8 for each 16 rows, at most 240 besides.
    let lists = rows * 76 + block * 8 + rows / 16 * 8 + 240;
    ring + tiles + lists.next_multiple_of(16) + 2 * 4 * (requests + 1)
}

fn tiling(size: &AttentionSize, gpu: Gpu) -> Result<Tiling> {
    in_range("queries of one request", size.max_queries, 1, i128::from(i32::MAX) / 64)?;
    in_range("query heads of a key and value head", size.group, 1, MAX_GROUP.into())?;
    let request_rows = u64::from(size.max_queries) * u64::from(size.group);
    // The kernels number a request's rows in int32, and round them up to tiles.
    let (all_rows, most) = (request_rows * u64::from(size.kv_heads), u64::from(i32::MAX as u32 - WIDE_ROWS));
    if all_rows > most {
        return Err(Error::Overflow {
            what: "rows of a request",
            expr: format!("{} queries * {} query heads * {} key heads", size.max_queries, size.group, size.kv_heads),
            ty: "int32",
            limit: most,
        });
    }
    // The lowest tile that holds a request's rows, else the highest that fits the GPU; as many stages as leave room for the
    // blocks that are to share a multiprocessor, at least 2. 128 rows of a group of one would be more queries than the
    // tail's block has keys.
    let wide = gpu.wide(size.head_dim) && size.group >= 2;
    let heights = TILE_ROWS.into_iter().chain(wide.then_some(WIDE_ROWS));
    let highest = if wide { WIDE_ROWS } else { 64 };
    let wanted = heights.clone().find(|&rows| u64::from(rows) >= request_rows).unwrap_or(highest);
    let fits = |rows: u32| {
        let sharers = if rows == WIDE_ROWS { 1 } else { RESIDENT };
        let bytes = |stages| shared_bytes(rows, stages, size.head_dim, size.requests, gpu.warpgroups);
        (1..=sharers).rev().find_map(|sharers| {
            let room = (gpu.shared.1 / sharers).saturating_sub(RESERVED_SHARED).min(gpu.shared.0);
            (2..=MAX_STAGES).rev().find(|&stages| bytes(stages) <= room).map(|stages| (stages, bytes(stages)))
        })
    };
    let chosen = heights.rev().filter(|&rows| rows <= wanted).find_map(|rows| Some((rows, fits(rows)?)));
    let Some((rows, (stages, shared))) = chosen else {
        return Err(Error::Invalid {
            what: "shared memory of a block",
            got: format!("{} bytes", gpu.shared.0),
            why: format!("attention needs {}", shared_bytes(16, 2, size.head_dim, size.requests, gpu.warpgroups)),
        });
    };
    let splits = u64::from(size.max_keys).div_ceil(ATTENTION_SPLIT as u64) + 1; // and the tail
    let tiles = u64::from(size.requests) * u64::from(size.kv_heads) * request_rows.div_ceil(rows.into());
    let items = tiles * splits;
    if items > i32::MAX as u64 / 8 {
        return Err(Error::Overflow {
            what: "items of attention",
            expr: format!(
                "{} requests * {} heads * {} tiles * {splits} splits",
                size.requests,
                size.kv_heads,
                request_rows.div_ceil(rows.into())
            ),
            ty: "int32",
            limit: i32::MAX as u64 / 8,
        });
    }
    let resident = (gpu.shared.1 / (shared + RESERVED_SHARED)).clamp(1, RESIDENT);
    let grid = u64::from(gpu.multiprocessors * resident).min(items).max(1);
    let slot_rows = request_rows.min(rows.into()) as u32;
    let merge_rows = u64::from(size.requests) * all_rows;
    let merge_grid =
        merge_rows.div_ceil(u64::from(THREADS / 32)).clamp(1, (gpu.multiprocessors * MERGE_RESIDENT).into());
    Ok(Tiling {
        rows,
        slot_rows,
        stages,
        shared,
        grid: grid as u32,
        merge_grid: merge_grid as u32,
        header: (4 * (2 + 2 * u64::from(size.requests))).next_multiple_of(256),
        slot: u64::from(slot_rows) * (u64::from(size.head_dim) * 4 + 8),
        slots: grid.max(tiles.min(PARALLEL_WAVES * grid) * splits),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Gpu = Gpu { multiprocessors: 132, shared: (232_448, 233_472), warpgroups: true };
    const ADA: Gpu = Gpu { multiprocessors: 142, shared: (101_376, 102_400), warpgroups: false };

    fn llama(requests: u32, max_queries: u32, max_keys: u32) -> AttentionSize {
        AttentionSize { requests, max_queries, kv_heads: 8, group: 4, head_dim: 128, max_keys }
    }

    #[test]
    fn tiles_are_as_high_as_a_request_needs_and_two_blocks_share_a_multiprocessor() {
        for (queries, rows, stages, grid) in [
            (1, 16, 3, 264),
            (4, 16, 3, 264),
            (5, 32, 3, 264),
            (8, 32, 3, 264),
            (9, 64, 3, 264),
            (16, 64, 3, 264),
            (17, 128, 5, 132),
            (2048, 128, 5, 132),
        ] {
            let t = tiling(&llama(16, queries, 32768), H200).unwrap();
            assert_eq!((t.rows, t.stages, t.grid), (rows, stages, grid), "{queries} queries");
            assert!(grid / 132 * (t.shared + RESERVED_SHARED) <= H200.shared.1);
        }
        let single = AttentionSize { group: 1, ..llama(16, 2048, 32768) };
        assert_eq!(tiling(&single, H200).unwrap().rows, 64);
        let small = tiling(&llama(1, 1, 1024), H200).unwrap();
        assert_eq!((small.grid, small.slot_rows), (16, 4)); // 8 heads, one split and the tail
    }

    #[test]
    fn a_gpu_with_less_shared_memory_gets_lower_tiles_or_fewer_blocks() {
        for queries in [1, 8, 64] {
            for requests in [1, 1024] {
                let t = tiling(&llama(requests, queries, 32768), ADA).unwrap();
                assert!(t.shared <= ADA.shared.0 && t.stages >= 2, "{t:?}");
            }
        }
        let tiny = Gpu { multiprocessors: 1, shared: (49_152, 65_536), warpgroups: false };
        assert!(tiling(&llama(1, 1, 1024), tiny).unwrap_err().to_string().contains("49152 bytes"));
    }

    #[test]
    fn heads_of_256_take_what_shared_memory_there_is() {
        let gemma = |queries| AttentionSize { kv_heads: 4, group: 2, head_dim: 256, ..llama(16, queries, 8192) };
        for (queries, rows) in [(8, 16), (16, 32), (17, 64), (2048, 64)] {
            let t = tiling(&gemma(queries), H200).unwrap();
            assert_eq!((t.rows, t.stages, t.grid), (rows, if rows == 64 { 2 } else { 3 }, 132), "{queries} queries");
            assert!(t.shared <= H200.shared.0);
        }
        let a100 = Gpu { multiprocessors: 108, shared: (166_912, 167_936), warpgroups: false };
        assert_eq!(tiling(&gemma(2048), a100).unwrap().rows, 32);
        assert!(tiling(&gemma(1), ADA).unwrap_err().to_string().contains("101376 bytes"));
    }

    #[test]
    fn the_workspace_covers_the_grid_and_every_split_of_a_small_batch() {
        for requests in [1, 3, 16, 64, 300] {
            for queries in [1, 7, 64] {
                for keys in [64, 1024, 8192, 131_072] {
                    let t = tiling(&llama(requests, queries, keys), H200).unwrap();
                    assert!(t.slots >= t.grid.into());
                    let tiles = u64::from(requests * 8) * u64::from(queries * 4).div_ceil(t.rows.into());
                    if tiles < u64::from(2 * t.grid) {
                        assert!(t.slots >= tiles * (u64::from(keys).div_ceil(1024) + 1));
                    }
                }
            }
        }
    }

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

    #[test]
    fn sizes_that_no_kernel_indexes_are_refused() {
        let text = |size: &AttentionSize| tiling(size, H200).unwrap_err().to_string();
        assert!(text(&AttentionSize { kv_heads: 60_000, ..llama(1024, 16, 1 << 30) }).contains("items of attention"));
        // 2^32 rows, which a product in 32 bits would take for none; and one more than there may be.
        let rows = AttentionSize { kv_heads: 64, group: 64, ..llama(1, 1 << 20, 64) };
        assert!(text(&rows).contains("rows of a request"), "{}", text(&rows));
        let most = |queries| AttentionSize { kv_heads: 1, group: 64, ..llama(1, queries, 64) };
        assert!(tiling(&most((i32::MAX as u32 - 128) / 64), H200).is_ok());
        assert!(text(&most((i32::MAX as u32 - 128) / 64 + 1)).contains("rows of a request"));
        let group = AttentionSize { group: 65, ..llama(1, 1, 64) };
        assert!(tiling(&group, H200).unwrap_err().to_string().contains("= 65 is outside 1..=64"));
    }
}
