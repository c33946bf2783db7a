// Paged attention, one family for every phase: plain decode, prefill in chunks, draft steps and tree verification.
//
// A row is one query of one head. It attends to a list of logical keys: positions 0..p of its own sequence. A tree's
// node finds the last of them among the stored nodes that are its ancestors. The bits of a row's output are a function
// of that list alone: not of the batch, of where keys are stored, of the other rows, or of how a prompt was cut into
// chunks. The rule that all phases keep (the constants are ATTENTION_* in params.cuh, and `ATTENTION_NUMERICS_ID` names
// them together):
//
//   * c = max(0, p + 1 - TAIL). Keys below c are taken in blocks of BLOCK at absolute positions, in order, with an online
//     softmax over blocks; a block's products in its absolute groups of 16 keys, in order. The group that holds c is cut
//     by the mask. Blocks form splits of SPLIT keys at absolute positions; each split starts fresh.
//   * Keys c..p are a split of their own, merged last. Its products take one key in each step of 16, in logical order: in
//     a tree, for each group of stored keys and each depth in it, ascending, the group with all other depths masked out.
//   * Splits are merged in index order by one formula (`Folded::add`).
//
// This holds for a tree whose ancestors below c are stored at their logical positions: the deepest path numbered first, and
// no node farther off it than TAIL nodes. The kernel checks that for each row.
//
// Why the bits hold (measured on an H200 and an H100): a tensor-core step's result depends on which products share
// it, never on their lanes, on other rows, or on steps of zero products before or after (but a sum of -0 becomes +0, which
// the last addition of +0 hides). The maximum is order-free. The row sum is taken in integers. The factor of the old
// sums comes from the difference of raw maxima, so that a block that a row does not reach multiplies by exactly 1.
//
// Sources: online softmax, Milakov and Gimelshein 2018; splitting over keys, Flash-Decoding (Dao et al. 2023); rows of a
// kv head's group packed into one tile, Ainslie et al. 2023 (GQA) and FlashAttention-3's packing.
//
// Work: a tile is M rows of one request and kv head. Its items are its splits and its last TAIL keys (the tail). The grid is
// fixed at launch and each CTA takes items gridDim.x apart, so that lengths are needed on the device alone. Where tiles
// alone fill the GPU, or the workspace has too few slots, a CTA takes a whole tile and folds its splits as it goes
// ("serial"); else every item leaves its sums in a slot of the workspace and `merge` folds them. Both fold the same
// numbers in the same order.
//
// Four warps share a tile. Warp w scores keys 32w..32w+31 of a block and owns a quarter of the output's columns, so that one
// warp takes all keys of its columns in order. On Hopper a tile of 64 rows is a warpgroup's: a warp owns 16 rows, scores all
// keys of a block for them, and keeps their weights in registers; two warpgroups have a tile of 128, for which a third loads.
// K and V come through a ring of blocks in shared memory, loaded by cp.async in 16-byte pieces; a key that no row reaches is
// zeros there, never read.
//
// Here is `attend`; beside it lie what rows attend to (`attention_rows.cuh`), items and the ring (`attention_ring.cuh`), and
// the folding of splits with `merge` (`attention_fold.cuh`).
//
// build.rs compiles this file once for each element type (SPECRS_ELEMENT) and head_dim (SPECRS_HEAD_DIM), and, for the
// models that cap their scores (Gemma 2, arXiv:2408.00118), once more with SPECRS_CAPPED.
#include "attention_fold.cuh"
#include "attention_ring.cuh"

namespace specrs {
namespace attention {

// tanh(x) within 2^-22 or so of it: 1 - 2 / (1 + e^2x), from `x` times 2 log2(e).
__device__ __forceinline__ float tanh_of(float x) {
    return __fsub_rn(1.0f, __fdiv_rn(2.0f, __fadd_rn(1.0f, exp2_approx(x))));
}

// WARPGROUP: a warp owns 16 rows, their scores against all keys of a block and all their columns, and products
// are Hopper's; weights never leave registers. A tile of 128 rows is WIDE: it belongs to two warpgroups, for which a third
// loads.
template <typename T, int HD, int M, bool WARPGROUP>
__device__ __forceinline__ void attend(const AttentionParams &p) {
    constexpr bool WIDE = M == 128;
    constexpr int COMPUTING = WIDE ? 2 * THREADS : THREADS;
    constexpr int ALL = WIDE ? WIDE_THREADS : THREADS;
    static_assert(!WARPGROUP || (M >= 64 && HD % 64 == 0 && HD <= 128),
                  "a warpgroup's product has 64 rows, a panel 64 columns, and a thread 255 registers");
    static_assert(WARPGROUP || !WIDE, "mma.sync keeps all rows of a tile in each warp");
    constexpr int ROW_TILES = WARPGROUP ? 1 : M / 16;
    constexpr int KEY_TILES = WARPGROUP ? BLOCK / 8 : 4;         // tiles of 8 keys, which a warp scores
    constexpr int COLUMN_TILES = WARPGROUP ? HD / 8 : HD / 32;  // tiles of 8 columns, which a warp owns
    constexpr int DIM_STEPS = HD / 16;
    constexpr int PIECES = HD / 8;       // pieces of 16 bytes in a row of K, V or Q
    constexpr uint32_t ENTRY = BLOCK * HD * 2;
    // The launcher counts on this size.
    static_assert(sizeof(Shared<M>) <= M * 76 + BLOCK * 8 + M / 16 * 8 + 240, "shared_bytes in kernels/attention.rs");
    // Q's fragments stay in registers, and its place becomes another's; else it lies behind the ring. One of more columns
    // than a block has keys is larger than the weights, whose place it would take.
    constexpr bool KEEP_Q = (WARPGROUP && !WIDE) || (M <= 32 && HD <= BLOCK);

    extern __shared__ __align__(1024) uint8_t shared_memory[];
    uint8_t *const ring = shared_memory;
    uint8_t *const p_tile = ring + p.stages * ENTRY;
    // Place of Q: the ring's last entry, which is loaded last; or the place of the weights; or one of its own.
    uint8_t *const q_tile = WARPGROUP ? (WIDE ? p_tile : p_tile - ENTRY) : (KEEP_Q ? p_tile : p_tile + M * BLOCK * 2);
    constexpr int TILES = WARPGROUP ? (WIDE ? M * HD * 2 : 0) : M * BLOCK * 2 + (KEEP_Q ? 0 : M * HD * 2);
    Shared<M> &sh = *reinterpret_cast<Shared<M> *>(p_tile + TILES);
    int32_t *const mains = reinterpret_cast<int32_t *>(&sh + 1);
    int32_t *const pairs = mains + p.requests + 1;
    const uint32_t ring_at = shared_address(ring);
    const uint32_t p_at = shared_address(p_tile);
    const uint32_t q_at = shared_address(q_tile);

    const int thread = threadIdx.x;
    const int warp = thread >> 5;
    const int lane = thread & 31;
    const int quad = lane >> 2;  // "g": row of a fragment
    const int pair = lane & 3;   // "t": columns 2t, 2t + 1
    const int row_first = WARPGROUP ? warp * 16 : 0;
    const int key_first = WARPGROUP ? 0 : warp * 32;
    const int column_first = WARPGROUP ? 0 : warp * (HD / 4);
    const float c = __uint_as_float(p.scale_bits);
    const int32_t heads = p.kv_heads * p.group;

    let_next_begin();

    // First item of each request: of splits (mains), and of tiles (pairs).
    int32_t main_items = 0;
    int32_t pair_items = 0;
    for (int32_t base = 0; base < p.requests; base += ALL) {
        const int32_t i = base + thread;
        int32_t a = 0;
        int32_t b = 0;
        if (i < p.requests) {
            const Request r = request_at<WARPGROUP>(p, i, blockIdx.x == 0);
            b = tiles_of<M>(p, r) * p.kv_heads;
            a = b * splits_of(p, r);
            if (r.refused && blockIdx.x == i % gridDim.x) {
                const int32_t end = __ldg(reinterpret_cast<const int32_t *>(p.starts) + i + 1);
                clear_queries<HD>(p, r.first, end, 0, 1);
            }
        }
        const int32_t own_a = a;
        const int32_t own_b = b;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int32_t up_a = __shfl_up_sync(~0u, a, step);
            const int32_t up_b = __shfl_up_sync(~0u, b, step);
            a += lane >= step ? up_a : 0;
            b += lane >= step ? up_b : 0;
        }
        if (lane == 31) {
            sh.scan[0][warp] = a;
            sh.scan[1][warp] = b;
        }
        __syncthreads();
        int32_t before_a = main_items;
        int32_t before_b = pair_items;
#pragma unroll
        for (int w = 0; w < ALL / 32; ++w) {
            before_a += w < warp ? sh.scan[0][w] : 0;
            before_b += w < warp ? sh.scan[1][w] : 0;
            main_items += sh.scan[0][w];
            pair_items += sh.scan[1][w];
        }
        if (i < p.requests) {
            mains[i] = before_a + a - own_a;
            pairs[i] = before_b + b - own_b;
        }
        __syncthreads();
    }
    if (thread == 0) {
        mains[p.requests] = main_items;
        pairs[p.requests] = pair_items;
    }
    // Serial where whole tiles keep at least 7 of 8 CTAs busy to the end, or where slots are too few.
    const int32_t waves = (pair_items + gridDim.x - 1) / gridDim.x;
    const bool serial = main_items + pair_items > p.slots ||
                        static_cast<int64_t>(pair_items) * 8 >= static_cast<int64_t>(waves) * gridDim.x * 7;
    __syncthreads();
    if (blockIdx.x == 0) {  // for `merge`
        int32_t *header = reinterpret_cast<int32_t *>(p.schedule);
        if (thread == 0) {
            header[0] = serial ? 1 : 0;
            header[1] = main_items;
        }
        for (int32_t i = thread; i < p.requests; i += ALL) {
            header[2 + i] = mains[i];
            header[2 + p.requests + i] = pairs[i];
        }
    }
    {  // dead lanes behind the last request
        const int32_t end = __ldg(reinterpret_cast<const int32_t *>(p.starts) + p.requests);
        clear_queries<HD>(p, min(max(end, 0), p.queries), p.queries, blockIdx.x * ALL + thread,
                          static_cast<int64_t>(gridDim.x) * ALL);
    }

    const int32_t items = serial ? pair_items : main_items + pair_items;
    // A barrier of the computing threads: of the whole block where no threads only load for them.
    auto sync = [&]() {
        if (WIDE) {
            asm volatile("bar.sync 1, %0;\n" ::"n"(COMPUTING) : "memory");
        } else {
            __syncthreads();
        }
    };
#if SPECRS_WARPGROUPS
    if constexpr (WIDE) {
        if (thread == 0) {
            for (int k = 0; k < MAX_STAGES; ++k) {
                barrier_init(shared_address(&sh.full[k]), THREADS);
                barrier_init(shared_address(&sh.empty[k]), COMPUTING / 32);
            }
        }
        __syncthreads();
        if (thread >= COMPUTING) {
            fewer_registers<72>();
            load_tiles<HD, M>(p, sh, mains, pairs, ring_at, main_items, items, serial);
            return;
        }
        more_registers<216>();
    }
#endif
    [[maybe_unused]] uint32_t full_parity = 0;  // bit k: of the entry's next use
    int32_t read_stage = 0;
    for (int32_t item = blockIdx.x; item < items; item += gridDim.x) {
        const Place place = place_of<M>(p, mains, pairs, main_items, serial, item);
        const bool with_tail = place.with_tail;
        const int32_t i = place.request;
        const Request r = request_at<false>(p, i, false);
        const int32_t tile = place.tile;
        const int32_t head = place.head;
        const int32_t split = place.split;
        const int32_t rows = r.queries * p.group - tile * M;  // rows of this tile; more than M: all
        const int32_t *table = pages_of(p, r);
        const int32_t block_first = with_tail ? 0 : split * SPLIT_BLOCKS;
        // Under way while the rows are: pages of the first block, which may turn out to have fewer keys.
        const int32_t first_column = (block_first * BLOCK + thread) >> p.page_shift;
        const int32_t first_page = !WIDE && first_column < p.table_width - r.page ? __ldg(table + first_column) : 0;

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
        // Q, past the end zeros.
        for (int at = thread; at < M * PIECES; at += COMPUTING) {
            const int row = at / PIECES;
            const int piece = at % PIECES;
            const bool live = row < rows;
            const int32_t packed = live ? tile * M + row : 0;
            const uint64_t line =
                static_cast<uint64_t>(r.first + packed / p.group) * heads + head * p.group + packed % p.group;
            copy_async(q_at + (WIDE ? in_entry<HD, true>(row, piece) : swizzled<HD>(row, piece)),
                       reinterpret_cast<const uint8_t *>(p.q) + line * (HD * 2) + piece * 16, live);
        }
        copy_commit();
        sync();
        if (thread < M) {
            Row row = {0, -1, 0};
            if (thread < rows) {
                row = row_at<WARPGROUP>(p, r, i, (tile * M + thread) / p.group, head == 0);
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
        sync();
        const int32_t cut_min = sh.cut_min;
        const int32_t cut_max = sh.cut_max;
        const int32_t tail_first = sh.last_max < 0 ? 0 : cut_min & ~(GROUP - 1);  // row position of the tail's block
        const int32_t all_blocks = (cut_max + BLOCK - 1) / BLOCK;
        const int32_t block_end = serial ? all_blocks : (with_tail ? 0 : min(all_blocks, block_first + SPLIT_BLOCKS));
        const int32_t plain_blocks = max(0, block_end - block_first);
        const int32_t blocks = plain_blocks + (with_tail ? 1 : 0);
        if (with_tail) {
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
                        logical = r.len + max(__popcll(own), 1) - 1;
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
            sync();
        }
#if SPECRS_WARPGROUPS
        if constexpr (WIDE) {
            copy_wait<0>();
            publish_to_products();  // Q
            __syncthreads();        // the loading threads may read the lists
        }
#endif

        // K and V of block b are entries 2b and 2b + 1 of a stream through the ring.
        const uint64_t head_offset = static_cast<uint64_t>(head) * (HD * 2);
        // Slot of this lane's key in the block under way, in pieces from the plane's first.
        uint32_t slot = NO_SLOT;
        int32_t ahead_position = -1;  // row position of this lane's key in the block after it, and its page
        int32_t ahead_page = 0;
        auto look_up = [&](int32_t block) {
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
        };
        int32_t issued = 0;
        int32_t write_stage = 0;
        auto issue = [&]() {
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
        };
        // Wait until all groups but the newest `stages - less` are there.
        auto wait = [&](int less) {
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
        };
        if (!WIDE) {
            look_up(0);
#pragma unroll 1
            for (int k = 0; k + 1 < p.stages; ++k) {
                issue();
            }
        }

        float o[ROW_TILES][COLUMN_TILES][4];
        float m[ROW_TILES][2];
        float l[2] = {0.0f, 0.0f};  // sums where a warp owns its rows; else they are in `sh`
        uint32_t q[KEEP_Q ? DIM_STEPS : 1][KEEP_Q ? ROW_TILES : 1][4];
        auto start_split = [&]() {
            l[0] = 0.0f;
            l[1] = 0.0f;
            if (thread < M) {
                sh.row_sum[thread] = 0.0f;
            }
#pragma unroll
            for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    m[rt][e] = none();
                }
#pragma unroll
                for (int ct = 0; ct < COLUMN_TILES; ++ct) {
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
                        o[rt][ct][x] = 0.0f;
                    }
                }
            }
        };
        start_split();
        if (thread < M) {
            sh.folded[thread] = Folded{none(), 0.0f};
        }

        // The entry at `read_stage` is there; and every lane of this warp is done with it.
        auto arrived = [&](int stage) {
#if SPECRS_WARPGROUPS
            if constexpr (WIDE) {
                barrier_wait(shared_address(&sh.full[stage]), full_parity >> stage & 1);
                full_parity ^= 1u << stage;
                publish_to_products();
            }
#endif
        };
        auto done_with = [&](int stage) {
#if SPECRS_WARPGROUPS
            if constexpr (WIDE) {
                __syncwarp();
                if (lane == 0) {
                    barrier_arrive(shared_address(&sh.empty[stage]));
                }
            }
#endif
        };
        if (!WIDE) {
            read_stage = 0;
        }
        for (int32_t block = 0; block < blocks; ++block) {
            const bool tail = block == plain_blocks;
            const int32_t base = tail ? tail_first : (block_first + block) * BLOCK;  // row position of the block's first key
            const int32_t keys = tail ? sh.tail_keys : min(BLOCK, cut_max - base);   // stored keys that some row attends to
            const int32_t k_stage = read_stage;
            const uint32_t k_at = ring_at + read_stage * ENTRY;
            read_stage = read_stage + 1 == p.stages ? 0 : read_stage + 1;
            const int32_t v_stage = read_stage;
            const uint32_t v_at = ring_at + read_stage * ENTRY;
            read_stage = read_stage + 1 == p.stages ? 0 : read_stage + 1;

            if (WIDE) {
                arrived(k_stage);
            } else {
                wait(2);
#if SPECRS_WARPGROUPS
                if (WARPGROUP) {
                    publish_to_products();
                }
#endif
                __syncthreads();  // K is there; every warp has left V of the block before, whose place is next
                if (!WARPGROUP || block != 0) {
                    issue();
                }
            }
            if (KEEP_Q && block == 0) {
#pragma unroll
                for (int d = 0; d < DIM_STEPS; ++d) {
#pragma unroll
                    for (int rt = 0; rt < ROW_TILES; ++rt) {
                        load_matrices(q[KEEP_Q ? d : 0][KEEP_Q ? rt : 0],
                                      q_at + swizzled<HD>(row_first + rt * 16 + (lane & 15), d * 2 + (lane >> 4)));
                    }
                }
                if (WARPGROUP) {
                    __syncthreads();  // every warp has its part of Q, whose place is next
                    issue();
                }
            }

            // Scores of this warp's keys.
            float s[ROW_TILES][KEY_TILES][4];
#pragma unroll
            for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                for (int kt = 0; kt < KEY_TILES; ++kt) {
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
                        s[rt][kt][x] = 0.0f;
                    }
                }
            }
#if SPECRS_WARPGROUPS
            if constexpr (WARPGROUP) {
                warpgroup_arrive();
#pragma unroll
                for (int d = 0; d < DIM_STEPS; ++d) {
                    const uint32_t step = (d >> 2) * (BLOCK * 128) + (d & 3) * 32;
                    if constexpr (WIDE) {
                        Warpgroup<T, BLOCK, 0>::mma(s[0], matrix_descriptor(q_at + (warp >> 2) * (64 * 128) + step, 0),
                                                    matrix_descriptor(k_at + step, 0));
                    } else {
                        Warpgroup<T, BLOCK, 0>::mma(s[0], q[d][0], matrix_descriptor(k_at + step, 0));
                    }
                }
                warpgroup_commit();
                warpgroup_wait();
            }
#endif
            if (!WARPGROUP && warp * 32 < keys) {
#pragma unroll(KEEP_Q ? DIM_STEPS : 4)
                for (int d = 0; d < DIM_STEPS; ++d) {
                    uint32_t b[2][4];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        load_matrices(b[half], k_at + swizzled<HD>(warp * 32 + half * 16 + ((lane >> 4) << 3) + (lane & 7),
                                                                   d * 2 + ((lane >> 3) & 1)));
                    }
#pragma unroll
                    for (int rt = 0; rt < ROW_TILES; ++rt) {
                        uint32_t a[4];
                        if (KEEP_Q) {
#pragma unroll
                            for (int x = 0; x < 4; ++x) {
                                a[x] = q[KEEP_Q ? d : 0][KEEP_Q ? rt : 0][x];
                            }
                        } else {
                            load_matrices(a, q_at + swizzled<HD>(rt * 16 + (lane & 15), d * 2 + (lane >> 4)));
                        }
#pragma unroll
                        for (int kt = 0; kt < 4; ++kt) {
                            T::mma(s[rt][kt], a, b[kt >> 1][(kt & 1) * 2], b[kt >> 1][(kt & 1) * 2 + 1]);
                        }
                    }
                }
            }
            if constexpr (CAPPED) {  // in units of the cap, which `c` has as a factor
                const float factor = __uint_as_float(p.cap_bits);
#pragma unroll
                for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                    for (int kt = 0; kt < KEY_TILES; ++kt) {
#pragma unroll
                        for (int x = 0; x < 4; ++x) {
                            s[rt][kt][x] = tanh_of(__fmul_rn(s[rt][kt][x], factor));
                        }
                    }
                }
            }
            // A key that a row does not attend to scores -inf: its weight is exactly 0.
            if (tail) {
#pragma unroll
                for (int kt = 0; kt < KEY_TILES; ++kt) {
#pragma unroll
                    for (int x = 0; x < 2; ++x) {
                        const int key = key_first + kt * 8 + pair * 2 + x;
                        const int32_t logical = sh.key_position[key];
                        const int32_t bit = base + key - r.len;
#pragma unroll
                        for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int row = row_first + rt * 16 + quad + 8 * e;
                                const bool listed = p.mask == 0 ? logical <= sh.last[row]
                                                                : bit < 0 || ((sh.bits[row] >> (bit & 63)) & 1) != 0;
                                if (!(listed && sh.last[row] >= 0 && logical >= sh.cut[row])) {
                                    s[rt][kt][e * 2 + x] = none();
                                }
                            }
                        }
                    }
                }
            } else if (base + BLOCK > cut_min) {
#pragma unroll
                for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int32_t left = sh.cut[row_first + rt * 16 + quad + 8 * e] - base - key_first - pair * 2;
#pragma unroll
                        for (int kt = 0; kt < KEY_TILES; ++kt) {
#pragma unroll
                            for (int x = 0; x < 2; ++x) {
                                if (kt * 8 + x >= left) {
                                    s[rt][kt][e * 2 + x] = none();
                                }
                            }
                        }
                    }
                }
            }

            // The block's maximum of each row; over the four warps where they share it.
            float tops[ROW_TILES][2];
#pragma unroll
            for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float top = none();
#pragma unroll
                    for (int kt = 0; kt < KEY_TILES; ++kt) {
                        top = fmaxf(top, fmaxf(s[rt][kt][e * 2], s[rt][kt][e * 2 + 1]));
                    }
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                    tops[rt][e] = top;
                    if (!WARPGROUP && pair == 0) {
                        sh.maxima[warp][rt * 16 + quad + 8 * e] = top;
                    }
                }
            }
            if (WIDE) {
                done_with(k_stage);
            } else {
                __syncthreads();  // every warp has left K, whose place is next
                issue();
            }

            float alpha[ROW_TILES][2];
            bool kept = true;
            uint32_t own[WARPGROUP ? BLOCK / GROUP : 1][4];  // weights, where they stay in registers
#pragma unroll
            for (int rt = 0; rt < ROW_TILES; ++rt) {
                float shift[2];  // maximum * c
                float unit[2];
                uint32_t sum[2] = {0, 0};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int row = rt * 16 + quad + 8 * e;
                    const float top = WARPGROUP ? tops[rt][e]
                                                : fmaxf(fmaxf(sh.maxima[0][row], sh.maxima[1][row]),
                                                        fmaxf(sh.maxima[2][row], sh.maxima[3][row]));
                    const float both = fmaxf(m[rt][e], top);
                    const float finite = both == none() ? 0.0f : both;
                    shift[e] = __fmul_rn(finite, c);
                    alpha[rt][e] = exp2_approx(__fmul_rn(__fsub_rn(m[rt][e], finite), c));
                    const int largest = __float_as_int(exp2_approx(__fmaf_rn(top, c, -shift[e])));
                    unit[e] = __int_as_float(top == none() ? 0x00800000 : (largest & 0x7f800000) + 0x00800000);
                    m[rt][e] = both;
                    kept = kept && alpha[rt][e] == 1.0f;
                    if (!WARPGROUP && warp == 0 && pair == 0) {
                        sh.alpha[row] = alpha[rt][e];
                        sh.unit[row] = unit[e];
                        sh.top[row] = both;
                    }
                }
#pragma unroll
                for (int kt = 0; kt < KEY_TILES; ++kt) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float low = exp2_approx(__fmaf_rn(s[rt][kt][e * 2], c, -shift[e]));
                        const float high = exp2_approx(__fmaf_rn(s[rt][kt][e * 2 + 1], c, -shift[e]));
                        const uint32_t weights = T::pack(low, high);
                        sum[e] += __float_as_uint(__fadd_rn(T::low(weights), unit[e]));
                        sum[e] += __float_as_uint(__fadd_rn(T::high(weights), unit[e]));
                        const int row = rt * 16 + quad + 8 * e;
                        if (WARPGROUP) {
                            own[WARPGROUP ? kt >> 1 : 0][(kt & 1) * 2 + e] = weights;
                        } else {
                            *reinterpret_cast<uint32_t *>(p_tile + swizzled<BLOCK>(row, warp * 4 + kt) + pair * 4) =
                                weights;
                        }
                    }
                }
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    // Modulo 2^32, in any order.
                    uint32_t part = sum[e] - static_cast<uint32_t>(2 * KEY_TILES) * __float_as_uint(unit[e]);
                    part += __shfl_xor_sync(~0u, part, 1);
                    part += __shfl_xor_sync(~0u, part, 2);
                    if (WARPGROUP) {
                        l[e] = __fmaf_rn(l[e], alpha[rt][e], row_sum_of(part, unit[e]));
                    } else if (pair == 0) {
                        sh.sums[warp][rt * 16 + quad + 8 * e] = part;
                    }
                }
            }
            if (!__all_sync(~0u, kept)) {  // a factor of 1 changes nothing
#pragma unroll
                for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                    for (int ct = 0; ct < COLUMN_TILES; ++ct) {
#pragma unroll
                        for (int x = 0; x < 4; ++x) {
                            o[rt][ct][x] = __fmul_rn(o[rt][ct][x], alpha[rt][x >> 1]);
                        }
                    }
                }
            }
            if (WIDE) {
                arrived(v_stage);
            } else {
                wait(1);
#if SPECRS_WARPGROUPS
                if (WARPGROUP) {
                    publish_to_products();
                }
#endif
                __syncthreads();  // V and all weights are there
            }
            if (!WARPGROUP && thread < M) {
                const uint32_t sum = sh.sums[0][thread] + sh.sums[1][thread] + sh.sums[2][thread] + sh.sums[3][thread];
                sh.row_sum[thread] =
                    __fmaf_rn(sh.row_sum[thread], sh.alpha[thread], row_sum_of(sum, sh.unit[thread]));
            }

            // Weights times V: this warp's columns, keys in groups of 16.
            auto values = [&](int group, uint32_t (&b)[COLUMN_TILES][2]) {
                const int row = group * 16 + (lane & 15);
#pragma unroll
                for (int ct = 0; ct + 1 < COLUMN_TILES; ct += 2) {
                    uint32_t d[4];
                    load_matrices_transposed(
                        d, v_at + in_entry<HD, WARPGROUP>(row, column_first / 8 + ct + (lane >> 4)));
                    b[ct][0] = d[0];
                    b[ct][1] = d[1];
                    b[ct + 1][0] = d[2];
                    b[ct + 1][1] = d[3];
                }
                if (COLUMN_TILES % 2 != 0) {
                    load_two_matrices_transposed(
                        b[COLUMN_TILES - 1], v_at + in_entry<HD, WARPGROUP>(row, column_first / 8 + COLUMN_TILES - 1));
                }
            };
            auto weights_of = [&](int rt, int group, uint32_t (&a)[4]) {
                load_matrices(a, p_at + swizzled<BLOCK>(rt * 16 + (lane & 15), group * 2 + (lane >> 4)));
            };
#if SPECRS_WARPGROUPS
            if constexpr (WARPGROUP) {
                if (!tail) {
                    warpgroup_arrive();
#pragma unroll
                    for (int group = 0; group < BLOCK / GROUP; ++group) {  // behind the last key zeros times zeros
                        Warpgroup<T, HD, 1>::mma(o[0], own[group],
                                                 matrix_descriptor(v_at + group * (GROUP * 128), BLOCK * 128));
                    }
                    warpgroup_commit();
                    warpgroup_wait();
                }
            }
#endif
            if (WARPGROUP && !tail) {
                // done
            } else if (!tail) {
#pragma unroll 4
                for (int group = 0; group < BLOCK / GROUP; ++group) {
                    if (group * GROUP < keys) {
                        uint32_t b[COLUMN_TILES][2];
                        values(group, b);
#pragma unroll
                        for (int rt = 0; rt < ROW_TILES; ++rt) {
                            uint32_t a[4];
                            weights_of(rt, group, a);
#pragma unroll
                            for (int ct = 0; ct < COLUMN_TILES; ++ct) {
                                T::mma(o[rt][ct], a, b[ct][0], b[ct][1]);
                            }
                        }
                    }
                }
            } else {
                // Take one logical position in a step.
                const int32_t positions = sh.tail_last < cut_min ? 0 : min(sh.tail_last - cut_min + 1, BLOCK);
                for (int32_t x = 0; x < positions; ++x) {
                    const int32_t logical = cut_min + x;
                    auto step = [&](int group, auto weights) {
                        const int32_t *at = sh.key_position + group * GROUP + pair * 2;
                        const uint32_t low = (at[0] == logical ? 0xffffu : 0u) | (at[1] == logical ? 0xffff0000u : 0u);
                        const uint32_t high = (at[8] == logical ? 0xffffu : 0u) | (at[9] == logical ? 0xffff0000u : 0u);
                        uint32_t b[COLUMN_TILES][2];
                        values(group, b);
#pragma unroll
                        for (int rt = 0; rt < ROW_TILES; ++rt) {
                            const int row_tile = WARPGROUP ? warp : rt;
                            if (logical < sh.row_tile_first[row_tile] || logical > sh.row_tile_last[row_tile]) {
                                continue;  // all weights are 0
                            }
                            uint32_t a[4];
                            weights(rt, group, a);
                            a[0] &= low;
                            a[1] &= low;
                            a[2] &= high;
                            a[3] &= high;
#pragma unroll
                            for (int ct = 0; ct < COLUMN_TILES; ++ct) {
                                T::mma(o[rt][ct], a, b[ct][0], b[ct][1]);
                            }
                        }
                    };
                    const uint32_t groups = sh.groups_at[x];
                    if (WARPGROUP) {
#pragma unroll
                        for (int group = 0; group < BLOCK / GROUP; ++group) {
                            if ((groups >> group & 1) != 0) {
                                step(group, [&](int, int, uint32_t (&a)[4]) {
#pragma unroll
                                    for (int y = 0; y < 4; ++y) {
                                        a[y] = own[WARPGROUP ? group : 0][y];
                                    }
                                });
                            }
                        }
                    } else {
                        for (uint32_t left = groups; left != 0; left &= left - 1) {
                            step(__ffs(static_cast<int>(left)) - 1, weights_of);
                        }
                    }
                }
            }

            if (WIDE) {
                done_with(v_stage);
            }
            const int32_t absolute = block_first + block;
            if (!tail && block + 1 != plain_blocks && (absolute + 1) % SPLIT_BLOCKS != 0) {
                continue;
            }
            // The end of a split: to the workspace, into the sums so far, or, after the last, out.
            if (WIDE) {
                sync();  // no barrier holds the warps together from one split's end to the next
            }
            if (WARPGROUP && pair == 0) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    sh.top[row_first + quad + 8 * e] = m[0][e];
                    sh.row_sum[row_first + quad + 8 * e] = l[e];
                }
            }
            sync();  // row_sum
            const int64_t at_slot = static_cast<int64_t>(serial ? blockIdx.x : item) * p.slot_rows;
            float *const slot_sums = reinterpret_cast<float *>(p.partials) + at_slot * HD + column_first + pair * 2;
            if (!serial) {
#pragma unroll
                for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int row = row_first + rt * 16 + quad + 8 * e;
                        if (row >= rows || !(tail || sh.cut[row] > split * SPLIT)) {
                            continue;
                        }
                        if ((WARPGROUP || warp == 0) && pair == 0) {
                            reinterpret_cast<float2 *>(p.states)[at_slot + row] = make_float2(m[rt][e], sh.row_sum[row]);
                        }
#pragma unroll
                        for (int ct = 0; ct < COLUMN_TILES; ++ct) {
                            *reinterpret_cast<float2 *>(slot_sums + row * HD + ct * 8) =
                                make_float2(o[rt][ct][e * 2], o[rt][ct][e * 2 + 1]);
                        }
                    }
                }
            } else {
                // All loads first: a store between them would make each wait for the one before.
                float2 old[ROW_TILES][2][COLUMN_TILES];
#pragma unroll
                for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int row = row_first + rt * 16 + quad + 8 * e;
                        const bool before = row < rows && sh.folded[row].m != none();
#pragma unroll
                        for (int ct = 0; ct < COLUMN_TILES; ++ct) {
                            old[rt][e][ct] = before ? *reinterpret_cast<const float2 *>(slot_sums + row * HD + ct * 8)
                                                    : make_float2(0.0f, 0.0f);
                        }
                    }
                }
#pragma unroll
                for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int row = row_first + rt * 16 + quad + 8 * e;
                        if (row >= rows) {
                            continue;
                        }
                        Folded f = sh.folded[row];
                        const bool before = f.m != none();
                        const bool reached = m[rt][e] != none();
                        float u = 1.0f;
                        float w = 1.0f;
                        if (reached) {
                            if (before) {
                                f.add(m[rt][e], sh.row_sum[row], c, u, w);
                            } else {
                                f.m = m[rt][e];
                                f.l = sh.row_sum[row];
                            }
                        }
                        const int32_t packed = tile * M + row;
                        const uint64_t line = static_cast<uint64_t>(r.first + packed / p.group) * heads +
                                              head * p.group + packed % p.group;
#pragma unroll
                        for (int ct = 0; ct < COLUMN_TILES; ++ct) {
                            float2 sum = make_float2(o[rt][ct][e * 2], o[rt][ct][e * 2 + 1]);
                            if (before) {
                                sum.x = reached ? fold(old[rt][e][ct].x, u, sum.x, w) : old[rt][e][ct].x;
                                sum.y = reached ? fold(old[rt][e][ct].y, u, sum.y, w) : old[rt][e][ct].y;
                            }
                            if (tail) {
                                store_pair<T>(p, line * HD + column_first + ct * 8 + pair * 2, normalised(sum.x, f),
                                              normalised(sum.y, f));
                            } else if (reached) {
                                *reinterpret_cast<float2 *>(slot_sums + row * HD + ct * 8) = sum;
                            }
                        }
                    }
                }
            }
            sync();  // every warp has read the state of the splits before
            if (thread < M) {
                sh.folded[thread].join(sh.top[thread], sh.row_sum[thread], c);
            }
            start_split();
        }
        copy_wait<0>();  // only empty groups are left
    }
}

}  // namespace attention
}  // namespace specrs

// Heights of a tile: a request's rows (queries times group) choose among them, and no bit depends on it.
extern "C" __global__ void __launch_bounds__(specrs::attention::THREADS, 2)
    attention_16(const __grid_constant__ specrs::AttentionParams p) {
    specrs::attention::attend<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM, 16, false>(p);
}
extern "C" __global__ void __launch_bounds__(specrs::attention::THREADS, 2)
    attention_32(const __grid_constant__ specrs::AttentionParams p) {
    specrs::attention::attend<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM, 32, false>(p);
}
extern "C" __global__ void __launch_bounds__(specrs::attention::THREADS, 2)
    attention_64(const __grid_constant__ specrs::AttentionParams p) {
    specrs::attention::attend<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM, 64,
                              SPECRS_WARPGROUPS != 0 && SPECRS_HEAD_DIM % 64 == 0 && SPECRS_HEAD_DIM <= 128>(p);
}
#if SPECRS_WARPGROUPS && SPECRS_HEAD_DIM % 64 == 0 && SPECRS_HEAD_DIM <= 128
extern "C" __global__ void __launch_bounds__(specrs::attention::WIDE_THREADS, 1)
    attention_128(const __grid_constant__ specrs::AttentionParams p) {
    specrs::attention::attend<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM, 128, true>(p);
}
#endif
extern "C" __global__ void __launch_bounds__(specrs::attention::THREADS)
    attention_merge(const __grid_constant__ specrs::AttentionParams p) {
    specrs::attention::merge<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM>(p);
}
