// Keys and values that come by the copy engine, a box of keys at a time: which of them are stored follows from a request's
// record, so that loading waits for no list of rows. Keys that no row attends to may be among them; their weight is 0. A page has
// as many tokens as a box, or more.
#pragma once

#include "attention_items.cuh"
#include "attention_ring.cuh"
#include "tma.cuh"

#if SPECRS_WARPGROUPS
namespace specrs {
namespace attention {

// Maps of a layer's [slots, kv_heads * head_dim].
struct BoxMaps {
    TensorMap keys;         // boxes of 64 columns and BOX slots
    TensorMap values;
    TensorMap keys_line;    // the same in boxes of one slot
    TensorMap values_line;
    TensorMap slices;       // values in boxes of an eighth of a head and BOX slots
};

// Parameters as kernels/attention.rs passes them.
struct BoxCall {
    BoxMaps maps;
    AttentionParams p;
};

// The lowest `n` bits.
__device__ __forceinline__ uint32_t below(int32_t n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1; }

// 32 bits of a request's own keys, from position `first` on, of which bit 0 of `own` is at position `len`.
__device__ __forceinline__ uint32_t own_keys(unsigned long long own, int32_t first, int32_t len) {
    const int32_t at = first - len;
    return at >= 64 ? 0u : at >= 0 ? static_cast<uint32_t>(own >> at) : at > -32 ? static_cast<uint32_t>(own) << -at : 0u;
}

constexpr int BOX = 16;  // keys of a copy; a page has as many or more

// Bit k: the key at position `at` + k is stored, and the block has it. `own`: the stored slots of a draft.
__device__ __forceinline__ uint32_t stored_keys(const AttentionParams &p, const Request &r, bool tail, int32_t at,
                                                unsigned long long own) {
    uint32_t keys = below((p.draft_slots == 0 ? r.len + r.queries : r.len) - at);
    if (p.draft_slots != 0 && tail) {
        keys |= own_keys(own, at, r.len);
    }
    return keys & below(BOX);
}

// Copy a box of keys or values. One of stored keys is one copy, one of which only some are stored a copy for each; others
// are zeros, which the copy engine makes of slots behind the last.
__device__ __forceinline__ void load_stored(const TensorMap &boxes, const TensorMap &lines, uint32_t to, int32_t column,
                                              int32_t slot, int32_t nowhere, uint32_t keys, uint32_t barrier) {
    if (keys == 0 || keys == below(BOX)) {
        load_box(to, boxes, column, slot, barrier);
        return;
    }
#pragma unroll 1
    for (int k = 0; k < BOX; ++k) {
        load_box(to + k * 128, lines, column, (keys >> k & 1) != 0 ? slot + k : nowhere, barrier);
    }
}

// Slots of a draft that rows of the tile attend to: others may not be written yet. For all lanes of a warp.
template <int M>
__device__ __forceinline__ unsigned long long draft_keys(const AttentionParams &p, const Request &r, int32_t tile) {
    const int lane = threadIdx.x & 31;
    const int32_t first = tile * M / p.group;
    const int32_t end = min(r.queries, ((tile + 1) * M - 1) / p.group + 1);
    unsigned long long own = 0;
    for (int32_t j = first + lane; j < end; j += 32) {
        const unsigned long long bits = __ldg(reinterpret_cast<const unsigned long long *>(p.mask) + r.first + j);
        own |= p.draft_slots < 64 && bits >> p.draft_slots != 0 ? 0 : bits;  // a refused row attends to nothing
    }
    return static_cast<unsigned long long>(__reduce_or_sync(~0u, static_cast<uint32_t>(own >> 32))) << 32 |
           __reduce_or_sync(~0u, static_cast<uint32_t>(own));
}

}  // namespace attention
}  // namespace specrs
#endif
