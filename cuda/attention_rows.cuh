// The requests and keys of attention: a batch's requests and the keys of each of its rows, checked before anything is
// read.
#pragma once

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SPECRS_WARPGROUPS 1
#else
#define SPECRS_WARPGROUPS 0
#endif
#ifndef SPECRS_CAPPED
#define SPECRS_CAPPED 0
#endif

#include "common.cuh"

namespace specrs {
namespace attention {

constexpr int BLOCK = ATTENTION_BLOCK;
constexpr int SPLIT = ATTENTION_SPLIT;
constexpr int TAIL = ATTENTION_TAIL;
constexpr int GROUP = 16;  // keys of a tensor-core step
constexpr int WARPS = 4;  // warps that share a tile of up to 64 rows
constexpr int THREADS = 32 * WARPS;
constexpr int WIDE_THREADS = 3 * THREADS;  // threads of a tile of 128 rows
constexpr int SPLIT_BLOCKS = SPLIT / BLOCK;
constexpr int CLUSTER = SPLIT_BLOCKS;  // blocks that share a split
constexpr int MAX_STAGES = 6;  // entries of the ring
constexpr bool CAPPED = SPECRS_CAPPED != 0;
static_assert(BLOCK == 32 * WARPS, "a lane looks up one key of a block, and a warp scores 32");
static_assert(SPLIT % BLOCK == 0 && BLOCK % GROUP == 0, "splits are whole blocks, blocks whole groups");

// A call in a kernel makes the compiler wait after each of a warpgroup's products; elsewhere it is the smaller code.
template <bool INLINE>
__device__ __forceinline__ void fault(const AttentionParams &p, Buffer buffer, int32_t request, int32_t step,
                                      int64_t index, int64_t bound) {
    if (INLINE) {
        write_record_inline(p.report.record, p.report.claim, KERNEL_ATTENTION, buffer, request, step, index, bound,
                            PROBE_NONE, -1);
    } else {
        record_fault(p.report, KERNEL_ATTENTION, buffer, request, step, index, bound);
    }
}

__device__ __forceinline__ float none() { return __int_as_float(0xff800000); }  // -inf: the maximum of no keys

// The live part of a request: `queries` is 0 where it is dead, or was refused by a check.
struct Request {
    int32_t first;    // first query
    int32_t queries;  // n
    int32_t len;      // L: keys before the queries' own, from the first page on
    int32_t row;      // row of the page table
    int32_t page;     // column of the table at which the keys begin: positions below count from there
    bool refused;     // true if nothing may be read for its queries
};

// Check request `i`. `report` is true in one thread of the grid.
template <bool INLINE>
__device__ __forceinline__ Request request_at(const AttentionParams &p, int32_t i, bool report) {
    const int32_t *starts = reinterpret_cast<const int32_t *>(p.starts);
    Request r;
    r.first = __ldg(starts + i);
    const int32_t end = __ldg(starts + i + 1);
    r.len = __ldg(reinterpret_cast<const int32_t *>(p.lens) + i);
    r.row = p.rows != 0 ? __ldg(reinterpret_cast<const int32_t *>(p.rows) + i) : i;
    // Behind the context wall a draft step has no prefix, and its queries attend to nothing.
    r.page = p.first_pages != 0 && r.len != 0 ? __ldg(reinterpret_cast<const int32_t *>(p.first_pages) + i) : 0;
    r.queries = 0;
    r.refused = false;
    if (r.first == end) {
        return r;
    }
    Buffer buffer = BUFFER_ATTENTION_QUERIES;
    int64_t index = 0;
    int64_t bound = p.queries;
    bool good = true;
    int32_t n = 0;
    if (r.first < 0 || end < r.first || end > p.queries) {
        const bool order = r.first >= 0 && end < r.first;
        buffer = order ? BUFFER_ATTENTION_QUERIES_ORDER : BUFFER_ATTENTION_QUERIES;
        index = r.first < 0 ? r.first : (order ? end : end - 1);
        good = false;
    } else {
        n = end - r.first;
        const int32_t span = p.draft_slots != 0 ? p.draft_slots : n;
        if (n > p.max_queries) {
            buffer = BUFFER_ATTENTION_REQUEST_QUERIES;
            index = n - 1;
            bound = p.max_queries;
            good = false;
        } else if (r.len < 0 || r.len > p.capacity - span) {
            buffer = BUFFER_ATTENTION_TABLE_TOKENS;
            index = r.len < 0 ? static_cast<int64_t>(r.len) : static_cast<int64_t>(r.len) + span - 1;
            bound = p.capacity;
            good = false;
        } else if (!in_bounds(r.row, p.table_rows)) {
            buffer = BUFFER_ATTENTION_TABLE_ROWS;
            index = r.row;
            bound = p.table_rows;
            good = false;
        } else if (!in_bounds(r.page, (r.len >> p.page_shift) + 1)) {
            buffer = BUFFER_ATTENTION_FIRST_PAGES;
            index = r.page;
            bound = (r.len >> p.page_shift) + 1;
            good = false;
        }
    }
    r.refused = !good;
    if (good) {
        r.queries = n;
        r.len -= r.page << p.page_shift;
    } else if (report) {
        fault<INLINE>(p, buffer, i, -1, index, bound);
    }
    return r;
}

// The keys that a query attends to.
struct Row {
    int32_t cut;    // c: logical keys below it go by blocks
    int32_t last;   // p: logical position of its last key; -1: it attends to nothing
    uint64_t bits;  // bits of a tree's query: its keys at L + bit
};

// Query `j` of request `i`. A mask that the rule cannot serve is recorded, and its row attends to nothing.
template <bool INLINE>
__device__ __forceinline__ Row row_at(const AttentionParams &p, const Request &r, int32_t i, int32_t j, bool report) {
    Row row = {0, r.len + j, 0};
    if (p.mask != 0) {
        row.bits = __ldg(reinterpret_cast<const unsigned long long *>(p.mask) + r.first + j);
        const int32_t span = p.draft_slots != 0 ? p.draft_slots : r.queries;
        const int32_t count = __popcll(row.bits);
        row.last = r.len + count - 1;
        const bool outside = span < 64 && (row.bits >> span) != 0;
        int32_t off = 0;
        if (!outside && p.draft_slots == 0 && count > TAIL) {
            off = count - (__ffsll(static_cast<long long>(~row.bits)) - 1);  // ancestors that are not on the spine
            if (row.bits == ~0ull) {
                off = 0;
            }
        }
        if (outside || off > TAIL) {
            if (report) {
                fault<INLINE>(p, outside ? BUFFER_ATTENTION_MASK_BITS : BUFFER_ATTENTION_MASK_BRANCH, i, j,
                              outside ? 63 - __clzll(static_cast<long long>(row.bits)) : off,
                              outside ? span : TAIL + 1);
            }
            row = Row{0, -1, 0};
            return row;
        }
    }
    row.cut = max(0, row.last + 1 - TAIL);
    if (p.draft_slots != 0) {
        row.cut = min(row.cut, r.len);  // draft slots lie by branch and step, never at their logical position
    }
    return row;
}

// Depth of the node `bit`, whose own mask is `own`: its ancestors stand before it. The rows of a block that is not causal
// have each other's bits, and stand one behind the other.
__device__ __forceinline__ int32_t depth_of(uint64_t own, int32_t bit) {
    return min(max(__popcll(own), 1) - 1, bit);
}

// The request's pages, from the first one that it attends to.
__device__ __forceinline__ const int32_t *pages_of(const AttentionParams &p, const Request &r) {
    return reinterpret_cast<const int32_t *>(p.table) + static_cast<int64_t>(r.row) * p.table_width + r.page;
}

template <int M>
__device__ __forceinline__ int32_t tiles_of(const AttentionParams &p, const Request &r) {
    return (r.queries * p.group + M - 1) / M;
}

// Splits that an item is made for: the rows of a tile may reach fewer.
__device__ __forceinline__ int32_t splits_of(const AttentionParams &p, const Request &r) {
    const int32_t most = p.draft_slots != 0 ? r.len : max(0, r.len + r.queries - TAIL);
    return (most + SPLIT - 1) / SPLIT;
}

}  // namespace attention
}  // namespace specrs
