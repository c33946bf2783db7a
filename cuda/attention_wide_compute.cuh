// Computing of a tile of 128 rows: scores, softmax, values, flush. See attention_wide.cuh.
#pragma once

#include "attention_wide.cuh"

#if SPECRS_WARPGROUPS
namespace specrs {
namespace attention {

// Registers that products under way read or write: the compiler must not move their uses over this.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            asm volatile("" : "+f"(x[i][j])::"memory");
        }
    }
}

// The same in all lanes, so that what follows from it is computed once a warp.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

// Begins the scores of a warpgroup's rows with a block's keys.
template <typename T, int HD>
__device__ __forceinline__ void begin_scores(float (&s)[16][4], uint32_t q_at, uint32_t k_at) {
    const uint64_t q_base = matrix_descriptor(uniform(q_at), 0);
    const uint64_t k_base = matrix_descriptor(uniform(k_at), 0);
    warpgroup_arrive();
#pragma unroll
    for (int d = 0; d < HD / 16; ++d) {
        const uint32_t step = ((d >> 2) * WIDE_PANEL + (d & 3) * 32) >> 4;
        if (d == 0) {
            Warpgroup<T, BLOCK, 0>::first(s, q_base + step, k_base + step);
        } else {
            Warpgroup<T, BLOCK, 0>::mma(s, q_base + step, k_base + step);
        }
    }
    warpgroup_commit();
}

// Begins the products of the weights with a block's values, keys in groups of 16.
template <typename T, int HD>
__device__ __forceinline__ void begin_values(float (&o)[HD / 8][4], const uint32_t (&w)[8][4], uint32_t v_at) {
    const uint64_t v_base = matrix_descriptor(uniform(v_at), WIDE_PANEL);
    warpgroup_arrive();
#pragma unroll
    for (int g = 0; g < BLOCK / GROUP; ++g) {
        Warpgroup<T, HD, 1>::mma(o, w[g], v_base + (g * (GROUP * 128) >> 4));
    }
    warpgroup_commit();
}

// A key that a row does not attend to scores -inf: its weight is exactly 0. Here those from each row's cut on.
__device__ __forceinline__ void cut_scores(float (&s)[16][4], const WideShared &sh, const WidePlace &at, int32_t base) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int32_t left = sh.cut[at.row + 8 * e] - base - at.pair * 2;
#pragma unroll
        for (int kt = 0; kt < 16; ++kt) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                if (kt * 8 + x >= left) {
                    s[kt][e * 2 + x] = none();
                }
            }
        }
    }
}

// And in the tail's block all but the listed keys.
__device__ __forceinline__ void pick_scores(float (&s)[16][4], const WideShared &sh, const WidePlace &at) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const uint4 allowed = sh.allowed[at.row + 8 * e];
        const uint32_t words[4] = {allowed.x >> (2 * at.pair), allowed.y >> (2 * at.pair), allowed.z >> (2 * at.pair),
                                   allowed.w >> (2 * at.pair)};
#pragma unroll
        for (int kt = 0; kt < 16; ++kt) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                if ((words[kt >> 2] & (1u << ((kt & 3) * 8 + x))) == 0) {
                    s[kt][e * 2 + x] = none();
                }
            }
        }
    }
}

// Exponentials of the scores in place, and the factors of the sums so far; `unit`: see `RowFactors`.
template <int HD>
__device__ __forceinline__ void exponentials(float (&s)[16][4], WideSums<HD> &sums, float (&unit)[2], float c) {
    float shift[2];
    sums.kept = true;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const RowFactors f = RowFactors::next(sums.m[e], row_max(s, e), c);
        shift[e] = f.shift;
        unit[e] = f.unit;
        sums.alpha[e] = f.alpha;
        sums.kept = sums.kept && sums.alpha[e] == 1.0f;
    }
#pragma unroll
    for (int kt = 0; kt < 16; ++kt) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            s[kt][x] = exp2_approx(__fmaf_rn(s[kt][x], c, -shift[x >> 1]));
        }
    }
}

// Row sums of the weights, as they are rounded. The weights themselves are rounded once more, by `round_weights`, behind the
// wait for the products before: what products under way read is written with none under way, or the compiler makes them
// wait one by one.
template <typename T, int HD>
__device__ __forceinline__ void add_row_sums(const float (&s)[16][4], WideSums<HD> &sums, const float (&unit)[2]) {
    uint32_t sum[2] = {0, 0};
#pragma unroll
    for (int kt = 0; kt < 16; ++kt) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            sum[e] += counts_of<T>(T::pack(s[kt][e * 2], s[kt][e * 2 + 1]), unit[e]);
        }
    }
    uint32_t never = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const uint32_t part = quad_sum(sum[e] - 32u * __float_as_uint(unit[e]));  // modulo 2^32, in any order
        sums.l[e] = __fmaf_rn(sums.l[e], sums.alpha[e], row_sum_of(part, unit[e]));
        never |= part;
    }
    if (never == 0x80000001u) {  // not by numbers, whose counts are below 2^30
        asm volatile("nanosleep.u32 0;\n");  // holds the wait for products back behind the exponentials
    }
}

template <typename T>
__device__ __forceinline__ void round_weights(const float (&s)[16][4], uint32_t (&w)[8][4]) {
#pragma unroll
    for (int kt = 0; kt < 16; ++kt) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            w[kt >> 1][(kt & 1) * 2 + e] = T::pack(s[kt][e * 2], s[kt][e * 2 + 1]);
        }
    }
#pragma unroll
    for (int g = 0; g < 8; ++g) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            asm volatile("" : "+r"(w[g][x])::"memory");
        }
    }
}

// Blocks of one split, from `done` up to `upto`: the softmax of a block runs beside the products before it.
template <typename T, int HD>
__device__ __forceinline__ void split_blocks(const AttentionParams &p, const WideShared &sh, const WidePlace &at,
                                             WideRing &ring, WideSums<HD> &sums, uint32_t ring_at, uint32_t q_at,
                                             int32_t cut_from, int32_t block, int32_t upto) {
    constexpr uint32_t ENTRY = BLOCK * HD * 2;
    const float c = __uint_as_float(p.scale_bits);
    float s[16][4];
    uint32_t w[8][4];
    float unit[2];
    int32_t k_stage = ring.next();
    int32_t v_stage = ring.next();
    auto weights_of = [&](int32_t b) {
        cap_scores(s, __uint_as_float(p.cap_bits));
        if ((b + 1) * BLOCK > cut_from) {
            cut_scores(s, sh, at, b * BLOCK);
        }
        exponentials(s, sums, unit, c);
        add_row_sums<T>(s, sums, unit);
    };
    ring.wait(k_stage);
    begin_scores<T, HD>(s, q_at, ring_at + k_stage * ENTRY);
    warpgroup_wait<0>();
    pin(s);
    ring.leave(k_stage);
    weights_of(block);
    round_weights<T>(s, w);
#pragma unroll 1
    for (++block; block < upto; ++block) {
        k_stage = ring.next();
        const int32_t next_v = ring.next();
        ring.wait(k_stage);
        begin_scores<T, HD>(s, q_at, ring_at + k_stage * ENTRY);
        sums.rescale();
        ring.wait(v_stage);
        pin(sums.o);
        begin_values<T, HD>(sums.o, w, ring_at + v_stage * ENTRY);
        warpgroup_wait<1>();  // the scores
        pin(s);
        ring.leave(k_stage);
        weights_of(block);
        pin(s);
        warpgroup_wait<0>();
        pin(sums.o);
        ring.leave(v_stage);
        round_weights<T>(s, w);
        v_stage = next_v;
    }
    sums.rescale();
    ring.wait(v_stage);
    pin(sums.o);
    begin_values<T, HD>(sums.o, w, ring_at + v_stage * ENTRY);
    warpgroup_wait<0>();
    pin(sums.o);
    ring.leave(v_stage);
}

// The tail's block: one logical position in a step. The weights lie where the queries were, in two panels of 64 keys.
template <typename T, int HD>
__device__ __forceinline__ void tail_block(const AttentionParams &p, const WideShared &sh, const WidePlace &at,
                                           WideRing &ring, WideSums<HD> &sums, uint32_t ring_at, uint32_t q_at) {
    constexpr uint32_t ENTRY = BLOCK * HD * 2;
    const int32_t k_stage = ring.next();
    const int32_t v_stage = ring.next();
    const uint32_t p_at = q_at + (at.row & 0x30) * 128;  // this warp's 16 rows of its warpgroup's
    {
        float s[16][4];
        uint32_t w[8][4];
        float unit[2];
        ring.wait(k_stage);
        begin_scores<T, HD>(s, q_at, ring_at + k_stage * ENTRY);
        warpgroup_wait<0>();
        pin(s);
        ring.leave(k_stage);
        cap_scores(s, __uint_as_float(p.cap_bits));
        pick_scores(s, sh, at);
        exponentials(s, sums, unit, __uint_as_float(p.scale_bits));
        add_row_sums<T>(s, sums, unit);
        round_weights<T>(s, w);
        half_sync(at.half);  // every warp has left the queries
#pragma unroll
        for (int g = 0; g < 8; ++g) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int row = (at.row & 7) + (x & 1) * 8;
                const int piece = g * 2 + (x >> 1);  // of 8 keys
                const uint32_t to =
                    p_at + (piece >> 3) * WIDE_PANEL + swizzled<64>(row, piece & 7) + at.pair * 4;
                asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(to), "r"(w[g][x]) : "memory");
            }
        }
        __syncwarp();
    }
    ring.wait(v_stage);
    const int32_t cut_min = sh.cut_min;
    const int32_t positions = sh.tail_last < cut_min ? 0 : min(sh.tail_last - cut_min + 1, BLOCK);
    const uint64_t v_base = matrix_descriptor(uniform(ring_at + v_stage * ENTRY), WIDE_PANEL);
    // A step is a position and a group of keys that has it. The next one's weights come while one is multiplied.
    int32_t x = -1;
    uint32_t left = 0;  // groups of position x that are to come
    int g = 0;
    auto next = [&](uint32_t (&a)[4]) {
        while (left == 0) {
            if (++x >= positions) {
                return false;
            }
            const int32_t logical = cut_min + x;
            if (logical >= sh.half_first[at.half] && logical <= sh.half_last[at.half]) {  // else all weights are 0
                left = uniform(sh.groups_at[x]);
            }
        }
        g = __ffs(static_cast<int>(left)) - 1;
        left &= left - 1;
        const int piece = g * 2 + (at.lane >> 4);
        load_matrices(a, p_at + (piece >> 3) * WIDE_PANEL + swizzled<64>(at.lane & 15, piece & 7));
        PositionMask(sh.key_position + g * GROUP + at.pair * 2, cut_min + x).keep(a);
        return true;
    };
    uint32_t a[4];
    uint32_t ahead[4];
    bool more = next(a);
#pragma unroll 1
    while (more) {
        warpgroup_arrive();
        Warpgroup<T, HD, 1>::mma(sums.o, a, v_base + (g * (GROUP * 128) >> 4));
        warpgroup_commit();
        more = next(ahead);
        warpgroup_wait<0>();
#pragma unroll
        for (int y = 0; y < 4; ++y) {
            a[y] = ahead[y];
            asm volatile("" : "+r"(a[y])::"memory");
        }
    }
    pin(sums.o);
    ring.leave(v_stage);
}

// A row's output, in the columns of this thread.
template <typename T, int HD>
__device__ __forceinline__ void store_row(const AttentionParams &p, uint64_t element, const float2 (&sum)[HD / 8],
                                          const Folded &f) {
    if (p.out_f32 != 0) {
#pragma unroll
        for (int i = 0; i < HD / 8; ++i) {
            *reinterpret_cast<float2 *>(p.out + (element + i * 8) * 4) =
                make_float2(normalised(sum[i].x, f), normalised(sum[i].y, f));
        }
    } else {
#pragma unroll
        for (int i = 0; i < HD / 8; ++i) {
            *reinterpret_cast<uint32_t *>(p.out + (element + i * 8) * 2) =
                T::pack(normalised(sum[i].x, f), normalised(sum[i].y, f));
        }
    }
}

// The end of a split: to its slot of the workspace; or, where a whole tile is the item, into the sums so far, and after the
// last, out.
template <typename T, int HD, bool SERIAL>
__device__ __forceinline__ void flush_split(const AttentionParams &p, WideShared &sh, const WidePlace &at,
                                            const TileRows &tile, const WideSums<HD> &sums, int32_t slot, bool last) {
    const float c = __uint_as_float(p.scale_bits);
    const int64_t at_slot = static_cast<int64_t>(slot) * p.slot_rows;
    float *const slot_sums = reinterpret_cast<float *>(p.partials) + at_slot * HD + at.pair * 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int row = at.row + 8 * e;
        if (row >= tile.rows) {
            continue;
        }
        if (!SERIAL) {
            if (at.pair == 0) {
                reinterpret_cast<float2 *>(p.states)[at_slot + row] = make_float2(sums.m[e], sums.l[e]);
            }
#pragma unroll
            for (int i = 0; i < HD / 8; ++i) {
                *reinterpret_cast<float2 *>(slot_sums + row * HD + i * 8) =
                    make_float2(sums.o[i][e * 2], sums.o[i][e * 2 + 1]);
            }
            continue;
        }
        Folded f = sh.folded[row];  // these four lanes' alone
        __syncwarp(0xfu << (at.lane & ~3));
        const bool before = f.m != none();
        const bool reached = sums.m[e] != none();
        float u = 1.0f;
        float v = 1.0f;
        if (reached && before) {
            f.add(sums.m[e], sums.l[e], c, u, v);
        } else if (reached) {
            f.m = sums.m[e];
            f.l = sums.l[e];
        }
        if (at.pair == 0) {
            sh.folded[row] = f;
        }
        float2 sum[HD / 8];
#pragma unroll
        for (int i = 0; i < HD / 8; ++i) {
            sum[i] = make_float2(sums.o[i][e * 2], sums.o[i][e * 2 + 1]);
        }
        if (before) {
            // All loads first: a store between them would make each wait for the one before.
            float2 old[HD / 8];
#pragma unroll
            for (int i = 0; i < HD / 8; ++i) {
                old[i] = *reinterpret_cast<const float2 *>(slot_sums + row * HD + i * 8);
            }
#pragma unroll
            for (int i = 0; i < HD / 8; ++i) {
                sum[i].x = reached ? fold(old[i].x, u, sum[i].x, v) : old[i].x;
                sum[i].y = reached ? fold(old[i].y, u, sum[i].y, v) : old[i].y;
            }
        }
        if (last) {
            store_row<T, HD>(p, tile.line_of(row) * HD + at.pair * 2, sum, f);
        } else if (reached) {
#pragma unroll
            for (int i = 0; i < HD / 8; ++i) {
                *reinterpret_cast<float2 *>(slot_sums + row * HD + i * 8) = sum[i];
            }
        }
        __syncwarp(0xfu << (at.lane & ~3));
    }
}

// The computing warps: every item's splits in order, then its tail.
template <typename T, int HD, bool SERIAL>
__device__ __forceinline__ void compute_wide(const AttentionParams &p, WideShared &sh, const Items &items,
                                             uint32_t ring_at, uint32_t q_tile) {
    const WidePlace at = WidePlace::of_thread();
    const uint32_t q_at = q_tile + at.half * (64 * 128);
    WideRing ring{sh, p.stages};
    for (int32_t item = blockIdx.x; item < items.count(); item += gridDim.x) {
        Request r;
        const WideItem w = wide_item(p, items, item, r);
        const TileRows tile = TileRows::of<WIDE_ROWS>(p, r, w.tile, w.head);
        if (item != static_cast<int32_t>(blockIdx.x)) {
            wide_sync();  // every warp has left the queries and lists of the item before
        }
        load_wide_queries<HD>(p, tile, q_tile);
        int32_t cut_from = 0x7fffffff;
        if (w.with_tail || (w.block_first + w.blocks) * BLOCK > least_cut<WIDE_ROWS>(p, r, w.tile)) {
            list_wide_rows(p, sh, r, w, tile);
            cut_from = sh.cut_least;
        }
        if (SERIAL && threadIdx.x < WIDE_ROWS) {
            sh.folded[threadIdx.x] = Folded{none(), 0.0f};
        }
        copy_wait<0>();
        publish_to_products();  // the queries
        wide_sync();

        const int32_t slot = SERIAL ? static_cast<int32_t>(blockIdx.x) : item;
        WideSums<HD> sums;
        if (!SERIAL && w.blocks == 0 && !w.with_tail) {  // no row of the tile reaches this split
            sums.restart();
            flush_split<T, HD, SERIAL>(p, sh, at, tile, sums, slot, false);
        }
        for (int32_t done = 0; done < w.blocks; done += SPLIT_BLOCKS) {
            sums.restart();
            const int32_t block = w.block_first + done;
            split_blocks<T, HD>(p, sh, at, ring, sums, ring_at, q_at, cut_from, block,
                                min(block + SPLIT_BLOCKS, w.block_first + w.blocks));
            flush_split<T, HD, SERIAL>(p, sh, at, tile, sums, slot, false);
        }
        if (w.with_tail) {
            sums.restart();
            tail_block<T, HD>(p, sh, at, ring, sums, ring_at, q_at);
            flush_split<T, HD, SERIAL>(p, sh, at, tile, sums, slot, true);
        }
    }
}

template <typename T, int HD>
__device__ __forceinline__ void attend_wide(const BoxCall &call) {
    const AttentionParams &p = call.p;
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    constexpr uint32_t ENTRY = BLOCK * HD * 2;
    uint8_t *const q_tile = shared_memory + p.stages * ENTRY;  // two panels: the weights of the tail take its place
    WideShared &sh = *reinterpret_cast<WideShared *>(q_tile + 2 * WIDE_PANEL);
    // The launcher counts on this size.
    static_assert(sizeof(WideShared) <= WIDE_ROWS * 28 + BLOCK * 8 + 240, "shared_bytes in kernels/attention.rs");
    Items items;
    items.mains = reinterpret_cast<int32_t *>(&sh + 1);
    items.pairs = items.mains + p.requests + 1;
    items.requests = reinterpret_cast<Request *>(items.pairs + p.requests + 1);
    let_next_begin();
    if (threadIdx.x == 0) {
        for (int k = 0; k < MAX_STAGES; ++k) {
            barrier_init(shared_address(&sh.full[k]), 1);
            barrier_init(shared_address(&sh.empty[k]), WIDE_WARPS);
        }
        publish_barriers();
    }
    count_items<HD, WIDE_ROWS, WIDE_THREADS, true>(p, sh.scan, items);
    __syncthreads();
    const uint32_t ring_at = shared_address(shared_memory);
    if (threadIdx.x >= WIDE_COMPUTING) {
        fewer_registers<40>();
        if (threadIdx.x < WIDE_COMPUTING + 32) {
            load_wide<HD>(call, sh, items, ring_at);
        }
        end_thread();
    }
    more_registers<232>();
    if (items.serial) {
        compute_wide<T, HD, true>(p, sh, items, ring_at, shared_address(q_tile));
    } else {
        compute_wide<T, HD, false>(p, sh, items, ring_at, shared_address(q_tile));
    }
}

}  // namespace attention
}  // namespace specrs
#endif
