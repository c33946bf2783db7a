// Unites two trees into one for each request: its own tree, which the device drafted, and another one, which the host
// made. Equal paths are one node, whose score is the greater one. The best `max_nodes[i]` nodes stay, by score, ties by
// lower index: own nodes first, then the other's. The deepest path is numbered first, as exact attention wants it; then
// the rest, own nodes first. `unite` of tests/python/reference_unite.py is the reference. One block a request.
//
// A block needs the sizes of the trees before its own, and so counts which nodes of these are equal too: a warp a
// request. No block waits for another.
#include "block.cuh"
#include "rows.cuh"
#include "trees.cuh"

namespace specrs {

constexpr int MOST = 64;  // nodes of each of the two trees: `MAX_UNITED` of src/device/kernels/tree_unite.rs
constexpr uint32_t ALL = 0xffffffffu;
constexpr int32_t OWN = 1;    // bits of `origins`
constexpr int32_t OTHER = 2;

// A tree of a request among all.
struct Tree {
    int32_t begin;
    int32_t size;
    const int32_t *tokens;
    const int32_t *parents;
    const float *scores;
};

// A root alone, of which nothing is read, if the offsets describe no tree.
__device__ __forceinline__ Tree tree_of(const TreeUniteParams &p, bool own, int32_t request, bool reporter) {
    const GivenTrees &given = own ? p.own : p.other;
    const int32_t *offsets = reinterpret_cast<const int32_t *>(given.offsets);
    Tree tree = {offsets[request], 1, reinterpret_cast<const int32_t *>(given.tokens),
                 reinterpret_cast<const int32_t *>(given.parents), reinterpret_cast<const float *>(given.scores)};
    const int64_t end = offsets[request + 1];
    const int64_t size = end - tree.begin;
    const int64_t capacity = static_cast<int64_t>(p.trees.requests) * p.trees.draft_tokens;
    if (size < 1 || size > p.trees.draft_tokens) {
        if (reporter) {
            record_fault(p.report, KERNEL_TREE_UNITE, BUFFER_TREE, request, own ? 0 : 1, size,
                         static_cast<int64_t>(p.trees.draft_tokens) + 1);
        }
        return tree;
    }
    if (tree.begin < 0 || end > capacity) {
        if (reporter) {
            record_fault(p.report, KERNEL_TREE_UNITE, BUFFER_TREES, request, own ? 0 : 1,
                         tree.begin < 0 ? tree.begin : end, capacity + 1);
        }
        return tree;
    }
    tree.size = static_cast<int32_t>(size);
    return tree;
}

// The parent of a node that is no root; the root where it has none before it.
__device__ __forceinline__ int32_t parent_of(const TreeUniteParams &p, const Tree &tree, int32_t node, int32_t request,
                                             bool reporter) {
    const int32_t parent = tree.parents[tree.begin + node];
    if (in_bounds(parent, node)) {
        return parent;
    }
    if (reporter) {
        record_fault(p.report, KERNEL_TREE_UNITE, BUFFER_TREE_PARENTS, request, node, parent, node);
    }
    return 0;
}

// Place the other tree's nodes among all of a request: at an own node's index, or behind these. A warp calls it;
// returns the number of nodes. `places`, where given, gets MOST entries.
__device__ __forceinline__ int32_t place(const TreeUniteParams &p, const Tree &own, const Tree &other, int32_t request,
                                         bool reporter, int32_t *places) {
    const int32_t lane = threadIdx.x % 32;
    int32_t token[2], parent[2], theirs[2], above[2];
    int32_t at[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int32_t node = lane + 32 * half;
        const bool mine = node > 0 && node < own.size;
        token[half] = mine ? own.tokens[own.begin + node] : 0;
        parent[half] = mine ? parent_of(p, own, node, request, reporter) : -1;
        const bool its = node > 0 && node < other.size;
        theirs[half] = its ? other.tokens[other.begin + node] : 0;
        above[half] = its ? parent_of(p, other, node, request, reporter) : 0;
    }
    int32_t count = own.size + other.size - 1;
    for (int32_t node = 1; node < other.size; ++node) {
        const bool high = node >= 32;
        const int32_t wanted = __shfl_sync(ALL, high ? theirs[1] : theirs[0], node % 32);
        const int32_t up = __shfl_sync(ALL, high ? above[1] : above[0], node % 32);
        const int32_t under = __shfl_sync(ALL, up >= 32 ? at[1] : at[0], up % 32);
        const uint32_t first = __ballot_sync(ALL, parent[0] == under && token[0] == wanted);
        const uint32_t second = __ballot_sync(ALL, parent[1] == under && token[1] == wanted);
        const bool equal = (first | second) != 0;
        const int32_t found = first != 0 ? __ffs(first) - 1 : 31 + __ffs(second);
        const int32_t where = equal ? found : own.size + node - 1;
        count -= equal;
        at[0] = node == lane ? where : at[0];
        at[1] = node == lane + 32 ? where : at[1];
    }
    if (places != nullptr) {
        places[lane] = at[0];
        places[lane + 32] = at[1];
    }
    return count;
}

__device__ __forceinline__ void tree_unite(const TreeUniteParams &p) {
    __shared__ int32_t places[MOST];
    __shared__ int32_t parents[2 * MOST];
    __shared__ float scores[2 * MOST];
    __shared__ bool chosen[2 * MOST];
    __shared__ bool spine[2 * MOST];
    __shared__ int32_t depths[2 * MOST];
    __shared__ int32_t numbers[2 * MOST];
    __shared__ int32_t numbered[MOST];
    __shared__ int32_t sums[33];
    __shared__ int32_t longest;
    const int32_t request = blockIdx.x;
    const int32_t x = threadIdx.x;
    const bool reporter = x == 0;
    const int32_t live =
        live_rows(p.live, p.trees.requests, p.report, KERNEL_TREE_UNITE, reporter && blockIdx.x == 0);

    int32_t before = 0;
    int32_t all = 0;
    for (int32_t one = x / 32; one < live; one += blockDim.x / 32) {
        const bool mine = one == request;
        const bool tells = mine && x % 32 == 0;
        const int32_t most = max_nodes_of(p.trees, p.report, KERNEL_TREE_UNITE, one, tells);
        const Tree own = tree_of(p, true, one, tells);
        const Tree other = tree_of(p, false, one, tells);
        const int32_t size = min(most, place(p, own, other, one, mine, mine ? places : nullptr));
        if (x % 32 == 0) {
            before += one < request ? size : 0;
            all += size;
        }
    }
    int32_t begin, total;
    block_before(before, sums, begin);
    block_before(all, sums, total);
    if (reporter) {
        write_offsets(p.trees, request, begin, total);
    }
    write_dead_nodes(p.trees, request, total);
    const int32_t capacity = p.trees.requests * p.trees.draft_tokens;
    for (int32_t i = total + request * blockDim.x + x; i < capacity; i += p.trees.requests * blockDim.x) {
        reinterpret_cast<int32_t *>(p.origins)[i] = 0;
    }
    if (request >= live) {
        return;
    }

    // All nodes: own ones, then those of the other tree that have no equal among these.
    const int32_t most = max_nodes_of(p.trees, p.report, KERNEL_TREE_UNITE, request, false);
    const Tree own = tree_of(p, true, request, false);
    const Tree other = tree_of(p, false, request, false);
    const int32_t end = own.size + other.size - 1;
    int32_t token = 0;
    int32_t origin = 0;
    bool here = false;
    if (x < 2 * MOST) {
        float score = 0.0f;
        int32_t parent = -1;
        const int32_t its = x - own.size + 1;
        if (x == 0) {
            token = reinterpret_cast<const int32_t *>(p.trees.roots)[request];
        } else if (x < own.size) {
            here = true;
            token = own.tokens[own.begin + x];
            parent = parent_of(p, own, x, request, false);
            score = score_at(own.scores, own.begin + x);
            origin = OWN;
            for (int32_t node = 1; node < other.size; ++node) {
                if (places[node] == x) {
                    score = fmaxf(score, score_at(other.scores, other.begin + node));
                    origin |= OTHER;
                }
            }
        } else if (x < end && places[its] == x) {
            here = true;
            token = other.tokens[other.begin + its];
            parent = places[parent_of(p, other, its, request, false)];
            score = score_at(other.scores, other.begin + its);
            origin = OTHER;
        }
        parents[x] = parent;
        scores[x] = score;
        chosen[x] = here;
        spine[x] = x == 0;
    }
    __syncthreads();
    bool stays = x == 0;
    if (here) {
        int32_t rank = 0;
        for (int32_t y = 1; y < end; ++y) {
            rank += chosen[y] && (scores[y] > scores[x] || (scores[y] == scores[x] && y < x));
        }
        stays = rank < most - 1;
    }
    __syncthreads();
    if (x < 2 * MOST) {
        chosen[x] = stays;
    }
    __syncthreads();
    // A parent scores no less than its child and stands before it, so it stays where the child does; the root replaces
    // a parent that does not stay.
    int32_t up = -1;
    if (stays && x > 0) {
        up = chosen[parents[x]] ? parents[x] : 0;
    }
    __syncthreads();
    if (x < 2 * MOST) {
        parents[x] = up;
    }
    __syncthreads();
    if (x < 2 * MOST) {
        depths[x] = stays ? static_cast<int32_t>(form::node_depth(parents, x)) : -1;
    }
    __syncthreads();
    if (stays) {
        bool tip = true;
        for (int32_t y = 0; y < end; ++y) {
            const bool better = scores[y] > scores[x] || (scores[y] == scores[x] && y < x);
            tip = tip && !(depths[y] > depths[x] || (depths[y] == depths[x] && better));
        }
        if (tip) {
            longest = depths[x] + 1;
            for (int32_t node = x; node > 0; node = parents[node]) {
                spine[node] = true;
            }
        }
    }
    __syncthreads();
    if (stays) {
        int32_t number = depths[x];
        if (!spine[x]) {
            number = longest;
            for (int32_t y = 0; y < x; ++y) {
                number += chosen[y] && !spine[y];
            }
        }
        numbers[x] = number;
    }
    __syncthreads();
    if (stays) {
        const int32_t number = numbers[x];
        numbered[number] = x == 0 ? -1 : numbers[up];
        reinterpret_cast<int32_t *>(p.trees.tokens)[begin + number] = token;
        reinterpret_cast<float *>(p.trees.scores)[begin + number] = scores[x];
        reinterpret_cast<int32_t *>(p.origins)[begin + number] = origin;
    }
    int32_t size;
    block_before(stays, sums, size);
    write_links(p.trees, numbered, begin, size);
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(512) tree_unite(const __grid_constant__ specrs::TreeUniteParams p) {
    specrs::tree_unite(p);
}
