// The blocks of a group that draw a request's tokens: what they share, and sums and maxima over warp, block and group.
#pragma once

#include "sample_row.cuh"

namespace specrs {

constexpr int BINS = 1024;
constexpr int CANDIDATES = THREADS;
constexpr int MOST_SUMS = 3;
static_assert(WARPS <= 32, "the warps of a block are summed in one warp");

// Mailboxes of a block, by what they count: posts of both turns, bins of this block's share, sums of all bins, gathered keys,
// a published value.
enum Box { BOX_POSTED, BOX_POSTED_NEXT, BOX_PARTS, BOX_SUMS, BOX_KEYS, BOX_PUBLISHED, BOXES };

struct Shared {
    Mailbox mailboxes[BOXES];
    // This block's part of a histogram (0 between histograms); all blocks' parts of its share of the bins; the whole.
    uint32_t bins[BINS];
    uint32_t parts[BINS];
    uint32_t sums[BINS];
    // Ranks of gathered tokens.
    uint64_t keys[CANDIDATES];
    int32_t gathered;
    uint64_t warp_sums[MOST_SUMS][WARPS];
    // A value of each block of the group, in turns; what the first warp made of them.
    uint64_t posted[2][MOST_SUMS][MAX_GROUP];
    uint64_t totals[MOST_SUMS], totals_before[MOST_SUMS];
    uint64_t published;
    int32_t found_bin;
};

// Named, not passed on: through a reference every access would be a generic one, and an atomic one slow.
__shared__ Shared shared;
static_assert(sizeof(Shared) + sizeof(walk_path) <= 24 << 10, "SHARED of src/device/kernels/sample.rs is too little");

// The blocks of a group at work on one request, as one of them sees it.
struct Team {
    Group group;
    // A bit for each mailbox: whether it was waited for an odd number of times.
    uint32_t odd;
    uint32_t turn;

    // Wait until `bytes` have arrived. All threads of the block call.
    __device__ __forceinline__ void receive(Box box, uint32_t bytes) {
        await(shared.mailboxes[box], bytes, odd >> box);
        odd ^= 1u << box;
#if __CUDA_ARCH__ < 900
        __syncthreads();
#endif
    }
};

// Open the mailboxes; ends with the barrier before which a block of the group may not have begun.
__device__ __forceinline__ Team begin_team() {
    if (threadIdx.x == 0) {
        for (Mailbox &mailbox : shared.mailboxes) {
            open_mailbox(mailbox);
        }
    }
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        shared.bins[bin] = 0;
    }
    group_barrier();
    return {own_group(), 0, 0};
}

// Sum of `x` over the warp, for all lanes; below 2^59, as the weight of a whole vocabulary is.
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
    const uint32_t low = __reduce_add_sync(ALL_LANES, static_cast<uint32_t>(x) & 0x7FFFFFFu);
    const uint32_t high = __reduce_add_sync(ALL_LANES, static_cast<uint32_t>(x >> 27));
    return (static_cast<uint64_t>(high) << 27) + low;
}

__device__ __forceinline__ uint64_t warp_largest(uint64_t x) {
    const uint32_t high = __reduce_max_sync(ALL_LANES, static_cast<uint32_t>(x >> 32));
    const uint32_t low = __reduce_max_sync(ALL_LANES, x >> 32 == high ? static_cast<uint32_t>(x) : 0u);
    return static_cast<uint64_t>(high) << 32 | low;
}

// Sum of `x` over this lane and those before it.
__device__ __forceinline__ uint64_t warp_scan(uint64_t x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint64_t y = __shfl_up_sync(ALL_LANES, x, d);
        x += lane >= d ? y : 0;
    }
    return x;
}

// What each block's first warp holds in `x`, for the first warp of each: that of block `lane`, 0 in lanes without one. All threads
// call; in between lies a barrier of each block.
template <int N>
__device__ __forceinline__ void exchange(Team &team, uint64_t (&x)[N]) {
    // In turns: a block may post again while another still waits or reads.
    const Box box = team.turn == 0 ? BOX_POSTED : BOX_POSTED_NEXT;
    if (threadIdx.x < 32) {
        uint64_t(*posted)[MAX_GROUP] = shared.posted[team.turn];
        if (threadIdx.x < team.group.size) {
            for (int n = 0; n < N; ++n) {
                send(posted[n][team.group.rank], threadIdx.x, x[n], shared.mailboxes[box]);
            }
        }
        await(shared.mailboxes[box], team.group.size * N * sizeof(uint64_t), team.odd >> box);
        __syncwarp();
        for (int n = 0; n < N; ++n) {
            x[n] = threadIdx.x < team.group.size ? posted[n][threadIdx.x] : 0;
        }
    }
    team.odd ^= 1u << box;
    team.turn ^= 1;
}

// The sums of each warp's `x` over the group, for all threads: `total`, and `before` over the blocks before this one. Each
// warp's first sum stays in `warp_sums[0]`.
template <int N>
__device__ __forceinline__ void sum_warps(Team &team, const uint64_t (&x)[N], uint64_t (&before)[N],
                                          uint64_t (&total)[N]) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) {
        for (int n = 0; n < N; ++n) {
            shared.warp_sums[n][warp] = x[n];
        }
    }
    __syncthreads();
    uint64_t blocks[N];
    if (warp == 0) {
        for (int n = 0; n < N; ++n) {
            blocks[n] = warp_sum(lane < WARPS ? shared.warp_sums[n][lane] : 0);
        }
    }
    exchange(team, blocks);
    if (warp == 0) {
        for (int n = 0; n < N; ++n) {
            shared.totals[n] = warp_sum(blocks[n]);
            shared.totals_before[n] = warp_sum(lane < team.group.rank ? blocks[n] : 0);
        }
    }
    __syncthreads();
    for (int n = 0; n < N; ++n) {
        total[n] = shared.totals[n];
        before[n] = shared.totals_before[n];
    }
}

// The largest key over the group, for all threads.
__device__ __forceinline__ uint64_t largest(Team &team, uint64_t key) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    key = warp_largest(key);
    if (lane == 0) {
        shared.warp_sums[0][warp] = key;
    }
    __syncthreads();
    uint64_t blocks[1] = {warp == 0 ? warp_largest(lane < WARPS ? shared.warp_sums[0][lane] : 0) : 0};
    exchange(team, blocks);
    if (warp == 0) {
        shared.totals[0] = warp_largest(blocks[0]);
    }
    __syncthreads();
    return shared.totals[0];
}

// Tell all blocks a value; one thread of the group calls, and all then `published`.
__device__ __forceinline__ void publish(uint64_t value, const Group &group) {
    for (uint32_t rank = 0; rank < group.size; ++rank) {
        send(shared.published, rank, value, shared.mailboxes[BOX_PUBLISHED]);
    }
}

// Ends with a barrier of the block.
__device__ __forceinline__ uint64_t published(Team &team) {
    team.receive(BOX_PUBLISHED, sizeof(uint64_t));
    __syncthreads();
    return shared.published;
}

// ---- The first threads of a block: a power of two from 32 on, each with one value ----

__device__ __forceinline__ int threads_for(int n) { return n <= 32 ? 32 : 1 << (32 - __clz(n - 1)); }

// A barrier of the first `threads` threads.
__device__ __forceinline__ void barrier_of(int threads) {
    if (threads == 32) {
        __syncwarp();
    } else {
        asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
    }
}

// Sum of `x` over this thread and those before it; `total` is that of all `threads`.
__device__ __noinline__ uint64_t scan(uint64_t x, int threads, uint64_t &total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    x = warp_scan(x);
    if (threads == 32) {
        total = __shfl_sync(ALL_LANES, x, 31);
        return x;
    }
    if (lane == 31) {
        shared.warp_sums[0][warp] = x;
    }
    barrier_of(threads);
    const uint64_t sum = lane < threads / 32 ? shared.warp_sums[0][lane] : 0;
    total = warp_sum(sum);
    x += warp_sum(lane < warp ? sum : 0);
    barrier_of(threads);
    return x;
}

// The keys of `threads` threads in ascending order. Through `shared.keys`.
__device__ __noinline__ uint64_t sort(uint64_t key, int threads) {
    const int thread = threadIdx.x;
    for (int run = 2; run <= threads; run *= 2) {
        for (int d = run / 2; d > 0; d /= 2) {
            uint64_t other;
            if (d >= 32) {
                barrier_of(threads);
                shared.keys[thread] = key;
                barrier_of(threads);
                other = shared.keys[thread ^ d];
            } else {
                other = __shfl_xor_sync(ALL_LANES, key, d);
            }
            const bool smaller = ((thread & d) == 0) == ((thread & run) == 0);
            key = (key < other) == smaller ? key : other;
        }
    }
    return key;
}

}  // namespace specrs
