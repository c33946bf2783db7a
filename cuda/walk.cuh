// Walks over token trees, by any kernel that draws the tokens, and gathers them into flat arrays: `Accepts` of
// `src/round`.
//
// Every verifying kernel has the parameters of verification, `VerifyParams`.
#pragma once

#include "block.cuh"
#include "rows.cuh"

namespace specrs {

constexpr int32_t NO_TOKEN = -1;

struct Range {
    int32_t begin;
    int32_t size;
};

// The nodes of a request; none where it is dead, its offsets are wrong or its tree is too large.
__device__ __forceinline__ Range nodes_of(const VerifyParams &p, Kernel kernel, int32_t request, int32_t live,
                                          bool reporter) {
    if (request >= live) {
        return {0, 0};
    }
    const int32_t *offsets = reinterpret_cast<const int32_t *>(p.offsets);
    const int32_t begin = offsets[request];
    const int32_t end = offsets[request + 1];
    if (begin < 0 || end < begin || end > p.nodes) {
        if (reporter) {
            const bool order = begin >= 0 && end >= 0 && end <= p.nodes;
            record_fault(p.report, kernel, order ? BUFFER_OFFSETS_DECREASE : BUFFER_TREES, request, -1,
                         begin < 0 ? begin : end, static_cast<int64_t>(p.nodes) + 1);
        }
        return {0, 0};
    }
    if (end - begin > p.max_nodes) {
        if (reporter) {
            record_fault(p.report, kernel, BUFFER_TREE, request, -1, end - begin - 1, p.max_nodes);
        }
        return {0, 0};
    }
    return {begin, end - begin};
}

// The first of `size` nodes whose parent is `node` and whose token is `token`; -1 if there is none. For a whole warp.
__device__ __forceinline__ int32_t child_with(const int32_t *parents, const int32_t *tokens, int32_t size, int32_t node,
                                              int32_t token) {
    for (int32_t first = node + 1; first < size; first += 32) {
        const int32_t j = first + threadIdx.x % 32;
        // Both are loaded before either is compared.
        const int32_t parent = j < size ? parents[j] : -1, carried = j < size ? tokens[j] : 0;
        const uint32_t mask = __ballot_sync(0xffffffffu, parent == node && carried == token);
        if (mask != 0) {
            return first + __ffs(mask) - 1;
        }
    }
    return -1;
}

// A walk under way; its entries stand in `p.walk_paths` and `p.walk_tokens`, `p.max_path` a request.
struct Walk {
    int32_t node;
    int32_t length;
};

// Take the step at `walk.node`, where `token` was drawn (NO_TOKEN: none could be). Whether the walk goes on. For a whole
// warp; `writer` is true in one thread of those that call.
__device__ __forceinline__ bool step(const VerifyParams &p, Kernel kernel, int32_t request, Range range,
                                     const int32_t *parents, const int32_t *tokens, int32_t token, Walk &walk,
                                     bool writer) {
    const int64_t at = static_cast<int64_t>(request) * p.max_path + walk.length;
    if (writer) {
        reinterpret_cast<int32_t *>(p.walk_paths)[at] = walk.node;
        reinterpret_cast<int32_t *>(p.walk_tokens)[at] = token;
    }
    walk.length += 1;
    if (token == NO_TOKEN) {
        return false;
    }
    const int32_t child = child_with(parents, tokens, range.size, walk.node, token);
    if (child < 0) {
        return false;
    }
    if (walk.length >= p.max_path) {
        if (writer) {
            record_fault(p.report, kernel, BUFFER_PATH, request, child, walk.length, p.max_path);
        }
        return false;  // the emitted tokens are right; there are only fewer of them
    }
    walk.node = child;
    return true;
}

// Gather the walks into the flat arrays. One block, the last one, to which the others' writes are visible.
static __device__ void gather_walks(const VerifyParams &p, int32_t live) {
    __shared__ int32_t sums[33];
    const int32_t *lengths = reinterpret_cast<const int32_t *>(p.walk_lengths);
    const int32_t *walk_paths = reinterpret_cast<const int32_t *>(p.walk_paths);
    const int32_t *walk_tokens = reinterpret_cast<const int32_t *>(p.walk_tokens);
    int32_t *out_offsets = reinterpret_cast<int32_t *>(p.out_offsets);
    int32_t *paths = reinterpret_cast<int32_t *>(p.paths);
    int32_t *tokens = reinterpret_cast<int32_t *>(p.tokens);
    int32_t *rows = reinterpret_cast<int32_t *>(p.rows);
    int32_t start = 0;
    for (int32_t first = 0; first < p.requests; first += blockDim.x) {
        const int32_t request = first + threadIdx.x;
        const int32_t length = request < p.requests ? __ldcg(lengths + request) : 0;
        int32_t total;
        const int32_t begin = start + block_before(length, sums, total);
        if (request < p.requests) {
            out_offsets[request] = begin;
            const int32_t len = request < live ? reinterpret_cast<const int32_t *>(p.lens)[request] : 0;
            reinterpret_cast<int32_t *>(p.new_lens)[request] = len + length;
        }
        start += total;
    }
    if (threadIdx.x == 0) {
        out_offsets[p.requests] = start;
    }
    __syncthreads();
    // A warp a request, so that a walk's nodes are loaded side by side.
    for (int32_t request = threadIdx.x / 32; request < p.requests; request += blockDim.x / 32) {
        const int32_t length = __ldcg(lengths + request), begin = out_offsets[request];
        const int32_t node = reinterpret_cast<const int32_t *>(p.offsets)[request];
        const int32_t *walked = walk_paths + request * p.max_path, *drawn = walk_tokens + request * p.max_path;
        for (int32_t first = 0; first < max(length, 1); first += 32) {
            // Loaded while the length is: entries behind it are there to be read, whatever they hold.
            const int32_t d = first + static_cast<int32_t>(threadIdx.x % 32);
            const bool there = d < p.max_path;
            const int32_t n = there ? __ldcg(walked + d) : 0, token = there ? __ldcg(drawn + d) : 0;
            if (d < length) {
                paths[begin + d] = n;
                rows[begin + d] = node + n;
                tokens[begin + d] = token;
            }
            if (d == max(length, 1) - 1) {
                reinterpret_cast<int32_t *>(p.roots)[request] = length > 0 ? token : 0;
            }
        }
    }
    for (int32_t i = start + threadIdx.x; i < p.requests * p.max_path; i += blockDim.x) {
        paths[i] = 0;
        rows[i] = 0;
        tokens[i] = NO_TOKEN;
    }
}

}  // namespace specrs
