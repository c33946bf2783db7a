// The page tables of `flash_attention`, from a plan in device memory (`plan.cu`) and the page table.
//
// The twin of the host's `plan::write::flash_attention`, bit for bit. CTAs over the rows of both tables, requests first, then
// queries; every cell of the capacity is written, 0 (the sink) behind a row's entries and in dead rows.
//
// A row that does not fit its table, a page that is none of the pool's, and a mask that its phase cannot express (a lane is
// read whole with K = 1 and in the holey layout) are recorded; that row has length 0 and is the sink.
//
// Cost: bytes of the tables.
#include "form.cuh"
#include "rows.cuh"

namespace specrs {

constexpr int TABLE_THREADS = 128;

template <typename T>
__device__ __forceinline__ T *at(uint64_t address) {
    return reinterpret_cast<T *>(address);
}

// A request that attends to something: its queries, its prefix, its line of the pool's table. `n` is 0 for any other.
struct Request {
    int32_t first;
    uint32_t n;
    uint32_t len;
    const int32_t *line;
};

__device__ __forceinline__ Request request_of(const PlanTableParams &p, int32_t i) {
    const int32_t *indptr = at<const int32_t>(p.plan.qo_indptr);
    const int32_t first = indptr[i], end = indptr[i + 1];
    const int32_t row = at<const int32_t>(p.plan.rows)[i], len = at<const int32_t>(p.plan.prefix_lens)[i];
    const bool sound = first >= 0 && end > first && end <= p.plan.queries && len >= 0 && in_bounds(row, p.table.rows);
    if (!sound || at<const int32_t>(p.plan.out_slots)[first] == 0) {
        return Request{0, 0, 0, nullptr};
    }
    return Request{first, static_cast<uint32_t>(end - first), static_cast<uint32_t>(len),
                   table_row(p.table, row)};
}

// The request of a query, -1 for a dead one.
__device__ __forceinline__ int32_t owner_of(const PlanTableParams &p, int32_t q) {
    const int32_t *indptr = at<const int32_t>(p.plan.qo_indptr);
    if (q >= indptr[p.plan.batch]) {
        return -1;
    }
    int32_t low = 0, high = p.plan.batch;
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (indptr[middle] <= q) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low - 1;
}

// Write one row of a table: `n` entries by `entry(c)`, each a slot or a page whose page `page(c)` says, 0 behind them. Its
// length is `len`, or 0 where something is wrong. All threads of the CTA call.
template <typename Page, typename Entry>
__device__ __forceinline__ void write_row(const PlanTableParams &p, Buffer buffer, int32_t request, int32_t step,
                                          int32_t *out, int32_t columns, uint32_t n, uint32_t len, int32_t *out_len,
                                          Page page, Entry entry) {
    bool bad = n > static_cast<uint32_t>(columns);
    if (bad && threadIdx.x == 0) {
        record_fault(p.report, KERNEL_PLAN_TABLES, buffer, request, step, static_cast<int64_t>(n) - 1, columns);
    }
    if (!bad) {
        bool wrong = false;
        for (uint32_t c = threadIdx.x; c < n && !wrong; c += TABLE_THREADS) {
            const int64_t column = page(c);
            const int32_t id = column < p.table.columns ? request_of(p, request).line[column] : 0;
            if (id == 0 || !in_bounds(id, p.table.num_pages)) {
                wrong = true;
                record_fault(p.report, KERNEL_PLAN_TABLES, id == 0 ? BUFFER_ALLOCATED : BUFFER_POOL_PAGES,
                             request, step, id == 0 ? column << p.step.shift : id,
                             id == 0 ? column << p.step.shift : p.table.num_pages);
            }
        }
        bad = __syncthreads_or(wrong);
    }
    for (uint32_t c = threadIdx.x; c < static_cast<uint32_t>(columns); c += TABLE_THREADS) {
        out[c] = !bad && c < n ? entry(c) : 0;
    }
    if (threadIdx.x == 0) {
        *out_len = bad ? 0 : static_cast<int32_t>(len);
    }
}

// True if branch `j` attends to its own lane, all of it, and nothing else.
__device__ __forceinline__ bool is_lane(form::Step s, const uint64_t *mask, uint32_t j) {
    for (uint32_t w = 0; w < form::mask_words(s); ++w) {
        if (mask[w] != form::lane_word(s, j, w)) {
            return false;
        }
    }
    return true;
}

__device__ __forceinline__ void plan_tables(const PlanTableParams &p) {
    const form::Step s = p.step;
    const uint32_t words = form::mask_words(s), passes = form::tables::passes(s);
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * TABLE_THREADS + threadIdx.x;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * TABLE_THREADS;
    const int32_t *indptr = at<const int32_t>(p.plan.qo_indptr);
    for (int64_t i = thread; i <= p.plan.batch; i += stride) {
        at<int32_t>(p.cu_seqlens_q)[i] = indptr[i];
    }
    if (passes != form::tables::ONE) {
        for (int64_t q = thread; q <= p.plan.queries; q += stride) {
            at<int32_t>(p.expand_cu_seqlens_q)[q] = static_cast<int32_t>(q);
        }
    }
    const int64_t rows = static_cast<int64_t>(p.plan.batch) + (passes == form::tables::ONE ? 0 : p.plan.queries);
    for (int64_t x = blockIdx.x; x < rows; x += gridDim.x) {
        const int32_t q = x < p.plan.batch ? -1 : static_cast<int32_t>(x - p.plan.batch);
        const int32_t i = q < 0 ? static_cast<int32_t>(x) : owner_of(p, q);
        Request r = i < 0 ? Request{0, 0, 0, nullptr} : request_of(p, i);
        // A lane that is read whole must be what the mask says; asked where the row is written that reads it.
        const bool asks = s.phase == form::DRAFT && (passes == form::tables::PAGES ? q >= 0 : passes == form::tables::ONE);
        if (asks && r.n > 0) {
            const uint32_t from = q < 0 ? 0 : q - r.first, to = q < 0 ? r.n : from + 1;
            for (uint32_t j = from; j < to && r.n > 0; ++j) {
                if (!is_lane(s, at<const uint64_t>(p.plan.mask) + (static_cast<int64_t>(r.first) + j) * words, j)) {
                    if (threadIdx.x == 0) {
                        record_fault(p.report, KERNEL_PLAN_TABLES, BUFFER_ANCESTORS, i, static_cast<int32_t>(j),
                                     form::own_bit(s, j), s.topk * s.steps);
                    }
                    r.n = 0;
                }
            }
        }
        if (q < 0) {
            const uint32_t len = r.n == 0 ? 0 : form::tables::len_at(s, r.len, r.n);
            write_row(
                p, BUFFER_PREFIX_TABLE, i, -1, at<int32_t>(p.page_table) + static_cast<int64_t>(i) * p.page_columns,
                p.page_columns, form::pages(s, len), len, at<int32_t>(p.cache_seqlens) + i,
                [](uint32_t c) -> int64_t { return c; }, [&](uint32_t c) { return r.line[c]; });
            continue;
        }
        const uint64_t *mask = at<const uint64_t>(p.plan.mask) + static_cast<int64_t>(q) * words;
        const uint32_t j = r.n == 0 ? 0 : static_cast<uint32_t>(q - r.first);
        const uint32_t len = r.n == 0 ? 0 : form::tables::expand_len_at(s, r.len, mask);
        const bool whole = passes == form::tables::PAGES;
        write_row(
            p, BUFFER_EXPAND_TABLE, i, q, at<int32_t>(p.expand_page_table) + static_cast<int64_t>(q) * p.expand_columns,
            p.expand_columns, whole ? form::pages(s, len) : len, len, at<int32_t>(p.expand_cache_seqlens) + q,
            [&](uint32_t c) -> int64_t {
                const uint32_t pos = whole ? form::draft_pos(s, r.len, j, 0) : form::bit_pos(s, r.len, form::nth_bit(mask, c));
                return static_cast<int64_t>(form::column(s, pos)) + (whole ? c : 0);
            },
            [&](uint32_t c) { return form::tables::expand_at(s, r.len, r.line, mask, j, c); });
    }
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(128) plan_tables(const __grid_constant__ specrs::PlanTableParams p) {
    specrs::plan_tables(p);
}
