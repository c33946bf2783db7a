// Greedy verification: from each request's root, follow the child that carries the argmax of its parent's row of logits
// (ties to the lower token), as `src/host/verify.rs` does. Rows that no walk reaches decide nothing.
//
// Two modes with the same result:
//   walk  a block a request: the argmax of the row it stands at, then the next one. For batches.
//   full  blocks over rows and chunks of rows, for all nodes at once; the last block to finish walks all trees. For one or
//         two requests, where a walk would leave the GPU idle. Rows have as many chunks as run at once.
// In both the last block gathers the walks into flat arrays, one request behind the other: `Accepts` of `src/round`.
//
// A request whose walk meets a row with a NaN, a +inf or nothing but -inf ends there with NO_TOKEN; the probe goes to the
// fault record and to `faults[request]`. Other requests go on.
//
// Static batches: requests from the live count on have no nodes, their root is 0, their length 0. Entries behind the
// last accepted node are 0, their tokens NO_TOKEN, which an embedding takes for a lane without a row.
#include "logits.cuh"
#include "walk.cuh"

namespace specrs {

constexpr int MAX_TREE = 1024;  // `bounds::MAX_DRAFT_TOKENS`, the most that max_nodes is

// Take the step at `walk.node`, whose row's largest key is `key`. Whether the walk goes on. As `step`.
__device__ __forceinline__ bool greedy_step(const VerifyParams &p, int32_t request, Range range, const int32_t *parents,
                                            const int32_t *tokens, uint64_t key, Walk &walk, bool writer) {
    const Probe probe = key_probe(key);
    if (writer && probe != PROBE_NONE) {
        const int32_t len = reinterpret_cast<const int32_t *>(p.lens)[request];
        record_probe(p.report, KERNEL_VERIFY_GREEDY, BUFFER_TARGET_LOGITS, probe, request,
                     range.begin + walk.node, probe_column(key, probe), len + walk.length + 1);
        reinterpret_cast<int32_t *>(p.faults)[request] = probe;
    }
    const int32_t token = probe == PROBE_NONE ? static_cast<int32_t>(key_index(key)) : NO_TOKEN;
    return step(p, KERNEL_VERIFY_GREEDY, request, range, parents, tokens, token, walk, writer);
}

template <typename L>
__device__ __forceinline__ void verify_walk(const VerifyParams &p) {
    __shared__ uint64_t keys[32];
    __shared__ int32_t parents[MAX_TREE];
    __shared__ int32_t tokens[MAX_TREE];
    const int32_t request = blockIdx.x;
    const int32_t live = live_rows(p.live, p.requests, p.report, KERNEL_VERIFY_GREEDY,
                                   blockIdx.x == 0 && threadIdx.x == 0);
    const Range range = nodes_of(p, KERNEL_VERIFY_GREEDY, request, live, threadIdx.x == 0);
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
        more = greedy_step(p, request, range, parents, tokens, key, walk, threadIdx.x == 0);
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
    const int32_t live = live_rows(p.live, p.requests, p.report, KERNEL_VERIFY_GREEDY,
                                   blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0);
    const uint64_t row = blockIdx.y;
    uint64_t *keys = reinterpret_cast<uint64_t *>(p.row_keys);
    const int32_t end = reinterpret_cast<const int32_t *>(p.offsets)[live];
    if (static_cast<int64_t>(row) < end) {
        const typename L::Storage *logits =
            reinterpret_cast<const typename L::Storage *>(p.logits) + row * p.logits_stride;
        const int32_t chunks = gridDim.x;
        const int32_t chunk = ((p.vocab + chunks - 1) / chunks + L::WIDE - 1) / L::WIDE * L::WIDE;
        const int32_t first = static_cast<int32_t>(min(static_cast<int64_t>(chunk) * blockIdx.x, static_cast<int64_t>(p.vocab)));
        const uint64_t key = block_max(best_key<L>(logits, first, first + min(chunk, p.vocab - first)), shared);
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
        const Range range = nodes_of(p, KERNEL_VERIFY_GREEDY, request, live, writer);
        if (writer) {
            reinterpret_cast<int32_t *>(p.faults)[request] = PROBE_NONE;
        }
        __syncwarp();
        Walk walk = {0, 0};
        bool more = range.size > 0;
        while (more) {
            const int32_t row = range.begin + walk.node;
            const uint64_t key = near ? near_keys[row] : __ldcg(keys + row);
            more = greedy_step(p, request, range, parents + range.begin, tokens + range.begin, key, walk, writer);
        }
        if (writer) {
            reinterpret_cast<int32_t *>(p.walk_lengths)[request] = walk.length;
        }
    }
    __threadfence();
    __syncthreads();
    for (int32_t i = threadIdx.x; i < p.nodes; i += blockDim.x) {
        keys[i] = 0;  // 0 as the next launch needs it
    }
    gather_walks(p, live);
}

}  // namespace specrs

#define SPECRS_VERIFY(name, mode, logit, threads, resident)                                                           \
    extern "C" __global__ void __launch_bounds__(threads, resident)                                                   \
        name(const __grid_constant__ specrs::VerifyParams p) {                                                         \
        specrs::mode<specrs::logit>(p);                                                                                \
    }
SPECRS_VERIFY(verify_walk_f32, verify_walk, LogitF32, 1024, 1)
SPECRS_VERIFY(verify_walk_bf16, verify_walk, LogitBf16, 1024, 1)
SPECRS_VERIFY(verify_walk_f16, verify_walk, LogitF16, 1024, 1)
SPECRS_VERIFY(verify_full_f32, verify_full, LogitF32, 256, 4)
SPECRS_VERIFY(verify_full_bf16, verify_full, LogitBf16, 256, 4)
SPECRS_VERIFY(verify_full_f16, verify_full, LogitF16, 256, 4)
