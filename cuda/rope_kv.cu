// Works between a layer's qkv product and its attention: biases, RMSNorm of each query and key head, rotary positions,
// and the write of keys and values to the paged cache. Eight lanes take a query head of a row, or a key head and its value.
//
//   x      = qkv[row, head] + bias[head]
//   q, k   = rotate(norm(x), position[row]);  v = x
//   q[row, head] = q;  cache[K][slot[row], head] = k;  cache[V][slot[row], head] = v
//
// Arithmetic is f32 from the load to the store, with the host's operations in the host's order where one is fixed (the
// rotation); results are rounded to the element type once. Lane t has the pairs (i, i + half) of i = 8t .. 8t + 7 of each
// 64, and then some of what lies behind the rotated part: a head's bits depend on the head alone. A lane loads its pairs,
// its part of the value, and the row's position and slot before it uses any of them.
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

constexpr int LANES = 8;             // of a head
constexpr int STEP = LANES * WIDTH;  // elements of a head that its lanes take at once

// Bits that are all set where a value is NaN or an infinity.
template <typename T>
constexpr uint16_t exponent = 0x7f80;
template <>
constexpr uint16_t exponent<F16> = 0x7c00;

struct Floats8 {
    float at[WIDTH];
};

template <typename T>
__device__ __forceinline__ Floats8 unpack(const Vector8 &v) {
    Floats8 x;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        x.at[j] = T::load(v.bits[j]);
    }
    return x;
}

template <typename T>
__device__ __forceinline__ Vector8 pack(const Floats8 &x) {
    Vector8 v;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        v.bits[j] = T::store(x.at[j]);
    }
    return v;
}

// Up to 8 elements from `at`, 0 where `left` has none. WIDE: by 16 bytes; then `left` is a multiple of 8.
template <bool WIDE>
__device__ __forceinline__ Vector8 load(const uint16_t *at, int32_t left) {
    Vector8 v;
    if (WIDE) {
        v.vector = left > 0 ? *reinterpret_cast<const uint4 *>(at) : make_uint4(0, 0, 0, 0);
    } else {
        v = load8(at, left, false);
    }
    return v;
}

template <bool WIDE>
__device__ __forceinline__ void store(uint16_t *at, const Vector8 &v, int32_t left) {
    if (!WIDE) {
        store8(at, v, left, false);
    } else if (left > 0) {
        *reinterpret_cast<uint4 *>(at) = v.vector;
    }
}

// As `load`, of floats, of which there is one at least.
template <bool WIDE>
__device__ __forceinline__ Floats8 load_floats(const float *at, int32_t left) {
    Floats8 x;
    if (WIDE) {
        const float4 *vectors = reinterpret_cast<const float4 *>(at);
        const float4 a = vectors[0];
        const float4 b = vectors[1];
        x = {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            x.at[j] = j < left ? at[j] : 0.0f;
        }
    }
    return x;
}

// Elements i .. i + 7 of a head, of which there are `left`, in f32 and with their biases, if any.
template <typename T, bool WIDE>
__device__ __forceinline__ Floats8 with_bias(const Vector8 &v, const uint16_t *bias, int32_t i, int32_t left) {
    Floats8 x = unpack<T>(v);
    if (bias != nullptr) {
        const Floats8 y = unpack<T>(load<WIDE>(bias + i, left));
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            x.at[j] = __fadd_rn(x.at[j], y.at[j]);
        }
    }
    return x;
}

// Elements i .. i + 7 of a head, of which there are `left`, times the head's scale and a norm's weights.
template <typename T, bool WIDE>
__device__ __forceinline__ void normalise(const RopeKvParams &p, Floats8 &x, float scale, uint64_t norm, int32_t i,
                                          int32_t left) {
    const Floats8 weight = p.norm_f32 != 0
                               ? load_floats<WIDE>(reinterpret_cast<const float *>(norm) + i, left)
                               : unpack<T>(load<WIDE>(reinterpret_cast<const uint16_t *>(norm) + i, left));
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        x.at[j] = __fmul_rn(__fmul_rn(x.at[j], scale), weight.at[j]);
    }
}

template <typename T>
__device__ __forceinline__ float weight_of(const RopeKvParams &p, uint64_t norm, int32_t i) {
    return p.norm_f32 != 0 ? reinterpret_cast<const float *>(norm)[i]
                           : T::load(reinterpret_cast<const uint16_t *>(norm)[i]);
}

template <typename T>
__device__ __forceinline__ float with_bias(const uint16_t *x, const uint16_t *bias, int32_t i) {
    const float v = T::load(x[i]);
    return bias == nullptr ? v : __fadd_rn(v, T::load(bias[i]));
}

// The lanes of this lane's head within the warp.
__device__ __forceinline__ uint32_t head_lanes() {
    return 0xffu << (threadIdx.x % 32 / LANES * LANES);
}

// A query head or a key head, as lane t has it: zeros where there are no elements.
template <int CHUNKS>
struct Head {
    const uint16_t *x;
    const uint16_t *bias;  // null for none
    Vector8 low[CHUNKS];   // elements 8t .. 8t + 7 of each 64 of the first half
    Vector8 high[CHUNKS];  // their partners
};

// Writes a value, or zeros where one of its elements is not finite as it is stored; true where all are.
template <typename T, bool WIDE, int VECTORS>
__device__ __forceinline__ bool write_value(Vector8 (&value)[VECTORS], const uint16_t *bias, uint16_t *out,
                                            int32_t d) {
    const int32_t first = threadIdx.x % LANES * WIDTH;
    bool finite = true;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int32_t i = k * STEP + first;
        if (bias != nullptr) {
            value[k] = pack<T>(with_bias<T, WIDE>(value[k], bias, i, d - i));
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            finite = finite && (value[k].bits[j] & exponent<T>) != exponent<T>;
        }
    }
    finite = __all_sync(head_lanes(), finite);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int32_t i = k * STEP + first;
        if (!finite) {
            value[k].vector = make_uint4(0, 0, 0, 0);
        }
        store<WIDE>(out + i, value[k], d - i);
    }
    return finite;
}

// 1 / RMS of a head. The sum is that of a warp whose lane l takes elements 2l and 2l + 1 of each 64 of both halves, then
// element l of each 32 behind them, and whose lanes are added in one tree: lane t takes the part of lanes 4t .. 4t + 3.
template <typename T, bool WIDE, int CHUNKS>
__device__ __forceinline__ float rms_scale(const RopeKvParams &p, const Head<CHUNKS> &head) {
    const int32_t half = p.half;
    const int32_t lane = threadIdx.x % LANES;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const int32_t i = k * STEP + lane * WIDTH;
        if (i < half) {
            const Floats8 a = with_bias<T, WIDE>(head.low[k], head.bias, i, half - i);
            const Floats8 b = with_bias<T, WIDE>(head.high[k], head.bias, half + i, half - i);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {  // zeros behind the half change no sum
                sums[j / 2] = __fmaf_rn(a.at[j], a.at[j], sums[j / 2]);
                sums[j / 2] = __fmaf_rn(b.at[j], b.at[j], sums[j / 2]);
            }
        }
    }
#pragma unroll 1
    for (int32_t i = 2 * half + 4 * lane; i < p.head_dim; i += 4 * LANES) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float v = i + j < p.head_dim ? with_bias<T>(head.x, head.bias, i + j) : 0.0f;
            sums[j] = __fmaf_rn(v, v, sums[j]);
        }
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sums[j] = __fadd_rn(sums[j], __shfl_xor_sync(head_lanes(), sums[j], distance));
        }
    }
    const float sum = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
    const float mean = __fdiv_rn(sum, static_cast<float>(p.head_dim));
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, __uint_as_float(p.eps_bits))));
}

// Norm and rotation of a head of a query or a key, and its store.
template <typename T, bool WIDE, int CHUNKS>
__device__ __forceinline__ void rotate(const RopeKvParams &p, const Head<CHUNKS> &head, uint64_t norm, int32_t position,
                                       uint16_t *out) {
    const int32_t half = p.half;
    const int32_t lane = threadIdx.x % LANES;
    const float scale = norm == 0 ? 1.0f : rms_scale<T, WIDE>(p, head);
    const float *cos = reinterpret_cast<const float *>(p.cos) + static_cast<uint64_t>(position) * half;
    const float *sin = reinterpret_cast<const float *>(p.sin) + static_cast<uint64_t>(position) * half;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const int32_t i = k * STEP + lane * WIDTH;
        if (i < half) {
            const int32_t left = half - i;
            const Floats8 c = load_floats<WIDE>(cos + i, left);
            const Floats8 s = load_floats<WIDE>(sin + i, left);
            Floats8 a = with_bias<T, WIDE>(head.low[k], head.bias, i, left);
            Floats8 b = with_bias<T, WIDE>(head.high[k], head.bias, half + i, left);
            if (norm != 0) {
                normalise<T, WIDE>(p, a, scale, norm, i, left);
                normalise<T, WIDE>(p, b, scale, norm, half + i, left);
            }
            Floats8 low, high;
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                low.at[j] = __fsub_rn(__fmul_rn(a.at[j], c.at[j]), __fmul_rn(b.at[j], s.at[j]));
                high.at[j] = __fadd_rn(__fmul_rn(b.at[j], c.at[j]), __fmul_rn(a.at[j], s.at[j]));
            }
            store<WIDE>(out + i, pack<T>(low), left);
            store<WIDE>(out + half + i, pack<T>(high), left);
        }
    }
#pragma unroll 1
    for (int32_t i = 2 * half + lane; i < p.head_dim; i += LANES) {
        const float v = with_bias<T>(head.x, head.bias, i);
        out[i] = T::store(norm == 0 ? v : __fmul_rn(__fmul_rn(v, scale), weight_of<T>(p, norm, i)));
    }
}

__device__ __forceinline__ void fill(uint16_t *out, int32_t d, uint16_t bits) {
#pragma unroll 1
    for (int32_t i = threadIdx.x % LANES; i < d; i += LANES) {
        out[i] = bits;
    }
}

// A lane's part of a launch of heads of up to 128 * CHUNKS elements; WIDE as in `load`.
template <typename T, bool WIDE, int CHUNKS>
__device__ __forceinline__ void rope_kv(const RopeKvParams &p) {
    const int32_t row = blockIdx.x;
    const int32_t task = blockIdx.y * (blockDim.x / LANES) + threadIdx.x / LANES;  // query heads, then key heads
    if (task >= p.heads + p.kv_heads) {
        return;
    }
    const bool query = task < p.heads;
    const int32_t d = p.head_dim;
    const int32_t half = p.half;
    const int32_t first = threadIdx.x % LANES * WIDTH;
    const int32_t position = __ldg(reinterpret_cast<const int32_t *>(p.positions) + row);
    const int32_t slot = __ldg(reinterpret_cast<const int32_t *>(p.slots) + row);
    const uint64_t at = static_cast<uint64_t>(task) * d;
    const uint64_t apart = static_cast<uint64_t>(p.kv_heads) * d;  // from a key to its value
    Head<CHUNKS> head;
    head.x = reinterpret_cast<const uint16_t *>(p.qkv) + row * p.qkv_stride + at;
    head.bias = p.bias == 0 ? nullptr : reinterpret_cast<const uint16_t *>(p.bias) + at;
    Vector8 value[2 * CHUNKS];
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const int32_t i = k * STEP + first;
        head.low[k] = load<WIDE>(head.x + i, half - i);
        head.high[k] = load<WIDE>(head.x + half + i, half - i);
    }
#pragma unroll
    for (int k = 0; k < 2 * CHUNKS; ++k) {
        const int32_t i = k * STEP + first;
        value[k] = load<WIDE>(head.x + apart + i, query ? 0 : d - i);
    }
    const bool placed = in_bounds(position, p.positions_in_table);
    const bool stored = in_bounds(slot, p.num_slots);
    if (task == p.heads && first == 0) {  // the first key head, which every launch has
        if (!placed) {
            record_fault(p.report, KERNEL_ROPE_KV, BUFFER_ROPE_TABLE, -1, row, position,
                         p.positions_in_table);
        }
        if (!stored) {
            record_fault(p.report, KERNEL_ROPE_KV, BUFFER_CACHE_SLOT, -1, row, slot, p.num_slots);
        }
    }
    uint16_t *out = reinterpret_cast<uint16_t *>(p.q) + row * p.q_stride + at;
    if (query && !placed) {
        fill(out, d, 0);
        return;
    }
    if (!query) {
        if (!placed || !stored || slot == 0) {
            return;
        }
        const uint64_t to = (static_cast<uint64_t>(slot) * p.kv_heads + (task - p.heads)) * d;
        out = reinterpret_cast<uint16_t *>(p.cache_k) + to;
        const uint16_t *bias = head.bias == nullptr ? nullptr : head.bias + apart;
        if (!write_value<T, WIDE>(value, bias, reinterpret_cast<uint16_t *>(p.cache_v) + to, d)) {
            fill(out, d, exponent<T> | 1);  // NaN
            return;
        }
    }
    rotate<T, WIDE>(p, head, query ? p.q_norm : p.k_norm, position, out);
}

template <typename T, int CHUNKS>
__device__ __forceinline__ void rope_kv(const RopeKvParams &p) {
    if (p.wide != 0) {
        rope_kv<T, true, CHUNKS>(p);
    } else {
        rope_kv<T, false, CHUNKS>(p);
    }
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(64) rope_kv_bf16(const __grid_constant__ specrs::RopeKvParams p) {
    specrs::rope_kv<specrs::Bf16, 1>(p);
}
extern "C" __global__ void __launch_bounds__(64) rope_kv_f16(const __grid_constant__ specrs::RopeKvParams p) {
    specrs::rope_kv<specrs::F16, 1>(p);
}
extern "C" __global__ void __launch_bounds__(64, 1) rope_kv_bf16_long(const __grid_constant__ specrs::RopeKvParams p) {
    specrs::rope_kv<specrs::Bf16, 4>(p);
}
extern "C" __global__ void __launch_bounds__(64, 1) rope_kv_f16_long(const __grid_constant__ specrs::RopeKvParams p) {
    specrs::rope_kv<specrs::F16, 4>(p);
}
