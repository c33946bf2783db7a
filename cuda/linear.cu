// Product of up to 16 rows with a weight, y = x W^T: the time of reading the weight, in a chain of launches.
//
// A row's bits are those of cublasLt's algorithms that split K alike: tensor-core steps of 16 inputs in order into one fp32
// accumulator, or, where K has two parts, one accumulator each, added in order. Measured on an H100 for every algorithm of
// such a class that was tried; no weight relies on it before it is compared on the device (`src/device/cublaslt/own.rs`).
//
// The weight is wgmma's A, from shared memory: its 64 rows are outputs. The rows of x are B's columns. A block has R
// outputs, so that about one block falls to each multiprocessor; a tile of 64 outputs that is only partly the block's
// reads on into the bytes behind it, and what comes of them is dropped. With two parts of K a cluster of two blocks shares
// R outputs, a part each, and the second sends its sums to the first.
//
// One warp loads weights and one loads rows, by TMA, through a ring of STAGES stages of DEPTH panels of 64 inputs. A panel
// that is partly behind the matrix is zeros there, which add nothing. In a chain a block has little enough memory and
// threads that the next launch takes its place beside it: that launch fills its ring with weights, which no launch in
// front of it writes, before it waits for its rows. So launches are early only where they are captured, and a weight that
// was written just now is not read too soon.
#include "common.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace specrs {

struct LinearCall {
    TensorMap weight;  // [outputs, inputs], boxes of R outputs and 64 inputs
    TensorMap x;       // [rows, inputs], boxes of TOKENS rows and 64 inputs
    LinearParams p;
};

// d += a * b: a 64x16 and b 16 columns deep, both in shared memory with their 16 elements side by side.
__device__ __forceinline__ void linear_step(float (&d)[1][4], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, accumulate, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
        : "l"(a), "l"(b));
}
__device__ __forceinline__ void linear_step(float (&d)[2][4], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, accumulate, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
        : "l"(a), "l"(b));
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// Sizes of a block, from which kernels/linear.rs computes the same bytes.
template <int R, int TOKENS, int DEPTH, int STAGES, int WARPGROUPS, int SPLIT>
struct LinearTile {
    static constexpr int COMPUTING = 128 * WARPGROUPS;
    static constexpr int TILES = (R + 64 * WARPGROUPS - 1) / (64 * WARPGROUPS);  // of 64 outputs, for each warpgroup
    static constexpr int WEIGHT = DEPTH * R * 128, X = DEPTH * TOKENS * 128;     // bytes of a stage
    static constexpr int BEHIND = (TILES * WARPGROUPS * 64 - R) * 128;  // bytes that a last tile reads behind the weights
    static constexpr int RING = STAGES * WEIGHT + (STAGES * X > BEHIND ? STAGES * X : BEHIND);
    static constexpr int SUMS = SPLIT == 2 ? TILES * WARPGROUPS * 64 * TOKENS * 4 : 0;
    static constexpr int BYTES = 1024 + RING + SUMS + 16 * STAGES;
    static_assert(R % 8 == 0 && R <= 256 && (TOKENS == 8 || TOKENS == 16), "whole groups of rows, a box of up to 256");
    static_assert(BYTES <= 113 * 1024, "two blocks share a multiprocessor");
    static_assert(TOKENS * (R + 4) * 4 <= RING, "the outputs take the ring's place");
};

template <int R, int TOKENS, int DEPTH, int STAGES, int WARPGROUPS, int SPLIT>
__device__ __forceinline__ void linear(const LinearCall &call) {
    using Tile = LinearTile<R, TOKENS, DEPTH, STAGES, WARPGROUPS, SPLIT>;
    constexpr int TILES = Tile::TILES, COMPUTING = Tile::COMPUTING;
    extern __shared__ uint8_t raw[];
    let_next_begin();
    const LinearParams &p = call.p;
    uint8_t *const memory = raw + (1024 - shared_address(raw) % 1024) % 1024;
    const uint32_t weight_at = shared_address(memory);
    const uint32_t x_at = weight_at + STAGES * Tile::WEIGHT;
    float *const sums = reinterpret_cast<float *>(memory + Tile::RING);
    const uint32_t full = weight_at + Tile::RING + Tile::SUMS, empty = full + 8 * STAGES;
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int part = SPLIT == 1 ? 0 : blockIdx.x % SPLIT;  // its rank in the cluster
    const int32_t output = static_cast<int32_t>(blockIdx.x) / SPLIT * R;
    if (thread == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 2);
            barrier_init(empty + 8 * s, COMPUTING / 32);
        }
        publish_barriers();
    }
    __syncthreads();
    if (SPLIT == 2) {
        cluster_sync();  // the other block is there, to be written to
    }
    if (thread >= COMPUTING) {
        const bool rows = warp > COMPUTING / 32;
        if (lane == 0) {
            if (rows) {
                wait_for_previous();  // weights depend on no launch
            }
            for (int i = 0; i < p.stages; ++i) {
                const int s = i % STAGES;
                if (i >= STAGES) {
                    barrier_wait(empty + 8 * s, (i / STAGES & 1) ^ 1);
                }
                barrier_arrive_expecting(full + 8 * s, rows ? Tile::X : Tile::WEIGHT);
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    const int32_t column = part * p.part + (i * DEPTH + d) * 64;
                    if (rows) {
                        load_box(x_at + s * Tile::X + d * TOKENS * 128, call.x, column, 0, full + 8 * s);
                    } else {
                        load_box(weight_at + s * Tile::WEIGHT + d * R * 128, call.weight, column, output, full + 8 * s);
                    }
                }
            }
        }
        __syncwarp();
        if (SPLIT == 2) {
            cluster_sync();
        }
        return;
    }

    const int tile_first = (warp >> 2) * TILES;
    float sum[TILES][TOKENS / 8][4] = {};
    for (int i = 0; i < p.stages; ++i) {
        const int s = i % STAGES;
        barrier_wait(full + 8 * s, i / STAGES & 1);
        warpgroup_arrive();
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint64_t b = matrix_descriptor(x_at + s * Tile::X + d * TOKENS * 128 + k * 32, 0);
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const uint32_t a = weight_at + s * Tile::WEIGHT + d * R * 128 + (tile_first + t) * (64 * 128) + k * 32;
                    linear_step(sum[t], matrix_descriptor(a, 0), b);
                }
            }
        }
        warpgroup_commit();
        asm volatile("wgmma.wait_group.sync.aligned 1;\n" ::: "memory");
        if (i > 0 && lane == 0) {  // the products of the stage before have ended
            barrier_arrive(empty + 8 * (s == 0 ? STAGES - 1 : s - 1));
        }
        __syncwarp();
    }
    warpgroup_wait();
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                asm volatile("" : "+f"(sum[t][j][e])::"memory");  // not read before the wait
            }
        }
    }
    auto place = [&](int t, int j, int e) { return ((t * (TOKENS / 8) + j) * 4 + e) * COMPUTING + thread; };
    if (SPLIT == 2) {
        if (part == 1) {
            uint32_t first;
            asm volatile("mapa.shared::cluster.u32 %0, %1, 0;\n" : "=r"(first) : "r"(shared_address(sums)));
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
#pragma unroll
                for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        asm volatile("st.shared::cluster.f32 [%0], %1;\n" ::"r"(first + place(t, j, e) * 4), "f"(sum[t][j][e])
                                     : "memory");
                    }
                }
            }
        }
        cluster_sync();
        if (part == 1) {
            return;
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sum[t][j][e] = __fadd_rn(sum[t][j][e], sums[place(t, j, e)]);
                }
            }
        }
    }

    constexpr int PITCH = R + 4;  // the ring becomes the outputs' place, row by row
    float *const out = reinterpret_cast<float *>(memory);
    asm volatile("bar.sync 1, %0;\n" ::"n"(COMPUTING) : "memory");  // every warpgroup has left the ring
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const int row = (tile_first + t) * 64 + (warp & 3) * 16 + (lane >> 2);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int at = row + (e >> 1) * 8;
                if (at < R) {
                    out[(j * 8 + (lane & 3) * 2 + (e & 1)) * PITCH + at] = sum[t][j][e];
                }
            }
        }
    }
    asm volatile("bar.sync 1, %0;\n" ::"n"(COMPUTING) : "memory");
    const int columns = min(R, p.outputs - output);  // a multiple of 8, as R and `outputs` are
    for (int at = thread; at < p.rows * (R / 4); at += COMPUTING) {
        const int row = at / (R / 4), column = at % (R / 4) * 4;
        if (column >= columns) {
            continue;
        }
        const float4 v = *reinterpret_cast<const float4 *>(out + row * PITCH + column);
        const int64_t to = static_cast<int64_t>(row) * p.outputs + output + column;
        if (p.f32_output != 0) {
            reinterpret_cast<float4 *>(p.y)[to / 4] = v;
        } else {
            reinterpret_cast<uint2 *>(p.y)[to / 4] = make_uint2(Bf16::pack(v.x, v.y), Bf16::pack(v.z, v.w));
        }
    }
}

}  // namespace specrs

#define SPECRS_LINEAR_OF(r, depth, stages, warpgroups, tokens, split)                                                 \
    extern "C" __global__ void __launch_bounds__(128 * warpgroups + 64, 2)                                             \
        linear_##r##_##tokens##_##split(const __grid_constant__ specrs::LinearCall call) {                             \
        specrs::linear<r, tokens, depth, stages, warpgroups, split>(call);                                             \
    }
#define SPECRS_LINEAR(r, depth, stages, warpgroups)          \
    SPECRS_LINEAR_OF(r, depth, stages, warpgroups, 8, 1)     \
    SPECRS_LINEAR_OF(r, depth, stages, warpgroups, 16, 1)    \
    SPECRS_LINEAR_OF(r, depth, stages, warpgroups, 8, 2)     \
    SPECRS_LINEAR_OF(r, depth, stages, warpgroups, 16, 2)

// Outputs of a block, panels of a stage, stages, warpgroups. kernels/linear.rs has the same.
SPECRS_LINEAR(16, 4, 5, 1)
SPECRS_LINEAR(32, 2, 8, 1)
SPECRS_LINEAR(48, 2, 6, 1)
SPECRS_LINEAR(64, 2, 5, 1)
SPECRS_LINEAR(128, 1, 5, 1)
SPECRS_LINEAR(224, 1, 3, 2)
