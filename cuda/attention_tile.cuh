// A tile of up to 64 rows: its threads and lists, and the keys and values that come to it.
#pragma once

#include "attention_items.cuh"
#include "attention_ring.cuh"

namespace specrs {
namespace attention {

// The sizes of a tile, which four warps share. WARPGROUP: a warp owns 16 rows, their scores against all keys of a block and
// all their columns, and products are Hopper's; weights never leave registers.
template <int HD, int M, bool WARPGROUP>
struct TileShape {
    static_assert(!WARPGROUP || (M == 64 && HD % 64 == 0 && HD <= 128),
                  "a warpgroup's product has 64 rows, a panel 64 columns, and a thread 255 registers");
    static constexpr int ROW_TILES = WARPGROUP ? 1 : M / 16;
    static constexpr int KEY_TILES = WARPGROUP ? BLOCK / 8 : 4;         // tiles of 8 keys, which a warp scores
    static constexpr int COLUMN_TILES = WARPGROUP ? HD / 8 : HD / 32;  // tiles of 8 columns, which a warp owns
    static constexpr int DIM_STEPS = HD / 16;
    static constexpr int PIECES = HD / 8;  // pieces of 16 bytes in a row of K, V or Q
    static constexpr uint32_t ENTRY = BLOCK * HD * 2;
    // Q's fragments stay in registers, and its place becomes another's; else it lies behind the ring. One of more columns
    // than a block has keys is larger than the weights, whose place it would take.
    static constexpr bool KEEP_Q = WARPGROUP || (M <= 32 && HD <= BLOCK);
    static constexpr int TILES = WARPGROUP ? 0 : M * BLOCK * 2 + (KEEP_Q ? 0 : M * HD * 2);  // bytes behind the ring
    // The launcher counts on this size.
    static_assert(sizeof(Shared<M>) <= M * 76 + BLOCK * 8 + M / 16 * 8 + 240, "shared_bytes in kernels/attention.rs");
};

// A CTA's threads and memory, and its item under way.
template <int HD, int M, bool WARPGROUP>
struct TileLoad : TileShape<HD, M, WARPGROUP> {
    using Shape = TileShape<HD, M, WARPGROUP>;
    using Shape::ENTRY;
    using Shape::PIECES;

    const AttentionParams &p;
    uint8_t *p_tile;
    Shared<M> &sh;
    Items items;
    uint32_t ring_at;
    uint32_t p_at;
    uint32_t q_at;
    int thread = threadIdx.x;
    int warp = threadIdx.x >> 5;
    int lane = threadIdx.x & 31;
    int quad = (threadIdx.x & 31) >> 2;  // "g": row of a fragment
    int pair = threadIdx.x & 3;          // "t": columns 2t, 2t + 1
    int row_first = WARPGROUP ? (threadIdx.x >> 5) * 16 : 0;
    int key_first = WARPGROUP ? 0 : (threadIdx.x >> 5) * 32;
    int column_first = WARPGROUP ? 0 : (threadIdx.x >> 5) * (HD / 4);
    int32_t heads;
    bool serial = false;

    // The item under way.
    int32_t item = 0;
    bool with_tail = false;
    int32_t i = 0;  // its request
    Request r;
    int32_t tile = 0;
    int32_t head = 0;
    int32_t split = 0;
    int32_t rows = 0;  // rows of this tile; more than M: all
    const int32_t *table = nullptr;
    int32_t block_first = 0;
    int32_t cut_min = 0;
    int32_t cut_max = 0;
    int32_t tail_first = 0;  // row position of the tail's block
    int32_t plain_blocks = 0;
    int32_t blocks = 0;
    uint64_t head_offset = 0;
    int32_t first_page = 0;

    // K and V of block b are entries 2b and 2b + 1 of a stream through the ring.
    uint32_t slot = NO_SLOT;      // slot of this lane's key in the block under way, in pieces from the plane's first
    int32_t ahead_position = -1;  // row position of this lane's key in the block after it, and its page
    int32_t ahead_page = 0;
    int32_t issued = 0;
    int32_t write_stage = 0;

    __device__ __forceinline__ TileLoad(const AttentionParams &params, uint8_t *memory)
        : p(params), p_tile(memory + params.stages * ENTRY), sh(*reinterpret_cast<Shared<M> *>(p_tile + Shape::TILES)) {
        items.mains = reinterpret_cast<int32_t *>(&sh + 1);
        items.pairs = items.mains + p.requests + 1;
        items.requests = nullptr;
        ring_at = shared_address(memory);
        p_at = shared_address(p_tile);
        // Place of Q: the ring's last entry, which is loaded last; or the place of the weights; or one of its own.
        q_at = WARPGROUP ? p_at - ENTRY : (Shape::KEEP_Q ? p_at : p_at + M * BLOCK * 2);
        heads = p.kv_heads * p.group;
    }

    __device__ __forceinline__ void count() {
        count_items<HD, M, THREADS, WARPGROUP>(p, sh.scan, items);
        serial = items.serial;
    }

    // Queries, under way; past the end zeros.
    __device__ __forceinline__ void load_queries(const TileRows &lines) {
        for (int at = thread; at < M * PIECES; at += THREADS) {
            const int row = at / PIECES;
            const int piece = at % PIECES;
            const bool live = row < lines.rows;
            copy_async(q_at + swizzled<HD>(row, piece),
                       reinterpret_cast<const uint8_t *>(p.q) + (live ? lines.line_of(row) * (HD * 2) + piece * 16 : 0), live);
        }
        copy_commit();
    }

    // The rows of the tile, and what they attend to together.
    __device__ __forceinline__ void list_rows(const TileRows &lines) {
        if (thread < M) {
            Row row = {0, -1, 0};
            if (thread < rows) {
                row = row_at<WARPGROUP>(p, r, i, lines.query(thread), head == 0);
            }
            sh.cut[thread] = row.cut;
            sh.last[thread] = row.last;
            sh.bits[thread] = row.bits;
            if (row.last >= 0) {
                atomicMin(&sh.cut_min, row.cut);
                atomicMax(&sh.cut_max, row.cut);
                atomicMax(&sh.last_max, row.last);
                atomicOr(&sh.any_bits, row.bits);
                atomicMin(&sh.row_tile_first[thread >> 4], row.cut);
                // A draft's mask may name any slots: no row of it is left out.
                atomicMax(&sh.row_tile_last[thread >> 4], p.draft_slots != 0 ? 0x7fffffff : row.last);
            }
        }
    }

    // The keys of the tail's block: their logical positions, and the groups of 16 in which a position is found.
    __device__ __forceinline__ void list_tail() {
        const int32_t position = tail_first + thread;
        int32_t logical = -1;
        if (thread < BLOCK && sh.last_max >= 0) {
            if (p.mask == 0) {
                logical = position <= sh.last_max ? position : -1;
            } else if (position < r.len) {
                logical = position;
            } else if (position - r.len < 64 && ((sh.any_bits >> (position - r.len)) & 1) != 0) {
                const int32_t bit = position - r.len;
                if (p.draft_slots != 0) {
                    logical = r.len + bit % p.draft_steps;
                } else {
                    const unsigned long long own =
                        __ldg(reinterpret_cast<const unsigned long long *>(p.mask) + r.first + bit);
                    logical = r.len + depth_of(own, bit);
                }
            }
        }
        if (thread < BLOCK) {
            sh.key_position[thread] = logical;
        }
        if (logical >= 0) {
            atomicMax(&sh.tail_keys, thread + 1);
            atomicMax(&sh.tail_last, logical);
            if (logical >= cut_min && logical - cut_min < BLOCK) {
                atomicOr(&sh.groups_at[logical - cut_min], 1u << (thread / GROUP));
            }
        }
    }

    __device__ __forceinline__ void begin_item(int32_t number) {
        item = number;
        const Place place = place_of<M>(p, items, item);
        with_tail = place.with_tail;
        i = place.request;
        r = items.request(p, i);
        tile = place.tile;
        head = place.head;
        split = place.split;
        const TileRows lines = TileRows::of<M>(p, r, tile, head);
        rows = lines.rows;
        table = pages_of(p, r);
        block_first = with_tail ? 0 : split * SPLIT_BLOCKS;
        head_offset = static_cast<uint64_t>(head) * (HD * 2);
        // Under way while the rows are: pages of the first block, which may turn out to have fewer keys.
        const int32_t first_column = (block_first * BLOCK + thread) >> p.page_shift;
        first_page = first_column < p.table_width - r.page ? __ldg(table + first_column) : 0;

        __syncthreads();  // the item before has left shared memory
        if (thread == 0) {
            sh.any_bits = 0;
            sh.cut_min = 0x7fffffff;
            sh.cut_max = 0;
            sh.last_max = -1;
            sh.tail_keys = 0;
            sh.tail_last = -1;
        }
        if (thread < M / 16) {
            sh.row_tile_first[thread] = 0x7fffffff;
            sh.row_tile_last[thread] = -1;
        }
        if (thread < BLOCK) {
            sh.groups_at[thread] = 0;
        }
        load_queries(lines);
        __syncthreads();
        list_rows(lines);
        __syncthreads();
        cut_min = sh.cut_min;
        cut_max = sh.cut_max;
        tail_first = sh.last_max < 0 ? 0 : cut_min & ~(GROUP - 1);
        const int32_t all_blocks = (cut_max + BLOCK - 1) / BLOCK;
        const int32_t block_end = serial ? all_blocks : (with_tail ? 0 : min(all_blocks, block_first + SPLIT_BLOCKS));
        plain_blocks = max(0, block_end - block_first);
        blocks = plain_blocks + (with_tail ? 1 : 0);
        if (with_tail) {
            list_tail();
            __syncthreads();
        }
        slot = NO_SLOT;
        issued = 0;
        write_stage = 0;
        look_up(0);
#pragma unroll 1
        for (int k = 0; k + 1 < p.stages; ++k) {
            issue();
        }
    }

    __device__ __forceinline__ void look_up(int32_t block) {
        ahead_position = -1;
        if (block < plain_blocks) {
            const int32_t position = (block_first + block) * BLOCK + thread;
            ahead_position = position < cut_max ? position : -1;
        } else if (block < blocks) {
            ahead_position = sh.key_position[thread % BLOCK] >= 0 ? tail_first + thread : -1;
        }
        if (ahead_position >= 0) {
            ahead_page = block == 0 && plain_blocks != 0 ? first_page
                                                         : __ldg(table + (ahead_position >> p.page_shift));
        }
    }

    // Ask for the next entry.
    __device__ __forceinline__ void issue() {
        if (issued < 2 * blocks) {
            if ((issued & 1) == 0) {
                slot = ahead_position < 0 ? NO_SLOT : slot_at<WARPGROUP>(p, i, ahead_position, ahead_page);
                look_up((issued >> 1) + 1);
            }
            load_keys<HD, WARPGROUP>(
                reinterpret_cast<const uint8_t *>((issued & 1) == 0 ? p.k : p.v) + head_offset,
                ring_at + write_stage * ENTRY, slot, warp * 32);
            ++issued;
            write_stage = write_stage + 1 == p.stages ? 0 : write_stage + 1;
        }
        copy_commit();  // an empty group too: waits count groups
    }

    // Wait until all groups but the newest `stages - less` are there.
    __device__ __forceinline__ void wait(int less) const {
        switch (p.stages - less) {
            case 0:
                copy_wait<0>();
                break;
            case 1:
                copy_wait<1>();
                break;
            case 2:
                copy_wait<2>();
                break;
            case 3:
                copy_wait<3>();
                break;
            case 4:
                copy_wait<4>();
                break;
            default:
                copy_wait<5>();
                break;
        }
    }
};

}  // namespace attention
}  // namespace specrs
