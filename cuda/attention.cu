// Paged attention, one family for every phase: plain decode, prefill in chunks, draft steps and tree verification.
//
// A row is one query of one head. It attends to a list of logical keys: positions 0..p of its own sequence. A tree's
// node finds the last of them among the stored nodes that are its ancestors. The bits of a row's output are a function
// of that list alone: not of the batch, of where keys are stored, of the other rows, or of how a prompt was cut into
// chunks. The rule that all phases keep (the constants are ATTENTION_* in params.cuh, and `ATTENTION_NUMERICS_ID` names
// them together):
//
//   * c = max(0, p + 1 - TAIL). Keys below c are taken in blocks of BLOCK at absolute positions, in order, with an online
//     softmax over blocks; a block's products in its absolute groups of 16 keys, in order. The group that holds c is cut
//     by the mask. Blocks form splits of SPLIT keys at absolute positions; each split starts fresh.
//   * Keys c..p are a split of their own, merged last. Its products take one key in each step of 16, in logical order: in
//     a tree, for each group of stored keys and each depth in it, ascending, the group with all other depths masked out.
//   * Splits are merged in index order by one formula (`Folded::add`).
//
// This holds for a tree whose ancestors below c are stored at their logical positions: the deepest path numbered first, and
// no node farther off it than TAIL nodes. The kernel checks that for each row.
//
// Why the bits hold (measured on an H200 and an H100): a tensor-core step's result depends on which products share
// it, never on their lanes, on other rows, or on steps of zero products before or after (but a sum of -0 becomes +0, which
// the last addition of +0 hides). The maximum is order-free. The row sum is taken in integers. The factor of the old
// sums comes from the difference of raw maxima, so that a block that a row does not reach multiplies by exactly 1.
//
// Sources: online softmax, Milakov and Gimelshein 2018; splitting over keys, Flash-Decoding (Dao et al. 2023); rows of a
// kv head's group packed into one tile, Ainslie et al. 2023 (GQA) and FlashAttention-3's packing.
//
// Work: a tile is M rows of one request and kv head. Its items are its splits and its last TAIL keys (the tail). The grid is
// fixed at launch and each CTA takes items gridDim.x apart, so that lengths are needed on the device alone. Where tiles
// alone fill the GPU, or the workspace has too few slots, a CTA takes a whole tile and folds its splits as it goes
// ("serial"); else every item leaves its sums in a slot of the workspace and `merge` folds them. Both fold the same
// numbers in the same order.
//
// On Hopper clusters take the place of `attend` where a batch can have only so few items, of low tiles, that each has a block
// (attention_cluster.cuh).
//
// Four warps share a tile of up to 64 rows. Warp w scores keys 32w..32w+31 of a block and owns a quarter of the output's
// columns, so that one warp takes all keys of its columns in order. On Hopper a tile of 64 rows is a warpgroup's: a warp owns
// 16 rows, scores all keys of a block for them, and keeps their weights in registers. K and V come through a ring of blocks in
// shared memory, loaded by cp.async in 16-byte pieces; a key that no row reaches is zeros there, never read. A tile of 128
// rows, on Hopper alone, belongs to two warpgroups, for which a warp loads by the copy engine.
//
// Beside the kernels lie:
//   attention_rows.cuh          requests and what rows attend to, checked
//   attention_items.cuh         items of the work
//   attention_ring.cuh          shared memory and cp.async
//   attention_tile.cuh          a tile of up to 64 rows: lists and loading; its computing: attention_tile_compute.cuh
//   attention_cluster.cuh       splits that the blocks of a cluster share
//   attention_wide.cuh          a tile of 128 rows: lists and loading; its computing: attention_wide_compute.cuh
//   attention_boxes.cuh         keys and values that come by the copy engine
//   attention_softmax.cuh       formulas of a block's softmax
//   attention_fold.cuh          the folding of splits, with `merge`
//
// build.rs compiles this file once for each element type (SPECRS_ELEMENT) and head_dim (SPECRS_HEAD_DIM), and, for the
// models that cap their scores (Gemma 2, arXiv:2408.00118), once more with SPECRS_CAPPED.
#include "attention_cluster.cuh"
#include "attention_tile_compute.cuh"
#include "attention_wide_compute.cuh"

// Heights of a tile: a request's rows (queries times group) choose among them, and no bit depends on it.
extern "C" __global__ void __launch_bounds__(specrs::attention::THREADS, 2)
    attention_16(const __grid_constant__ specrs::AttentionParams p) {
    specrs::attention::attend<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM, 16, false>(p);
}
extern "C" __global__ void __launch_bounds__(specrs::attention::THREADS, 2)
    attention_32(const __grid_constant__ specrs::AttentionParams p) {
    specrs::attention::attend<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM, 32, false>(p);
}
extern "C" __global__ void __launch_bounds__(specrs::attention::THREADS, 2)
    attention_64(const __grid_constant__ specrs::AttentionParams p) {
    specrs::attention::attend<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM, 64,
                              SPECRS_WARPGROUPS != 0 && SPECRS_HEAD_DIM % 64 == 0 && SPECRS_HEAD_DIM <= 128>(p);
}
#if SPECRS_WARPGROUPS && SPECRS_HEAD_DIM % 64 == 0 && SPECRS_HEAD_DIM <= 128
extern "C" __global__ void __launch_bounds__(specrs::attention::WIDE_THREADS, 1)
    attention_128(const __grid_constant__ specrs::attention::BoxCall call) {
    specrs::attention::attend_wide<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM>(call);
}
#endif
#if SPECRS_WARPGROUPS && SPECRS_HEAD_DIM % 64 == 0 && SPECRS_HEAD_DIM <= 128
extern "C" __global__ void __launch_bounds__(specrs::attention::THREADS, 2)
    attention_cluster_16(const __grid_constant__ specrs::attention::BoxCall call) {
    specrs::attention::attend_clustered<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM, 16>(call);
}
extern "C" __global__ void __launch_bounds__(specrs::attention::THREADS, 2)
    attention_cluster_32(const __grid_constant__ specrs::attention::BoxCall call) {
    specrs::attention::attend_clustered<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM, 32>(call);
}
#endif
extern "C" __global__ void __launch_bounds__(specrs::attention::THREADS)
    attention_merge(const __grid_constant__ specrs::AttentionParams p) {
    specrs::attention::merge<specrs::SPECRS_ELEMENT, SPECRS_HEAD_DIM>(p);
}
