// Makes operands that any run can make again, and fingerprints of the rows of a matrix, which compare the algorithms of
// a product. A fingerprint is a sum over the row's 16-bit units, each mixed with its place, so that neither the order
// of the sum nor the shape of the grid matters, and two rows share one by accident in one of 2^64 cases. Every index is
// below a capacity of the launch; none is read from memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common.cuh"

namespace specrs {
namespace {

// splitmix64's output function.
__device__ __forceinline__ uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

}  // namespace
}  // namespace specrs

// Fill element (row, column) with a mantissa of 24 bits, a sign and one of 16 exponents. If rows are mirrored, a column
// has the value of the column as far from the other end, negated or not, and the middle one of an odd number is 0. The
// product of a mirrored row and a mirrored and negated row is 0, so only rounding remains in a sum of it, and two
// orders of adding differ in nearly every element.
extern "C" __global__ void __launch_bounds__(256) fill_random(const __grid_constant__ specrs::FillParams p) {
    using namespace specrs;
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += stride) {
        const uint64_t row = i / p.cols;
        const uint32_t column = static_cast<uint32_t>(i - row * p.cols), opposite = p.cols - 1 - column;
        const bool behind = p.mirror != MIRROR_NONE && column > opposite;
        const uint64_t z = mix(row * p.cols + (behind ? opposite : column) + 0x9E3779B97F4A7C15ull * (p.seed + 1ull));
        const float mantissa = static_cast<float>(static_cast<uint32_t>(z >> 41) + (1u << 23));
        // 2^(exponent - 23), built from its bits: it is a normal number.
        const int32_t exponent = static_cast<int32_t>((z >> 8) & 15) - 8 + p.exponent;
        float value = __fmul_rn(mantissa, __int_as_float((exponent - 23 + 127) << 23));
        if (((z & 1) != 0) != (behind && p.mirror == MIRROR_NEGATED)) {
            value = -value;
        }
        if (p.mirror != MIRROR_NONE && column == opposite) {
            value = 0.0f;
        }
        if (p.f16 != 0) {
            reinterpret_cast<__half *>(p.out)[i] = __float2half_rn(value);
        } else {
            reinterpret_cast<__nv_bfloat16 *>(p.out)[i] = __float2bfloat16_rn(value);
        }
    }
}

// One block a row.
extern "C" __global__ void __launch_bounds__(256) row_fingerprint(const __grid_constant__ specrs::FingerprintParams p) {
    using namespace specrs;
    __shared__ uint64_t parts[8];
    const uint32_t row = blockIdx.x;
    const uint16_t *units = reinterpret_cast<const uint16_t *>(p.data) + row * p.row_units;
    uint64_t sum = 0;
    for (uint64_t i = threadIdx.x; i < p.row_units; i += blockDim.x) {
        sum += mix((i << 16) | units[i]);
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) {
        sum += __shfl_down_sync(0xFFFFFFFFu, sum, lane);
    }
    if ((threadIdx.x & 31) == 0) {
        parts[threadIdx.x >> 5] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; ++w) {
            sum += parts[w];
        }
        reinterpret_cast<uint64_t *>(p.out)[row] = sum;
    }
}
