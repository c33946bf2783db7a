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

// Count how many of `count` scores come before candidate c: larger ones, and as good ones of a lower index. The candidates of a
// warp are `c - lane` and the 31 behind it, so that most blocks of 32 need one comparison a score. `count` is a multiple of 32.
// Summed as floats: those additions do not wait for the unit that compares.
__device__ __forceinline__ int32_t rank_of(const float4 *scores, int32_t count, int32_t c) {
    const float own = reinterpret_cast<const float *>(scores)[c];
    const int32_t own_block = c / 32 * 8;  // of four scores
    const auto one_if = [](bool before) { return before ? 1.0f : 0.0f; };
    float ranks[2] = {0.0f, 0.0f};
    int32_t four = 0;
#pragma unroll 4
    for (; four < own_block; ++four) {
        const float4 x = scores[four];
        ranks[0] += one_if(x.x >= own) + one_if(x.y >= own);
        ranks[1] += one_if(x.z >= own) + one_if(x.w >= own);
    }
#pragma unroll 4
    for (; four < own_block + 8; ++four) {
        const float4 x = scores[four];
        const int32_t lower = c - 4 * four;  // so many of the four have a lower index
        ranks[0] += one_if(x.x > own || (x.x == own && lower > 0)) + one_if(x.y > own || (x.y == own && lower > 1));
        ranks[1] += one_if(x.z > own || (x.z == own && lower > 2)) + one_if(x.w > own || (x.w == own && lower > 3));
    }
#pragma unroll 4
    for (; four < count / 4; ++four) {
        const float4 x = scores[four];
        ranks[0] += one_if(x.x > own) + one_if(x.y > own);
        ranks[1] += one_if(x.z > own) + one_if(x.w > own);
    }
    return static_cast<int32_t>(ranks[0] + ranks[1]);  // exact
}

// The limits of a request, checked.
struct Limits {
    int32_t within;  // candidates of its sound steps within its depth
    int32_t count;   // most candidates that the tree takes; -1 for a dead request, which has no root either
};

// Loads do not wait until it is known whether the request lives.
__device__ __forceinline__ Limits limits_of(const TreeBuildParams &p, int32_t request, int32_t live, bool reporter) {
    const bool lives = request < live;
    int32_t sound = reinterpret_cast<const int32_t *>(p.drafts.sound)[request];
    const int32_t depth = max(reinterpret_cast<const int32_t *>(p.max_depths)[request], 0);
    const int32_t nodes = max_nodes_of(p.trees, p.report, KERNEL_TREE_BUILD, request, reporter && lives);
    if (sound < 0 || sound > p.drafts.steps) {
        if (reporter && lives) {
            record_fault(p.report, KERNEL_TREE_BUILD, BUFFER_SOUND, request, -1, sound,
                         static_cast<int64_t>(p.drafts.steps) + 1);
        }
        sound = 0;
    }
    const int32_t levels = lives ? min(sound, depth) : 0;
    const int32_t within = levels == 0 ? 0 : p.drafts.topk + (levels - 1) * p.drafts.topk * p.drafts.topk;
    return {within, lives ? min(nodes - 1, within) : -1};
}

__device__ __forceinline__ void tree_build(const TreeBuildParams &p) {
    __shared__ alignas(16) float near_scores[MAX_CANDIDATES];
    __shared__ uint16_t node_of[MAX_CANDIDATES];
    __shared__ int32_t parents[MAX_TREE];
    __shared__ int32_t sums[64];
    __shared__ int32_t chosen_of[32];  // by each warp
    const int32_t request = blockIdx.x;
    const int32_t lane = threadIdx.x % 32;
    const int32_t warp = threadIdx.x / 32;
    const bool reporter = threadIdx.x == 0;
    const int32_t live =
        live_rows(p.live, p.trees.requests, p.report, KERNEL_TREE_BUILD, reporter && blockIdx.x == 0);
    const float least = p.min_score == 0 ? __uint_as_float(0xff800000u) : *reinterpret_cast<const float *>(p.min_score);
    const float *all_scores = reinterpret_cast<const float *>(p.drafts.scores);
    const bool counted = !(least <= __uint_as_float(0xff800000u));  // NaN too: no score reaches it

    // Loaded before it is known how many count, parents and tokens ahead of each turn: fewer trips to memory.
    const uint64_t base = static_cast<uint64_t>(request) * p.drafts.candidates;
    int32_t next_parent = -1;
    int32_t next_token = 0;
    const auto load_ahead = [&](int32_t c) {
        if (c < p.drafts.candidates) {
            next_parent = reinterpret_cast<const int32_t *>(p.drafts.parents)[base + c];
            next_token = reinterpret_cast<const int32_t *>(p.drafts.tokens)[base + c];
        }
    };
    load_ahead(threadIdx.x);
    for (int32_t c = threadIdx.x; c < p.drafts.candidates; c += blockDim.x) {
        near_scores[c] = score_at(all_scores, base + c);
        node_of[c] = 0;
    }
    const Limits limits = limits_of(p, request, live, reporter);
    // Scores that do not count come behind all that do.
    const int32_t padded = (limits.within + 31) / 32 * 32;
    for (int32_t c = threadIdx.x; c < padded; c += blockDim.x) {
        if (c >= limits.within) {
            near_scores[c] = __uint_as_float(0xff800000u);
        }
    }

    // Nodes of the trees before this one, and of all.
    int32_t begin = 0;
    int32_t total = 0;
    if (counted) {
        for (int32_t other = warp; other < live; other += blockDim.x / 32) {
            const Limits limits = limits_of(p, other, live, false);
            const float *scores = all_scores + static_cast<uint64_t>(other) * p.drafts.candidates;
            int32_t reach = 0;
            for (int32_t c = lane; c < limits.within; c += 32) {
                reach += score_at(scores, c) >= least;
            }
            reach = __reduce_add_sync(0xffffffffu, reach);
            if (lane == 0) {
                const int32_t size = 1 + min(limits.count, reach);
                begin += other < request ? size : 0;
                total += size;
            }
        }
    } else {
        for (int32_t other = threadIdx.x; other < p.trees.requests; other += blockDim.x) {
            const int32_t size = 1 + limits_of(p, other, live, false).count;
            begin += other < request ? size : 0;
            total += size;
        }
    }
    block_sums(begin, total, sums);

    int32_t *tokens = reinterpret_cast<int32_t *>(p.trees.tokens);
    float *scores = reinterpret_cast<float *>(p.trees.scores);
    if (reporter) {
        write_offsets(p.trees, request, begin, total);
    }
    write_dead_nodes(p.trees, request, total);
    if (limits.count < 0) {
        return;
    }

    if (threadIdx.x == 0) {
        parents[0] = -1;
        tokens[begin] = reinterpret_cast<const int32_t *>(p.trees.roots)[request];
        scores[begin] = 0.0f;
    }
    // Nodes, numbered in the order of candidates, `blockDim.x` candidates at a time.
    int32_t size = 1;
    for (int32_t first = 0; first < limits.within; first += blockDim.x) {
        const int32_t c = first + threadIdx.x;
        int32_t parent = next_parent;
        const int32_t token = next_token;
        load_ahead(c + blockDim.x);
        bool chosen = false;
        if (c < limits.within && near_scores[c] >= least) {
            chosen = rank_of(reinterpret_cast<const float4 *>(near_scores), padded, c) < limits.count;
        }
        const uint32_t chosen_lanes = __ballot_sync(0xffffffffu, chosen);
        if (lane == 0) {
            chosen_of[warp] = __popc(chosen_lanes);
        }
        __syncthreads();
        const int32_t of_warp = lane < static_cast<int32_t>(blockDim.x / 32) ? chosen_of[lane] : 0;
        const int32_t before = __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
        const int32_t node = size + before + __popc(chosen_lanes & ((1u << lane) - 1));
        if (chosen) {
            node_of[c] = static_cast<uint16_t>(node);
        }
        __syncthreads();
        if (chosen) {
            if (parent >= c || parent < -1) {
                record_fault(p.report, KERNEL_TREE_BUILD, BUFFER_CANDIDATE_PARENTS, request, c, parent, c);
                parent = -1;
            }
            parents[node] = parent < 0 ? 0 : node_of[parent];
            tokens[begin + node] = token;
            scores[begin + node] = near_scores[c];
        }
        size += __reduce_add_sync(0xffffffffu, of_warp);
    }
    __syncthreads();
    write_links(p.trees, parents, begin, size);
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(512) tree_build(const __grid_constant__ specrs::TreeBuildParams p) {
    specrs::tree_build(p);
}
