// Between a layer's qkv product and its attention: biases, RMSNorm of each query and key head, rotary positions, and the
// write of keys and values to the paged cache. One warp a head of a row.
//
//   x      = qkv[row, head] + bias[head]
//   q, k   = rotate(norm(x), position[row]);  v = x
//   q[row, head] = q;  cache[K][slot[row], head] = k;  cache[V][slot[row], head] = v
//
// Arithmetic is f32 from the load to the store, with the host's operations in the host's order where one is fixed (the
// rotation); results are rounded to the element type once. Lane l has the pairs (i, i + half) of i = 2l, 2l + 1, 2l + 64,
// ... and then what lies behind the rotated part: a head's bits depend on the head alone.
//
// Slot 0 is the sink: a row that goes there (a dead lane, a draft behind the context wall) writes no key and no value,
// so that the sink keeps the finite values that it was made with. A slot outside the cache is recorded and not written. A
// position outside the table is recorded; the row's queries are zeros then, and it writes no key and no value.
#include "rows.cuh"

namespace specrs {

constexpr int MAX_PAIRS = 8;  // (i, i + half) of a lane: rotary dimensions up to 512
constexpr int MAX_REST = 16;  // of a lane behind the rotated part: up to 512

template <typename T>
__device__ __forceinline__ float with_bias(const uint16_t *x, const uint16_t *bias, int32_t i) {
    const float v = T::load(x[i]);
    return bias == nullptr ? v : __fadd_rn(v, T::load(bias[i]));
}

template <typename T>
__device__ __forceinline__ void rope_kv(const RopeKvParams &p) {
    const int32_t row = blockIdx.x;
    const int32_t head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    const int32_t heads = p.heads + 2 * p.kv_heads;
    if (head >= heads) {
        return;
    }
    const int32_t lane = threadIdx.x % 32;
    const bool query = head < p.heads;
    const bool value = head >= p.heads + p.kv_heads;
    const int32_t position = __ldg(reinterpret_cast<const int32_t *>(p.positions) + row);
    const int32_t slot = __ldg(reinterpret_cast<const int32_t *>(p.slots) + row);
    const bool placed = in_bounds(position, p.positions_in_table);
    const bool stored = in_bounds(slot, p.num_slots);
    if (head == p.heads && lane == 0) {  // the first key head, which every launch has
        if (!placed) {
            record_fault(p.record, p.claim, KERNEL_ROPE_KV, BUFFER_ROPE_TABLE, -1, row, position,
                         p.positions_in_table);
        }
        if (!stored) {
            record_fault(p.record, p.claim, KERNEL_ROPE_KV, BUFFER_CACHE_SLOT, -1, row, slot, p.num_slots);
        }
    }
    if (!query && (!placed || !stored || slot == 0)) {
        return;
    }
    const int32_t d = p.head_dim;
    const uint16_t *x = reinterpret_cast<const uint16_t *>(p.qkv) + row * p.qkv_stride + static_cast<uint64_t>(head) * d;
    const uint16_t *bias =
        p.bias == 0 ? nullptr : reinterpret_cast<const uint16_t *>(p.bias) + static_cast<uint64_t>(head) * d;
    uint16_t *out;
    if (query) {
        out = reinterpret_cast<uint16_t *>(p.q) + row * p.q_stride + static_cast<uint64_t>(head) * d;
    } else {
        const int32_t kv_head = head - p.heads - (value ? p.kv_heads : 0);
        out = reinterpret_cast<uint16_t *>(value ? p.cache_v : p.cache_k) +
              (static_cast<uint64_t>(slot) * p.kv_heads + kv_head) * d;
    }
    if (value) {
        for (int32_t i = lane; i < d; i += 32) {
            out[i] = bias == nullptr ? x[i] : T::store(with_bias<T>(x, bias, i));
        }
        return;
    }
    if (!placed) {
        for (int32_t i = lane; i < d; i += 32) {
            out[i] = 0;
        }
        return;
    }

    const int32_t half = p.half;
    float low[MAX_PAIRS], high[MAX_PAIRS], rest[MAX_REST];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < MAX_PAIRS; ++k) {
        const int32_t i = (k / 2) * 64 + 2 * lane + k % 2;
        if (i < half) {
            low[k] = with_bias<T>(x, bias, i);
            high[k] = with_bias<T>(x, bias, i + half);
            sum = __fmaf_rn(low[k], low[k], sum);
            sum = __fmaf_rn(high[k], high[k], sum);
        }
    }
#pragma unroll
    for (int k = 0; k < MAX_REST; ++k) {
        const int32_t i = 2 * half + k * 32 + lane;
        if (i < d) {
            rest[k] = with_bias<T>(x, bias, i);
            sum = __fmaf_rn(rest[k], rest[k], sum);
        }
    }
    const uint64_t norm = query ? p.q_norm : p.k_norm;
    if (norm != 0) {
        const uint16_t *weight = reinterpret_cast<const uint16_t *>(norm);
        const float mean = __fdiv_rn(warp_sum(sum), static_cast<float>(d));
        const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, __uint_as_float(p.eps_bits))));
#pragma unroll
        for (int k = 0; k < MAX_PAIRS; ++k) {
            const int32_t i = (k / 2) * 64 + 2 * lane + k % 2;
            if (i < half) {
                low[k] = __fmul_rn(__fmul_rn(low[k], scale), T::load(weight[i]));
                high[k] = __fmul_rn(__fmul_rn(high[k], scale), T::load(weight[i + half]));
            }
        }
#pragma unroll
        for (int k = 0; k < MAX_REST; ++k) {
            const int32_t i = 2 * half + k * 32 + lane;
            if (i < d) {
                rest[k] = __fmul_rn(__fmul_rn(rest[k], scale), T::load(weight[i]));
            }
        }
    }
    const float *cos = reinterpret_cast<const float *>(p.cos) + static_cast<uint64_t>(position) * half;
    const float *sin = reinterpret_cast<const float *>(p.sin) + static_cast<uint64_t>(position) * half;
#pragma unroll
    for (int k = 0; k < MAX_PAIRS; ++k) {
        const int32_t i = (k / 2) * 64 + 2 * lane + k % 2;
        if (i < half) {
            const float c = __ldg(cos + i);
            const float s = __ldg(sin + i);
            out[i] = T::store(__fsub_rn(__fmul_rn(low[k], c), __fmul_rn(high[k], s)));
            out[i + half] = T::store(__fadd_rn(__fmul_rn(high[k], c), __fmul_rn(low[k], s)));
        }
    }
#pragma unroll
    for (int k = 0; k < MAX_REST; ++k) {
        const int32_t i = 2 * half + k * 32 + lane;
        if (i < d) {
            out[i] = T::store(rest[k]);
        }
    }
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(128) rope_kv_bf16(const __grid_constant__ specrs::RopeKvParams p) {
    specrs::rope_kv<specrs::Bf16>(p);
}
extern "C" __global__ void __launch_bounds__(128) rope_kv_f16(const __grid_constant__ specrs::RopeKvParams p) {
    specrs::rope_kv<specrs::F16>(p);
}
