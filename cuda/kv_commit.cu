// Commit of accepted paths: node n_i of a request's path becomes row position L + i (`plan::write::commit` of the host).
//
//   remap  pages of one token: the row's columns L .. L + last are reordered, the accepted nodes first in the order of
//          the path, then the others in their own order. No KV moves and no id is lost: the row stays a permutation.
//   moves  larger pages: the list of slots (source, destination) that `kv_move` executes, for each d with n_d != d.
//
// A path starts with node 0 and increases strictly, so n_d >= d, and from the first d with n_d != d on all differ.
// A request whose path or whose row is not so is recorded and left as it is; so is one whose moves have no room.
#include "block.cuh"
#include "rows.cuh"

namespace specrs {

constexpr int32_t MAX_NODES = 1024;  // limit of a tree: `bounds::MAX_DRAFT_TOKENS`

struct Path {
    int32_t begin;
    int32_t length;
};

// The path of a request, as long as it is one; else none. `reporter` records why.
__device__ __forceinline__ Path path_of(const KvCommitParams &p, int32_t request, int32_t live, bool reporter) {
    const int32_t *offsets = reinterpret_cast<const int32_t *>(p.offsets);
    const int32_t *paths = reinterpret_cast<const int32_t *>(p.paths);
    const int32_t begin = offsets[request];
    const int32_t end = offsets[request + 1];
    const bool lives = request < live;  // known no sooner than its offsets
    if (!lives || begin < 0 || end < begin || end > p.entries) {
        if (reporter && lives) {
            const bool order = begin >= 0 && end >= 0 && end <= p.entries;
            record_fault(p.report, KERNEL_KV_COMMIT, order ? BUFFER_OFFSETS_DECREASE : BUFFER_PATH, request,
                         -1, begin < 0 ? begin : end, static_cast<int64_t>(p.entries) + 1);
        }
        return {0, 0};
    }
    int32_t before = -1;
    for (int32_t d = 0; d < end - begin; ++d) {
        const int32_t node = paths[begin + d];
        if (node <= before || node >= p.max_nodes || (d == 0 && node != 0)) {
            if (reporter) {
                record_fault(p.report, KERNEL_KV_COMMIT, BUFFER_PATH_ORDER, request, d, node, p.max_nodes);
            }
            return {0, 0};
        }
        before = node;
    }
    return {begin, end - begin};
}

// Where a request is and what length its path gives it, loaded before the path is known: one trip to memory less.
struct Grown {
    int32_t row;
    int32_t len;
};

__device__ __forceinline__ Grown grown_of(const KvCommitParams &p, int32_t request) {
    return {reinterpret_cast<const int32_t *>(p.rows)[request], reinterpret_cast<const int32_t *>(p.new_lens)[request]};
}

// The request's line of the page table, where positions up to `last` behind its old length lie in it; else null.
__device__ __forceinline__ int32_t *line_of(const KvCommitParams &p, int32_t request, Grown grown, Path path, int32_t last,
                                            int32_t &len, bool reporter) {
    const int32_t row = grown.row;
    if (!in_bounds(row, p.table.rows)) {
        if (reporter) {
            record_fault(p.report, KERNEL_KV_COMMIT, BUFFER_TABLE_ROWS, request, -1, row, p.table.rows);
        }
        return nullptr;
    }
    len = grown.len - path.length;
    const int64_t end = static_cast<int64_t>(p.table.columns) << p.shift;  // positions of a line
    if (len < 0 || static_cast<int64_t>(len) + last >= end) {
        if (reporter) {
            record_fault(p.report, KERNEL_KV_COMMIT, BUFFER_PAGE_TABLE, request, last,
                         len < 0 ? len : static_cast<int64_t>(len) + last, end);
        }
        return nullptr;
    }
    return table_row(p.table, row);
}

__device__ __forceinline__ void kv_remap(const KvCommitParams &p) {
    __shared__ int32_t old[MAX_NODES];
    __shared__ int32_t nodes[MAX_NODES];
    const int32_t request = blockIdx.x;
    const bool reporter = threadIdx.x == 0;
    const int32_t live =
        live_rows(p.live, p.requests, p.report, KERNEL_KV_COMMIT, reporter && blockIdx.x == 0);
    const Grown grown = grown_of(p, request);
    const Path path = path_of(p, request, live, reporter);
    if (path.length == 0) {
        return;
    }
    const int32_t last = reinterpret_cast<const int32_t *>(p.paths)[path.begin + path.length - 1];
    if (last + 1 == path.length) {
        return;  // 0, 1, 2, ...: all in place
    }
    int32_t len;
    int32_t *line = line_of(p, request, grown, path, last, len, reporter);
    if (line == nullptr) {
        return;
    }
    for (int32_t j = threadIdx.x; j <= last; j += blockDim.x) {
        old[j] = line[len + j];
    }
    for (int32_t d = threadIdx.x; d < path.length; d += blockDim.x) {
        nodes[d] = reinterpret_cast<const int32_t *>(p.paths)[path.begin + d];
    }
    __syncthreads();
    for (int32_t j = threadIdx.x; j <= last; j += blockDim.x) {
        int32_t below = 0;
        bool accepted = false;
        for (int32_t d = 0; d < path.length; ++d) {
            below += nodes[d] < j;
            accepted = accepted || nodes[d] == j;
        }
        line[len + (accepted ? below : path.length + j - below)] = old[j];
    }
}

// Moves of a path: entries from the first that is not in place on.
__device__ __forceinline__ int32_t moves_of(const KvCommitParams &p, Path path) {
    int32_t in_place = 0;
    while (in_place < path.length && reinterpret_cast<const int32_t *>(p.paths)[path.begin + in_place] == in_place) {
        ++in_place;
    }
    return path.length - in_place;
}

__device__ __forceinline__ int32_t slot_of(const KvCommitParams &p, const int32_t *line, int32_t position,
                                           int32_t request, int32_t step) {
    const int32_t page = line[position >> p.shift];
    if (!in_bounds(page, p.table.num_pages)) {
        record_fault(p.report, KERNEL_KV_COMMIT, BUFFER_PAGE, request, step, page, p.table.num_pages);
        return 0;
    }
    return (page << p.shift) | (position & ((1 << p.shift) - 1));
}

__device__ __forceinline__ void kv_list(const KvCommitParams &p) {
    __shared__ int32_t sums[64];
    const int32_t request = blockIdx.x;
    const bool reporter = threadIdx.x == 0;
    const int32_t live =
        live_rows(p.live, p.requests, p.report, KERNEL_KV_COMMIT, reporter && blockIdx.x == 0);
    const Grown grown = grown_of(p, request);
    // Every block counts the moves of all requests: a few loads, and no block waits for another.
    int32_t before = 0;
    int32_t total = 0;
    for (int32_t other = threadIdx.x; other < p.requests; other += blockDim.x) {
        const int32_t moves = moves_of(p, path_of(p, other, live, false));
        before += other < request ? moves : 0;
        total += moves;
    }
    block_sums(before, total, sums);
    int32_t *src = reinterpret_cast<int32_t *>(p.src);
    int32_t *dst = reinterpret_cast<int32_t *>(p.dst);
    if (reporter) {
        int32_t *offsets = reinterpret_cast<int32_t *>(p.move_offsets);
        offsets[request] = min(before, p.moves);
        if (request == p.requests - 1) {
            offsets[p.requests] = min(total, p.moves);
        }
    }
    // Lanes behind the last move are padding: from the sink to the sink.
    for (int32_t i = total + request * blockDim.x + threadIdx.x; i < p.moves; i += p.requests * blockDim.x) {
        src[i] = 0;
        dst[i] = 0;
    }
    const Path path = path_of(p, request, live, reporter);
    const int32_t moves = moves_of(p, path);
    if (moves == 0) {
        return;
    }
    // Offsets that decrease make paths overlap, and those have more moves together than there are entries.
    const bool fits = before + moves <= p.moves;
    if (!fits && reporter) {
        record_fault(p.report, KERNEL_KV_COMMIT, BUFFER_MOVES, request, -1,
                     static_cast<int64_t>(before) + moves - 1, p.moves);
    }
    const int32_t *paths = reinterpret_cast<const int32_t *>(p.paths) + path.begin;
    int32_t len = 0;
    const int32_t *line = fits ? line_of(p, request, grown, path, paths[path.length - 1], len, reporter) : nullptr;
    for (int32_t i = threadIdx.x; i < moves && before + i < p.moves; i += blockDim.x) {
        const int32_t d = path.length - moves + i;
        int32_t from = 0;
        int32_t to = 0;
        if (line != nullptr) {
            from = slot_of(p, line, len + paths[d], request, paths[d]);
            to = slot_of(p, line, len + d, request, d);
        }
        const bool whole = from != 0 && to != 0;  // the sink holds nobody's data
        src[before + i] = whole ? from : 0;
        dst[before + i] = whole ? to : 0;
    }
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(128) kv_commit_remap(const __grid_constant__ specrs::KvCommitParams p) {
    specrs::kv_remap(p);
}
extern "C" __global__ void __launch_bounds__(128) kv_commit_moves(const __grid_constant__ specrs::KvCommitParams p) {
    specrs::kv_list(p);
}
