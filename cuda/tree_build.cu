// The trees of a batch from the candidates of its draft steps: `DraftBeams::finish_above` of `src/host/select`, bit for
// bit, and the ancestor bits of verification. One block a request.
//
// Request i gets its root and the best `max_nodes[i] - 1` candidates of its sound steps within `max_depths[i]`, by
// cumulative log-probability, ties by lower index, none below the least score; in the order of their indices. Ranks are
// counted, not sorted: a rank is the number of candidates that come before.
//
// Trees lie behind one another, so a block needs the sizes of those before its own. A size follows from the limits alone
// where there is no least score; else the block counts other requests' candidates too. No block waits for another.
#include "block.cuh"
#include "rows.cuh"
#include "trees.cuh"

namespace specrs {

constexpr int MAX_CANDIDATES = 4096;
constexpr int MAX_TREE = 1024;  // `bounds::MAX_DRAFT_TOKENS`

// Count how many of `count` scores from `first` on come before candidate c: larger ones, and as good ones of a lower
// index. The candidates of a warp are `c - lane` and the 31 behind it, so that most blocks of 32 need one comparison a
// score.
__device__ __forceinline__ int32_t rank_of(const float *scores, int32_t count, int32_t c) {
    const float own = scores[c];
    const int32_t own_block = c / 32 * 32;
    int32_t rank = 0;
    int32_t other = 0;
#pragma unroll 8
    for (; other < own_block; ++other) {
        rank += scores[other] >= own;
    }
    for (; other < min(own_block + 32, count); ++other) {
        rank += scores[other] > own || (scores[other] == own && other < c);
    }
#pragma unroll 8
    for (; other < count; ++other) {
        rank += scores[other] > own;
    }
    return rank;
}

// The limits of a request, checked.
struct Limits {
    int32_t within;  // candidates of its sound steps within its depth
    int32_t count;   // most candidates that the tree takes
};

__device__ __forceinline__ Limits limits_of(const TreeBuildParams &p, int32_t request, int32_t live, bool reporter) {
    if (request >= live) {
        return {0, -1};  // no root either
    }
    int32_t sound = reinterpret_cast<const int32_t *>(p.drafts.sound)[request];
    if (sound < 0 || sound > p.drafts.steps) {
        if (reporter) {
            record_fault(p.report, KERNEL_TREE_BUILD, BUFFER_SOUND, request, -1, sound,
                         static_cast<int64_t>(p.drafts.steps) + 1);
        }
        sound = 0;
    }
    const int32_t nodes = max_nodes_of(p.trees, p.report, KERNEL_TREE_BUILD, request, reporter);
    const int32_t levels = min(sound, max(reinterpret_cast<const int32_t *>(p.max_depths)[request], 0));
    const int32_t within = levels == 0 ? 0 : p.drafts.topk + (levels - 1) * p.drafts.topk * p.drafts.topk;
    return {within, min(nodes - 1, within)};
}

__device__ __forceinline__ void tree_build(const TreeBuildParams &p) {
    __shared__ float near_scores[MAX_CANDIDATES];
    __shared__ uint16_t node_of[MAX_CANDIDATES];
    __shared__ int32_t parents[MAX_TREE];
    __shared__ int32_t sums[33];
    const int32_t request = blockIdx.x;
    const bool reporter = threadIdx.x == 0;
    const int32_t live =
        live_rows(p.live, p.trees.requests, p.report, KERNEL_TREE_BUILD, reporter && blockIdx.x == 0);
    const float least = p.min_score == 0 ? __uint_as_float(0xff800000u) : *reinterpret_cast<const float *>(p.min_score);
    const float *all_scores = reinterpret_cast<const float *>(p.drafts.scores);
    const bool counted = !(least <= __uint_as_float(0xff800000u));  // NaN too: no score reaches it

    // Loaded before it is known how many count: one trip to memory less.
    const uint64_t base = static_cast<uint64_t>(request) * p.drafts.candidates;
    for (int32_t c = threadIdx.x; c < p.drafts.candidates; c += blockDim.x) {
        near_scores[c] = score_at(all_scores, base + c);
        node_of[c] = 0;
    }

    // Sizes of all trees.
    int32_t mine = 0;
    int32_t all = 0;
    if (counted) {
        const int32_t lane = threadIdx.x % 32;
        for (int32_t other = threadIdx.x / 32; other < live; other += blockDim.x / 32) {
            const Limits limits = limits_of(p, other, live, false);
            const float *scores = all_scores + static_cast<uint64_t>(other) * p.drafts.candidates;
            int32_t reach = 0;
            for (int32_t c = lane; c < limits.within; c += 32) {
                reach += score_at(scores, c) >= least;
            }
            reach = __reduce_add_sync(0xffffffffu, reach);
            if (lane == 0) {
                const int32_t size = 1 + min(limits.count, reach);
                mine += other < request ? size : 0;
                all += size;
            }
        }
    } else {
        for (int32_t other = threadIdx.x; other < live; other += blockDim.x) {
            const int32_t size = 1 + limits_of(p, other, live, false).count;
            mine += other < request ? size : 0;
            all += size;
        }
    }
    int32_t begin, total;
    block_before(mine, sums, begin);
    block_before(all, sums, total);

    int32_t *tokens = reinterpret_cast<int32_t *>(p.trees.tokens);
    float *scores = reinterpret_cast<float *>(p.trees.scores);
    if (reporter) {
        write_offsets(p.trees, request, begin, total);
    }
    write_dead_nodes(p.trees, request, total);
    const Limits limits = limits_of(p, request, live, reporter);
    if (limits.count < 0) {
        return;
    }

    if (threadIdx.x == 0) {
        parents[0] = -1;
        tokens[begin] = reinterpret_cast<const int32_t *>(p.trees.roots)[request];
        scores[begin] = 0.0f;
    }
    __syncthreads();
    // Nodes, numbered in the order of candidates, `blockDim.x` candidates at a time.
    int32_t size = 1;
    for (int32_t first = 0; first < limits.within; first += blockDim.x) {
        const int32_t c = first + threadIdx.x;
        bool chosen = false;
        if (c < limits.within && near_scores[c] >= least) {
            chosen = rank_of(near_scores, limits.within, c) < limits.count;
        }
        int32_t found;
        const int32_t node = size + block_before(chosen, sums, found);
        if (chosen) {
            node_of[c] = static_cast<uint16_t>(node);
        }
        __syncthreads();
        if (chosen) {
            int32_t parent = reinterpret_cast<const int32_t *>(p.drafts.parents)[base + c];
            if (parent >= c || parent < -1) {
                record_fault(p.report, KERNEL_TREE_BUILD, BUFFER_CANDIDATE_PARENTS, request, c, parent, c);
                parent = -1;
            }
            parents[node] = parent < 0 ? 0 : node_of[parent];
            tokens[begin + node] = reinterpret_cast<const int32_t *>(p.drafts.tokens)[base + c];
            scores[begin + node] = near_scores[c];
        }
        size += found;
    }
    __syncthreads();
    write_links(p.trees, parents, begin, size);
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(512) tree_build(const __grid_constant__ specrs::TreeBuildParams p) {
    specrs::tree_build(p);
}
