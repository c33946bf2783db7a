// Rows of 16-bit activations: conversions, vectors of 8 elements, and how many rows of a static batch are live.
//
// Arithmetic on rows is in f32 by intrinsics that say how they round, so that neither the compiler nor a batch decides
// what is fused: a row's bits are a function of that row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common.cuh"

namespace specrs {

constexpr int WIDTH = 8;  // elements of a 16-byte vector

struct Bf16 {
    static __device__ __forceinline__ float load(uint16_t bits) {
        return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    }
    static __device__ __forceinline__ uint16_t store(float x) {
        return __bfloat16_as_ushort(__float2bfloat16_rn(x));
    }
};

struct F16 {
    static __device__ __forceinline__ float load(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
    static __device__ __forceinline__ uint16_t store(float x) { return __half_as_ushort(__float2half_rn(x)); }
};

union Vector8 {
    uint4 vector;
    uint16_t bits[WIDTH];
};

// Up to 8 elements from `at`, 0 where `left` has none; one load of 16 bytes where `wide` (then left is at least 8).
__device__ __forceinline__ Vector8 load8(const uint16_t *at, int64_t left, bool wide) {
    Vector8 v;
    v.vector = make_uint4(0, 0, 0, 0);
    if (wide && left >= WIDTH) {
        v.vector = *reinterpret_cast<const uint4 *>(at);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (j < left) {
                v.bits[j] = at[j];
            }
        }
    }
    return v;
}

__device__ __forceinline__ void store8(uint16_t *at, const Vector8 &v, int64_t left, bool wide) {
    if (wide && left >= WIDTH) {
        *reinterpret_cast<uint4 *>(at) = v.vector;
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (j < left) {
                at[j] = v.bits[j];
            }
        }
    }
}

// Live rows of a static batch of `rows`: all where `address` is 0, else what the int32 there says. A count outside
// 0..=rows is recorded and clamped.
__device__ __forceinline__ int32_t live_rows(uint64_t address, int32_t rows, const Report &report, Kernel kernel,
                                             bool reporter) {
    if (address == 0) {
        return rows;
    }
    const int32_t live = *reinterpret_cast<const int32_t *>(address);
    if (live < 0 || live > rows) {
        if (reporter) {
            record_fault(report, kernel, BUFFER_LIVE, -1, -1, live, static_cast<int64_t>(rows) + 1);
        }
        return live < 0 ? 0 : rows;
    }
    return live;
}

// Sum over the warp in one tree: addition commutes, so that every lane has the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, lane));
    }
    return x;
}

// e^x by the operations of the host's `act::exp`, with its bits.
__device__ __forceinline__ float host_exp(float x) {
    const bool under = x < -87.3f;
    const bool over = x > 88.72f;
    x = under || over ? 0.0f : x;
    const float round = 12582912.0f;  // 1.5 * 2^23
    const float shifted = __fmaf_rn(x, 1.44269504f, round);
    const float n = __fsub_rn(shifted, round);
    const float r = __fmaf_rn(n, 2.1219444e-4f, __fmaf_rn(n, -0.6933594f, x));
    float p = 1.9875691e-4f;
    p = __fmaf_rn(p, r, 1.3981999e-3f);
    p = __fmaf_rn(p, r, 8.333452e-3f);
    p = __fmaf_rn(p, r, 4.1665796e-2f);
    p = __fmaf_rn(p, r, 1.6666665e-1f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
    const uint32_t offset = 256;
    const uint32_t k = __float_as_uint(shifted) - (__float_as_uint(round) - offset);
    const uint32_t half = k >> 1;
    const float low = __uint_as_float((half - (offset / 2 - 127)) << 23);
    const float high = __uint_as_float((k - half - (offset / 2 - 127)) << 23);
    const float y = __fmul_rn(__fmul_rn(p, low), high);
    return over ? __uint_as_float(0x7f800000u) : under ? 0.0f : y;
}

}  // namespace specrs
