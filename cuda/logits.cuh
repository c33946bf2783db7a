// Rows of logits (f32, bf16 or f16): keys whose order is the order of choice, and the best key of a part of a row.
//
// A key is the logit, mapped to an unsigned integer of the same order, over the complement of its index: the largest key
// is the largest logit, the lowest index on ties (0 and -0 tie). NaN lies above +inf. So the largest key of a row tells
// all: its argmax; or that the row holds a NaN, else a +inf, and where the first one is; or that all is -inf.
#pragma once

#include "rows.cuh"

namespace specrs {

constexpr uint32_t KEY_NAN = 0xffffffffu;
constexpr uint32_t KEY_POSITIVE_INFINITY = 0xff800000u;
constexpr uint32_t KEY_NEGATIVE_INFINITY = 0x007fffffu;

__device__ __forceinline__ uint64_t rank_key(float x, uint32_t index) {
    const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));  // -0 becomes 0
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    const uint32_t high = x != x ? KEY_NAN : ordered;
    return static_cast<uint64_t>(high) << 32 | ~index;
}

__device__ __forceinline__ uint32_t key_index(uint64_t key) { return ~static_cast<uint32_t>(key); }

__device__ __forceinline__ float key_logit(uint64_t key) {
    const uint32_t ordered = static_cast<uint32_t>(key >> 32);
    return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

// Reason why nothing can be chosen from a row whose largest key this is.
__device__ __forceinline__ Probe key_probe(uint64_t key) {
    const uint32_t high = static_cast<uint32_t>(key >> 32);
    return high == KEY_NAN                 ? PROBE_NAN
           : high == KEY_POSITIVE_INFINITY ? PROBE_POSITIVE_INFINITY
           : high <= KEY_NEGATIVE_INFINITY ? PROBE_ALL_NEGATIVE_INFINITY
                                           : PROBE_NONE;
}

// The first offending column: 0 where the whole row is -inf.
__device__ __forceinline__ int64_t probe_column(uint64_t key, Probe probe) {
    return probe == PROBE_ALL_NEGATIVE_INFINITY ? 0 : static_cast<int64_t>(key_index(key));
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        key = larger(key, __shfl_xor_sync(0xffffffffu, key, lane));
    }
    return key;
}

// NaN where either is one.
__device__ __forceinline__ float max_nan(float a, float b) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

// An element type of logits: its storage, and how many fill 16 bytes.
struct LogitF32 {
    using Storage = uint32_t;
    static constexpr int WIDE = 4;
    static constexpr Storage LEAST = 0xff800000u;  // -inf
    static __device__ __forceinline__ float load(uint32_t bits) { return __uint_as_float(bits); }
};
struct LogitBf16 : Bf16 {
    using Storage = uint16_t;
    static constexpr int WIDE = 8;
    static constexpr Storage LEAST = 0xff80u;
};
struct LogitF16 : F16 {
    using Storage = uint16_t;
    static constexpr int WIDE = 8;
    static constexpr Storage LEAST = 0xfc00u;
};

template <typename L>
union LogitVector {
    uint4 vector;
    typename L::Storage bits[L::WIDE];
};

// This thread's largest key of columns begin..end of a row, the block's threads sharing them. A block-wide maximum of the
// results is the same for any number of threads, any alignment and any cut of the row.
template <typename L>
__device__ __forceinline__ uint64_t best_key(const typename L::Storage *row, int32_t begin, int32_t end) {
    constexpr int GROUP = 8;  // vectors in flight
    const int32_t thread = threadIdx.x;
    const int32_t threads = blockDim.x;
    const uint32_t misaligned = reinterpret_cast<uint64_t>(row + begin) % 16 / sizeof(typename L::Storage);
    int32_t head = misaligned == 0 ? 0 : L::WIDE - static_cast<int32_t>(misaligned);
    head = min(head, end - begin);
    const int32_t first = begin + head;
    const int32_t vectors = (end - first) / L::WIDE;
    const int32_t tail = first + vectors * L::WIDE;
    uint64_t best = 0;
    for (int32_t i = begin + thread; i < first; i += threads) {
        best = larger(best, rank_key(L::load(row[i]), i));
    }
    for (int32_t i = tail + thread; i < end; i += threads) {
        best = larger(best, rank_key(L::load(row[i]), i));
    }
    // A thread meets its vectors in ascending order and keeps the first that holds its largest value, or its first NaN;
    // keys are made of that one alone. Selections instead of branches: some lane of a warp nearly always has a new maximum.
    const uint4 *wide = reinterpret_cast<const uint4 *>(row + first);
    LogitVector<L> kept;
    kept.vector = make_uint4(0, 0, 0, 0);
    int32_t at = -1;
    float top = __uint_as_float(0xff800000u);
    for (int32_t v = thread; v < vectors; v += threads * GROUP) {
        LogitVector<L> group[GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            if (v + g * threads < vectors) {
                group[g].vector = wide[v + g * threads];
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            float m = L::load(group[g].bits[0]);
#pragma unroll
            for (int j = 1; j < L::WIDE; ++j) {
                m = max_nan(m, L::load(group[g].bits[j]));
            }
            const bool better = !(m <= top) && top == top;  // larger, or the first NaN
            if (v + g * threads < vectors && (better || at < 0)) {
                top = m;
                at = v + g * threads;
                kept.vector = group[g].vector;
            }
        }
    }
    if (at >= 0) {
#pragma unroll
        for (int j = 0; j < L::WIDE; ++j) {
            best = larger(best, rank_key(L::load(kept.bits[j]), first + at * L::WIDE + j));
        }
    }
    return best;
}

// The largest key over the block, for every thread; `shared` has a place for each warp.
__device__ __forceinline__ uint64_t block_max(uint64_t key, uint64_t *shared) {
    key = warp_max(key);
    __syncthreads();  // `shared` may still be read from the time before
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = key;
    }
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32;
    return warp_max(lane < blockDim.x / 32 ? shared[lane] : 0);
}

}  // namespace specrs
