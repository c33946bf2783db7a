// Formulas of a block's softmax, one for tiles of every height. A thread of a quad (four lanes) has two columns of each 8 of a
// row's scores; element x of a fragment of four is of row x / 2 of the thread's two.
#pragma once

#include "attention_fold.cuh"

namespace specrs {
namespace attention {

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ uint32_t quad_sum(uint32_t x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// A row's largest score of these columns, in every lane of the quad.
template <int N>
__device__ __forceinline__ float row_max(const float (&s)[N][4], int row) {
    float top = none();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        top = fmaxf(top, fmaxf(s[i][row * 2], s[i][row * 2 + 1]));
    }
    return quad_max(top);
}

// Factors of a row in a block.
struct RowFactors {
    float shift;  // maximum so far * c
    float alpha;  // of the sums so far
    float unit;   // power of two above the block's largest weight: the row sum counts 2^-23 of it

    // `m` becomes the maximum with this block's, `top`.
    static __device__ __forceinline__ RowFactors next(float &m, float top, float c) {
        RowFactors f;
        const float both = fmaxf(m, top);
        const float finite = both == none() ? 0.0f : both;
        f.shift = __fmul_rn(finite, c);
        f.alpha = exp2_approx(__fmul_rn(__fsub_rn(m, finite), c));
        const int largest = __float_as_int(exp2_approx(__fmaf_rn(top, c, -f.shift)));
        f.unit = __int_as_float(top == none() ? 0x00800000 : (largest & 0x7f800000) + 0x00800000);
        m = both;
        return f;
    }
};

// What two weights, as they are rounded, add to a row's count, with twice the bits of `unit`.
template <typename T>
__device__ __forceinline__ uint32_t counts_of(uint32_t weights, float unit) {
    return __float_as_uint(__fadd_rn(T::low(weights), unit)) + __float_as_uint(__fadd_rn(T::high(weights), unit));
}

// A block's part of the row sum: `count` steps of 2^-23 of `unit`.
__device__ __forceinline__ float row_sum_of(uint32_t count, float unit) {
    return __fmul_rn(__fmul_rn(__int2float_rn(static_cast<int32_t>(count)), 1.0f / 8388608.0f), unit);
}

// tanh(x) within 2^-22 or so of it: 1 - 2 / (1 + e^2x), from `x` times 2 log2(e).
__device__ __forceinline__ float tanh_of(float x) {
    return __fsub_rn(1.0f, __fdiv_rn(2.0f, __fadd_rn(1.0f, exp2_approx(x))));
}

// Scores in units of the cap, which `c` has as a factor.
template <int N>
__device__ __forceinline__ void cap_scores(float (&s)[N][4], float factor) {
    if constexpr (CAPPED) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                s[i][x] = tanh_of(__fmul_rn(s[i][x], factor));
            }
        }
    }
}

template <int N>
__device__ __forceinline__ void scale_rows(float (&o)[N][4], const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            o[i][x] = __fmul_rn(o[i][x], alpha[x >> 1]);
        }
    }
}

// Bits of this thread's weights of a group of 16 keys that are at one logical position.
struct PositionMask {
    uint32_t low;
    uint32_t high;

    // `keys`: positions of the group's keys, from this thread's first.
    __device__ __forceinline__ PositionMask(const int32_t *keys, int32_t logical)
        : low((keys[0] == logical ? 0xffffu : 0u) | (keys[1] == logical ? 0xffff0000u : 0u)),
          high((keys[8] == logical ? 0xffffu : 0u) | (keys[9] == logical ? 0xffff0000u : 0u)) {}
    __device__ __forceinline__ void keep(uint32_t (&a)[4]) const {
        a[0] &= low;
        a[1] &= low;
        a[2] &= high;
        a[3] &= high;
    }
};

}  // namespace attention
}  // namespace specrs
