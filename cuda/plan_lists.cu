// The slot lists and masks of `flashinfer` and `triton`, from a plan in device memory (`plan.cu`) and the page table.
//
// The twin of the host's `plan::write::{slots, masks}`, bit for bit, in two launches of grids that follow from the bucket:
//
//   plan_starts  one CTA: where each list and each mask starts, sums over the batch in chunks of a thread each
//   plan_fill    CTAs over requests and over positions: what the lists and the masks hold
//
// Arrays have static capacities. A list or a mask that does not fit is recorded and empty, and so are those behind it; a page
// that is none of the pool's is recorded, and its slots are the sink. Dead requests and queries have empty lists.
//
// In a draft or decode step each query has a list, in other phases each request. The K lists of a request begin with the same
// prefix: its slots are found once and stored K times.
//
// Cost: bytes of the lists and masks written, and the pages read once for each request.
#include "form.cuh"
#include "rows.cuh"

namespace specrs {

constexpr int START_THREADS = 1024;
constexpr int FILL_THREADS = 256;

template <typename T>
__device__ __forceinline__ T *at(uint64_t address) {
    return reinterpret_cast<T *>(address);
}

// A request of the plan: its queries, its prefix, and whether it attends to anything.
struct Request {
    int32_t first;
    uint32_t n;
    uint32_t len;
    bool open;
};

__device__ __forceinline__ Request request_of(const PlanListParams &p, int32_t i) {
    const int32_t *indptr = at<const int32_t>(p.plan.qo_indptr);
    const int32_t first = indptr[i], end = indptr[i + 1];
    const int32_t row = at<const int32_t>(p.plan.rows)[i], len = at<const int32_t>(p.plan.prefix_lens)[i];
    // A plan of this device is well-formed; one that is not reads nothing.
    const bool sound = first >= 0 && end >= first && end <= p.plan.queries && len >= 0 && in_bounds(row, p.table.rows);
    const bool open = sound && end > first && at<const int32_t>(p.plan.out_slots)[first] != 0;
    return Request{first, sound ? static_cast<uint32_t>(end - first) : 0, open ? static_cast<uint32_t>(len) : 0, open};
}

// The request of a query, -1 for a dead one.
__device__ __forceinline__ int32_t owner_of(const PlanListParams &p, int32_t q) {
    const int32_t *indptr = at<const int32_t>(p.plan.qo_indptr);
    if (q >= indptr[p.plan.batch]) {
        return -1;
    }
    int32_t low = 0, high = p.plan.batch;  // the first request that starts behind q
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

__device__ __forceinline__ const uint64_t *mask_of(const PlanListParams &p, form::Step s, int64_t q) {
    return at<const uint64_t>(p.plan.mask) + q * form::mask_words(s);
}

// Keys of a query behind the prefix.
__device__ __forceinline__ uint32_t own_of(const PlanListParams &p, form::Step s, const Request &r, int32_t q) {
    const uint32_t words = form::mask_words(s);
    return words == 0 ? static_cast<uint32_t>(q - r.first) + 1 : form::bits(mask_of(p, s, q), words);
}

// Slots in list `z`.
__device__ __forceinline__ uint64_t list_len(const PlanListParams &p, form::Step s, int32_t z) {
    if (!form::lists::per_query(s)) {
        const Request r = request_of(p, z);
        return r.open ? form::lists::request_len(r.len, r.n, p.own) : 0;
    }
    const int32_t i = owner_of(p, z);
    if (i < 0) {
        return 0;
    }
    const Request r = request_of(p, i);
    const uint32_t own = r.open ? own_of(p, s, r, z) : 0;
    return own == 0 ? 0 : static_cast<uint64_t>(r.len) + own;
}

// Write the starts of `count` lists whose lengths `length(z)` gives, and the end of the last, by `put(z, start)`. One CTA of
// START_THREADS threads. Lists from the first that does not fit `capacity` on are empty; that one is recorded.
template <typename Length, typename Put>
__device__ __forceinline__ void write_starts(const PlanListParams &p, Buffer buffer, int32_t count, int64_t capacity,
                                             Length length, Put put) {
    __shared__ uint64_t sums[START_THREADS / 32];
    __shared__ unsigned long long fitting;  // the end of the last list that fits
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t carry = 0;
    if (threadIdx.x == 0) {
        put(0, 0);
        fitting = 0;
    }
    for (int32_t base = 0; base < count; base += START_THREADS) {
        const int32_t z = base + threadIdx.x;
        const uint64_t own = z < count ? length(z) : 0;
        uint64_t sum = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const uint64_t y = __shfl_up_sync(0xffffffffu, sum, d);
            sum += lane >= d ? y : 0;
        }
        __syncthreads();
        if (lane == 31) {
            sums[warp] = sum;
        }
        __syncthreads();
        uint64_t all = 0;
        for (int w = 0; w < START_THREADS / 32; ++w) {
            sum += w < warp ? sums[w] : 0;
            all += sums[w];
        }
        const uint64_t end = carry + sum, limit = static_cast<uint64_t>(capacity);
        if (z < count && end <= limit) {
            atomicMax(&fitting, static_cast<unsigned long long>(end));
        } else if (z < count && end - own <= limit && own > 0) {
            record_fault(p.report, KERNEL_PLAN_LISTS, buffer, z, -1, static_cast<int64_t>(end) - 1, capacity);
        }
        __syncthreads();
        if (z < count) {
            put(z + 1, end <= limit ? end : fitting);
        }
        carry += all;
    }
    __syncthreads();
}

// int32 or int64, as the format has it.
__device__ __forceinline__ void put_index(const PlanListParams &p, uint64_t array, int64_t x, int64_t value) {
    if (p.wide != 0) {
        at<int64_t>(array)[x] = value;
    } else {
        at<int32_t>(array)[x] = static_cast<int32_t>(value);
    }
}

__device__ __forceinline__ int64_t index_at(const PlanListParams &p, uint64_t array, int64_t x) {
    return p.wide != 0 ? at<const int64_t>(array)[x] : at<const int32_t>(array)[x];
}

__device__ __forceinline__ void plan_starts(const PlanListParams &p) {
    const form::Step s = p.step;
    const int32_t lists = form::lists::per_query(s) ? p.plan.queries : p.plan.batch;
    write_starts(
        p, BUFFER_KV_INDICES, lists, p.indices, [&](int32_t z) { return list_len(p, s, z); },
        [&](int32_t z, uint64_t start) { at<int32_t>(p.kv_indptr)[z] = static_cast<int32_t>(start); });
    const auto mask_len = [&](int32_t i) -> uint64_t {
        const Request r = request_of(p, i);
        return r.open ? form::lists::mask_len(r.len, r.n) : 0;
    };
    if (p.custom_mask != 0) {
        write_starts(p, BUFFER_CUSTOM_MASK, p.plan.batch, p.mask_elements, mask_len, [&](int32_t i, uint64_t start) {
            put_index(p, p.mask_indptr, i, static_cast<int64_t>(start));
        });
    }
    if (p.packed_mask != 0) {
        write_starts(
            p, BUFFER_PACKED_MASK, p.plan.batch, p.packed_bytes, [&](int32_t i) { return (mask_len(i) + 7) >> 3; },
            [&](int32_t i, uint64_t start) { at<int32_t>(p.packed_indptr)[i] = static_cast<int32_t>(start); });
    }
    if (p.last_page_len != 0) {
        for (int32_t z = threadIdx.x; z < lists; z += START_THREADS) {
            at<int32_t>(p.last_page_len)[z] = 1;
        }
    }
    if (p.qo_out != 0) {
        for (int32_t i = threadIdx.x; i <= p.plan.batch; i += START_THREADS) {
            put_index(p, p.qo_out, i, at<const int32_t>(p.plan.qo_indptr)[i]);
        }
    }
}

// Slot of row position `pos`; the sink where it lies on no page of the pool, which is recorded.
__device__ __forceinline__ int32_t checked_slot(const PlanListParams &p, form::Step s, const int32_t *row, int32_t request,
                                                uint32_t pos) {
    const uint32_t column = form::column(s, pos);
    if (column >= static_cast<uint32_t>(p.table.columns)) {
        record_fault(p.report, KERNEL_PLAN_LISTS, BUFFER_ALLOCATED, request, -1, pos,
                     static_cast<int64_t>(p.table.columns) << s.shift);
        return 0;
    }
    const int32_t page = row[column];
    if (page == 0 || !in_bounds(page, p.table.num_pages)) {
        record_fault(p.report, KERNEL_PLAN_LISTS, page == 0 ? BUFFER_ALLOCATED : BUFFER_POOL_PAGES, request, -1,
                     page == 0 ? static_cast<int64_t>(pos) : page, page == 0 ? pos : p.table.num_pages);
        return 0;
    }
    return form::slot(s, page, pos);
}

// The masks of a request, in bytes: 16 of the array at a time.
__device__ __forceinline__ void fill_bytes(const PlanListParams &p, form::Step s, int32_t i, const Request &r) {
    const int64_t start = index_at(p, p.mask_indptr, i), end = index_at(p, p.mask_indptr, i + 1);
    if (end - start != static_cast<int64_t>(form::lists::mask_len(r.len, r.n))) {
        return;  // the list does not fit
    }
    uint8_t *out = at<uint8_t>(p.custom_mask);
    const uint64_t *mask = mask_of(p, s, r.first);
    const uint32_t words = form::mask_words(s);
    const uint64_t width = static_cast<uint64_t>(r.len) + r.n;
    const int64_t shift = static_cast<int64_t>(p.custom_mask % 16);  // shifted so that whole vectors are aligned
    const int64_t begin = (start + shift) / 16, stop = (end + shift + 15) / 16;
    for (int64_t v = begin + static_cast<int64_t>(blockIdx.x) * FILL_THREADS + threadIdx.x; v < stop;
         v += static_cast<int64_t>(gridDim.x) * FILL_THREADS) {
        const int64_t first = v * 16 - shift > start ? v * 16 - shift : start;
        const int64_t behind = v * 16 - shift + 16 < end ? v * 16 - shift + 16 : end;
        uint64_t j = static_cast<uint64_t>(first - start) / width, key = static_cast<uint64_t>(first - start) % width;
        if (behind - first == 16 && key + 16 <= r.len) {
            *reinterpret_cast<uint4 *>(out + first) = make_uint4(0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u);
            continue;
        }
        for (int64_t x = first; x < behind; ++x) {
            const uint64_t bit = key - r.len;
            out[x] = key < r.len ? 1 : static_cast<uint8_t>(mask[j * words + (bit >> 6)] >> (bit & 63) & 1);
            if (++key == width) {
                key = 0;
                ++j;
            }
        }
    }
}

// The same in bits.
__device__ __forceinline__ void fill_bits(const PlanListParams &p, form::Step s, int32_t i, const Request &r) {
    const int32_t start = at<const int32_t>(p.packed_indptr)[i], end = at<const int32_t>(p.packed_indptr)[i + 1];
    if (end - start != static_cast<int64_t>(form::lists::packed_len(r.len, r.n))) {
        return;
    }
    const uint64_t *mask = mask_of(p, s, r.first);
    const uint64_t width = static_cast<uint64_t>(r.len) + r.n;
    uint8_t *out = at<uint8_t>(p.packed_mask) + start;
    for (int64_t x = static_cast<int64_t>(blockIdx.x) * FILL_THREADS + threadIdx.x; x < end - start;
         x += static_cast<int64_t>(gridDim.x) * FILL_THREADS) {
        const uint64_t key = static_cast<uint64_t>(x) * 8 % width;
        out[x] = key + 8 <= r.len ? 0xFF : form::lists::packed_at(s, r.len, r.n, mask, x);
    }
}

__device__ __forceinline__ void plan_fill(const PlanListParams &p) {
    const form::Step s = p.step;
    const int32_t *indptr = at<const int32_t>(p.kv_indptr);
    const int64_t stride = static_cast<int64_t>(gridDim.x) * FILL_THREADS;
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * FILL_THREADS + threadIdx.x;
    if (p.extend_slots != 0 && blockIdx.y == 0) {
        for (int64_t q = thread; q < p.plan.queries; q += stride) {
            at<int64_t>(p.extend_slots)[q] = at<const int32_t>(p.plan.out_slots)[q];
        }
    }
    for (int32_t i = blockIdx.y; i < p.plan.batch; i += gridDim.y) {
        const Request r = request_of(p, i);
        if (!r.open) {
            continue;
        }
        const int32_t *row = table_row(p.table, at<const int32_t>(p.plan.rows)[i]);
        if (!form::lists::per_query(s)) {
            const int32_t start = indptr[i], slots = indptr[i + 1] - start;
            if (slots == static_cast<int64_t>(list_len(p, s, i))) {
                for (int64_t o = thread; o < slots; o += stride) {
                    const int32_t slot = checked_slot(p, s, row, i, static_cast<uint32_t>(o));
                    put_index(p, p.kv_indices, start + o, slot);
                }
            }
        } else {
            for (int64_t pos = thread; pos < r.len; pos += stride) {
                const int32_t slot = checked_slot(p, s, row, i, static_cast<uint32_t>(pos));
                for (uint32_t j = 0; j < r.n; ++j) {
                    const int32_t start = indptr[r.first + j];
                    if (indptr[r.first + j + 1] - start > pos) {  // else it does not fit, or has no keys
                        put_index(p, p.kv_indices, start + pos, slot);
                    }
                }
            }
            // Write the few keys that each query attends to behind the prefix, by the first CTA.
            for (uint32_t j = blockIdx.x == 0 ? threadIdx.x / 32 : r.n; j < r.n; j += FILL_THREADS / 32) {
                const int32_t q = r.first + static_cast<int32_t>(j), start = indptr[q], slots = indptr[q + 1] - start;
                for (int64_t o = r.len + threadIdx.x % 32; o < slots; o += 32) {
                    const uint32_t pos = form::key_pos(s, r.len, mask_of(p, s, q), static_cast<uint32_t>(o));
                    put_index(p, p.kv_indices, start + o, checked_slot(p, s, row, i, pos));
                }
            }
        }
        if (p.custom_mask != 0) {
            fill_bytes(p, s, i, r);
        }
        if (p.packed_mask != 0) {
            fill_bits(p, s, i, r);
        }
    }
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(1024) plan_starts(const __grid_constant__ specrs::PlanListParams p) {
    specrs::plan_starts(p);
}
extern "C" __global__ void __launch_bounds__(256) plan_fill(const __grid_constant__ specrs::PlanListParams p) {
    specrs::plan_fill(p);
}
