//! The launch of `cuda/kv_move.cu`: KV rows from slot to slot, K and V of all layers, all requests, in one kernel.

use std::sync::Arc;

use crate::device::context::Context;
use crate::device::driver::{Function, Module, Stream};
use crate::device::images;
use crate::device::params::kv::KvMoveParams;
use crate::device::view::{KvCacheView, MovesView, device_mismatch};
use crate::error::{Error, Result};
use crate::overlap::{Operand, disjoint};

/// Threads of a block; `__launch_bounds__` of the kernels.
const BLOCK: u32 = 256;
/// Blocks of a large batch, for each multiprocessor: two waves of what fits at the kernel's registers.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;
/// Largest `gridDim.y`; the kernel strides over more requests than that.
const MAX_GRID_Y: u32 = 65_535;

/// The kernels of `cuda/kv_move.cu`, one for each vector width, on one device.
#[derive(Debug)]
pub struct KvMove {
    /// `(bytes of a vector, function)`, widest first. Valid while `_module` is loaded.
    by_width: [(u64, Function); 5],
    _module: Module,
    context: Arc<Context>,
}

impl KvMove {
    /// Load them into `context`, which is current.
    pub(super) fn load(context: Arc<Context>) -> Result<Self> {
        let module = Module::load(images::select("kv_move", context.capability())?)?;
        let by_width = [
            (16, module.function("kv_move_v16")?),
            (8, module.function("kv_move_v8")?),
            (4, module.function("kv_move_v4")?),
            (2, module.function("kv_move_v2")?),
            (1, module.function("kv_move_v1")?),
        ];
        Ok(Self { by_width, _module: module, context })
    }

    /// For each request in the batch, and each of its moves in order, copy the token row of slot `src` to slot `dst` in
    /// every plane of the cache. Equal to executing a request's moves one by one, whatever their overlap; requests run
    /// concurrently, so one's destinations must not be slots of another's moves (pages that are written have one owner).
    ///
    /// Moves whose destination is slot 0 are padding. A slot outside the cache skips its move, offsets outside the arrays
    /// skip their request; either is recorded for [`Device::check`](crate::device::Device::check). Launches once, or not
    /// at all for an empty batch. Can be captured: a replay reads the arrays' contents of that time.
    pub fn launch(&self, stream: Stream, cache: &KvCacheView, moves: &MovesView) -> Result<()> {
        let context = &self.context;
        for (operand, on) in [("cache", cache.device()), ("src", moves.src().device())] {
            if on != context.ordinal() {
                return Err(device_mismatch(operand, on, context.ordinal(), "the kernel is launched"));
            }
        }
        disjoint(&[&[cache.span()]], &[&moves.spans()])?;
        if moves.requests() == 0 || moves.src().is_empty() {
            return Ok(());
        }
        let shape = launch_shape(cache, moves.requests(), context.multiprocessors())?;
        let report = context.report(stream)?;
        let params = KvMoveParams {
            cache: cache.address(),
            src: moves.src().address(),
            dst: moves.dst().address(),
            offsets: moves.offsets().address(),
            report,
            plane_bytes: cache.row_bytes() * cache.num_slots() as u64, // KvCacheView checked the product
            num_slots: cache.num_slots(),
            moves: moves.src().len() as i32, // at most MAX_MOVES
            requests: moves.requests() as i32,
            planes: cache.planes(),
            columns: shape.columns,
            reserved: 0,
        };
        let Some((_, function)) = self.by_width.iter().find(|(width, _)| *width == shape.width) else {
            return Err(Error::Invalid {
                what: "vector width",
                got: shape.width.to_string(),
                why: "no such kernel".into(),
            });
        };
        let _current = context.enter()?;
        // SAFETY: the device's module is loaded for the process and its context is current. Addresses and capacities come
        // from views, whose constructors' callers promised them; the fault record lives as long as the process.
        unsafe { function.launch((shape.blocks, shape.rows, 1), BLOCK, stream, &params) }
    }
}

/// How a cache is cut into threads.
#[derive(Debug, PartialEq, Eq)]
struct LaunchShape {
    /// Bytes of a vector: the widest of 16, 8, 4, 2, 1 that divides the row and the cache's address.
    width: u64,
    /// Vectors in a row.
    columns: u32,
    /// Blocks over planes and columns.
    blocks: u32,
    /// Blocks over requests.
    rows: u32,
}

fn launch_shape(cache: &KvCacheView, requests: u32, multiprocessors: u32) -> Result<LaunchShape> {
    let common = cache.address() | cache.row_bytes() | 16;
    let width = 1 << common.trailing_zeros(); // at most 16
    let columns = cache.row_bytes() / width;
    let threads = u64::from(cache.planes()) * columns;
    if threads > i32::MAX as u64 {
        return Err(Error::Overflow {
            what: "threads of kv_move",
            expr: format!("{} planes * {} bytes / {width}", cache.planes(), cache.row_bytes()),
            ty: "int32",
            limit: i32::MAX as u64,
        });
    }
    let rows = requests.min(MAX_GRID_Y);
    // One thread a column for small batches, where latency counts. For large ones the grid stops growing and a thread
    // takes several columns, as evenly as they divide: a request without moves then costs less.
    let needed = (threads as u32).div_ceil(BLOCK);
    let wanted = (multiprocessors * BLOCKS_PER_MULTIPROCESSOR).div_ceil(rows.max(1)).clamp(1, needed);
    let blocks = needed.div_ceil(needed.div_ceil(wanted));
    Ok(LaunchShape { width, columns: columns as u32, blocks, rows })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::view::{DeviceSlice, MAX_MOVES};

    fn cache(address: u64, shape: [u64; 5], element: u64) -> Result<KvCacheView> {
        // SAFETY: nothing is launched with it.
        unsafe { KvCacheView::from_raw(address, shape, element, 0) }
    }

    fn slice(len: usize, device: i32) -> DeviceSlice<i32> {
        // SAFETY: nothing is launched with it.
        unsafe { DeviceSlice::from_raw("src", 64, len, device) }.unwrap()
    }

    #[test]
    fn the_widest_vector_that_divides_row_and_address_is_taken() {
        let shape = |address, heads, dim, element| {
            launch_shape(&cache(address, [3, 2, 10, heads, dim], element).unwrap(), 5, 132).unwrap()
        };
        assert_eq!(shape(4096, 8, 128, 2), LaunchShape { width: 16, columns: 128, blocks: 3, rows: 5 });
        assert_eq!(shape(4096 + 8, 8, 128, 2).width, 8);
        assert_eq!(shape(4096 + 2, 8, 128, 2).width, 2);
        assert_eq!(shape(4096, 1, 7, 2), LaunchShape { width: 2, columns: 7, blocks: 1, rows: 5 });
        assert_eq!(shape(4096, 1, 5, 1).width, 1);
        assert_eq!(shape(4096, 3, 1, 4), LaunchShape { width: 4, columns: 3, blocks: 1, rows: 5 });
        let many = cache(16, [1, 2, 10, 1, 8], 2).unwrap();
        assert_eq!(launch_shape(&many, 65_536, 132).unwrap().rows, 65_535);
    }

    #[test]
    fn a_grid_covers_every_column_and_stops_growing_with_the_batch() {
        let llama = cache(4096, [32, 2, 1000, 8, 128], 2).unwrap();
        let blocks = |requests| launch_shape(&llama, requests, 132).unwrap().blocks;
        // 64 planes of 128 columns fill 32 blocks.
        assert_eq!([1, 16, 33, 64, 128, 1000].map(blocks), [32, 32, 32, 16, 8, 2]);
        let tiny = cache(4096, [1, 2, 1000, 1, 8], 2).unwrap();
        assert_eq!(launch_shape(&tiny, 1, 132).unwrap().blocks, 1);
    }

    #[test]
    fn caches_that_no_kernel_can_index_are_refused() {
        let want = |got: Result<KvCacheView>, what: &str| {
            let text = got.unwrap_err().to_string();
            assert!(text.contains(what), "{text}");
        };
        want(cache(16, [1, 3, 10, 1, 8], 2), "[layers, 2, num_slots, kv_heads, head_dim]");
        want(cache(16, [0, 2, 10, 1, 8], 2), "cache layers = 0 is outside 1..=");
        want(cache(16, [1, 2, 0, 1, 8], 2), "cache num_slots = 0");
        want(cache(16, [1, 2, 1 << 31, 1, 8], 2), "cache num_slots = 2147483648 is outside 1..=2147483647");
        want(cache(16, [1 << 20, 2, 1 << 30, 1 << 20, 1 << 20], 2), "does not fit int64");
        want(cache(17, [1, 2, 10, 1, 8], 2), "aligned to its elements of 2 bytes");
        want(cache(0, [1, 2, 10, 1, 8], 2), "0x0");
        want(cache(16, [1, 2, 10, 1, 8], 3), "elements of 3 bytes");
        let wide = cache(16, [1 << 10, 2, 1, 1 << 12, 1 << 12], 8).unwrap();
        assert!(matches!(launch_shape(&wide, 1, 132), Err(Error::Overflow { .. })));
    }

    #[test]
    fn moves_that_do_not_fit_each_other_are_refused() {
        assert_eq!(MovesView::new(slice(4, 0), slice(4, 0), slice(3, 0)).unwrap().requests(), 2);
        let text = |m: Result<MovesView>| m.unwrap_err().to_string();
        assert!(text(MovesView::new(slice(4, 0), slice(5, 0), slice(3, 0))).contains("dst: got 5 slots, want 4"));
        assert!(text(MovesView::new(slice(4, 0), slice(4, 0), slice(0, 0))).contains("= 0 is outside 1..=65537"));
        assert!(text(MovesView::new(slice(4, 0), slice(4, 1), slice(3, 0))).contains("dst: got a tensor on cuda:1"));
        assert!(
            text(MovesView::new(slice(4, 1), slice(4, 1), slice(3, 0))).contains("offsets: got a tensor on cuda:0")
        );
        let long = slice(MAX_MOVES + 1, 0);
        assert!(text(MovesView::new(long, long, slice(3, 0))).contains("capacity = 1073741825"));
        // SAFETY: nothing is launched with it.
        let odd = unsafe { DeviceSlice::<i32>::from_raw("offsets", 66, 3, 0) };
        assert!(odd.unwrap_err().to_string().contains("offsets: got device address 0x42"));
    }
}
