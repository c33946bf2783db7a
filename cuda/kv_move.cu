// KV move: copy token rows of the KV cache from slot to slot, K and V of all layers, in one launch.
//
//   for each request r, for m in offsets[r] .. offsets[r + 1], in this order, for each plane:
//       cache[plane][dst[m]] = cache[plane][src[m]]
//
// The result equals executing a request's moves one after the other, whatever their overlap: a destination may be a
// later source, an earlier source or a later destination. No barrier is needed for that: a thread owns one vector
// column of one plane for all moves of a request, so every hazard lies within a thread. To keep several loads in
// flight all the same, it takes GROUP moves at a time: all loads first, then a value is forwarded in a register where a
// source is an earlier destination of the group, then all stores in order.
// Measured on an H200: longer groups, several columns at once, streaming hints and a register cap are no faster.
//
// Requests run concurrently: no request's destination may be a slot that another one's moves name (the pool gives each
// page that is written one owner). Breaking this gives one of the orders' results in each vector, never a fault of memory.
//
// A move whose destination is slot 0 (the sink) is padding, and a move from a slot to itself has nothing to do: both
// touch nothing. An index outside the cache skips its move; offsets outside the arrays skip the request.
// Either is recorded. Dead rows of a static batch have offsets[r] == offsets[r + 1].
//
// Cost: bytes read plus bytes written, 2 * planes * row for each move; nothing is read for dead rows but two offsets.
#include "common.cuh"

namespace specrs {

constexpr int GROUP = 4;

template <typename Vector>
__device__ __forceinline__ void kv_move(const KvMoveParams &p) {
    const uint32_t items = p.planes * p.columns;  // fits int32: the launcher checked
    const uint32_t stride = gridDim.x * blockDim.x;
    const bool reporter = blockIdx.x == 0 && threadIdx.x == 0;
    const int32_t *src = reinterpret_cast<const int32_t *>(p.src);
    const int32_t *dst = reinterpret_cast<const int32_t *>(p.dst);
    const int32_t *offsets = reinterpret_cast<const int32_t *>(p.offsets);

    for (int32_t request = blockIdx.y; request < p.requests; request += gridDim.y) {
        const int32_t begin = __ldg(offsets + request);
        const int32_t end = __ldg(offsets + request + 1);
        if (begin == end) {
            continue;
        }
        if (begin < 0 || end < begin || end > p.moves) {
            if (reporter) {
                const bool order = begin >= 0 && end < begin;
                record_fault(p.report, KERNEL_KV_MOVE, order ? BUFFER_OFFSETS_ORDER : BUFFER_MOVES, request,
                             -1, begin < 0 ? begin : (order ? end : end - 1), p.moves);
            }
            continue;
        }
        for (int32_t first = begin; first < end; first += GROUP) {
            int32_t from[GROUP];
            int32_t to[GROUP];  // 0: nothing to do
#pragma unroll
            for (int k = 0; k < GROUP; ++k) {
                const bool live = k < end - first;
                from[k] = live ? __ldg(src + first + k) : 0;
                to[k] = live ? __ldg(dst + first + k) : 0;
            }
#pragma unroll
            for (int k = 0; k < GROUP; ++k) {
                const bool source = in_bounds(from[k], p.num_slots);
                const bool destination = in_bounds(to[k], p.num_slots);
                if (!source || !destination) {
                    if (reporter) {
                        record_fault(p.report, KERNEL_KV_MOVE, source ? BUFFER_CACHE_DST : BUFFER_CACHE_SRC,
                                     request, first + k - begin, source ? to[k] : from[k], p.num_slots);
                    }
                    to[k] = 0;
                }
                if (from[k] == to[k]) {
                    to[k] = 0;
                }
            }
            // The same thread takes an item in every group, so a later group sees what an earlier one wrote.
            for (uint32_t item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += stride) {
                const uint32_t plane = item / p.columns;
                const uint32_t column = item - plane * p.columns;
                // Slot s of this column is line[s * columns].
                Vector *line = reinterpret_cast<Vector *>(p.cache + plane * p.plane_bytes) + column;
                Vector value[GROUP];
#pragma unroll
                for (int k = 0; k < GROUP; ++k) {
                    if (to[k] != 0) {
                        value[k] = line[static_cast<uint64_t>(from[k]) * p.columns];
                    }
                }
#pragma unroll
                for (int k = 1; k < GROUP; ++k) {
#pragma unroll
                    for (int earlier = 0; earlier < k; ++earlier) {
                        if (to[k] != 0 && to[earlier] != 0 && to[earlier] == from[k]) {
                            value[k] = value[earlier];  // the latest earlier write wins
                        }
                    }
                }
#pragma unroll
                for (int k = 0; k < GROUP; ++k) {
                    if (to[k] != 0) {
                        line[static_cast<uint64_t>(to[k]) * p.columns] = value[k];
                    }
                }
            }
        }
    }
}

}  // namespace specrs

// One entry for each vector width; the launcher takes the widest that divides the row and the cache's address.
extern "C" __global__ void __launch_bounds__(256) kv_move_v16(const __grid_constant__ specrs::KvMoveParams p) {
    specrs::kv_move<uint4>(p);
}
extern "C" __global__ void __launch_bounds__(256) kv_move_v8(const __grid_constant__ specrs::KvMoveParams p) {
    specrs::kv_move<uint2>(p);
}
extern "C" __global__ void __launch_bounds__(256) kv_move_v4(const __grid_constant__ specrs::KvMoveParams p) {
    specrs::kv_move<uint32_t>(p);
}
extern "C" __global__ void __launch_bounds__(256) kv_move_v2(const __grid_constant__ specrs::KvMoveParams p) {
    specrs::kv_move<uint16_t>(p);
}
extern "C" __global__ void __launch_bounds__(256) kv_move_v1(const __grid_constant__ specrs::KvMoveParams p) {
    specrs::kv_move<uint8_t>(p);
}
