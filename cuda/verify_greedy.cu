// Greedy verification: from each request's root, follow the child that carries the argmax of its parent's row of logits
// (ties to the lower token), as `src/host/verify.rs` does. Rows that no walk reaches decide nothing.
//
// Two modes with the same result:
//   walk  a block a request: the argmax of the row it stands at, then the next one. For batches.
//   full  blocks over rows and chunks of rows, for all nodes at once; the last block to finish walks all trees. For one or
//         two requests, where a walk would leave the GPU idle.
// In both the last block gathers the walks into flat arrays, one request behind the other: `Accepts` of `src/round`.
//
// A request whose walk meets a row with a NaN, a +inf or nothing but -inf ends there with NO_TOKEN; the probe goes to the
// fault record and to `faults[request]`. Other requests go on.
//
// Static batches: requests from the live count on have no nodes, their root is 0, their length 0. Entries behind the
// last accepted node are 0, their tokens NO_TOKEN, which an embedding takes for a lane without a row.
#include "block.cuh"
#include "logits.cuh"

namespace specrs {

constexpr int32_t NO_TOKEN = -1;
constexpr int CHUNKS = 16;      // of a row, in mode full
constexpr int MAX_TREE = 1024;  // `bounds::MAX_DRAFT_TOKENS`, the most that max_nodes is

struct Range {
    int32_t begin;
    int32_t size;
};

// The nodes of a request; none where it is dead or its offsets are wrong.
__device__ __forceinline__ Range nodes_of(const VerifyParams &p, int32_t request, int32_t live, bool reporter) {
    if (request >= live) {
        return {0, 0};
    }
    const int32_t *offsets = reinterpret_cast<const int32_t *>(p.offsets);
    const int32_t begin = offsets[request];
    const int32_t end = offsets[request + 1];
    if (begin < 0 || end < begin || end > p.nodes) {
        if (reporter) {
            const bool order = begin >= 0 && end >= 0 && end <= p.nodes;
            record_fault(p.record, p.claim, KERNEL_VERIFY_GREEDY, order ? BUFFER_OFFSETS_DECREASE : BUFFER_TREES,
                         request, -1, begin < 0 ? begin : end, static_cast<int64_t>(p.nodes) + 1);
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
        const bool found = j < size && parents[j] == node && tokens[j] == token;
        const uint32_t mask = __ballot_sync(0xffffffffu, found);
        if (mask != 0) {
            return first + __ffs(mask) - 1;
        }
    }
    return -1;
}

// A walk under way; `path` and `tokens` have room for `p.max_path` entries.
struct Walk {
    int32_t node;
    int32_t length;
};

// Take the step at `walk.node`, whose row's largest key is `key`. Whether the walk goes on. For a whole warp; `writer`
// is true in one thread of those that call.
__device__ __forceinline__ bool step(const VerifyParams &p, int32_t request, Range range, const int32_t *parents,
                                     const int32_t *tokens, uint64_t key, Walk &walk, bool writer) {
    const Probe probe = key_probe(key);
    const int32_t token = probe == PROBE_NONE ? static_cast<int32_t>(key_index(key)) : NO_TOKEN;
    const int64_t at = static_cast<int64_t>(request) * p.max_path + walk.length;
    if (writer) {
        reinterpret_cast<int32_t *>(p.walk_paths)[at] = walk.node;
        reinterpret_cast<int32_t *>(p.walk_tokens)[at] = token;
        if (probe != PROBE_NONE) {
            const int32_t len = reinterpret_cast<const int32_t *>(p.lens)[request];
            record_probe(p.record, p.claim, KERNEL_VERIFY_GREEDY, BUFFER_TARGET_LOGITS, probe, request,
                         range.begin + walk.node, probe_column(key, probe), len + walk.length + 1);
            reinterpret_cast<int32_t *>(p.faults)[request] = probe;
        }
    }
    walk.length += 1;
    if (probe != PROBE_NONE) {
        return false;
    }
    const int32_t child = child_with(parents, tokens, range.size, walk.node, token);
    if (child < 0) {
        return false;
    }
    if (walk.length >= p.max_path) {
        if (writer) {
            record_fault(p.record, p.claim, KERNEL_VERIFY_GREEDY, BUFFER_PATH, request, child, walk.length,
                         p.max_path);
        }
        return false;  // what is emitted is right; there is only less of it
    }
    walk.node = child;
    return true;
}

// Gather the walks into the flat arrays. One block.
__device__ void gather_walks(const VerifyParams &p, int32_t live) {
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
            const int32_t at = request * p.max_path;
            const int32_t node = length > 0 ? reinterpret_cast<const int32_t *>(p.offsets)[request] : 0;
            out_offsets[request] = begin;
            for (int32_t d = 0; d < length; ++d) {
                const int32_t n = __ldcg(walk_paths + at + d);
                paths[begin + d] = n;
                rows[begin + d] = node + n;
                tokens[begin + d] = __ldcg(walk_tokens + at + d);
            }
            reinterpret_cast<int32_t *>(p.roots)[request] = length > 0 ? __ldcg(walk_tokens + at + length - 1) : 0;
            const int32_t len = request < live ? reinterpret_cast<const int32_t *>(p.lens)[request] : 0;
            reinterpret_cast<int32_t *>(p.new_lens)[request] = len + length;
        }
        start += total;
    }
    if (threadIdx.x == 0) {
        out_offsets[p.requests] = start;
    }
    for (int32_t i = start + threadIdx.x; i < p.requests * p.max_path; i += blockDim.x) {
        paths[i] = 0;
        rows[i] = 0;
        tokens[i] = NO_TOKEN;
    }
}

template <typename L>
__device__ __forceinline__ void verify_walk(const VerifyParams &p) {
    __shared__ uint64_t keys[32];
    __shared__ int32_t parents[MAX_TREE];
    __shared__ int32_t tokens[MAX_TREE];
    const int32_t request = blockIdx.x;
    const int32_t live = live_rows(p.live, p.requests, p.record, p.claim, KERNEL_VERIFY_GREEDY,
                                   blockIdx.x == 0 && threadIdx.x == 0);
    Range range = nodes_of(p, request, live, threadIdx.x == 0);
    if (range.size > p.max_nodes) {
        if (threadIdx.x == 0) {
            record_fault(p.record, p.claim, KERNEL_VERIFY_GREEDY, BUFFER_TREE, request, -1, range.size - 1,
                         p.max_nodes);
        }
        range.size = 0;
    }
    for (int32_t j = threadIdx.x; j < range.size; j += blockDim.x) {
        parents[j] = reinterpret_cast<const int32_t *>(p.tree_parents)[range.begin + j];
        tokens[j] = reinterpret_cast<const int32_t *>(p.tree_tokens)[range.begin + j];
    }
    if (threadIdx.x == 0) {
        reinterpret_cast<int32_t *>(p.faults)[request] = PROBE_NONE;
    }
    __syncthreads();
    Walk walk = {0, 0};
    bool more = range.size > 0;
    while (more) {
        const uint64_t row = static_cast<uint64_t>(range.begin) + walk.node;
        const typename L::Storage *logits =
            reinterpret_cast<const typename L::Storage *>(p.logits) + row * p.logits_stride;
        const uint64_t key = block_max(best_key<L>(logits, 0, p.vocab), keys);
        more = step(p, request, range, parents, tokens, key, walk, threadIdx.x == 0);
    }
    if (threadIdx.x == 0) {
        reinterpret_cast<int32_t *>(p.walk_lengths)[request] = walk.length;
    }
    if (last_block(p.counter, gridDim.x)) {
        gather_walks(p, live);
    }
}

template <typename L>
__device__ __forceinline__ void verify_full(const VerifyParams &p) {
    __shared__ uint64_t shared[32];
    const int32_t live = live_rows(p.live, p.requests, p.record, p.claim, KERNEL_VERIFY_GREEDY,
                                   blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0);
    const uint64_t row = blockIdx.y;
    uint64_t *keys = reinterpret_cast<uint64_t *>(p.row_keys);
    const int32_t end = reinterpret_cast<const int32_t *>(p.offsets)[live];
    if (static_cast<int64_t>(row) < end) {
        const typename L::Storage *logits =
            reinterpret_cast<const typename L::Storage *>(p.logits) + row * p.logits_stride;
        const int32_t chunk = (p.vocab + CHUNKS - 1) / CHUNKS;
        const int32_t first = min(chunk * static_cast<int32_t>(blockIdx.x), p.vocab);
        const uint64_t key = block_max(best_key<L>(logits, first, min(first + chunk, p.vocab)), shared);
        if (threadIdx.x == 0) {
            atomicMax(reinterpret_cast<unsigned long long *>(keys + row), static_cast<unsigned long long>(key));
        }
    }
    if (!last_block(p.counter, gridDim.x * gridDim.y)) {
        return;
    }
    // Trees and keys of the few requests that this mode is for lie in shared memory: a walk is a chain of loads.
    __shared__ uint64_t near_keys[MAX_TREE];
    __shared__ int32_t near_parents[MAX_TREE];
    __shared__ int32_t near_tokens[MAX_TREE];
    const int32_t *parents = reinterpret_cast<const int32_t *>(p.tree_parents);
    const int32_t *tokens = reinterpret_cast<const int32_t *>(p.tree_tokens);
    const bool near = p.nodes <= MAX_TREE;
    for (int32_t i = threadIdx.x; near && i < p.nodes; i += blockDim.x) {
        near_keys[i] = __ldcg(keys + i);
        near_parents[i] = parents[i];
        near_tokens[i] = tokens[i];
    }
    __syncthreads();
    if (near) {
        parents = near_parents;
        tokens = near_tokens;
    }
    for (int32_t request = threadIdx.x / 32; request < p.requests; request += blockDim.x / 32) {
        const bool writer = threadIdx.x % 32 == 0;
        Range range = nodes_of(p, request, live, writer);
        if (range.size > p.max_nodes) {
            if (writer) {
                record_fault(p.record, p.claim, KERNEL_VERIFY_GREEDY, BUFFER_TREE, request, -1, range.size - 1,
                             p.max_nodes);
            }
            range.size = 0;
        }
        if (writer) {
            reinterpret_cast<int32_t *>(p.faults)[request] = PROBE_NONE;
        }
        __syncwarp();
        Walk walk = {0, 0};
        bool more = range.size > 0;
        while (more) {
            const int32_t row = range.begin + walk.node;
            const uint64_t key = near ? near_keys[row] : __ldcg(keys + row);
            more = step(p, request, range, parents + range.begin, tokens + range.begin, key, walk, writer);
        }
        if (writer) {
            reinterpret_cast<int32_t *>(p.walk_lengths)[request] = walk.length;
        }
    }
    __threadfence();
    __syncthreads();
    for (int32_t i = threadIdx.x; i < p.nodes; i += blockDim.x) {
        keys[i] = 0;  // as the next launch needs them
    }
    gather_walks(p, live);
}

}  // namespace specrs

#define SPECRS_VERIFY(name, mode, logit, threads)                                                                     \
    extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ specrs::VerifyParams p) {      \
        specrs::mode<specrs::logit>(p);                                                                                \
    }
SPECRS_VERIFY(verify_walk_f32, verify_walk, LogitF32, 1024)
SPECRS_VERIFY(verify_walk_bf16, verify_walk, LogitBf16, 1024)
SPECRS_VERIFY(verify_walk_f16, verify_walk, LogitF16, 1024)
SPECRS_VERIFY(verify_full_f32, verify_full, LogitF32, 256)
SPECRS_VERIFY(verify_full_bf16, verify_full, LogitBf16, 256)
SPECRS_VERIFY(verify_full_f16, verify_full, LogitF16, 256)
