// Works between a layer's qkv product and its attention: biases, RMSNorm of each query and key head, rotary positions,
// and the write of keys and values to the paged cache. One warp a head of a row.
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
//
// Values in the cache are finite. A tensor core multiplies a value by the weight 0 of a row that does not attend to it,
// and 0 * NaN would carry one node's NaN to its siblings, or a token's to those before it in its chunk. So where a
// value is NaN or infinite, zeros are written for all of its head, and NaN for all of the key. Every query that attends
// to it gets NaN.
#include "rows.cuh"

namespace specrs {

constexpr int MAX_PAIRS = 4;  // pairs of neighbours of a lane in each half: rotary dimensions up to 512
constexpr int MAX_REST = 16;  // elements of a lane behind the rotated part: up to 512

// Bits that are all set where a value is NaN or an infinity.
template <typename T>
constexpr uint16_t exponent = 0x7f80;
template <>
constexpr uint16_t exponent<F16> = 0x7c00;

// Elements i and i + 1, the second only where it is one of `count`: one access where `wide`.
template <typename T>
__device__ __forceinline__ float2 load_pair(const uint16_t *at, int32_t i, int32_t count, bool wide) {
    if (wide) {
        const uint32_t both = *reinterpret_cast<const uint32_t *>(at + i);
        return make_float2(T::load(static_cast<uint16_t>(both)), T::load(static_cast<uint16_t>(both >> 16)));
    }
    return make_float2(T::load(at[i]), i + 1 < count ? T::load(at[i + 1]) : 0.0f);
}

template <typename T>
__device__ __forceinline__ void store_pair(uint16_t *at, int32_t i, int32_t count, bool wide, float2 x) {
    const uint16_t first = T::store(x.x);
    const uint16_t second = T::store(x.y);
    if (wide) {
        *reinterpret_cast<uint32_t *>(at + i) = first | static_cast<uint32_t>(second) << 16;
    } else {
        at[i] = first;
        if (i + 1 < count) {
            at[i + 1] = second;
        }
    }
}

__device__ __forceinline__ float2 load_angles(const float *at, int32_t i, int32_t count, bool wide) {
    if (wide) {
        return *reinterpret_cast<const float2 *>(at + i);
    }
    return make_float2(at[i], i + 1 < count ? at[i + 1] : 0.0f);
}

template <typename T>
__device__ __forceinline__ float2 add_pair(float2 x, const uint16_t *at, int32_t i, int32_t count, bool wide) {
    const float2 y = load_pair<T>(at, i, count, wide);
    return make_float2(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y));
}

// A norm's weights `first + i` and the next one, the second only where `i + 1` is one of `count`.
template <typename T>
__device__ __forceinline__ float2 weight_pair(const RopeKvParams &p, uint64_t norm, int32_t first, int32_t i, int32_t count) {
    if (p.norm_f32 != 0) {
        return load_angles(reinterpret_cast<const float *>(norm) + first, i, count, false);
    }
    return load_pair<T>(reinterpret_cast<const uint16_t *>(norm) + first, i, count, p.wide != 0);
}

template <typename T>
__device__ __forceinline__ float weight_of(const RopeKvParams &p, uint64_t norm, int32_t i) {
    return p.norm_f32 != 0 ? reinterpret_cast<const float *>(norm)[i] : T::load(reinterpret_cast<const uint16_t *>(norm)[i]);
}

__device__ __forceinline__ float2 scale_pair(float2 x, float scale, float2 weight) {
    return make_float2(__fmul_rn(__fmul_rn(x.x, scale), weight.x), __fmul_rn(__fmul_rn(x.y, scale), weight.y));
}

template <typename T>
__device__ __forceinline__ float with_bias(const uint16_t *x, const uint16_t *bias, int32_t i) {
    const float v = T::load(x[i]);
    return bias == nullptr ? v : __fadd_rn(v, T::load(bias[i]));
}

// Elements i and i + 1 of a value, as they are stored.
template <typename T>
__device__ __forceinline__ float2 value_pair(const uint16_t *x, const uint16_t *bias, int32_t i, int32_t count,
                                             bool wide) {
    const float2 v = load_pair<T>(x, i, count, wide);
    return bias == nullptr ? v : add_pair<T>(v, bias, i, count, wide);
}

// True if all of a value will be finite as it is stored; a warp calls it.
template <typename T>
__device__ __forceinline__ bool is_finite(const uint16_t *x, const uint16_t *bias, int32_t count, bool wide) {
    bool finite = true;
    for (int32_t i = 2 * (threadIdx.x % 32); i < count; i += 64) {
        const float2 v = value_pair<T>(x, bias, i, count, wide);
        finite = finite && (T::store(v.x) & exponent<T>) != exponent<T> && (T::store(v.y) & exponent<T>) != exponent<T>;
    }
    return __all_sync(~0u, finite);
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
            record_fault(p.report, KERNEL_ROPE_KV, BUFFER_ROPE_TABLE, -1, row, position,
                         p.positions_in_table);
        }
        if (!stored) {
            record_fault(p.report, KERNEL_ROPE_KV, BUFFER_CACHE_SLOT, -1, row, slot, p.num_slots);
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
    const bool wide = p.wide != 0;
    if (value) {
        const bool finite = is_finite<T>(x, bias, d, wide);
        for (int32_t i = 2 * lane; i < d; i += 64) {
            const float2 v = value_pair<T>(x, bias, i, d, wide);
            store_pair<T>(out, i, d, wide, finite ? v : make_float2(0.0f, 0.0f));
        }
        return;
    }
    if (!query) {
        const int64_t apart = static_cast<int64_t>(p.kv_heads) * d;  // from a key to its value
        if (!is_finite<T>(x + apart, bias == nullptr ? nullptr : bias + apart, d, wide)) {
            for (int32_t i = lane; i < d; i += 32) {
                out[i] = static_cast<uint16_t>(exponent<T> | 1);  // NaN
            }
            return;
        }
    }
    if (!placed) {
        for (int32_t i = lane; i < d; i += 32) {
            out[i] = 0;
        }
        return;
    }

    const int32_t half = p.half;
    float2 low[MAX_PAIRS], high[MAX_PAIRS];
    float rest[MAX_REST];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < MAX_PAIRS; ++k) {
        const int32_t i = k * 64 + 2 * lane;
        if (i < half) {
            low[k] = load_pair<T>(x, i, half, wide);
            high[k] = load_pair<T>(x + half, i, half, wide);
            if (bias != nullptr) {
                low[k] = add_pair<T>(low[k], bias, i, half, wide);
                high[k] = add_pair<T>(high[k], bias + half, i, half, wide);
            }
            sum = __fmaf_rn(low[k].x, low[k].x, sum);
            sum = __fmaf_rn(high[k].x, high[k].x, sum);
            sum = i + 1 < half ? __fmaf_rn(low[k].y, low[k].y, sum) : sum;
            sum = i + 1 < half ? __fmaf_rn(high[k].y, high[k].y, sum) : sum;
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
        const float mean = __fdiv_rn(warp_sum(sum), static_cast<float>(d));
        const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, __uint_as_float(p.eps_bits))));
#pragma unroll
        for (int k = 0; k < MAX_PAIRS; ++k) {
            const int32_t i = k * 64 + 2 * lane;
            if (i < half) {
                low[k] = scale_pair(low[k], scale, weight_pair<T>(p, norm, 0, i, half));
                high[k] = scale_pair(high[k], scale, weight_pair<T>(p, norm, half, i, half));
            }
        }
#pragma unroll
        for (int k = 0; k < MAX_REST; ++k) {
            const int32_t i = 2 * half + k * 32 + lane;
            if (i < d) {
                rest[k] = __fmul_rn(__fmul_rn(rest[k], scale), weight_of<T>(p, norm, i));
            }
        }
    }
    const float *cos = reinterpret_cast<const float *>(p.cos) + static_cast<uint64_t>(position) * half;
    const float *sin = reinterpret_cast<const float *>(p.sin) + static_cast<uint64_t>(position) * half;
#pragma unroll
    for (int k = 0; k < MAX_PAIRS; ++k) {
        const int32_t i = k * 64 + 2 * lane;
        if (i < half) {
            const float2 c = load_angles(cos, i, half, wide);
            const float2 s = load_angles(sin, i, half, wide);
            const float2 a = low[k];
            const float2 b = high[k];
            store_pair<T>(out, i, half, wide,
                          make_float2(__fsub_rn(__fmul_rn(a.x, c.x), __fmul_rn(b.x, s.x)),
                                      __fsub_rn(__fmul_rn(a.y, c.y), __fmul_rn(b.y, s.y))));
            store_pair<T>(out + half, i, half, wide,
                          make_float2(__fadd_rn(__fmul_rn(b.x, c.x), __fmul_rn(a.x, s.x)),
                                      __fadd_rn(__fmul_rn(b.y, c.y), __fmul_rn(a.y, s.y))));
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
