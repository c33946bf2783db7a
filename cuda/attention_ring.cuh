// Work and memory of a CTA of attention: which item it has, what lies in its shared memory, and the ring through which keys
// and values come, in the banks that the tensor cores read.
#pragma once

#include "attention_rows.cuh"
#include "mma.cuh"
#if SPECRS_WARPGROUPS
#include "wgmma.cuh"
#endif

namespace specrs {
namespace attention {

// Byte offset of 16-byte piece `piece` of row `row` in a tile of rows of HD elements: eight rows at one piece, or eight
// pieces of a row, lie in different banks.
template <int HD>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
    const int key = HD == 96 ? (row >> 1) & 3 : row & 7;
    return static_cast<uint32_t>(row * HD * 2 + ((piece ^ key) << 4));
}

// Place of piece `piece` of key `row` in an entry of the ring: as above, or in panels of 64 columns.
template <int HD, bool PANELS>
__device__ __forceinline__ uint32_t in_entry(int row, int piece) {
    return PANELS ? static_cast<uint32_t>((piece >> 3) * BLOCK * 128) + swizzled<64>(row, piece & 7)
                  : swizzled<HD>(row, piece);
}

// Data that a CTA keeps in shared memory beside the tiles.
template <int M>
struct Shared {
    unsigned long long bits[M];
    int32_t cut[M];
    int32_t last[M];
    float maxima[WARPS][M];
    uint32_t sums[WARPS][M];
    float alpha[M];        // factors of the block under way
    float unit[M];         // power of two above the block's largest weight: the row sum counts 2^-23 of it
    float top[M];          // m of the split under way
    float row_sum[M];      // l of the split under way
    Folded folded[M];      // results of the splits before
    // Positions of the tail's block: logical position of a stored key; -1: not a key of this tile.
    int32_t key_position[BLOCK];
    uint32_t groups_at[BLOCK];      // bit g: the tail's group g holds a key at logical position cut_min + index
    int32_t row_tile_first[M / 16];  // smallest cut, largest last of 16 rows
    int32_t row_tile_last[M / 16];
    unsigned long long any_bits;  // keys at L + bit that some row of the tile attends to
    int32_t cut_min;              // over rows that attend to something
    int32_t cut_max;
    int32_t last_max;
    int32_t tail_keys;      // stored keys of the tail's block, up to the last
    int32_t tail_last;      // largest logical position among them
    int32_t scan[2][WARPS];
};

// Put pages of a block's keys into an entry: those of this warp's 32 keys whose `slot` (pieces from the plane's first)
// is not NO_SLOT, zeros for the others. Rows of 8 keys repeat the pattern of pieces and banks.
constexpr uint32_t NO_SLOT = 0xffffffffu;

template <int HD, bool PANELS>
__device__ __forceinline__ void load_keys(const uint8_t *plane, uint32_t entry, uint32_t slot, int first_key) {
    constexpr int PIECES = HD / 8;
    const int lane = threadIdx.x & 31;
    const uint32_t live = __ballot_sync(~0u, slot != NO_SLOT);
    const uint32_t own_slot = slot != NO_SLOT ? slot : 0;
#pragma unroll
    for (int turn = 0; turn < PIECES * 8 / 32; ++turn) {
        const int key = (turn * 32 + lane) / PIECES;
        const int piece = (turn * 32 + lane) % PIECES;
        const uint8_t *from = plane + piece * 16;
        const uint32_t to = entry + in_entry<HD, PANELS>(first_key + key, piece);
        const uint32_t mine = live >> key;
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
            const uint32_t at = __shfl_sync(~0u, own_slot, eight * 8 + key);
            copy_async(to + eight * (8 * (PANELS ? 64 : HD) * 2), from + static_cast<uint64_t>(at) * 16,
                       (mine & (1u << (eight * 8))) != 0);
        }
    }
}

// The slot of a position whose page is `page`; a page outside the cache is recorded, with its number among those that
// the request attends to.
template <bool INLINE>
__device__ __forceinline__ uint32_t slot_at(const AttentionParams &p, int32_t request, int32_t position, int32_t page) {
    if (!in_bounds(page, p.pages)) {
        fault<INLINE>(p, BUFFER_ATTENTION_CACHE_PAGE, request, position >> p.page_shift, page, p.pages);
        return NO_SLOT;
    }
    const int32_t index = (page << p.page_shift) | (position & ((1 << p.page_shift) - 1));
    return static_cast<uint32_t>(index) * p.slot_pieces;
}

}  // namespace attention
}  // namespace specrs
