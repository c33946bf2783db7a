// Operations on rows of activations [rows, columns]: gathers (embeddings, rows by index, from table to table), RMSNorm with the residual sum,
// SiLU(gate) * up, GELU(gate) * up, convolutions over the rows of each request.
//
// Bits: a row's result is a function of that row (of a convolution, of its request's rows up to it) and of `columns`, whatever the batch, the strides and the alignment. The
// norm takes one block a row, whose threads and tree of sums are fixed by `columns`; sums and products are f32 in one
// order, and are rounded to the element type once, at the end.
//
// Products come behind most of these, and begin early: they read their weights meanwhile (`linear.cu`).
//
// Dead rows: rows from the live count on are written as zeros, so that a static batch holds finite values everywhere. A
// copy from table to table leaves them as they are.
#include "rows.cuh"

namespace specrs {

// out[targets[row]] = table[indices[row] + shift], bytes as they are. An index of -1 is a lane without a row: the
// output gets zeros, or keeps what it has. An index outside the table, or the output, is recorded, and counts as -1.
template <typename Vector>
__device__ __forceinline__ void gather_rows(const GatherRowsParams &p) {
    const Kernel kernel = static_cast<Kernel>(p.kernel);
    const bool reporter = blockIdx.y == 0 && threadIdx.x == 0;
    const int32_t live = live_rows(p.live, p.rows, p.report, kernel, blockIdx.x == 0 && reporter);
    const int32_t row = blockIdx.x;
    int32_t index = -1;
    int32_t target = row;
    if (row < live) {
        index = row;
        if (p.indices != 0) {
            // Wraps in unsigned arithmetic: the result of a wild index is checked below.
            index = static_cast<int32_t>(static_cast<uint32_t>(reinterpret_cast<const int32_t *>(p.indices)[row]) +
                                         static_cast<uint32_t>(p.shift));
        }
        if (index != -1 && !in_bounds(index, p.table_rows)) {
            if (reporter) {
                record_fault(p.report, kernel, static_cast<Buffer>(p.buffer), -1, row, index, p.table_rows);
            }
            index = -1;
        }
        if (p.targets != 0) {
            target = reinterpret_cast<const int32_t *>(p.targets)[row];
            if (target != -1 && !in_bounds(target, p.out_rows)) {
                if (reporter) {
                    record_fault(p.report, kernel, BUFFER_ROWS_OUT, -1, row, target, p.out_rows);
                }
                target = -1;
            }
        }
    }
    if (target < 0 || (index < 0 && p.keeps != 0)) {
        return;
    }
    Vector *out = reinterpret_cast<Vector *>(p.out + target * p.out_stride);
    const uint32_t first = blockIdx.y * blockDim.x + threadIdx.x;
    const uint32_t threads = gridDim.y * blockDim.x;
    if (index < 0) {
        for (uint32_t c = first; c < p.columns; c += threads) {
            out[c] = Vector{};
        }
        return;
    }
    const Vector *in = reinterpret_cast<const Vector *>(p.table + index * p.table_stride);
    for (uint32_t c = first; c < p.columns; c += threads) {
        out[c] = in[c];
    }
}

constexpr int NORM_VECTORS = 4;  // vectors of a thread: so many keep a row in registers

// Weights `at`..`at + WIDTH` of a norm, 0 behind its last column.
template <typename T>
__device__ __forceinline__ void load_weights(const AddRmsNormParams &p, int64_t at, bool wide, float (&weight)[WIDTH]) {
    const int64_t left = p.columns - at;
    if (p.weight_f32 == 0) {
        const Vector8 v = load8(reinterpret_cast<const uint16_t *>(p.weight) + at, left, wide);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            weight[j] = T::load(v.bits[j]);
        }
        return;
    }
    const float *from = reinterpret_cast<const float *>(p.weight) + at;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
        weight[j] = j < left ? __ldg(from + j) : 0.0f;
    }
}

// residual += x (rounded: the residual stream has the element type), out = residual * weight / rms(residual).
// Without x the residual is read alone. `copy`, where it is given, gets the residual too.
//
// Thread t has the elements of vectors t, t + threads, ...; a thread sums its squares in order, a warp by one tree, the
// block's warps by another.
template <typename T>
__device__ __forceinline__ void add_rms_norm(const AddRmsNormParams &p) {
    __shared__ float partial[32];
    const int32_t live =
        live_rows(p.live, p.rows, p.report, KERNEL_RMS_NORM, blockIdx.x == 0 && threadIdx.x == 0);
    const uint64_t row = blockIdx.x;
    const bool dead = blockIdx.x >= static_cast<uint32_t>(live);
    const bool wide = p.wide != 0;
    const int64_t columns = p.columns;
    uint16_t *residual = reinterpret_cast<uint16_t *>(p.residual) + row * p.residual_stride;
    const uint16_t *x = reinterpret_cast<const uint16_t *>(p.x) + row * p.x_stride;
    uint16_t *copy = reinterpret_cast<uint16_t *>(p.copy) + row * p.copy_stride;
    uint16_t *out = reinterpret_cast<uint16_t *>(p.out) + row * p.out_stride;

    float value[NORM_VECTORS][WIDTH];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < NORM_VECTORS; ++i) {
        const int64_t at = (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * WIDTH;
        if (at >= columns) {
            continue;
        }
        Vector8 v;
        v.vector = make_uint4(0, 0, 0, 0);
        if (!dead) {
            v = load8(residual + at, columns - at, wide);
        }
        if (!dead && p.x != 0) {
            const Vector8 d = load8(x + at, columns - at, wide);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                v.bits[j] = T::store(__fadd_rn(T::load(v.bits[j]), T::load(d.bits[j])));
            }
        }
        if (p.x != 0) {
            store8(residual + at, v, columns - at, wide);
        }
        if (p.copy != 0) {
            store8(copy + at, v, columns - at, wide);
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            value[i][j] = T::load(v.bits[j]);
            sum = __fmaf_rn(value[i][j], value[i][j], sum);
        }
    }
    if (p.out == 0) {
        return;  // the sum alone
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32;
    sum = warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0f);
    const float mean = __fdiv_rn(sum, static_cast<float>(columns));
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, __uint_as_float(p.eps_bits))));
#pragma unroll
    for (int i = 0; i < NORM_VECTORS; ++i) {
        const int64_t at = (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * WIDTH;
        if (at >= columns) {
            continue;
        }
        Vector8 v;
        float weight[WIDTH];
        load_weights<T>(p, at, wide, weight);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            v.bits[j] = dead ? 0 : T::store(__fmul_rn(__fmul_rn(value[i][j], scale), weight[j]));
        }
        store8(out + at, v, columns - at, wide);
    }
}

// out = activation(gate) * up, of rows [gate | up], or of pairs gate, up, gate, up, ... Both activations are g / (1 + e^-z):
// SiLU with z = g, GELU in its tanh form, 0.5 g (1 + tanh(z / 2)), with z = sqrt(8 / pi) (g + 0.044715 g^3)
// (https://arxiv.org/abs/1606.08415).
template <typename T, bool GELU>
__device__ __forceinline__ void gated_up(const GatedUpParams &p) {
    const int32_t live =
        live_rows(p.live, p.rows, p.report, KERNEL_GATED_UP,
                  blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0);
    const uint64_t row = blockIdx.x;
    const bool wide = p.wide != 0;
    const int64_t columns = p.columns;
    const int64_t at = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * WIDTH;
    if (at >= columns) {
        return;
    }
    uint16_t *out = reinterpret_cast<uint16_t *>(p.out) + row * p.out_stride + at;
    Vector8 v;
    v.vector = make_uint4(0, 0, 0, 0);
    if (blockIdx.x < static_cast<uint32_t>(live)) {
        const uint16_t *in = reinterpret_cast<const uint16_t *>(p.gate_up) + row * p.in_stride;
        Vector8 gate, up;
        if (p.interleaved != 0) {
            const int64_t left = 2 * (columns - at);
            const Vector8 low = load8(in + 2 * at, left, wide);
            const Vector8 high = load8(in + 2 * at + WIDTH, left - WIDTH, wide);
#pragma unroll
            for (int j = 0; j < WIDTH / 2; ++j) {
                gate.bits[j] = low.bits[2 * j];
                up.bits[j] = low.bits[2 * j + 1];
                gate.bits[WIDTH / 2 + j] = high.bits[2 * j];
                up.bits[WIDTH / 2 + j] = high.bits[2 * j + 1];
            }
        } else {
            gate = load8(in + at, columns - at, wide);
            up = load8(in + columns + at, columns - at, wide);
        }
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            const float g = T::load(gate.bits[j]);
            float z = g;
            if (GELU) {
                const float cube = __fmul_rn(__fmul_rn(g, g), g);
                z = __fmul_rn(__fmaf_rn(cube, 0.044715f, g), 1.5957691216057308f);
            }
            const float active = __fdiv_rn(g, __fadd_rn(1.0f, host_exp(-z)));
            v.bits[j] = T::store(__fmul_rn(active, T::load(up.bits[j])));
        }
    }
    store8(out, v, columns - at, wide);
}

// out = (out +) the sum over taps t of (base[t] + own[t] of the column's group) * x[row - t], over rows of one request. A
// thread has an element; its sum is in f32, from the row's own tap on.
template <typename T>
__device__ __forceinline__ void row_conv(const RowConvParams &p) {
    const int32_t row = blockIdx.x;
    const int32_t column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= p.columns) {
        return;
    }
    // The last request that begins no later; `requests` of the rows behind all.
    const int32_t *starts = reinterpret_cast<const int32_t *>(p.starts);
    int32_t request = 0;
    for (int32_t end = p.requests + 1; end - request > 1;) {
        const int32_t middle = (request + end) / 2;
        if (starts[middle] <= row) {
            request = middle;
        } else {
            end = middle;
        }
    }
    uint16_t *out = reinterpret_cast<uint16_t *>(p.out) + row * p.out_stride + column;
    if (request == p.requests) {
        if (p.adds == 0) {
            *out = 0;
        }
        return;
    }
    const int32_t place = min(max(row - starts[request], 0), row);  // whatever `starts` has, no row before the first
    const uint16_t *x = reinterpret_cast<const uint16_t *>(p.x) + row * p.x_stride + column;
    const uint16_t *base = reinterpret_cast<const uint16_t *>(p.base) + column;
    const uint16_t *own = reinterpret_cast<const uint16_t *>(p.own) + row * p.own_stride + column / (p.columns / p.groups);
    float sum = 0.0f;
    for (int32_t tap = 0; tap <= min(p.taps - 1, place); ++tap) {
        const float factor = __fadd_rn(T::load(base[tap * p.base_stride]), T::load(own[tap * p.groups]));
        sum = __fmaf_rn(factor, T::load(x[-tap * static_cast<int64_t>(p.x_stride)]), sum);
    }
    *out = T::store(p.adds != 0 ? __fadd_rn(T::load(*out), sum) : sum);
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(256) gather_rows_v16(const __grid_constant__ specrs::GatherRowsParams p) {
    specrs::let_next_begin();
    specrs::gather_rows<uint4>(p);
}
extern "C" __global__ void __launch_bounds__(256) gather_rows_v2(const __grid_constant__ specrs::GatherRowsParams p) {
    specrs::let_next_begin();
    specrs::gather_rows<uint16_t>(p);
}
extern "C" __global__ void __launch_bounds__(1024)
    add_rms_norm_bf16(const __grid_constant__ specrs::AddRmsNormParams p) {
    specrs::let_next_begin();
    specrs::add_rms_norm<specrs::Bf16>(p);
}
extern "C" __global__ void __launch_bounds__(1024)
    add_rms_norm_f16(const __grid_constant__ specrs::AddRmsNormParams p) {
    specrs::let_next_begin();
    specrs::add_rms_norm<specrs::F16>(p);
}
extern "C" __global__ void __launch_bounds__(256) silu_up_bf16(const __grid_constant__ specrs::GatedUpParams p) {
    specrs::let_next_begin();
    specrs::gated_up<specrs::Bf16, false>(p);
}
extern "C" __global__ void __launch_bounds__(256) silu_up_f16(const __grid_constant__ specrs::GatedUpParams p) {
    specrs::let_next_begin();
    specrs::gated_up<specrs::F16, false>(p);
}
extern "C" __global__ void __launch_bounds__(256) gelu_up_bf16(const __grid_constant__ specrs::GatedUpParams p) {
    specrs::let_next_begin();
    specrs::gated_up<specrs::Bf16, true>(p);
}
extern "C" __global__ void __launch_bounds__(256) gelu_up_f16(const __grid_constant__ specrs::GatedUpParams p) {
    specrs::let_next_begin();
    specrs::gated_up<specrs::F16, true>(p);
}
extern "C" __global__ void __launch_bounds__(256) row_conv_bf16(const __grid_constant__ specrs::RowConvParams p) {
    specrs::let_next_begin();
    specrs::row_conv<specrs::Bf16>(p);
}
extern "C" __global__ void __launch_bounds__(256) row_conv_f16(const __grid_constant__ specrs::RowConvParams p) {
    specrs::let_next_begin();
    specrs::row_conv<specrs::F16>(p);
}
