// The blocks of a group that draw a request's tokens: what they share, and sums and maxima over warp, block and group.
#pragma once

#include "sample_row.cuh"

namespace specrs {

constexpr int BINS = 256;
// Tokens that all blocks together may gather, whose ranks are compared pair by pair; places for them, the same number a block.
constexpr int CANDIDATES = 256;
constexpr int KEYS = 704;
// Parts of a row whose largest logits are known: half-warps and the like.
constexpr int TOPS = 256;
constexpr int MOST_SUMS = 3;
static_assert(WARPS <= 32, "the warps of a block are summed in one warp");
static_assert(BINS <= THREADS && CANDIDATES <= THREADS, "a thread for each");

// Mailboxes of a block, by what they count: posts of both turns, bins, gathered ranks of both turns, the largest logits of warps,
// a published value. Those of two turns may be sent before a block has what came before them; between two of the others lies a
// post.
enum Box { BOX_POSTED, BOX_POSTED_NEXT, BOX_BINS, BOX_KEYS, BOX_KEYS_NEXT, BOX_TOPS, BOX_PUBLISHED, BOXES };

// A gathered token: its rank, or its id, and what it weighs.
struct alignas(16) Entry {
    uint64_t key, weight;
};

struct Shared {
    // The histogram of each block, and their sum.
    alignas(16) uint32_t bins[MAX_GROUP][BINS];
    uint32_t sums[BINS];
    // Ranks that the blocks gathered, in turns: a block may send while another still reads.
    alignas(16) uint64_t keys[2][KEYS];
    // All gathered tokens, by rank and by id.
    Entry by_rank[CANDIDATES], by_id[CANDIDATES];
    // The largest logits of the parts of a row, as the upper halves of keys.
    alignas(16) uint32_t tops[TOPS];
    Mailbox mailboxes[BOXES];
    // The values of each warp of the block and of each block of the group, in turns.
    uint64_t warp_sums[2][MOST_SUMS][WARPS];
    uint64_t posted[2][MOST_SUMS][MAX_GROUP];
    uint64_t kept[MAX_GROUP > WARPS ? MAX_GROUP : WARPS];
    uint64_t found, published;
    int32_t gathered, found_bin;
};
static_assert(KEYS % (2 * MAX_GROUP) == 0 && TOPS % (4 * MAX_GROUP) == 0, "copies are of 16 bytes");

// Named, not passed on: through a reference every access would be a generic one, and an atomic one slow.
__shared__ Shared shared;
static_assert(sizeof(Shared) + sizeof(walk_path) <= 46 << 10, "SHARED of src/device/kernels/sample.rs is too little");

// The blocks of a group at work on one request, as one of them sees it.
struct Team {
    Group group;
    // A bit for each mailbox: whether it was waited for an odd number of times.
    uint32_t odd;
    // Turns of posts and gathered ranks.
    uint32_t turn, keys_turn;

    // Wait until `bytes` have arrived, or so many from each other block. All threads of the block call.
    __device__ __forceinline__ void receive(Box box, uint32_t bytes) {
        await(shared.mailboxes[box], bytes, odd >> box);
        odd ^= 1u << box;
#if __CUDA_ARCH__ < 900
        __syncthreads();
#endif
    }
    __device__ __forceinline__ void receive_shares(Box box, uint32_t bytes) { receive(box, (group.size - 1) * bytes); }
};

// Open the mailboxes. A barrier of the group has to follow before anything is sent.
__device__ __forceinline__ Team begin_team() {
    if (threadIdx.x == 0) {
        for (Mailbox &mailbox : shared.mailboxes) {
            open_mailbox(mailbox);
        }
        shared.gathered = 0;
    }
    return {own_group(), 0, 0, 0};
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

// Post each warp's `x`: `reduce` makes one of those of a block's warps, which then stands in `posted[turn][n]` of every block.
// All threads call; what a block wrote before it calls, `send_more` may send. In turns, since a block may post again while another
// still reads; a barrier of the block lies in between.
template <int N, typename Reduce, typename Send>
__device__ __forceinline__ uint32_t post(Team &team, const uint64_t (&x)[N], Reduce reduce, Send send_more) {
    const uint32_t lane = threadIdx.x % 32, turn = team.turn;
    const Box box = turn == 0 ? BOX_POSTED : BOX_POSTED_NEXT;
    if (lane == 0) {
        for (int n = 0; n < N; ++n) {
            shared.warp_sums[turn][n][threadIdx.x / 32] = x[n];
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int n = 0; n < N; ++n) {
            const uint64_t value = reduce(lane < WARPS ? shared.warp_sums[turn][n][lane] : 0);
            if (lane < team.group.size) {
                send(shared.posted[turn][n][team.group.rank], lane, value, shared.mailboxes[box]);
            }
        }
    }
    send_more();
    team.receive(box, team.group.size * N * sizeof(uint64_t));
    team.turn ^= 1;
    return turn;
}

// Send the `bytes` at `at` to the same place in all other blocks, each by a warp.
__device__ __forceinline__ void share(const Team &team, const void *at, uint32_t bytes, Box box) {
    if (threadIdx.x % 32 == 0) {
        for (uint32_t block = threadIdx.x / 32; block < team.group.size; block += WARPS) {
            if (block != team.group.rank) {
                send_bytes(at, block, bytes, shared.mailboxes[box]);
            }
        }
    }
}

// The sum of each warp's `x` over the group, for all threads: `total`, and `before` over the warps before this one.
template <typename Send>
__device__ __forceinline__ uint64_t sum_warps(Team &team, uint64_t x, uint64_t &before, Send send_more) {
    const uint64_t own[1] = {x};
    const auto sum = [](uint64_t x) { return warp_sum(x); };
    const uint32_t turn = post(team, own, sum, send_more), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint64_t block = lane < team.group.size ? shared.posted[turn][0][lane] : 0;
    before = warp_sum(lane < team.group.rank ? block : 0) +
             warp_sum(lane < warp ? shared.warp_sums[turn][0][lane % WARPS] : 0);
    return warp_sum(block);
}

// The largest of each warp's keys over the group, for all threads.
__device__ __forceinline__ uint64_t largest(Team &team, uint64_t warp_key) {
    const uint64_t own[1] = {warp_key};
    const auto most = [](uint64_t x) { return warp_largest(x); };
    const uint32_t turn = post(team, own, most, [] {}), lane = threadIdx.x % 32;
    return warp_largest(lane < team.group.size ? shared.posted[turn][0][lane] : 0);
}

// Tell all blocks a value; one warp of the group calls, and all threads then `published`.
__device__ __forceinline__ void publish(uint64_t value, const Group &group) {
    if (threadIdx.x % 32 < group.size) {
        send(shared.published, threadIdx.x % 32, value, shared.mailboxes[BOX_PUBLISHED]);
    }
}

__device__ __forceinline__ uint64_t published(Team &team) {
    team.receive(BOX_PUBLISHED, sizeof(uint64_t));
    return shared.published;
}

// The sum of the weights of those of `n` entries, at most CANDIDATES, whose key is at most that of entry `place`. Some lanes of a
// warp add it up for each place: the first of them gets its number, and others n. All threads of the block call.
static __device__ __noinline__ uint64_t sum_upto(const Entry *entries, int n, int &place) {
    // Lanes a place, as a shift, where places are a power of two.
    const int shift = __clz(max(n, 32) - 1) - __clz(THREADS - 1), lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
    static_assert(CANDIDATES <= THREADS && THREADS <= 1024, "a lane for each place, and a warp's lanes are enough for a place");
    const int of = threadIdx.x >> shift;
    const uint64_t key = of < n ? entries[of].key : 0;
    uint64_t sum = 0;
#pragma unroll 4
    for (int i = lane; i < n; i += lanes) {
        const Entry entry = entries[i];
        sum += entry.key <= key ? entry.weight : 0;
    }
    for (int d = 1; d < lanes; d *= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, d);
    }
    place = lane == 0 ? min(of, n) : n;
    return sum;
}

}  // namespace specrs
