// Computing of a tile of up to 64 rows: scores, softmax, values, flush. See attention_tile.cuh.
#pragma once

#include "attention_softmax.cuh"
#include "attention_tile.cuh"

namespace specrs {
namespace attention {

// Registers of a thread, by tiles of 16 rows and of 8 keys or columns.
template <typename T, int HD, int M, bool WARPGROUP>
struct TileCompute : TileLoad<HD, M, WARPGROUP> {
    using Load = TileLoad<HD, M, WARPGROUP>;
    static constexpr int ROW_TILES = Load::ROW_TILES, KEY_TILES = Load::KEY_TILES, COLUMN_TILES = Load::COLUMN_TILES;
    static constexpr int DIM_STEPS = Load::DIM_STEPS;
    static constexpr uint32_t ENTRY = Load::ENTRY;
    static constexpr bool KEEP_Q = Load::KEEP_Q;
    using Scores = float[ROW_TILES][KEY_TILES][4];
    using Weights = uint32_t[WARPGROUP ? BLOCK / GROUP : 1][4];  // where they stay in registers
    using Load::p, Load::p_tile, Load::sh, Load::ring_at, Load::p_at, Load::q_at;
    using Load::thread, Load::warp, Load::lane, Load::quad, Load::pair, Load::row_first, Load::key_first, Load::column_first;
    using Load::heads, Load::serial, Load::item, Load::with_tail, Load::r, Load::tile, Load::head, Load::split, Load::rows;
    using Load::block_first, Load::cut_min, Load::cut_max, Load::tail_first, Load::plain_blocks, Load::blocks;
    using Load::issue, Load::wait;

    float c;  // factor of a score in the exponent of 2
    float o[ROW_TILES][COLUMN_TILES][4];
    float m[ROW_TILES][2];
    float l[2];  // sums where a warp owns its rows; else they are in `sh`
    float alpha[ROW_TILES][2];
    uint32_t q[KEEP_Q ? DIM_STEPS : 1][KEEP_Q ? ROW_TILES : 1][4];

    __device__ __forceinline__ TileCompute(const AttentionParams &params, uint8_t *memory)
        : Load(params, memory), c(__uint_as_float(params.scale_bits)) {}

    __device__ __forceinline__ void start_split() {
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
    }

    __device__ __forceinline__ void load_query_fragments() {
#pragma unroll
        for (int d = 0; d < DIM_STEPS; ++d) {
#pragma unroll
            for (int rt = 0; rt < ROW_TILES; ++rt) {
                load_matrices(q[KEEP_Q ? d : 0][KEEP_Q ? rt : 0],
                              q_at + swizzled<HD>(row_first + rt * 16 + (lane & 15), d * 2 + (lane >> 4)));
            }
        }
    }

    // Scores of this warp's keys, which may lie in panels.
    template <bool PANELS = false>
    __device__ __forceinline__ void scores(Scores &s, uint32_t k_at, int32_t keys) {
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
                Warpgroup<T, BLOCK, 0>::mma(s[0], q[d][0], matrix_descriptor(k_at + step, 0));
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
                    load_matrices(b[half],
                                  k_at + in_entry<HD, PANELS>(warp * 32 + half * 16 + ((lane >> 4) << 3) + (lane & 7),
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
#pragma unroll
        for (int rt = 0; rt < ROW_TILES; ++rt) {
            cap_scores(s[rt], __uint_as_float(p.cap_bits));
        }
    }

    // A key that a row does not attend to scores -inf: its weight is exactly 0.
    __device__ __forceinline__ void mask_scores(Scores &s, bool tail, int32_t base) {
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
    }

    // The block's maximum of each row; over the four warps where they share it.
    __device__ __forceinline__ void maxima(const Scores &s, float (&tops)[ROW_TILES][2]) {
#pragma unroll
        for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                tops[rt][e] = row_max(s[rt], e);
                if (!WARPGROUP && pair == 0) {
                    sh.maxima[warp][rt * 16 + quad + 8 * e] = tops[rt][e];
                }
            }
        }
    }

    // Weights of the scores, into registers or `tile`, which may have fewer than M rows, and the row sums. Returns whether the
    // sums so far keep their factor.
    __device__ __forceinline__ bool softmax(const Scores &s, const float (&tops)[ROW_TILES][2], Weights &own, uint8_t *tile,
                                            int32_t tile_rows) {
        bool kept = true;
#pragma unroll
        for (int rt = 0; rt < ROW_TILES; ++rt) {
            float shift[2];
            float unit[2];
            uint32_t sum[2] = {0, 0};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = rt * 16 + quad + 8 * e;
                const float top = WARPGROUP ? tops[rt][e]
                                            : fmaxf(fmaxf(sh.maxima[0][row], sh.maxima[1][row]),
                                                    fmaxf(sh.maxima[2][row], sh.maxima[3][row]));
                const RowFactors f = RowFactors::next(m[rt][e], top, c);
                shift[e] = f.shift;
                unit[e] = f.unit;
                alpha[rt][e] = f.alpha;
                kept = kept && f.alpha == 1.0f;
                if (!WARPGROUP && warp == 0 && pair == 0) {
                    sh.alpha[row] = f.alpha;
                    sh.unit[row] = f.unit;
                    sh.top[row] = m[rt][e];
                }
            }
#pragma unroll
            for (int kt = 0; kt < KEY_TILES; ++kt) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float low = exp2_approx(__fmaf_rn(s[rt][kt][e * 2], c, -shift[e]));
                    const float high = exp2_approx(__fmaf_rn(s[rt][kt][e * 2 + 1], c, -shift[e]));
                    const uint32_t weights = T::pack(low, high);
                    sum[e] += counts_of<T>(weights, unit[e]);
                    const int row = rt * 16 + quad + 8 * e;
                    if (WARPGROUP) {
                        own[WARPGROUP ? kt >> 1 : 0][(kt & 1) * 2 + e] = weights;
                    } else if (row < tile_rows) {
                        *reinterpret_cast<uint32_t *>(tile + swizzled<BLOCK>(row, warp * 4 + kt) + pair * 4) = weights;
                    }
                }
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                // Modulo 2^32, in any order.
                const uint32_t part =
                    quad_sum(sum[e] - static_cast<uint32_t>(2 * KEY_TILES) * __float_as_uint(unit[e]));
                if (WARPGROUP) {
                    l[e] = __fmaf_rn(l[e], alpha[rt][e], row_sum_of(part, unit[e]));
                } else if (pair == 0) {
                    sh.sums[warp][rt * 16 + quad + 8 * e] = part;
                }
            }
        }
        return kept;
    }

    __device__ __forceinline__ void rescale(bool kept) {
        if (!__all_sync(~0u, kept)) {  // a factor of 1 changes nothing
#pragma unroll
            for (int rt = 0; rt < ROW_TILES; ++rt) {
                scale_rows(o[rt], alpha[rt]);
            }
        }
    }

    __device__ __forceinline__ void add_row_sums() {
        if (!WARPGROUP && thread < M) {
            const uint32_t sum = sh.sums[0][thread] + sh.sums[1][thread] + sh.sums[2][thread] + sh.sums[3][thread];
            sh.row_sum[thread] =
                __fmaf_rn(sh.row_sum[thread], sh.alpha[thread], row_sum_of(sum, sh.unit[thread]));
        }
    }

    // A group of 16 keys: this warp's columns of their values, and the weights of 16 rows.
    __device__ __forceinline__ void value_fragments(uint32_t v_at, int group, uint32_t (&b)[COLUMN_TILES][2]) {
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
    }
    __device__ __forceinline__ void weight_fragments(int rt, int group, uint32_t (&a)[4]) {
        load_matrices(a, p_at + swizzled<BLOCK>(rt * 16 + (lane & 15), group * 2 + (lane >> 4)));
    }

    // Weights times V: this warp's columns, keys in groups of 16.
    __device__ __forceinline__ void values(uint32_t v_at, int32_t keys, const Weights &own) {
#if SPECRS_WARPGROUPS
        if constexpr (WARPGROUP) {
            warpgroup_arrive();
#pragma unroll
            for (int group = 0; group < BLOCK / GROUP; ++group) {  // behind the last key zeros times zeros
                Warpgroup<T, HD, 1>::mma(o[0], own[group],
                                         matrix_descriptor(v_at + group * (GROUP * 128), BLOCK * 128));
            }
            warpgroup_commit();
            warpgroup_wait();
        } else
#endif
        {
#pragma unroll 4
            for (int group = 0; group < BLOCK / GROUP; ++group) {
                if (group * GROUP < keys) {
                    uint32_t b[COLUMN_TILES][2];
                    value_fragments(v_at, group, b);
#pragma unroll
                    for (int rt = 0; rt < ROW_TILES; ++rt) {
                        uint32_t a[4];
                        weight_fragments(rt, group, a);
#pragma unroll
                        for (int ct = 0; ct < COLUMN_TILES; ++ct) {
                            T::mma(o[rt][ct], a, b[ct][0], b[ct][1]);
                        }
                    }
                }
            }
        }
    }

    // The tail's block: one logical position in a step.
    __device__ __forceinline__ void tail_values(uint32_t v_at, const Weights &own) {
        const int32_t positions = sh.tail_last < cut_min ? 0 : min(sh.tail_last - cut_min + 1, BLOCK);
        for (int32_t x = 0; x < positions; ++x) {
            const int32_t logical = cut_min + x;
            auto step = [&](int group, auto weights) {
                const PositionMask mask(sh.key_position + group * GROUP + pair * 2, logical);
                uint32_t b[COLUMN_TILES][2];
                value_fragments(v_at, group, b);
#pragma unroll
                for (int rt = 0; rt < ROW_TILES; ++rt) {
                    const int row_tile = WARPGROUP ? warp : rt;
                    if (logical < sh.row_tile_first[row_tile] || logical > sh.row_tile_last[row_tile]) {
                        continue;  // all weights are 0
                    }
                    uint32_t a[4];
                    weights(rt, group, a);
                    mask.keep(a);
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
                    step(__ffs(static_cast<int>(left)) - 1,
                         [&](int rt, int g, uint32_t (&a)[4]) { weight_fragments(rt, g, a); });
                }
            }
        }
    }

    // The end of a split, to its slot of the workspace.
    __device__ __forceinline__ void flush_to_slot(bool tail) {
        const int64_t at_slot = static_cast<int64_t>(item) * p.slot_rows;
        float *const slot_sums = reinterpret_cast<float *>(p.partials) + at_slot * HD + column_first + pair * 2;
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
    }

    // The end of a split, into the sums so far, or, after the last, out.
    __device__ __forceinline__ void fold_split(bool tail) {
        const int64_t at_slot = static_cast<int64_t>(blockIdx.x) * p.slot_rows;
        float *const slot_sums = reinterpret_cast<float *>(p.partials) + at_slot * HD + column_first + pair * 2;
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

    __device__ __forceinline__ void end_split(bool tail) {
        if (WARPGROUP && pair == 0) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                sh.top[row_first + quad + 8 * e] = m[0][e];
                sh.row_sum[row_first + quad + 8 * e] = l[e];
            }
        }
        __syncthreads();  // row_sum
        if (serial) {
            fold_split(tail);
        } else {
            flush_to_slot(tail);
        }
        __syncthreads();  // every warp has read the state of the splits before
        if (thread < M && sh.last[thread] >= 0) {  // a refused row is not cut, and takes nothing
            sh.folded[thread].join(sh.top[thread], sh.row_sum[thread], c);
        }
        start_split();
    }

    // Wait for the ring: for all entries but the newest `stages - less`, in every warp.
    __device__ __forceinline__ void arrive(int less) {
        wait(less);
#if SPECRS_WARPGROUPS
        if (WARPGROUP) {
            publish_to_products();
        }
#endif
        __syncthreads();
    }

    __device__ __forceinline__ void block_of(int32_t block, uint32_t k_at, uint32_t v_at) {
        const bool tail = block == plain_blocks;
        const int32_t base = tail ? tail_first : (block_first + block) * BLOCK;  // row position of the block's first key
        const int32_t keys = tail ? sh.tail_keys : min(BLOCK, cut_max - base);   // stored keys that some row attends to
        arrive(2);  // K is there; every warp has left V of the block before, whose place is next
        if (!WARPGROUP || block != 0) {
            issue();
        }
        if (KEEP_Q && block == 0) {
            load_query_fragments();
            if (WARPGROUP) {
                __syncthreads();  // every warp has its part of Q, whose place is next
                issue();
            }
        }
        Scores s;
        scores(s, k_at, keys);
        mask_scores(s, tail, base);
        float tops[ROW_TILES][2];
        maxima(s, tops);
        __syncthreads();  // every warp has left K, whose place is next
        issue();
        Weights own;
        rescale(softmax(s, tops, own, p_tile, M));
        arrive(1);  // V and all weights are there
        add_row_sums();
        if (tail) {
            tail_values(v_at, own);
        } else {
            values(v_at, keys, own);
        }
        if (tail || block + 1 == plain_blocks || (block_first + block + 1) % SPLIT_BLOCKS == 0) {
            end_split(tail);
        }
    }

    __device__ __forceinline__ void take_item(int32_t number) {
        this->begin_item(number);
        start_split();
        if (thread < M) {
            sh.folded[thread] = Folded{none(), 0.0f};
        }
        int32_t stage = 0;
        auto next = [&]() {
            const uint32_t at = ring_at + stage * ENTRY;
            stage = stage + 1 == p.stages ? 0 : stage + 1;
            return at;
        };
        for (int32_t block = 0; block < blocks; ++block) {
            const uint32_t k_at = next();
            block_of(block, k_at, next());
        }
        copy_wait<0>();  // only empty groups are left
    }

    __device__ __forceinline__ void run() {
        this->count();
        for (int32_t number = blockIdx.x; number < this->items.count(); number += gridDim.x) {
            take_item(number);
        }
    }
};

template <typename T, int HD, int M, bool WARPGROUP>
__device__ __forceinline__ void attend(const AttentionParams &p) {
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    let_next_begin();
    TileCompute<T, HD, M, WARPGROUP>(p, shared_memory).run();
}

}  // namespace attention
}  // namespace specrs
