// A tile of 128 rows on Hopper: two warpgroups of 64 rows compute, one warp loads by the copy engine.
//
// Loading needs nothing of the computing warpgroups (attention_boxes.cuh), so that loads run ahead over blocks and items as far
// as the ring goes.
//
// A warpgroup keeps its rows' scores, weights and sums in registers. Scores of the next block are under way while the
// weights of this one are multiplied by its values, and beside those products runs the softmax of the next block.
#pragma once

#include "attention_boxes.cuh"
#include "attention_softmax.cuh"

#if SPECRS_WARPGROUPS
namespace specrs {
namespace attention {

constexpr int WIDE_ROWS = 128;
constexpr int WIDE_COMPUTING = 2 * THREADS;
constexpr int WIDE_WARPS = WIDE_COMPUTING / 32;
constexpr uint32_t WIDE_PANEL = WIDE_ROWS * 128;  // bytes of a panel of 64 columns: of queries, weights, keys or values
static_assert(WIDE_ROWS == BLOCK, "panels of queries, weights and keys are of one size");

struct WideShared {
    uint4 allowed[WIDE_ROWS];  // keys of the tail's block that a row takes
    unsigned long long full[MAX_STAGES];
    unsigned long long empty[MAX_STAGES];
    unsigned long long any_bits;  // keys at L + bit that some row attends to
    Folded folded[WIDE_ROWS];     // results of the splits before
    int32_t cut[WIDE_ROWS];
    int32_t key_position[BLOCK];  // logical position of a stored key of the tail's block; -1: not a key of this tile
    uint32_t groups_at[BLOCK];    // bit g: the tail's group g holds a key at logical position cut_min + index
    int32_t cut_min;              // over rows that attend to something
    int32_t cut_least;            // over refused rows too, which attend to nothing
    int32_t last_max;
    int32_t tail_last;      // largest logical position of the tail's keys
    int32_t half_first[2];  // smallest cut, largest last of a warpgroup's rows
    int32_t half_last[2];
    int32_t scan[2][WIDE_THREADS / 32];
};

// What an item is made of.
struct WideItem {
    int32_t request;
    int32_t tile;
    int32_t head;
    int32_t split;
    int32_t block_first;
    int32_t blocks;      // before the tail's
    int32_t tail_first;  // row position of the tail's block
    bool with_tail;
};

__device__ __forceinline__ WideItem wide_item(const AttentionParams &p, const Items &items, int32_t item, Request &r) {
    const Place place = place_of<WIDE_ROWS>(p, items, item);
    r = items.requests[place.request];
    WideItem w;
    w.request = place.request;
    w.tile = place.tile;
    w.head = place.head;
    w.split = place.split;
    w.with_tail = place.with_tail;
    const int32_t all = (most_cut<WIDE_ROWS>(p, r, w.tile) + BLOCK - 1) / BLOCK;
    w.block_first = place.with_tail ? 0 : place.split * SPLIT_BLOCKS;
    const int32_t end = items.serial ? all : (place.with_tail ? 0 : min(all, w.block_first + SPLIT_BLOCKS));
    w.blocks = max(0, end - w.block_first);
    w.tail_first = least_cut<WIDE_ROWS>(p, r, w.tile) & ~(GROUP - 1);
    return w;
}

// The loading warp: every entry of every item, as the computing warps leave the ring. A lane has one panel of one box of
// each entry.
template <int HD>
__device__ __forceinline__ void load_wide(const BoxCall &call, WideShared &sh, const Items &items, uint32_t ring_at) {
    constexpr int PANELS = HD / 64;
    constexpr uint32_t ENTRY = BLOCK * HD * 2;
    const AttentionParams &p = call.p;
    const int lane = threadIdx.x & 31;
    const int box = lane / PANELS % (BLOCK / BOX);
    const uint32_t place = lane % PANELS * WIDE_PANEL + box * (BOX * 128);
    const bool copies = lane < PANELS * (BLOCK / BOX);
    const int32_t nowhere = p.pages << p.page_shift;
    int32_t stage = 0;
    uint32_t empty_parity = (1u << MAX_STAGES) - 1;  // bit k: of the entry's last use; nothing waits before its first
    for (int32_t item = blockIdx.x; item < items.count(); item += gridDim.x) {
        Request r;
        const WideItem w = wide_item(p, items, item, r);
        const int32_t *table = pages_of(p, r);
        const unsigned long long own = w.with_tail && p.draft_slots != 0 ? draft_keys<WIDE_ROWS>(p, r, w.tile) : 0;
        const int32_t blocks = w.blocks + (w.with_tail ? 1 : 0);
        const int32_t column = w.head * HD + lane % PANELS * 64;
        auto position_of = [&](int32_t block) {
            return (block < w.blocks ? (w.block_first + block) * BLOCK : w.tail_first) + box * BOX;
        };
        auto keys_of = [&](int32_t block) {
            return block < blocks ? stored_keys(p, r, block == w.blocks, position_of(block), own) : 0;
        };
        auto page_of = [&](int32_t block, uint32_t keys) {
            return keys != 0 ? __ldg(table + (position_of(block) >> p.page_shift)) : 0;
        };
        uint32_t keys = keys_of(0);
        int32_t page = page_of(0, keys);
        for (int32_t block = 0; block < blocks; ++block) {
            const uint32_t next_keys = keys_of(block + 1);
            const int32_t next_page = page_of(block + 1, next_keys);
            const int32_t at = position_of(block);
            int32_t slot = nowhere;
            if (keys != 0 && !in_bounds(page, p.pages)) {  // its number among the pages that the request attends to
                fault<true>(p, BUFFER_ATTENTION_CACHE_PAGE, w.request, at >> p.page_shift, page, p.pages);
                keys = 0;
            } else if (keys != 0) {
                slot = (page << p.page_shift) | (at & ((1 << p.page_shift) - 1));
            }
#pragma unroll
            for (int plane = 0; plane < 2; ++plane) {
                const uint32_t full = shared_address(&sh.full[stage]);
                barrier_wait(shared_address(&sh.empty[stage]), empty_parity >> stage & 1);
                empty_parity ^= 1u << stage;
                if (lane == 0) {
                    barrier_arrive_expecting(full, ENTRY);
                }
                __syncwarp();
                if (copies) {
                    load_stored(plane == 0 ? call.maps.keys : call.maps.values,
                                plane == 0 ? call.maps.keys_line : call.maps.values_line,
                                  ring_at + stage * ENTRY + place, column, slot, nowhere, keys, full);
                }
                stage = stage + 1 == p.stages ? 0 : stage + 1;
            }
            keys = next_keys;
            page = next_page;
        }
    }
}

// Barrier of the computing threads, and of one warpgroup's.
__device__ __forceinline__ void wide_sync() { asm volatile("bar.sync 1, %0;\n" ::"n"(WIDE_COMPUTING) : "memory"); }
__device__ __forceinline__ void half_sync(int half) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(2 + half), "n"(THREADS) : "memory");
}

// Queries of a tile, under way to panels of 64 columns; rows past the end are zeros.
template <int HD>
__device__ __forceinline__ void load_wide_queries(const AttentionParams &p, const TileRows &tile, uint32_t q_at) {
    constexpr int PIECES = HD / 8;
#pragma unroll
    for (int turn = 0; turn < WIDE_ROWS * PIECES / WIDE_COMPUTING; ++turn) {
        const int at = turn * WIDE_COMPUTING + threadIdx.x;
        const int row = at / PIECES;
        const int piece = at % PIECES;
        const bool live = row < tile.rows;
        copy_async(q_at + in_entry<HD, true>(row, piece),
                   reinterpret_cast<const uint8_t *>(p.q) + (live ? tile.line_of(row) * (HD * 2) + piece * 16 : 0), live);
    }
    copy_commit();
}

// Fills the lists of a tile's rows: their cuts, and the keys of the tail's block that each takes.
__device__ __forceinline__ void list_wide_rows(const AttentionParams &p, WideShared &sh, const Request &r,
                                               const WideItem &w, const TileRows &tile) {
    const int thread = threadIdx.x;
    const int lane = thread & 31;
    if (thread == 0) {
        sh.any_bits = 0;
        sh.cut_min = 0x7fffffff;
        sh.cut_least = 0x7fffffff;
        sh.last_max = -1;
        sh.tail_last = -1;
    }
    if (thread < 2) {
        sh.half_first[thread] = 0x7fffffff;
        sh.half_last[thread] = -1;
    }
    if (thread < BLOCK) {
        sh.groups_at[thread] = 0;
    }
    Row row = {0, -1, 0};
    const bool live = thread < WIDE_ROWS && thread < tile.rows;
    if (live) {
        row = row_at<true>(p, r, w.request, tile.query(thread), w.head == 0);
    }
    wide_sync();
    if (thread < WIDE_ROWS) {
        const bool on = row.last >= 0;
        sh.cut[thread] = row.cut;
        uint32_t words[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int32_t first = w.tail_first + x * 32;
            const uint32_t keys =
                p.mask == 0 ? below(row.last + 1 - first) : below(r.len - first) | own_keys(row.bits, first, r.len);
            words[x] = on ? keys & ~below(row.cut - first) : 0u;
        }
        sh.allowed[thread] = make_uint4(words[0], words[1], words[2], words[3]);
        const int cut = __reduce_min_sync(~0u, on ? row.cut : 0x7fffffff);
        const int least = __reduce_min_sync(~0u, live ? row.cut : 0x7fffffff);
        const int last = __reduce_max_sync(~0u, row.last);
        const uint32_t low = __reduce_or_sync(~0u, on ? static_cast<uint32_t>(row.bits) : 0u);
        const uint32_t high = __reduce_or_sync(~0u, on ? static_cast<uint32_t>(row.bits >> 32) : 0u);
        if (lane == 0) {
            atomicMin(&sh.cut_min, cut);
            atomicMin(&sh.cut_least, least);
            atomicMax(&sh.last_max, last);
            atomicOr(&sh.any_bits, static_cast<unsigned long long>(high) << 32 | low);
            atomicMin(&sh.half_first[thread >> 6], cut);
            // A draft's mask may name any slots: no row of it is left out.
            atomicMax(&sh.half_last[thread >> 6], p.draft_slots != 0 && last >= 0 ? 0x7fffffff : last);
        }
    }
    wide_sync();
    if (w.with_tail && thread < BLOCK && sh.last_max >= 0) {
        const int32_t position = w.tail_first + thread;
        const int32_t bit = position - r.len;
        int32_t logical = -1;
        if (p.mask == 0) {
            logical = position <= sh.last_max ? position : -1;
        } else if (bit < 0) {
            logical = position;
        } else if (bit < 64 && ((sh.any_bits >> bit) & 1) != 0) {
            const int32_t depth =
                p.draft_slots != 0
                    ? bit % p.draft_steps
                    : depth_of(__ldg(reinterpret_cast<const unsigned long long *>(p.mask) + r.first + bit), bit);
            logical = r.len + depth;
        }
        sh.key_position[thread] = logical;
        const int most = __reduce_max_sync(~0u, logical);
        if (lane == 0) {
            atomicMax(&sh.tail_last, most);
        }
        if (logical >= sh.cut_min && logical - sh.cut_min < BLOCK) {
            atomicOr(&sh.groups_at[logical - sh.cut_min], 1u << (thread / GROUP));
        }
    }
    wide_sync();
}

// Places of a thread: its warpgroup, rows `row` and `row` + 8 of the tile, and columns 2 * pair, 2 * pair + 1 of each 8.
struct WidePlace {
    int half;
    int lane;
    int row;
    int pair;

    static __device__ __forceinline__ WidePlace of_thread() {
        const int warp = threadIdx.x >> 5;
        const int lane = threadIdx.x & 31;
        return {warp >> 2, lane, warp * 16 + (lane >> 2), lane & 3};
    }
};

// A computing warp's view of the ring: entries in the order in which they are loaded.
struct WideRing {
    WideShared &sh;
    int32_t stages;
    int32_t stage = 0;
    uint32_t full_parity = 0;  // bit k: of the entry's next use

    __device__ __forceinline__ int32_t next() {
        const int32_t s = stage;
        stage = stage + 1 == stages ? 0 : stage + 1;
        return s;
    }
    __device__ __forceinline__ void wait(int32_t s) {
        barrier_wait(shared_address(&sh.full[s]), full_parity >> s & 1);
        full_parity ^= 1u << s;
    }
    // Every lane of this warp is done with the entry.
    __device__ __forceinline__ void leave(int32_t s) {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            barrier_arrive(shared_address(&sh.empty[s]));
        }
    }
};

// Sums of a thread's two rows in the split under way.
template <int HD>
struct WideSums {
    float o[HD / 8][4];
    float m[2];
    float l[2];
    float alpha[2];  // factors of the block under way
    bool kept;       // true if they are 1 for this thread's rows

    __device__ __forceinline__ void restart() {
#pragma unroll
        for (int i = 0; i < HD / 8; ++i) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                o[i][x] = 0.0f;
            }
        }
        m[0] = m[1] = none();
        l[0] = l[1] = 0.0f;
    }
    __device__ __forceinline__ void rescale() {
        if (!__all_sync(~0u, kept)) {  // a factor of 1 changes nothing
            scale_rows(o, alpha);
        }
    }
};

}  // namespace attention
}  // namespace specrs
#endif
