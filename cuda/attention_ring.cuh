// Work and memory of a CTA of attention: which item it has, what lies in its shared memory, and the ring through which keys
// and values come, in the banks that the tensor cores read.
#pragma once

#include "attention_rows.cuh"
#include "mma.cuh"
#if SPECRS_WARPGROUPS
#include "wgmma.cuh"
#endif

namespace specrs {
namespace attention {

// The last i with table[i] <= index; table[0] = 0 and index < table[n].
__device__ __forceinline__ int32_t search(const int32_t *table, int32_t n, int32_t index) {
    int32_t low = 0;
    int32_t high = n;
    while (high - low > 1) {
        const int32_t middle = (low + high) >> 1;
        if (table[middle] <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Byte offset of 16-byte piece `piece` of row `row` in a tile of rows of HD elements: eight rows at one piece, or eight
// pieces of a row, lie in different banks.
template <int HD>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
    const int key = HD == 96 ? (row >> 1) & 3 : row & 7;
    return static_cast<uint32_t>(row * HD * 2 + ((piece ^ key) << 4));
}

// Place of piece `piece` of key `row` in an entry of the ring: as above, or in panels of 64 columns.
template <int HD, bool PANELS>
__device__ __forceinline__ uint32_t in_entry(int row, int piece) {
    return PANELS ? static_cast<uint32_t>((piece >> 3) * BLOCK * 128) + swizzled<64>(row, piece & 7)
                  : swizzled<HD>(row, piece);
}

// Data that a CTA keeps in shared memory beside the tiles.
template <int M>
struct Shared {
    unsigned long long bits[M];
    int32_t cut[M];
    int32_t last[M];
    float maxima[WARPS][M];
    uint32_t sums[WARPS][M];
    float alpha[M];        // factors of the block under way
    float unit[M];         // power of two above the block's largest weight: the row sum counts 2^-23 of it
    float top[M];          // m of the split under way
    float row_sum[M];      // l of the split under way
    Folded folded[M];      // results of the splits before
    // Positions of the tail's block: logical position of a stored key; -1: not a key of this tile.
    int32_t key_position[BLOCK];
    uint32_t groups_at[BLOCK];      // bit g: the tail's group g holds a key at logical position cut_min + index
    int32_t row_tile_first[M / 16];  // smallest cut, largest last of 16 rows
    int32_t row_tile_last[M / 16];
    unsigned long long any_bits;  // keys at L + bit that some row of the tile attends to
    int32_t cut_min;              // over rows that attend to something
    int32_t cut_max;
    int32_t last_max;
    int32_t tail_keys;      // stored keys of the tail's block, up to the last
    int32_t tail_last;      // largest logical position among them
    int32_t scan[2][WIDE_THREADS / 32];
    unsigned long long full[MAX_STAGES];   // barriers of a ring that one warpgroup fills for two
    unsigned long long empty[MAX_STAGES];
};

// An item of the CTA's work.
struct Place {
    int32_t request;
    int32_t tile;
    int32_t head;
    int32_t split;
    bool with_tail;
};

template <int M>
__device__ __forceinline__ Place place_of(const AttentionParams &p, const int32_t *mains, const int32_t *pairs,
                                          int32_t main_items, bool serial, int32_t item) {
    Place place;
    place.with_tail = serial || item >= main_items;
    const int32_t *table = place.with_tail ? pairs : mains;
    const int32_t index = place.with_tail && !serial ? item - main_items : item;
    place.request = search(table, p.requests, index);
    const int32_t local = index - table[place.request];
    const int32_t tiles = tiles_of<M>(p, request_at<false>(p, place.request, false));
    place.tile = tiles - 1 - local % tiles;  // the longest first
    place.head = local / tiles % p.kv_heads;
    place.split = local / tiles / p.kv_heads;
    return place;
}

// Put pages of a block's keys into an entry: those of this warp's 32 keys whose `slot` (pieces from the plane's first)
// is not NO_SLOT, zeros for the others. Rows of 8 keys repeat the pattern of pieces and banks.
constexpr uint32_t NO_SLOT = 0xffffffffu;

template <int HD, bool PANELS>
__device__ __forceinline__ void load_keys(const uint8_t *plane, uint32_t entry, uint32_t slot, int first_key) {
    constexpr int PIECES = HD / 8;
    const int lane = threadIdx.x & 31;
    const uint32_t live = __ballot_sync(~0u, slot != NO_SLOT);
    const uint32_t own_slot = slot != NO_SLOT ? slot : 0;
#pragma unroll
    for (int turn = 0; turn < PIECES * 8 / 32; ++turn) {
        const int key = (turn * 32 + lane) / PIECES;
        const int piece = (turn * 32 + lane) % PIECES;
        const uint8_t *from = plane + piece * 16;
        const uint32_t to = entry + in_entry<HD, PANELS>(first_key + key, piece);
        const uint32_t mine = live >> key;
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
            const uint32_t at = __shfl_sync(~0u, own_slot, eight * 8 + key);
            copy_async(to + eight * (8 * (PANELS ? 64 : HD) * 2), from + static_cast<uint64_t>(at) * 16,
                       (mine & (1u << (eight * 8))) != 0);
        }
    }
}

// The slot of a position whose page is `page`; a page outside the cache is recorded, with its number among those that
// the request attends to.
template <bool INLINE>
__device__ __forceinline__ uint32_t slot_at(const AttentionParams &p, int32_t request, int32_t position, int32_t page) {
    if (!in_bounds(page, p.pages)) {
        fault<INLINE>(p, BUFFER_ATTENTION_CACHE_PAGE, request, position >> p.page_shift, page, p.pages);
        return NO_SLOT;
    }
    const int32_t index = (page << p.page_shift) | (position & ((1 << p.page_shift) - 1));
    return static_cast<uint32_t>(index) * p.slot_pieces;
}

#if SPECRS_WARPGROUPS
// The loading warpgroup of a tile of 128 rows: every entry of every item, as the computing ones leave the ring.
template <int HD, int M>
__device__ __forceinline__ void load_tiles(const AttentionParams &p, Shared<M> &sh, const int32_t *mains,
                                           const int32_t *pairs, uint32_t ring_at, int32_t main_items, int32_t items,
                                           bool serial) {
    constexpr uint32_t ENTRY = BLOCK * HD * 2;
    const int thread = threadIdx.x % THREADS;  // thread of this warpgroup: its key of a block
    const int warp = thread >> 5;
    int32_t stage = 0;
    uint32_t empty_parity = (1u << MAX_STAGES) - 1;  // bit k: of the entry's last use; nothing waits before its first
    for (int32_t item = blockIdx.x; item < items; item += gridDim.x) {
        const Place place = place_of<M>(p, mains, pairs, main_items, serial, item);
        const Request r = request_at<false>(p, place.request, false);
        const int32_t *table = pages_of(p, r);
        const int32_t block_first = place.with_tail ? 0 : place.split * SPLIT_BLOCKS;
        const uint64_t head_offset = static_cast<uint64_t>(place.head) * (HD * 2);
        __syncthreads();  // the item before has left shared memory
        __syncthreads();  // the lists of this one are there
        const int32_t cut_max = sh.cut_max;
        const int32_t tail_first = sh.last_max < 0 ? 0 : sh.cut_min & ~(GROUP - 1);
        const int32_t all_blocks = (cut_max + BLOCK - 1) / BLOCK;
        const int32_t block_end =
            serial ? all_blocks : (place.with_tail ? 0 : min(all_blocks, block_first + SPLIT_BLOCKS));
        const int32_t plain_blocks = max(0, block_end - block_first);
        const int32_t blocks = plain_blocks + (place.with_tail ? 1 : 0);
        auto position_of = [&](int32_t block) {  // position of this thread's key, or -1
            if (block < plain_blocks) {
                const int32_t position = (block_first + block) * BLOCK + thread;
                return position < cut_max ? position : -1;
            }
            return block < blocks && sh.key_position[thread] >= 0 ? tail_first + thread : -1;
        };
        auto page_of = [&](int32_t position) { return position < 0 ? 0 : __ldg(table + (position >> p.page_shift)); };
        int32_t position = position_of(0);
        int32_t page = page_of(position);
        for (int32_t block = 0; block < blocks; ++block) {
            const int32_t next_position = position_of(block + 1);
            const int32_t next_page = page_of(next_position);
            const uint32_t slot = position < 0 ? NO_SLOT : slot_at<true>(p, place.request, position, page);
#pragma unroll
            for (int plane = 0; plane < 2; ++plane) {
                barrier_wait(shared_address(&sh.empty[stage]), empty_parity >> stage & 1);
                empty_parity ^= 1u << stage;
                load_keys<HD, true>(reinterpret_cast<const uint8_t *>(plane == 0 ? p.k : p.v) + head_offset,
                                    ring_at + stage * ENTRY, slot, warp * 32);
                barrier_arrive_copied(shared_address(&sh.full[stage]));
                stage = stage + 1 == p.stages ? 0 : stage + 1;
            }
            position = next_position;
            page = next_page;
        }
    }
    copy_wait<0>();
}
#endif

}  // namespace attention
}  // namespace specrs
