// Plans on the device: positions that a step writes and attends to, from lengths that only the device knows.
//
// The twin of `src/plan/write`: the same arrays, bit for bit, by the element functions of `form.cuh`. Lengths, counts,
// trees and masks are read from device memory; the grid follows from the bucket alone, so a captured launch serves any
// batch that fits. A request is live where its row is not negative; the live ones come first. The kernel fills the
// place behind the live requests and queries with the values of a padded plan: row -1, version 0, prefix 0, no queries;
// position 0, slot 0 (the sink), mask 0.
//
// One CTA a request. Its first query is the sum of the queries of the requests before it, which each CTA adds up by itself.
// A request is checked before anything of it is written; one at fault (a length, a count, a page, a parent or a bit outside
// its limits) is recorded and has dead queries and row -1, in the place that its count gives it, so that the others stay where
// they are. Queries that do not fit the bucket are cut off.
//
// `plan_native`: extend (prefill, draft-extend), decode, draft step t, verify. `plan_tail_copies`: copies into the holes of the
// holey layout, as `kv_move` takes them. Commits: `kv_commit.cu`.
//
// Cost: bytes of the arrays, and a read of the pages of the positions that are written.
#include "form.cuh"
#include "rows.cuh"

namespace specrs {

constexpr int PLAN_THREADS = 256;

template <typename T>
__device__ __forceinline__ T *at(uint64_t address) {
    return reinterpret_cast<T *>(address);
}

// Fault that a thread found; the first query's fault is recorded.
struct Wrong {
    int32_t buffer;  // 0: nothing
    int32_t step;
    int64_t index;
    int64_t bound;
};

// Tokens or nodes that the offsets give request `i`.
__device__ __forceinline__ int64_t given_of(const PlanParams &p, int32_t i) {
    const int32_t *offsets = at<const int32_t>(p.offsets);
    return static_cast<int64_t>(offsets[i + 1]) - offsets[i];
}

// Queries of request `i`, whatever its fault; 0 for a dead one and for a count that no request can have. Loads do not wait until it
// is known whether the request lives.
__device__ __forceinline__ uint32_t queries_of(const PlanParams &p, int32_t live, int32_t i) {
    int64_t n = p.step.phase == form::DRAFT ? p.step.topk : 1, most = n;
    if (p.step.phase != form::DRAFT && p.step.phase != form::DECODE) {
        n = given_of(p, i);
        most = p.step.phase == form::VERIFY ? p.step.nodes : p.step.context;
    }
    const bool dead = static_cast<int>(i >= live) | static_cast<int>(at<const int32_t>(p.rows)[i] < 0);
    return dead || n < 0 || n > most ? 0 : static_cast<uint32_t>(n);
}

// Sums over the CTA, of 64 bits each; barriers around.
__device__ __forceinline__ void sum2(uint64_t &a, uint64_t &b) {
    __shared__ uint64_t parts[2][PLAN_THREADS / 32];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        a += __shfl_xor_sync(0xFFFFFFFFu, a, d);
        b += __shfl_xor_sync(0xFFFFFFFFu, b, d);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        parts[0][threadIdx.x / 32] = a;
        parts[1][threadIdx.x / 32] = b;
    }
    __syncthreads();
    a = b = 0;
    for (int w = 0; w < PLAN_THREADS / 32; ++w) {
        a += parts[0][w];
        b += parts[1][w];
    }
    __syncthreads();
}

// Record the fault of the lowest query, if any thread has one; whether there was one. All threads call.
__device__ __forceinline__ bool any_wrong(const Report &report, Kernel kernel, int32_t request, const Wrong &wrong) {
    __shared__ int32_t first;
    if (!__syncthreads_or(wrong.buffer != 0)) {
        return false;
    }
    if (threadIdx.x == 0) {
        first = INT32_MAX;
    }
    __syncthreads();
    // A fault of the whole request (step -1) comes before those of its queries.
    if (wrong.buffer != 0) {
        atomicMin(&first, wrong.step);
    }
    __syncthreads();
    if (wrong.buffer != 0 && wrong.step == first) {
        record_fault(report, kernel, static_cast<Buffer>(wrong.buffer), request, wrong.step, wrong.index, wrong.bound);
    }
    __syncthreads();
    return true;
}

// Positions that a row has allocated: its columns before the first sink. Only on a fault.
static __device__ __noinline__ int64_t allocated(const int32_t *row, int32_t columns, uint32_t shift) {
    int32_t n = 0;
    while (n < columns && row[n] != 0) {
        ++n;
    }
    return static_cast<int64_t>(n) << shift;
}

// Check that row position `pos` lies on a page of the pool.
__device__ __forceinline__ void check_page(Wrong &wrong, form::Step s, const int32_t *row, int32_t columns,
                                           int32_t num_pages, int32_t query, uint64_t pos) {
    const uint64_t column = pos >> s.shift;
    const int32_t page = column < static_cast<uint64_t>(columns) ? row[column] : 0;
    if (page == 0) {
        wrong = Wrong{BUFFER_ALLOCATED, query, static_cast<int64_t>(pos), allocated(row, columns, s.shift)};
    } else if (!in_bounds(page, num_pages)) {
        wrong = Wrong{BUFFER_POOL_PAGES, query, page, num_pages};
    }
}

// Check the parts of a request that concern it as a whole: its row, its length, its count. Thread 0 calls it.
__device__ __forceinline__ Wrong check_request(const PlanParams &p, form::Step s, int32_t i, int32_t row, int64_t len, uint32_t n,
                                               int64_t first) {
    const int64_t context = s.context;
    if (row >= p.table.rows) {
        return Wrong{BUFFER_TABLE_ROWS, -1, row, p.table.rows};
    }
    if (len < 0 || len > context) {
        return Wrong{BUFFER_LENGTHS, -1, len, context + 1};
    }
    if (p.offsets != 0) {
        const int64_t given = given_of(p, i), most = s.phase == form::VERIFY ? s.nodes : s.context;
        if (given < (s.phase == form::VERIFY ? 1 : 0) || given > most) {
            return Wrong{s.phase == form::VERIFY ? BUFFER_TREE : BUFFER_COUNTS, -1, given, most + 1};
        }
    }
    const bool grows = s.phase == form::EXTEND || s.phase == form::DECODE;
    if (grows && len + n > context) {
        return Wrong{BUFFER_CONTEXT, -1, len + n - 1, context};
    }
    if (s.phase == form::VERIFY && len >= context) {
        return Wrong{BUFFER_CONTEXT, -1, len, context};
    }
    if (first + n > p.plan.queries) {
        return Wrong{BUFFER_QUERIES, -1, first + n - 1, p.plan.queries};
    }
    if (s.phase == form::VERIFY) {
        const int64_t begin = at<const int32_t>(p.offsets)[i];
        if (begin < 0 || begin + n > p.parents_len) {
            return Wrong{BUFFER_TREES, -1, begin < 0 ? begin : begin + n - 1, p.parents_len};
        }
    }
    return Wrong{};
}

// Check query `j` of a live request.
__device__ __forceinline__ Wrong check_query(const PlanParams &p, form::Step s, int32_t i, const int32_t *row, uint32_t len,
                                             uint32_t j, const int32_t *parents) {
    Wrong wrong{};
    const int32_t query = static_cast<int32_t>(j);
    const int32_t parent = s.phase == form::VERIFY ? parents[j] : -1;
    check_page(wrong, s, row, p.table.columns, p.table.num_pages, query, form::row_pos(s, len, j));
    if (s.phase == form::VERIFY && (j == 0 ? parent != -1 : !in_bounds(parent, query))) {
        return Wrong{BUFFER_TREE_PARENTS, query, parent, j};
    }
    if (s.phase == form::DRAFT && p.ancestors != 0) {
        const uint32_t words = form::mask_words(s);
        const uint64_t *given = at<const uint64_t>(p.ancestors) + (static_cast<uint64_t>(i) * s.topk + j) * words;
        const uint32_t own = form::own_bit(s, j);
        for (uint32_t w = 0; w < words && wrong.buffer == 0; ++w) {
            const uint64_t stray = (given[w] ^ form::run_word(own, own + 1, w)) & ~form::earlier_word(s, w);
            if (stray != 0) {
                wrong = Wrong{BUFFER_ANCESTORS, query, w * 64 + form::trailing_zeros(stray), s.topk * s.steps};
            }
        }
    }
    return wrong;
}

// A word of the mask of query `j` of a live request.
__device__ __forceinline__ uint64_t mask_word(const PlanParams &p, form::Step s, int32_t i, uint32_t j, uint32_t w,
                                              uint32_t words, const int32_t *parents) {
    if (s.phase == form::VERIFY) {
        return form::node_word(parents, j, w);
    }
    if (p.ancestors == 0) {
        return form::lane_word(s, j, w);
    }
    return at<const uint64_t>(p.ancestors)[(static_cast<uint64_t>(i) * s.topk + j) * words + w];
}

__device__ __forceinline__ void plan_native(const PlanParams &p) {
    const form::Step s = p.step;
    const uint32_t words = form::mask_words(s);
    int32_t *indptr = at<int32_t>(p.plan.qo_indptr);
    int32_t *positions = at<int32_t>(p.positions);
    int32_t *slots = at<int32_t>(p.plan.out_slots);
    uint64_t *mask = at<uint64_t>(p.plan.mask);
    const int64_t capacity = p.plan.queries;
    const int32_t live_batch =
        live_rows(p.live, p.plan.batch, p.report, KERNEL_PLAN, blockIdx.x == 0 && threadIdx.x == 0);
    uint64_t total = 0;

    for (int32_t i = blockIdx.x; i < p.plan.batch; i += gridDim.x) {
        // Loaded beside what the sums are of: fewer trips to memory.
        const int32_t table_line = at<const int32_t>(p.rows)[i];
        const int32_t own_len = at<const int32_t>(p.lens)[i];
        const uint64_t version = at<const uint64_t>(p.versions)[i];
        uint64_t before = 0, all = 0;
        for (int32_t other = threadIdx.x; other < p.plan.batch; other += PLAN_THREADS) {
            const uint32_t n = queries_of(p, live_batch, other);
            before += other < i ? n : 0;
            all += n;
        }
        sum2(before, all);
        total = all;
        const int64_t first = static_cast<int64_t>(before);
        const bool live = i < live_batch && table_line >= 0;
        const uint32_t n = queries_of(p, live_batch, i);
        bool fault = false, open = false;  // open: its queries attend to something
        uint32_t len = 0;
        const int32_t *row = nullptr, *parents = nullptr;
        if (live) {
            Wrong wrong{};
            if (threadIdx.x == 0) {
                wrong = check_request(p, s, i, table_line, own_len, n, first);
            }
            fault = any_wrong(p.report, KERNEL_PLAN, i, wrong);
        }
        if (live && !fault) {
            len = static_cast<uint32_t>(own_len);
            row = table_row(p.table, table_line);
            parents = s.phase == form::VERIFY ? at<const int32_t>(p.parents) + at<const int32_t>(p.offsets)[i] : nullptr;
            open = form::alive(s, len);
            if (open) {
                Wrong wrong{};
                if (threadIdx.x == PLAN_THREADS - 1 && len > 0) {  // a thread that seldom has a query
                    check_page(wrong, s, row, p.table.columns, p.table.num_pages, -1, len - 1);
                }
                for (uint32_t j = threadIdx.x; j < n && wrong.buffer == 0; j += PLAN_THREADS) {
                    wrong = check_query(p, s, i, row, len, j, parents);
                }
                fault = any_wrong(p.report, KERNEL_PLAN, i, wrong);
            }
            if (!fault && open && s.phase == form::VERIFY && len + n > s.context) {
                // Depth is less than the node count, so that only trees near the wall need a look at each node.
                Wrong wrong{};
                for (uint32_t j = threadIdx.x; j < n && wrong.buffer == 0; j += PLAN_THREADS) {
                    const uint32_t pos = form::rope_pos(s, len, j, form::node_depth(parents, j));
                    if (pos >= s.context) {
                        wrong = Wrong{BUFFER_CONTEXT, static_cast<int32_t>(j), pos, s.context};
                    }
                }
                fault = any_wrong(p.report, KERNEL_PLAN, i, wrong);
            }
        }
        const bool good = live && !fault;
        if (threadIdx.x == 0) {
            indptr[i] = static_cast<int32_t>(first < capacity ? first : capacity);
            at<int32_t>(p.plan.rows)[i] = good ? table_line : -1;
            at<uint64_t>(p.out_versions)[i] = good ? version : 0;
            at<int32_t>(p.plan.prefix_lens)[i] = good ? static_cast<int32_t>(form::prefix(s, len)) : 0;
        }
        const bool write = good && open;
        for (uint32_t j = threadIdx.x; j < n && first + j < capacity; j += PLAN_THREADS) {
            const uint32_t depth = write && s.phase == form::VERIFY ? form::node_depth(parents, j) : 0;
            positions[first + j] = write ? static_cast<int32_t>(form::rope_pos(s, len, j, depth)) : 0;
            slots[first + j] = write ? form::out_slot(s, len, row, j) : 0;
        }
        for (uint64_t x = threadIdx.x; x < static_cast<uint64_t>(n) * words; x += PLAN_THREADS) {
            const uint32_t j = static_cast<uint32_t>(x / words), w = static_cast<uint32_t>(x % words);
            if (first + j < capacity) {
                mask[first * words + x] = write ? mask_word(p, s, i, j, w, words, parents) : 0;
            }
        }
    }
    // The queries behind the live ones, by all CTAs. With no request there is one CTA, and the total is 0.
    const int64_t end = static_cast<int64_t>(total) < capacity ? static_cast<int64_t>(total) : capacity;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        indptr[p.plan.batch] = static_cast<int32_t>(end);
    }
    const int64_t stride = static_cast<int64_t>(gridDim.x) * PLAN_THREADS;
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * PLAN_THREADS + threadIdx.x;
    for (int64_t q = end + thread; q < capacity; q += stride) {
        positions[q] = 0;
        slots[q] = 0;
    }
    for (int64_t x = end * words + thread; x < capacity * words; x += stride) {
        mask[x] = 0;
    }
}

// Holey layout: the prefix's tail, position by position, to the holes before the branches from 1 on. One CTA a request; a
// request has (K - 1) * r of them.
__device__ __forceinline__ void plan_tail_copies(const TailCopyParams &p) {
    const form::Step s = p.step;
    int32_t *src = at<int32_t>(p.src), *dst = at<int32_t>(p.dst), *offsets = at<int32_t>(p.offsets);
    const int32_t live =
        live_rows(p.live, p.batch, p.report, KERNEL_TAIL_COPIES, blockIdx.x == 0 && threadIdx.x == 0);
    const auto copies = [&](int32_t i) -> uint64_t {
        const int32_t len = at<const int32_t>(p.lens)[i];
        if (i >= live || at<const int32_t>(p.rows)[i] < 0 || len < 0 || len > static_cast<int32_t>(s.context)) {
            return 0;
        }
        return static_cast<uint64_t>(s.topk - 1) * form::hole_len(s, static_cast<uint32_t>(len), 1);
    };
    uint64_t total = 0;
    for (int32_t i = blockIdx.x; i < p.batch; i += gridDim.x) {
        uint64_t before = 0, all = 0;
        for (int32_t other = threadIdx.x; other < p.batch; other += PLAN_THREADS) {
            const uint64_t n = copies(other);
            before += other < i ? n : 0;
            all += n;
        }
        sum2(before, all);
        total = all;
        const int64_t n = static_cast<int64_t>(copies(i)), first = static_cast<int64_t>(before);
        const int32_t row = i < live ? at<const int32_t>(p.rows)[i] : -1;
        const int64_t len = at<const int32_t>(p.lens)[i];
        Wrong wrong{};
        if (threadIdx.x == 0 && row >= 0) {
            if (len < 0 || len > static_cast<int64_t>(s.context)) {
                wrong = Wrong{BUFFER_LENGTHS, -1, len, static_cast<int64_t>(s.context) + 1};
            } else if (row >= p.table.rows) {
                wrong = Wrong{BUFFER_TABLE_ROWS, -1, row, p.table.rows};
            } else if (first + n > p.copies) {
                wrong = Wrong{BUFFER_COPIES, -1, first + n - 1, p.copies};
            }
        }
        bool fault = any_wrong(p.report, KERNEL_TAIL_COPIES, i, wrong);
        const int32_t *line = fault || row < 0 ? nullptr : table_row(p.table, row);
        const uint32_t r = n == 0 ? 1 : form::hole_len(s, static_cast<uint32_t>(len), 1);
        const auto source = [&](int64_t m) { return static_cast<uint32_t>(len) - r + static_cast<uint32_t>(m % r); };
        const auto target = [&](int64_t m) {
            const uint32_t b = 1 + static_cast<uint32_t>(m / r);
            return form::draft_pos(s, static_cast<uint32_t>(len), b, 0) - r + static_cast<uint32_t>(m % r);
        };
        if (!fault && n > 0) {
            for (int64_t m = threadIdx.x; m < n && wrong.buffer == 0; m += PLAN_THREADS) {
                check_page(wrong, s, line, p.table.columns, p.table.num_pages, static_cast<int32_t>(m), source(m));
                if (wrong.buffer == 0) {
                    check_page(wrong, s, line, p.table.columns, p.table.num_pages, static_cast<int32_t>(m), target(m));
                }
            }
            fault = any_wrong(p.report, KERNEL_TAIL_COPIES, i, wrong);
        }
        if (threadIdx.x == 0) {
            offsets[i] = static_cast<int32_t>(first < p.copies ? first : p.copies);
            }
        for (int64_t m = threadIdx.x; m < n && first + m < p.copies; m += PLAN_THREADS) {
            src[first + m] = fault ? 0 : form::row_slot(s, line, source(m));
            dst[first + m] = fault ? 0 : form::row_slot(s, line, target(m));
        }
    }
    const int64_t end = static_cast<int64_t>(total) < p.copies ? static_cast<int64_t>(total) : p.copies;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        offsets[p.batch] = static_cast<int32_t>(end);
    }
    for (int64_t m = end + static_cast<int64_t>(blockIdx.x) * PLAN_THREADS + threadIdx.x; m < p.copies;
         m += static_cast<int64_t>(gridDim.x) * PLAN_THREADS) {
        src[m] = dst[m] = 0;
    }
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(256) plan_native(const __grid_constant__ specrs::PlanParams p) {
    specrs::plan_native(p);
}
extern "C" __global__ void __launch_bounds__(256) plan_tail_copies(const __grid_constant__ specrs::TailCopyParams p) {
    specrs::plan_tail_copies(p);
}
