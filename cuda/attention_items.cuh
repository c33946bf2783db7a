// Items of attention's work. A tile is M rows of one request and kv head; its items are its splits ("mains") and its last
// TAIL keys ("pairs"). Every CTA counts all of them for itself, since lengths are on the device alone.
#pragma once

#include "attention_fold.cuh"

namespace specrs {
namespace attention {

// Items of a launch, in shared memory of each CTA.
struct Items {
    int32_t *mains;     // first split of each request, and the end
    int32_t *pairs;     // first tile of each request, and the end
    Request *requests;  // the checked requests, or null: each is read once more where it is wanted
    int32_t main_items;
    int32_t pair_items;
    bool serial;  // true if an item is a whole tile

    __device__ __forceinline__ int32_t count() const { return serial ? pair_items : main_items + pair_items; }
    __device__ __forceinline__ Request request(const AttentionParams &p, int32_t i) const {
        return requests != nullptr ? requests[i] : request_at<false>(p, i, false);
    }
};

// The query of the output at which a start lies; its end for starts behind it.
__device__ __forceinline__ int32_t query_of(const AttentionParams &p, int32_t start) {
    return min(max(start, 0), p.queries);
}

// Counts items. `scan` has a place for each warp of the CTA's THREADS_ALL.
//
// The batch ends in front of the first request whose starts decrease. Requests before it lie behind one another, so that
// those that are taken share no query; all other queries' output becomes 0 here.
template <int HD, int M, int THREADS_ALL, bool INLINE>
__device__ __forceinline__ void count_items(const AttentionParams &p, int32_t (*scan)[THREADS_ALL / 32], Items &items) {
    const int thread = threadIdx.x;
    const int warp = thread >> 5;
    const int lane = thread & 31;
    const int32_t *starts = reinterpret_cast<const int32_t *>(p.starts);
    int32_t taken = p.requests;
    items.main_items = 0;
    items.pair_items = 0;
    for (int32_t base = 0; base < p.requests; base += THREADS_ALL) {
        const int32_t i = base + thread;
        int32_t a = 0;
        int32_t b = 0;
        bool refused = false;
        bool decreases = false;
        if (i < p.requests) {
            const Request r = request_at<INLINE>(p, i, blockIdx.x == 0);
            b = tiles_of<M>(p, r) * p.kv_heads;
            a = b * splits_of(p, r);
            if (items.requests != nullptr) {
                items.requests[i] = r;
            }
            refused = r.refused;
            decreases = __ldg(starts + i + 1) < r.first;
        }
        const int32_t own_a = a;
        const int32_t own_b = b;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int32_t up_a = __shfl_up_sync(~0u, a, step);
            const int32_t up_b = __shfl_up_sync(~0u, b, step);
            a += lane >= step ? up_a : 0;
            b += lane >= step ? up_b : 0;
        }
        if (lane == 31) {
            scan[0][warp] = a;
            scan[1][warp] = b;
        }
        const bool ends = __syncthreads_or(decreases);
        int32_t before_a = items.main_items;
        int32_t before_b = items.pair_items;
#pragma unroll
        for (int w = 0; w < THREADS_ALL / 32; ++w) {
            before_a += w < warp ? scan[0][w] : 0;
            before_b += w < warp ? scan[1][w] : 0;
            items.main_items += scan[0][w];
            items.pair_items += scan[1][w];
        }
        if (i < p.requests) {
            items.mains[i] = before_a + a - own_a;
            items.pairs[i] = before_b + b - own_b;
        }
        __syncthreads();
        if (ends) {
            for (taken = base; __ldg(starts + taken) <= __ldg(starts + taken + 1);) {
                ++taken;
            }
            items.main_items = items.mains[taken];
            items.pair_items = items.pairs[taken];
            __syncthreads();
        }
        if (i < taken && (refused || i == 0) && blockIdx.x == i % gridDim.x) {
            const int32_t end = __ldg(starts + i + (refused ? 1 : 0));
            clear_queries<HD>(p, i == 0 ? 0 : query_of(p, __ldg(starts + i)), query_of(p, end), 0, 1);
        }
        if (ends) {
            break;
        }
    }
    for (int32_t i = taken + thread; i <= p.requests; i += THREADS_ALL) {
        items.mains[i] = items.main_items;
        items.pairs[i] = items.pair_items;
    }
    // Serial where whole tiles keep at least 7 of 8 CTAs busy to the end, or where slots are too few.
    const int32_t waves = (items.pair_items + gridDim.x - 1) / gridDim.x;
    items.serial = items.main_items + items.pair_items > p.slots ||
                   static_cast<int64_t>(items.pair_items) * 8 >= static_cast<int64_t>(waves) * gridDim.x * 7;
    __syncthreads();
    if (blockIdx.x == 0) {  // for `merge`
        int32_t *header = reinterpret_cast<int32_t *>(p.schedule);
        if (thread == 0) {
            header[0] = items.serial ? 1 : 0;
            header[1] = items.main_items;
        }
        for (int32_t i = thread; i < p.requests; i += THREADS_ALL) {
            header[2 + i] = items.mains[i];
            header[2 + p.requests + i] = i < taken ? items.pairs[i] : -1;
        }
    }
    // Behind the last request.
    clear_queries<HD>(p, taken == 0 ? 0 : query_of(p, __ldg(starts + taken)), p.queries, blockIdx.x * THREADS_ALL + thread,
                      static_cast<int64_t>(gridDim.x) * THREADS_ALL);
}

// The last i with table[i] <= index; table[0] = 0 and index < table[n].
__device__ __forceinline__ int32_t search(const int32_t *table, int32_t n, int32_t index) {
    int32_t low = 0;
    int32_t high = n;
    while (high - low > 1) {
        const int32_t middle = (low + high) >> 1;
        if (table[middle] <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Bounds of a tile that follow from its request alone: no row's cut is larger than the first, or less than the second.
template <int M>
__device__ __forceinline__ int32_t most_cut(const AttentionParams &p, const Request &r, int32_t tile) {
    if (p.draft_slots != 0) {
        return r.len;
    }
    const int32_t last_of_tile = ((tile + 1) * M - 1) / p.group;
    const int32_t last = p.mask == 0 ? min(r.queries - 1, last_of_tile) : r.queries - 1;
    return max(0, r.len + last + 1 - TAIL);
}

template <int M>
__device__ __forceinline__ int32_t least_cut(const AttentionParams &p, const Request &r, int32_t tile) {
    const int32_t keys = p.mask == 0 ? tile * M / p.group + 1 : 0;
    return max(0, r.len + keys - TAIL);
}

// An item of the CTA's work.
struct Place {
    int32_t request;
    int32_t tile;
    int32_t head;
    int32_t split;
    bool with_tail;
};

template <int M>
__device__ __forceinline__ Place place_of(const AttentionParams &p, const Items &items, int32_t item) {
    Place place;
    place.with_tail = items.serial || item >= items.main_items;
    const int32_t *table = place.with_tail ? items.pairs : items.mains;
    const int32_t index = place.with_tail && !items.serial ? item - items.main_items : item;
    place.request = search(table, p.requests, index);
    const int32_t local = index - table[place.request];
    const int32_t tiles = tiles_of<M>(p, items.request(p, place.request));
    place.tile = tiles - 1 - local % tiles;  // the longest first
    place.head = local / tiles % p.kv_heads;
    place.split = local / tiles / p.kv_heads;
    return place;
}

// Rows of a tile, packed as query * group + head of the group: their queries and lines of q without a division each.
struct TileRows {
    int32_t first_query;  // query of row 0
    int32_t first_head;   // head of row 0
    int32_t rows;         // rows that there are; more than M: all
    uint32_t reciprocal;  // of the group, times 2^16 and rounded up: exact for rows below 2^16 / group
    int32_t group;
    int32_t heads;
    uint64_t line;  // line of query 0 and the group's head 0

    template <int M>
    static __device__ __forceinline__ TileRows of(const AttentionParams &p, const Request &r, int32_t tile, int32_t head) {
        TileRows t;
        t.first_query = tile * M / p.group;
        t.first_head = tile * M - t.first_query * p.group;
        t.rows = r.queries * p.group - tile * M;
        t.reciprocal = 65536u / p.group + 1;
        t.group = p.group;
        t.heads = p.kv_heads * p.group;
        t.line = static_cast<uint64_t>(r.first) * t.heads + head * p.group;
        return t;
    }
    // Queries between row 0's and a row's.
    __device__ __forceinline__ int32_t step(int32_t row) const {
        return static_cast<int32_t>((first_head + row) * reciprocal >> 16);
    }
    __device__ __forceinline__ int32_t query(int32_t row) const { return first_query + step(row); }
    __device__ __forceinline__ uint64_t line_of(int32_t row) const {
        const int32_t queries = step(row);
        return line + static_cast<uint64_t>(first_query + queries) * heads + (first_head + row - queries * group);
    }
};

}  // namespace attention
}  // namespace specrs
