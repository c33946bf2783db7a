// Trees of a batch from the lists of a block drafter's levels: `draft::list_tree` of the host, node for node, and the
// rows of the pass that gives these lists.
//
// `block_rows`: the rows of each request's block, which begins with its root and goes on with a mask, no further than
// the context; where something else gives the first level (`skipped` is -1), masks alone. `tree_lists`: the best tree of each request whose levels do not depend on the path. A path's score is
// the sum of its tokens' log-probabilities, so the best open node is taken again and again; it opens its next sibling
// and its first child. A warp grows a tree with the open nodes in registers, two a lane. The deepest path is numbered
// first. Where a path would leave it by more nodes than attention takes, the tree is grown again without these.
//
// Trees lie behind one another, so a block needs the sizes of those before its own, and grows these too: a warp a
// request. No block waits for another.
#include "block.cuh"
#include "rows.cuh"
#include "trees.cuh"

namespace specrs {

constexpr int MOST = 64;   // nodes of a tree: `MAX_LISTED` of src/device/kernels/tree_lists.rs
constexpr int WARPS = 16;  // of a block
constexpr int MOST_OFF = ATTENTION_TAIL;  // nodes that a path may have off the spine
constexpr uint32_t ALL = 0xffffffffu;

// Nodes of a tree in the order in which they were taken.
struct Grown {
    float scores[MOST];
    uint8_t levels[MOST];   // 0 of the root
    uint8_t ranks[MOST];    // in the list of its level
    uint8_t parents[MOST];
    uint8_t offs[MOST];     // nodes of its path off the spine
};

// An open node as two words, of which a greater pair is better: its score, and then the place of the node, whose level
// comes first, then its rank, then its parent. A score of 0 is none.
struct Open {
    uint32_t score;
    uint32_t place;
};

// Floats in the order of unsigned words; what is above -inf is above 0.
__device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(uint32_t x) {
    return __uint_as_float((x & 0x80000000u) != 0 ? x ^ 0x80000000u : ~x);
}

__device__ __forceinline__ Open opened(const TreeListsParams &p, int32_t request, int32_t levels, float above,
                                       int32_t level, int32_t rank, int32_t parent) {
    if (level >= levels || rank >= p.width) {
        return Open{0, 0};
    }
    const uint64_t row = static_cast<uint64_t>(request) * p.levels + level;
    const float score = above + score_at(reinterpret_cast<const float *>(p.scores), row * p.width + rank);
    if (!(score > __uint_as_float(0xff800000u))) {
        return Open{0, 0};
    }
    return Open{ordered(score), ~static_cast<uint32_t>(level << 16 | rank << 8 | parent)};
}

// Take up to `most` nodes, the root with them, best first. With a spine, the ranks of its nodes, a path ends where it
// would have more than MOST_OFF nodes off it, and the spine grows by the best child of its end. A warp calls it.
__device__ __forceinline__ int32_t grow(const TreeListsParams &p, int32_t request, int32_t levels, int32_t most,
                                        const uint8_t *spine, int32_t spine_levels, Grown &tree) {
    const int32_t lane = threadIdx.x % 32;
    if (lane == 0) {
        tree.scores[0] = 0.0f;
        tree.levels[0] = tree.ranks[0] = tree.parents[0] = tree.offs[0] = 0;
    }
    __syncwarp();
    const Open first = opened(p, request, levels, 0.0f, 0, 0, 0);
    Open open[2] = {lane == 0 ? first : Open{0, 0}, {0, 0}};
    int32_t tip = 0;
    int32_t size = 1;
    while (size < most) {
        const uint32_t best = __reduce_max_sync(ALL, max(open[0].score, open[1].score));
        if (best == 0) {
            break;
        }
        const uint32_t mine = max(open[0].score == best ? open[0].place : 0, open[1].score == best ? open[1].place : 0);
        const uint32_t taken = __reduce_max_sync(ALL, mine);
        const int32_t level = ~taken >> 16;
        const int32_t rank = ~taken >> 8 & 255;
        const int32_t parent = ~taken & 255;
        const Open sibling = opened(p, request, levels, tree.scores[parent], level, rank + 1, parent);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (open[half].score == best && open[half].place == taken) {
                open[half] = sibling;
            }
        }
        const bool on_spine = spine_levels > 0 && parent == tip && (level >= spine_levels || spine[level] == rank);
        const int32_t off = spine_levels == 0 || on_spine ? 0 : tree.offs[parent] + 1;
        if (off > MOST_OFF) {
            continue;
        }
        const float score = unordered(best);
        if (lane == 0) {
            tree.scores[size] = score;
            tree.levels[size] = static_cast<uint8_t>(level + 1);
            tree.ranks[size] = static_cast<uint8_t>(rank);
            tree.parents[size] = static_cast<uint8_t>(parent);
            tree.offs[size] = static_cast<uint8_t>(off);
        }
        __syncwarp();
        tip = on_spine ? size : tip;
        // A node's child has the place of its number; its sibling has taken the node's own.
        const Open child = opened(p, request, levels, score, level + 1, 0, size);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (size == lane + 32 * half) {
                open[half] = child;
            }
        }
        ++size;
    }
    return size;
}

// Nodes that a path from the spine to a node has off it.
__device__ __forceinline__ int32_t off_spine(const Grown &tree, uint64_t spine, int32_t node) {
    int32_t off = 0;
    for (; (spine >> node & 1) == 0; node = tree.parents[node]) {
        ++off;
    }
    return off;
}

// The tree of a request: its size, and its spine as bits. `ranks` has room for those of the spine. A warp calls it.
__device__ __forceinline__ int32_t tree_of(const TreeListsParams &p, int32_t request, int32_t levels, int32_t most,
                                           uint8_t *ranks, Grown &tree, uint64_t &spine) {
    const int32_t lane = threadIdx.x % 32;
    int32_t size = grow(p, request, levels, most, ranks, 0, tree);
    // The first of the deepest nodes, which scores higher than the others.
    int32_t deepest = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int32_t node = lane + 32 * half;
        deepest = max(deepest, node < size ? tree.levels[node] << 8 | (255 - node) : 0);
    }
    deepest = __reduce_max_sync(ALL, deepest);
    const int32_t depth = deepest >> 8;
    spine = 1;
    for (int32_t node = 255 - (deepest & 255); node > 0; node = tree.parents[node]) {
        spine |= 1ull << node;
        if (lane == 0) {
            ranks[tree.levels[node] - 1] = tree.ranks[node];
        }
    }
    if (depth <= MOST_OFF) {
        return size;
    }
    __syncwarp();
    int32_t off = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        off = max(off, lane + 32 * half < size ? off_spine(tree, spine, lane + 32 * half) : 0);
    }
    if (__reduce_max_sync(ALL, off) > MOST_OFF) {
        size = grow(p, request, levels, most, ranks, depth, tree);
        const uint64_t low = __ballot_sync(ALL, lane < size && tree.offs[lane] == 0);
        const uint64_t high = __ballot_sync(ALL, lane + 32 < size && tree.offs[lane + 32] == 0);
        spine = low | high << 32;
    }
    return size;
}

// The levels of a request that has a distribution in each of them, 0 for another; `sound` says which. A warp calls it.
__device__ __forceinline__ int32_t levels_of(const TreeListsParams &p, int32_t request, bool &sound) {
    const int32_t lane = threadIdx.x % 32;
    const int32_t levels = min(max(reinterpret_cast<const int32_t *>(p.max_depths)[request], 0), p.levels);
    bool bad = false;
    for (int32_t level = lane; level < levels; level += 32) {
        bad = bad || reinterpret_cast<const int32_t *>(p.sound)[static_cast<int64_t>(request) * p.levels + level] == 0;
    }
    sound = __ballot_sync(ALL, bad) == 0;
    return sound ? levels : 0;
}

__device__ __forceinline__ void tree_lists(const TreeListsParams &p) {
    __shared__ Grown trees[WARPS];
    __shared__ Grown own;
    __shared__ uint8_t ranks[WARPS][MOST];
    __shared__ int32_t parents[MOST];
    __shared__ int32_t sums[33];
    __shared__ uint64_t own_spine;
    __shared__ int32_t own_size;
    const int32_t request = blockIdx.x;
    const int32_t x = threadIdx.x;
    const int32_t warp = x / 32;
    const bool reporter = x == 0;
    const int32_t live =
        live_rows(p.live, p.trees.requests, p.report, KERNEL_TREE_LISTS, reporter && blockIdx.x == 0);
    int32_t before = 0;
    int32_t all = 0;
    for (int32_t one = warp; one < live; one += WARPS) {
        const bool mine = one == request;
        const bool tells = mine && x % 32 == 0;
        const int32_t most = max_nodes_of(p.trees, p.report, KERNEL_TREE_LISTS, one, tells);
        bool sound = true;
        const int32_t levels = levels_of(p, one, sound);
        uint64_t spine = 1;
        const int32_t size = tree_of(p, one, levels, most, ranks[warp], mine ? own : trees[warp], spine);
        if (tells) {
            own_spine = spine;
            own_size = size;
            reinterpret_cast<int32_t *>(p.sound_out)[one] = sound ? 1 : 0;
        }
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
    if (request >= live) {
        if (reporter) {
            reinterpret_cast<int32_t *>(p.sound_out)[request] = 1;
        }
        return;
    }

    const uint64_t spine = own_spine;
    const int32_t size = own_size;
    const auto number_of = [&](int32_t node) {
        const uint64_t lower = (1ull << node) - 1;
        return (spine >> node & 1) != 0 ? static_cast<int32_t>(own.levels[node])
                                        : __popcll(spine) + __popcll(~spine & lower);
    };
    if (x < size) {
        const int32_t number = number_of(x);
        int32_t token = 0;
        if (x == 0) {
            parents[0] = -1;
            token = reinterpret_cast<const int32_t *>(p.trees.roots)[request];
        } else {
            parents[number] = number_of(own.parents[x]);
            const uint64_t row = static_cast<uint64_t>(request) * p.levels + own.levels[x] - 1;
            token = reinterpret_cast<const int32_t *>(p.ids)[row * p.width + own.ranks[x]];
            if (p.to_target != 0) {
                if (in_bounds(token, p.draft_vocab)) {
                    token = reinterpret_cast<const int32_t *>(p.to_target)[token];
                } else {
                    record_fault(p.report, KERNEL_TREE_LISTS, BUFFER_TARGET_IDS, request, x, token, p.draft_vocab);
                    token = 0;
                }
            }
        }
        reinterpret_cast<int32_t *>(p.trees.tokens)[begin + number] = token;
        reinterpret_cast<float *>(p.trees.scores)[begin + number] = own.scores[x];
    }
    __syncthreads();
    write_links(p.trees, parents, begin, size);
}

// Rows of a request's block: none where it does not draft, and none beyond the context.
__device__ __forceinline__ int32_t block_of(const BlockRowsParams &p, int32_t live, int32_t request) {
    if (request >= live || reinterpret_cast<const int32_t *>(p.depths)[request] <= 0) {
        return 0;
    }
    const int32_t len = reinterpret_cast<const int32_t *>(p.lens)[request];
    return len < 0 ? 0 : max(min(p.rows, p.context - len), 0);
}

__device__ __forceinline__ void block_rows(const BlockRowsParams &p) {
    __shared__ int32_t sums[64];
    const int32_t request = blockIdx.x;
    const int32_t x = threadIdx.x;
    const int32_t live = live_rows(p.live, p.requests, p.report, KERNEL_BLOCK_ROWS, x == 0 && request == 0);
    int32_t begin = 0;
    int32_t total = 0;
    for (int32_t other = x; other < p.requests; other += blockDim.x) {
        const int32_t count = block_of(p, live, other);
        begin += other < request ? count : 0;
        total += count;
    }
    block_sums(begin, total, sums);
    const int32_t count = block_of(p, live, request);
    const int32_t levels =
        min(min(reinterpret_cast<const int32_t *>(p.depths)[request], p.levels), max(count - p.skipped, 0));
    int32_t *tokens = reinterpret_cast<int32_t *>(p.tokens);
    uint64_t *masks = reinterpret_cast<uint64_t *>(p.masks);
    if (x == 0) {
        int32_t *offsets = reinterpret_cast<int32_t *>(p.offsets);
        offsets[request] = begin;
        if (request == p.requests - 1) {
            offsets[p.requests] = total;
        }
        reinterpret_cast<int32_t *>(p.levels_out)[request] = max(levels, 0);
        reinterpret_cast<int32_t *>(p.nodes_out)[request] =
            min(reinterpret_cast<const int32_t *>(p.nodes)[request], p.most);
    }
    for (int32_t row = x; row < count; row += blockDim.x) {
        const bool is_root = row == 0 && p.skipped >= 0;
        tokens[begin + row] = is_root ? reinterpret_cast<const int32_t *>(p.roots)[request] : p.mask_token;
        masks[begin + row] = ~0ull >> (64 - count);
    }
    for (int32_t row = total + request * blockDim.x + x; row < p.requests * p.rows; row += p.requests * blockDim.x) {
        tokens[row] = 0;
        masks[row] = 0;
    }
    for (int32_t level = x; level < p.levels; level += blockDim.x) {
        const int32_t place = request * p.levels + level;
        const int32_t row = p.skipped + level;
        reinterpret_cast<int32_t *>(p.wanted)[place] = level >= levels ? 0 : row < 0 ? -1 : begin + row;
        reinterpret_cast<float *>(p.row_heats)[place] = reinterpret_cast<const float *>(p.heats)[request];
    }
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(512) tree_lists(const __grid_constant__ specrs::TreeListsParams p) {
    specrs::tree_lists(p);
}

extern "C" __global__ void __launch_bounds__(128) block_rows(const __grid_constant__ specrs::BlockRowsParams p) {
    specrs::block_rows(p);
}
