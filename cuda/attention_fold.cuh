// Folds splits of the keys into a row of the output. There is one formula, in index order, whether a CTA folds them on
// the way or `merge` does it later.
#pragma once

#include "attention_rows.cuh"
#include "mma.cuh"  // exp2_approx

namespace specrs {
namespace attention {

// Maximum and row sum of the splits so far.
struct Folded {
    float m;
    float l;

    // Add (m, l) of the next split. Sums become fold(old, u, new, w), or the new ones if there was nothing before.
    __device__ __forceinline__ void add(float mj, float lj, float c, float &u, float &w) {
        const float top = fmaxf(m, mj);
        u = exp2_approx(__fmul_rn(__fsub_rn(m, top), c));
        w = exp2_approx(__fmul_rn(__fsub_rn(mj, top), c));
        l = __fmaf_rn(lj, w, __fmul_rn(l, u));
        m = top;
    }

    // The same for (m, l) alone; a split that the row does not reach leaves it.
    __device__ __forceinline__ void join(float mj, float lj, float c) {
        if (mj == none()) {
            return;
        }
        if (m == none()) {
            m = mj;
            l = lj;
            return;
        }
        float u;
        float w;
        add(mj, lj, c, u, w);
    }
};

__device__ __forceinline__ float fold(float sum, float u, float part, float w) {
    return __fmaf_rn(part, w, __fmul_rn(sum, u));
}

// The output of sums `o` over a row sum `l`; 0 for a row without keys. -0 becomes +0 (see the top).
__device__ __forceinline__ float normalised(float o, const Folded &f) {
    return f.m == none() ? 0.0f : __fadd_rn(__fdiv_rn(o, f.l), 0.0f);
}

template <typename T>
__device__ __forceinline__ void store_pair(const AttentionParams &p, uint64_t element, float low, float high) {
    if (p.out_f32 != 0) {
        *reinterpret_cast<float2 *>(p.out + element * 4) = make_float2(low, high);
    } else {
        *reinterpret_cast<uint32_t *>(p.out + element * 2) = T::pack(low, high);
    }
}

// Zeros for queries first..end, by threads `thread`, `thread + threads`, ...
template <int HD>
__device__ __forceinline__ void clear_queries(const AttentionParams &p, int64_t first, int64_t end, int64_t thread,
                                              int64_t threads) {
    const int64_t bytes = static_cast<int64_t>(p.kv_heads) * p.group * HD * (p.out_f32 != 0 ? 4 : 2);
    for (int64_t at = first * bytes + thread * 16; at < end * bytes; at += threads * 16) {
        *reinterpret_cast<uint4 *>(p.out + at) = make_uint4(0, 0, 0, 0);
    }
}

constexpr int MERGED_EARLY = 64;  // rows of a tile beside which a block of `merge` has room

// Sums of splits that a lane has asked for, all at once, and folds in order: VECTORS of four columns of each.
template <int HD>
struct Parts {
    static constexpr int VECTORS = (HD / 4 + 31) / 32;
    static constexpr int AHEAD = 4;
    float2 state[AHEAD];
    float4 part[AHEAD][VECTORS];

    // Ask for part k of `count`, at line `line`.
    __device__ __forceinline__ void load(const AttentionParams &p, int k, int64_t line) {
        const int lane = threadIdx.x & 31;
        state[k] = __ldcg(reinterpret_cast<const float2 *>(p.states) + line);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            if (v * 32 + lane < HD / 4) {
                part[k][v] = __ldcg(reinterpret_cast<const float4 *>(p.partials) + line * (HD / 4) + v * 32 + lane);
            }
        }
    }
    __device__ __forceinline__ void fold_into(int k, float c, Folded &f, float4 (&sum)[VECTORS]) const {
        if (state[k].x == none()) {
            return;
        }
        if (f.m == none()) {
            f.m = state[k].x;
            f.l = state[k].y;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                sum[v] = part[k][v];
            }
            return;
        }
        float u;
        float w;
        f.add(state[k].x, state[k].y, c, u, w);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            sum[v].x = fold(sum[v].x, u, part[k][v].x, w);
            sum[v].y = fold(sum[v].y, u, part[k][v].y, w);
            sum[v].z = fold(sum[v].z, u, part[k][v].z, w);
            sum[v].w = fold(sum[v].w, u, part[k][v].w, w);
        }
    }
};

// Fold the slots of each row: splits in index order, then the tail. One warp a row. It is launched early, and what it reads
// before it waits was written before `attend` began, which is not.
//
// The row's mask says how many splits it reaches. The sums are asked for before it is there: those of splits that the
// row does not reach may be anything, and are not folded.
template <typename T, int HD>
__device__ __forceinline__ void merge(const AttentionParams &p) {
    let_next_begin();
    const int32_t *header = reinterpret_cast<const int32_t *>(p.schedule);
    // Beside tiles that take a multiprocessor's registers whole it begins when they have ended.
    bool waited = p.tile_rows > MERGED_EARLY;
    if (waited) {
        wait_for_previous();
        if (__ldcg(header) != 0) {
            return;  // the sums were folded on the way
        }
    }
    const int lane = threadIdx.x & 31;
    const int32_t heads = p.kv_heads * p.group;
    const int shift = __ffs(p.tile_rows) - 1;  // a power of two
    const int64_t per_request = static_cast<int64_t>(p.max_queries) * heads;
    const int64_t step = static_cast<int64_t>(gridDim.x) * WARPS;
    for (int64_t at = blockIdx.x * WARPS + (threadIdx.x >> 5); at < per_request * p.requests; at += step) {
        const int32_t i = static_cast<int32_t>(at / per_request);
        const int32_t rest = static_cast<int32_t>(at % per_request);
        const int32_t j = rest / heads;
        const Request r = request_at<false>(p, i, false);
        if (j >= r.queries) {
            continue;
        }
        const int32_t query_head = rest % heads;
        const int32_t head = query_head / p.group;
        const int32_t packed = j * p.group + query_head % p.group;
        const int32_t tiles = (r.queries * p.group + p.tile_rows - 1) >> shift;
        const int32_t place = head * tiles + tiles - 1 - (packed >> shift);  // `attend` numbers items so
        const int32_t tile_row = packed & (p.tile_rows - 1);
        const int32_t step_of_split = p.kv_heads * tiles;
        const int32_t most = splits_of(p, r);
        // Writes of `attend` are read past L1, and not before the wait: no load for constants may be used.
        if (!waited) {
            wait_for_previous();
            waited = true;
        }
        const int32_t serial = __ldcg(header);
        const int32_t first = __ldcg(header + 2 + i) + place;
        const int32_t pairs = __ldcg(header + 2 + p.requests + i);
        const int32_t tail = __ldcg(header + 1) + pairs + place;
        if (serial != 0) {
            return;
        }
        if (pairs < 0) {
            continue;  // not taken: the batch ends before it
        }
        using Some = Parts<HD>;
        Folded f = {none(), 0.0f};
        float4 sum[Some::VECTORS];
#pragma unroll
        for (int v = 0; v < Some::VECTORS; ++v) {
            sum[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        for (int32_t split = 0; split <= most; split += Some::AHEAD) {
            Some parts;
#pragma unroll
            for (int k = 0; k < Some::AHEAD; ++k) {
                if (split + k <= most) {
                    const int32_t slot = split + k == most ? tail : first + (split + k) * step_of_split;
                    parts.load(p, k, static_cast<int64_t>(slot) * p.slot_rows + tile_row);
                }
            }
            const Row row = row_at<false>(p, r, i, j, false);
            const int32_t reached = (row.cut + SPLIT - 1) / SPLIT;
#pragma unroll
            for (int k = 0; k < Some::AHEAD; ++k) {
                if (split + k < reached || split + k == most) {
                    parts.fold_into(k, __uint_as_float(p.scale_bits), f, sum);
                }
            }
        }
        const uint64_t line = (static_cast<uint64_t>(r.first + j) * heads + query_head) * HD;
#pragma unroll
        for (int v = 0; v < Some::VECTORS; ++v) {
            const int vector = v * 32 + lane;
            if (vector < HD / 4) {
                store_pair<T>(p, line + vector * 4, normalised(sum[v].x, f), normalised(sum[v].y, f));
                store_pair<T>(p, line + vector * 4 + 2, normalised(sum[v].z, f), normalised(sum[v].w, f));
            }
        }
    }
    if (!waited) {
        wait_for_previous();  // launches behind `merge` in the stream wait for it alone
    }
}

}  // namespace attention
}  // namespace specrs
