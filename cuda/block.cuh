// Work that the threads of a block do together: sums, also of what stands before each, and finding a launch's last block.
#pragma once

#include "common.cuh"

namespace specrs {

// Sum of `x` over the threads before this one; `total` gets the sum over the block. `shared` has 33 places. Every thread
// of the block calls it.
__device__ __forceinline__ int32_t block_before(int32_t x, int32_t *shared, int32_t &total) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t warps = (blockDim.x + 31) / 32;
    int32_t upto = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffu, upto, step);
        upto += lane >= static_cast<uint32_t>(step) ? other : 0;
    }
    __syncthreads();  // `shared` may still be read from the time before
    if (lane == 31) {
        shared[warp] = upto;
    }
    __syncthreads();
    if (warp == 0) {
        int32_t sums = lane < warps ? shared[lane] : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int32_t other = __shfl_up_sync(0xffffffffu, sums, step);
            sums += lane >= static_cast<uint32_t>(step) ? other : 0;
        }
        __syncwarp();
        shared[lane + 1] = sums;
        if (lane == 0) {
            shared[0] = 0;
        }
    }
    __syncthreads();
    total = shared[warps];
    return shared[warp] + upto - x;
}

// Sums of `a` and of `b` over the block, for all its threads, of which there are whole warps. `shared` has 64 places that nothing
// else has written or read since the last barrier.
__device__ __forceinline__ void block_sums(int32_t &a, int32_t &b, int32_t *shared) {
    const uint32_t lane = threadIdx.x % 32;
    a = __reduce_add_sync(0xffffffffu, a);
    b = __reduce_add_sync(0xffffffffu, b);
    if (lane == 0) {
        shared[threadIdx.x / 32] = a;
        shared[32 + threadIdx.x / 32] = b;
    }
    __syncthreads();
    const bool there = lane < blockDim.x / 32;
    a = __reduce_add_sync(0xffffffffu, there ? shared[lane] : 0);
    b = __reduce_add_sync(0xffffffffu, there ? shared[32 + lane] : 0);
}

// True if this block is the last of `blocks` to come here, told to all its threads; writes of the other blocks are
// visible then. The counter is 0 before a launch and after it.
__device__ __forceinline__ bool last_block(uint64_t counter, uint32_t blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicInc(reinterpret_cast<unsigned int *>(counter), blocks - 1) == blocks - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

}  // namespace specrs
