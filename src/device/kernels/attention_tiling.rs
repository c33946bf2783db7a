//! How a launch of `cuda/attention.cu` is cut into tiles, blocks and slots: from capacities and the GPU alone, so that a
//! captured launch serves every batch of its bucket.

use crate::device::attention_view::MAX_GROUP;
use crate::device::params::attention::{ATTENTION_BLOCK, ATTENTION_SPLIT};
use crate::error::{Error, Result, in_range};

/// Threads that share a tile, or load for others; `THREADS` of the kernel.
pub(super) const THREADS: u32 = 128;
/// Blocks of `attend` that share a multiprocessor; `__launch_bounds__` leaves registers for two, but for tiles of
/// [`WIDE_ROWS`].
const RESIDENT: u32 = 2;
/// Entries of the ring that the kernel can count.
const MAX_STAGES: u32 = 6;
/// Shared memory that the driver keeps of each block.
const RESERVED_SHARED: u32 = 1024;
/// Heights of a tile, for which there are kernels in every image.
pub(super) const TILE_ROWS: [u32; 3] = [16, 32, 64];
/// And one that only Hopper's own image has, for head_dims of a warpgroup ([`by_warpgroups`]): two warpgroups compute, and the
/// copy engine loads.
pub(super) const WIDE_ROWS: u32 = 128;
/// Tokens of a box that the copy engine loads for [`WIDE_ROWS`]: a page has as many or more.
pub(super) const BOX_TOKENS: u32 = 16;
/// Heights of tiles whose splits clusters may share.
pub(super) const CLUSTER_ROWS: [u32; 2] = [16, 32];
/// Blocks of a cluster: each has one of a split's blocks of keys.
pub(super) const CLUSTER: u32 = (ATTENTION_SPLIT / ATTENTION_BLOCK) as u32;
/// Tiles of a launch that clusters take, at most, by [`CLUSTER_ROWS`]: up to these a launch with more splits than clusters, too,
/// takes as long as `attend`'s, or nearly. Requests, at most: a warp of the kernel counts them.
const CLUSTER_TILES: [u64; 2] = [24, 8];
const CLUSTER_REQUESTS: u32 = 32;
/// Blocks of `merge` for each multiprocessor, at most. Those beside tiles of [`WIDE_ROWS`] begin when the tiles have ended, and
/// are as many as have room at once.
const MERGE_RESIDENT: u32 = 16;
const WIDE_MERGE_RESIDENT: u32 = 6;
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

/// How a launch is cut: a function of capacities and of the GPU alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tiling {
    /// Rows of a tile: one of [`TILE_ROWS`], or [`WIDE_ROWS`].
    pub(super) rows: u32,
    /// Rows of a slot: no more than a request has.
    pub(super) slot_rows: u32,
    /// Entries of the ring.
    pub(super) stages: u32,
    /// Bytes of shared memory of a block.
    pub(super) shared: u32,
    /// Blocks of `attend`.
    pub(super) grid: u32,
    /// Blocks of `merge`.
    pub(super) merge_grid: u32,
    /// Bytes before the first slot.
    pub(super) header: u64,
    /// Bytes of a slot.
    pub(super) slot: u64,
    /// Slots with which every split of [`PARALLEL_WAVES`] tiles a block has its own.
    pub(super) slots: u64,
}

/// What of a GPU a tiling depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gpu {
    pub(super) multiprocessors: u32,
    /// Shared memory of a block, and of a multiprocessor.
    pub(super) shared: (u32, u32),
    /// Whether the images are Hopper's own: the highest tiles by a warpgroup's products, an early merge.
    pub(super) warpgroups: bool,
    /// Whether a page of the launch has [`BOX_TOKENS`], which tiles of [`WIDE_ROWS`] need.
    pub(super) wide_pages: bool,
}

impl Gpu {
    /// Shared memory of a cluster's block, at most.
    pub(super) fn cluster_shared(self) -> u32 {
        (self.shared.1 / RESIDENT).saturating_sub(RESERVED_SHARED)
    }

    /// Whether there are tiles of [`WIDE_ROWS`].
    pub(super) fn wide(self, head_dim: u32) -> bool {
        self.warpgroups && self.wide_pages && by_warpgroups(head_dim)
    }
}

/// Whether a warpgroup's products take a head: whole panels of 64 columns, as many as a thread has registers for.
fn by_warpgroups(head_dim: u32) -> bool {
    head_dim.is_multiple_of(64) && head_dim <= 128
}

/// Threads of a block of `attend` for tiles of `rows`.
pub(super) fn threads_of(rows: u32) -> u32 {
    if rows == WIDE_ROWS { 3 * THREADS } else { THREADS } // two warpgroups compute, a warp of the third loads
}

/// Bytes of shared memory of a block of `attend`: the ring, the weights' tile, the queries' where it does not share that, and
/// the lists.
fn shared_bytes(rows: u32, stages: u32, head_dim: u32, requests: u32, warpgroups: bool) -> u32 {
    let block = ATTENTION_BLOCK as u32;
    let ring = stages * block * head_dim * 2;
    if rows == WIDE_ROWS {
        // The queries, or the tail's weights in their place; `WideShared` of the kernel: 28 bytes a row, 8 a key of a block, at
        // most 240 besides; and for each request its first items and 24 bytes of itself.
        return ring + rows * block * 2 + rows * 28 + block * 8 + 240 + 8 * (requests + 1) + 24 * requests;
    }
    // A warpgroup keeps weights in registers, and its queries begin in the ring.
    let tiles = match rows {
        64 if warpgroups && by_warpgroups(head_dim) => 0,
        16 | 32 if head_dim <= block => rows * block * 2,
        _ => rows * block * 2 + rows * head_dim * 2,
    };
    // `Shared` of the kernel: 76 bytes a row (16 of bits, cut and last, 32 of four warps' maxima and sums, 28 of the row's
    // state), 8 a key of a block, 8 for each 16 rows, at most 240 besides.
    let lists = rows * 76 + block * 8 + rows / 16 * 8 + 240;
    ring + tiles + lists.next_multiple_of(16) + 2 * 4 * (requests + 1)
}

pub(super) fn tiling(size: &AttentionSize, gpu: Gpu) -> Result<Tiling> {
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
    let merge_resident = if rows == WIDE_ROWS { WIDE_MERGE_RESIDENT } else { MERGE_RESIDENT };
    let merge_grid =
        merge_rows.div_ceil(u64::from(THREADS / 32)).clamp(1, (gpu.multiprocessors * merge_resident).into());
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

/// A launch of clusters in the place of `attend`'s, with the tiles and slots of its [`Tiling`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Clusters {
    /// Index in [`CLUSTER_ROWS`].
    pub(super) height: usize,
    /// Entries of the ring.
    pub(super) stages: u32,
    /// Bytes of shared memory of a block.
    pub(super) shared: u32,
    /// Items that there can be; each needs a block.
    pub(super) items: u64,
    /// Clusters that share all splits there can be, and those for the tails.
    pub(super) most: u64,
}

/// The clusters of a launch of few low tiles; `None` where there are none or too many, where its workspace has not a slot for each
/// item, and where GPU or pages are not those of the copy engine.
pub(super) fn clusters(size: &AttentionSize, gpu: Gpu, tiling: &Tiling, slots: u64) -> Option<Clusters> {
    let height = CLUSTER_ROWS.iter().position(|&rows| rows == tiling.rows)?;
    let tiles = u64::from(size.requests) * u64::from(size.kv_heads);
    let splits = u64::from(size.max_keys).div_ceil(ATTENTION_SPLIT as u64);
    // A request of more rows than its tile has taken a lower one for want of room.
    let whole = u64::from(size.max_queries) * u64::from(size.group) <= tiling.rows.into();
    if !gpu.wide(size.head_dim)
        || !whole
        || !(1..=CLUSTER_TILES[height]).contains(&tiles)
        || size.requests > CLUSTER_REQUESTS
        || slots < tiles * (splits + 1)
    {
        return None;
    }
    // Keys, and in their place a split's weights; behind them the values. Three entries, where a block has a split alone.
    let block = ATTENTION_BLOCK as u32;
    let stages = (CLUSTER * block * 2 * tiling.slot_rows).div_ceil(block * size.head_dim * 2).max(2) + 1;
    // `Exchange` of the kernel: 64 bytes a row, and 32; 24 of each request.
    let shared = shared_bytes(tiling.rows, stages, size.head_dim, size.requests, false)
        + 64 * tiling.rows
        + 32
        + 24 * size.requests;
    let most = tiles * splits + tiles.div_ceil(CLUSTER.into());
    (shared <= gpu.cluster_shared()).then_some(Clusters { height, stages, shared, items: tiles * (splits + 1), most })
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Gpu = Gpu { multiprocessors: 132, shared: (232_448, 233_472), warpgroups: true, wide_pages: true };
    const ADA: Gpu = Gpu { multiprocessors: 142, shared: (101_376, 102_400), warpgroups: false, wide_pages: true };

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
        let small_pages = Gpu { wide_pages: false, ..H200 };
        assert_eq!(tiling(&llama(16, 64, 32768), small_pages).unwrap().rows, 64);
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
        let tiny = Gpu { multiprocessors: 1, shared: (49_152, 65_536), warpgroups: false, wide_pages: true };
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
        let a100 = Gpu { multiprocessors: 108, shared: (166_912, 167_936), warpgroups: false, wide_pages: true };
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
    fn clusters_take_launches_of_few_low_tiles() {
        let clusters = |size: &AttentionSize, gpu| {
            let tiling = tiling(size, gpu).unwrap();
            let found = clusters(size, gpu, &tiling, tiling.slots)?;
            let items = u64::from(size.requests * size.kv_heads) * (u64::from(size.max_keys).div_ceil(1024) + 1);
            assert_eq!(super::clusters(size, gpu, &tiling, items - 1), None, "a slot for each item");
            // The weights lie in front of the ring's last entry, where the values are.
            let entry = 128 * size.head_dim * 2;
            assert!(CLUSTER * 256 * tiling.slot_rows <= (found.stages - 1) * entry);
            assert!(2 * (found.shared + RESERVED_SHARED) <= gpu.shared.1);
            assert_eq!(found.items, items);
            Some((CLUSTER_ROWS[found.height], found.stages, found.most))
        };
        for (queries, rows) in [(1, 16), (4, 16), (5, 32), (8, 32)] {
            assert_eq!(clusters(&llama(1, queries, 32768), H200), Some((rows, 3, 8 * 32 + 1)), "{queries} queries");
        }
        assert_eq!(clusters(&llama(3, 1, 2000), H200), Some((16, 3, 24 * 2 + 3)));
        let half = |queries| clusters(&AttentionSize { head_dim: 64, ..llama(1, queries, 32768) }, H200).unwrap().1;
        assert_eq!((half(1), half(8)), (3, 5));
        assert_eq!(clusters(&llama(1, 9, 32768), H200), None);
        assert_eq!(clusters(&llama(0, 1, 32768), H200), None, "a launch of no blocks");
        assert_eq!(clusters(&llama(4, 1, 32768), H200), None);
        assert_eq!(clusters(&llama(2, 8, 32768), H200), None);
        assert_eq!(clusters(&AttentionSize { head_dim: 256, ..llama(1, 1, 32768) }, H200), None);
        assert_eq!(clusters(&llama(1, 1, 32768), Gpu { wide_pages: false, ..H200 }), None);
        assert_eq!(clusters(&llama(1, 1, 32768), ADA), None);
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
