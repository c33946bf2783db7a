// Tiles of up to 32 rows on Hopper, where a batch can have no more items than there is room for blocks. Where it has so few splits
// that each has a cluster, the cluster's blocks share it; else each block has an item, as in `attend`.
//
// A score depends on its key alone, and a column of the output on all weights, in order. So block b of the cluster scores
// block b of the split's keys, and multiplies the weights of all keys by its own columns of their values: each reads an eighth of
// the bytes, all at once, by the copy engine. Between lie two exchanges: of the blocks' maxima, from which each has the maximum
// up to its own keys, and of the weights. The sums are those of one block that takes the keys in order, to the bit.
//
// The tail of a tile is a block's own work: eight of them are a cluster's.
#pragma once

#include "attention_boxes.cuh"
#include "attention_tile_compute.cuh"
#include "group.cuh"

#if SPECRS_WARPGROUPS
namespace specrs {
namespace attention {

// What the blocks of a cluster send one another, beside the weights.
template <int M>
struct Exchange {
    uint32_t tops[CLUSTER][M];    // bits of the largest score of each row in each block
    uint32_t counts[CLUSTER][M];  // parts of the row sums, for block 0
    Mailbox tops_box;
    Mailbox weights_box;
    uint64_t keys_full;  // barriers of what the copy engine loads
    uint64_t values_full;
};

template <typename T, int HD, int M>
struct ClusterTile : TileCompute<T, HD, M, false> {
    using Compute = TileCompute<T, HD, M, false>;
    static constexpr int SLICE = HD / CLUSTER;  // columns that a block multiplies
    static constexpr int PIECES = SLICE / 8;
    static constexpr int ROW_TILES = M / 16;
    // A warp multiplies 16 rows by so many tiles of 8 columns; without enough of them some warps have none.
    static constexpr int COLUMN_TILES = (PIECES * ROW_TILES + WARPS - 1) / WARPS;
    static constexpr int BLOCK_GROUPS = BLOCK / GROUP;
    static_assert(PIECES == 1 || PIECES == 2, "the pattern of pieces and banks");
    using Compute::p, Compute::sh, Compute::items, Compute::c, Compute::m;
    using Compute::thread, Compute::warp, Compute::lane, Compute::quad, Compute::pair;

    Exchange<M> &ex;
    const BoxMaps &maps;
    Group group = own_group();
    uint8_t *weights;  // of each block of the split, `slot_rows` rows of its keys, in the place of the keys
    uint32_t v_at;     // the slice of the values: lines of PIECES for all keys of the split

    __device__ __forceinline__ ClusterTile(const BoxCall &call, uint8_t *memory)
        : Compute(call.p, memory),
          ex(*reinterpret_cast<Exchange<M> *>(&this->sh + 1)),
          maps(call.maps),
          weights(memory),
          v_at(this->ring_at + (p.stages - 1) * Compute::ENTRY) {
        // The launcher counts on this size.
        static_assert(sizeof(Exchange<M>) <= M * 64 + 32, "shared_bytes in kernels/attention.rs");
        items.mains = reinterpret_cast<int32_t *>(&ex + 1);
        items.pairs = items.mains + p.requests + 1;
        items.requests = reinterpret_cast<Request *>(items.pairs + p.requests + 1);
    }

    __device__ __forceinline__ uint8_t *weights_of(int block) const {
        return weights + block * p.slot_rows * (BLOCK * 2);
    }

    // Place of piece `piece` of a key in the slice of the values.
    __device__ __forceinline__ uint32_t in_slice(int key, int piece) const {
        return v_at + key * (SLICE * 2) + (PIECES == 2 ? (piece ^ (key >> 2 & 1)) << 4 : 0);
    }

    // This block's keys, from `base` on, and its columns of the values of keys first..end, under way. A box with keys behind the
    // end is copied whole: what they score is masked, and their values are cleared.
    __device__ __forceinline__ void load_split(int32_t first, int32_t base, int32_t end) {
        constexpr int PANELS = HD / 64;
        constexpr int BOXES = BLOCK / BOX;
        // In each warp a lane has a box of its slices, a few more have a panel of a box of keys.
        const bool slice = lane < CLUSTER * BOXES / WARPS;
        const int at = slice ? warp * (CLUSTER * BOXES / WARPS) + lane : warp * (PANELS * BOXES / WARPS) + lane - 16;
        const int box = slice ? at : at / PANELS;
        const int32_t position = (slice ? first : base) + box * BOX;
        const int32_t page = position < end ? __ldg(this->table + (position >> p.page_shift)) : 0;
        int32_t slot = p.pages << p.page_shift;  // nowhere, which is zeros
        if (position < end) {
            if (in_bounds(page, p.pages)) {
                slot = (page << p.page_shift) | (position & ((1 << p.page_shift) - 1));
            } else {
                fault<false>(p, BUFFER_ATTENTION_CACHE_PAGE, this->i, position >> p.page_shift, page, p.pages);
            }
        }
        const int parts = (end - first + BLOCK - 1) / BLOCK;
        const uint32_t keys_full = shared_address(&ex.keys_full);
        const uint32_t values_full = shared_address(&ex.values_full);
        if (thread == 0) {
            barrier_arrive_expecting(keys_full, base < end ? Compute::ENTRY : 0);
            barrier_arrive_expecting(values_full, parts * (BLOCK * SLICE * 2));
        }
        const int32_t column = this->head * HD;
        if (slice) {
            if (box < parts * BOXES) {
                load_box(v_at + box * (BOX * SLICE * 2), maps.slices, column + group.rank * SLICE, slot, values_full);
            }
        } else if (lane < 16 + PANELS * BOXES / WARPS && base < end) {
            load_box(this->ring_at + at % PANELS * (BLOCK * 128) + box * (BOX * 128), maps.keys,
                     column + at % PANELS * 64, slot, keys_full);
        }
    }

    // Groups of a block: weights of a warp's rows, and its columns of the values.
    struct Fragments {
        uint32_t a[BLOCK_GROUPS][4];
        uint32_t b[BLOCK_GROUPS][COLUMN_TILES][2];
    };

    __device__ __forceinline__ void load_fragments(Fragments &f, int block, int row_tile, int piece) {
        const uint32_t from = shared_address(weights_of(block));
        const int row = min(row_tile * 16 + (lane & 15), p.slot_rows - 1);  // rows that there are not give sums that are not
#pragma unroll
        for (int g = 0; g < BLOCK_GROUPS; ++g) {
            load_matrices(f.a[g], from + swizzled<BLOCK>(row, g * 2 + (lane >> 4)));
        }
        const int key = block * BLOCK + (lane & 15);
#pragma unroll
        for (int g = 0; g < BLOCK_GROUPS; g += COLUMN_TILES == 1 ? 2 : 1) {
            uint32_t d[4];  // two groups of one tile, or two tiles of one group
            if (COLUMN_TILES == 1) {
                load_matrices_transposed(d, in_slice(key + (g + (lane >> 4)) * GROUP, piece));
                f.b[g][0][0] = d[0];
                f.b[g][0][1] = d[1];
                f.b[g + 1 < BLOCK_GROUPS ? g + 1 : g][0][0] = d[2];
                f.b[g + 1 < BLOCK_GROUPS ? g + 1 : g][0][1] = d[3];
            } else {
                load_matrices_transposed(d, in_slice(key + g * GROUP, piece + (lane >> 4)));
                f.b[g][0][0] = d[0];
                f.b[g][0][1] = d[1];
                f.b[g][COLUMN_TILES - 1][0] = d[2];
                f.b[g][COLUMN_TILES - 1][1] = d[3];
            }
        }
    }

    __device__ __forceinline__ float top_of(int block, int row) const {
        return __uint_as_float(ex.tops[block][row]);
    }

    // The weights of `parts` blocks times the values, to the split's slot of the workspace.
    __device__ __forceinline__ void slice_values(int32_t number, int parts) {
        const int row_tile = warp % ROW_TILES;
        const int piece = warp / ROW_TILES * COLUMN_TILES;
        if (piece >= PIECES) {
            return;
        }
        const int rows[2] = {row_tile * 16 + quad, row_tile * 16 + quad + 8};
        float sums[COLUMN_TILES][4] = {};
        float top[2] = {none(), none()};
        Fragments now;
        load_fragments(now, 0, row_tile, piece);
#pragma unroll 2
        for (int block = 0; block < parts; ++block) {
            Fragments next;
            load_fragments(next, min(block + 1, parts - 1), row_tile, piece);
            float alpha[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                alpha[e] = RowFactors::next(top[e], top_of(block, rows[e]), c).alpha;
            }
            scale_rows(sums, alpha);
#pragma unroll
            for (int g = 0; g < BLOCK_GROUPS; ++g) {
#pragma unroll
                for (int t = 0; t < COLUMN_TILES; ++t) {
                    T::mma(sums[t], now.a[g], now.b[g][t][0], now.b[g][t][1]);
                }
            }
            now = next;
        }
        float *const to = reinterpret_cast<float *>(p.partials) +
                          static_cast<int64_t>(number) * p.slot_rows * HD + group.rank * SLICE + piece * 8 + pair * 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (rows[e] < this->rows) {
#pragma unroll
                for (int t = 0; t < COLUMN_TILES; ++t) {
                    *reinterpret_cast<float2 *>(to + rows[e] * HD + t * 8) = make_float2(sums[t][e * 2], sums[t][e * 2 + 1]);
                }
            }
        }
    }

    // Maximum and row sum of the split, of a row for each thread.
    __device__ __forceinline__ void store_state(int32_t number, int parts) {
        if (thread < M && thread < this->rows) {
            float top = none();
            float sum = 0.0f;
            for (int block = 0; block < parts; ++block) {
                const RowFactors f = RowFactors::next(top, top_of(block, thread), c);
                sum = __fmaf_rn(sum, f.alpha, row_sum_of(ex.counts[block][thread], f.unit));
            }
            reinterpret_cast<float2 *>(p.states)[static_cast<int64_t>(number) * p.slot_rows + thread] =
                make_float2(top, sum);
        }
    }

    // A split of the keys, which is item `number`.
    __device__ __forceinline__ void take_split(int32_t number) {
        const Place place = place_of<M>(p, items, number);
        this->i = place.request;
        this->r = items.request(p, this->i);
        this->head = place.head;
        this->table = pages_of(p, this->r);
        const TileRows lines = TileRows::of<M>(p, this->r, place.tile, place.head);
        this->rows = lines.rows;
        const int32_t live = min(lines.rows, M);
        const int32_t first = place.split * SPLIT;
        const int32_t end = min(most_cut<M>(p, this->r, place.tile), first + SPLIT);
        if (end <= first) {
            return;  // no row of the tile reaches it
        }
        const int parts = (end - first + BLOCK - 1) / BLOCK;
        const int32_t base = first + group.rank * BLOCK;
        const bool active = base < end;
        load_split(first, base, end);
        this->load_queries(lines);
        const bool cuts = base + BLOCK > least_cut<M>(p, this->r, place.tile);
        this->cut_min = cuts ? 0 : 0x7fffffff;
        if (cuts && thread < M) {
            sh.cut[thread] = thread < lines.rows ? row_at<false>(p, this->r, this->i, lines.query(thread), false).cut : 0;
        }
        copy_wait<0>();
        __syncthreads();  // queries and cuts are there
        typename Compute::Scores s;
        float tops[ROW_TILES][2];
        if (active) {
            this->load_query_fragments();
            barrier_wait(shared_address(&ex.keys_full), 0);
            this->template scores<true>(s, this->ring_at, end - base);
            this->mask_scores(s, false, base);
            this->maxima(s, tops);
        }
        __syncthreads();  // and every warp has left the keys, whose place is the weights'
        for (int at = thread; at < M * CLUSTER; at += THREADS) {
            const int row = at % M;
            const float top = !active ? none()
                                      : fmaxf(fmaxf(sh.maxima[0][row], sh.maxima[1][row]),
                                              fmaxf(sh.maxima[2][row], sh.maxima[3][row]));
            send(ex.tops[group.rank][row], at / M, __float_as_uint(top), ex.tops_box);
        }
        await(ex.tops_box, sizeof(ex.tops), 0);
        if (active) {
#pragma unroll
            for (int rt = 0; rt < ROW_TILES; ++rt) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    m[rt][e] = none();
#pragma unroll
                    for (int block = 0; block + 1 < CLUSTER; ++block) {
                        const float top = top_of(block, rt * 16 + quad + 8 * e);
                        m[rt][e] = block < group.rank ? fmaxf(m[rt][e], top) : m[rt][e];
                    }
                }
            }
            typename Compute::Weights none_own;
            this->softmax(s, tops, none_own, weights_of(group.rank), live);
            let_send();
        }
        __syncthreads();
        if (active) {
            if (thread < CLUSTER && thread != group.rank) {
                send_bytes(weights_of(group.rank), thread, live * (BLOCK * 2), ex.weights_box);
            }
            if (thread < M) {
                send(ex.counts[group.rank][thread], 0,
                     sh.sums[0][thread] + sh.sums[1][thread] + sh.sums[2][thread] + sh.sums[3][thread], ex.weights_box);
            }
        }
        barrier_wait(shared_address(&ex.values_full), 0);
        if (const int key = end - first + thread / PIECES; key < (end - first + BOX - 1) / BOX * BOX) {
            clear_shared(in_slice(key, thread % PIECES));  // values behind the end may be no numbers
        }
        await(ex.weights_box, (parts - (active ? 1 : 0)) * live * (BLOCK * 2) + (group.rank == 0 ? parts * M * 4 : 0), 0);
        group_arrive();  // this block has all weights
        __syncthreads();
        slice_values(number, parts);
        if (group.rank == 0) {
            store_state(number, parts);
        }
        group_wait();  // and the others have this one's
    }

    __device__ __forceinline__ void run() {
        if (thread == 0) {
            open_mailbox(ex.tops_box);
            open_mailbox(ex.weights_box);
            barrier_init(shared_address(&ex.keys_full), 1);
            barrier_init(shared_address(&ex.values_full), 1);
            publish_barriers();
        }
        group_arrive();
        const int32_t taken = count_few();
        group_wait();
        if (items.main_items + items.pair_items > p.clusters * CLUSTER) {
            return;  // never: no request has more than the launcher counted on
        }
        const int32_t tails = (items.pair_items + CLUSTER - 1) / CLUSTER;
        const int32_t unit = blockIdx.x / CLUSTER;
        int32_t number = blockIdx.x;
        if (tails + items.main_items <= p.clusters) {
            if (unit >= tails && unit < tails + items.main_items) {
                take_split(unit - tails);
            }
            number = items.main_items + (unit < tails ? unit * CLUSTER + static_cast<int32_t>(group.rank) : items.pair_items);
        }
        if (number < items.count()) {
            this->take_item(number);
        }
        tell_merge(taken);
    }

    // Counts items as `count_items` does, of a batch of up to 32 requests, in each warp. Returns how many requests are taken.
    __device__ __forceinline__ int32_t count_few() {
        const int32_t *starts = reinterpret_cast<const int32_t *>(p.starts);
        Request r = {0, 0, 0, 0, 0, false};
        bool decreases = false;
        if (lane < p.requests) {
            r = request_at<false>(p, lane, blockIdx.x == 0 && warp == 0);
            decreases = __ldg(starts + lane + 1) < r.first;
        }
        const uint32_t down = __ballot_sync(~0u, decreases);
        const int32_t taken = down == 0 ? p.requests : __ffs(static_cast<int>(down)) - 1;
        const int32_t own_pairs = lane < taken ? tiles_of<M>(p, r) * p.kv_heads : 0;
        const int32_t own_mains = own_pairs * splits_of(p, r);
        int32_t mains = own_mains;
        int32_t pairs = own_pairs;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int32_t up_mains = __shfl_up_sync(~0u, mains, step);
            const int32_t up_pairs = __shfl_up_sync(~0u, pairs, step);
            mains += lane >= step ? up_mains : 0;
            pairs += lane >= step ? up_pairs : 0;
        }
        items.main_items = __shfl_sync(~0u, mains, 31);
        items.pair_items = __shfl_sync(~0u, pairs, 31);
        items.serial = false;
        if (warp == 0 && lane < p.requests) {
            items.mains[lane] = mains - own_mains;
            items.pairs[lane] = pairs - own_pairs;
            items.requests[lane] = r;
        }
        if (thread == 0) {
            items.mains[p.requests] = items.main_items;
            items.pairs[p.requests] = items.pair_items;
        }
        __syncthreads();
        return taken;
    }

    // What `merge` reads, and zeros for queries that no item has.
    __device__ __forceinline__ void tell_merge(int32_t taken) {
        const int32_t *starts = reinterpret_cast<const int32_t *>(p.starts);
        if (blockIdx.x == 0 && thread < p.requests) {
            int32_t *header = reinterpret_cast<int32_t *>(p.schedule);
            if (thread == 0) {
                header[0] = 0;
                header[1] = items.main_items;
            }
            header[2 + thread] = items.mains[thread];
            header[2 + p.requests + thread] = thread < taken ? items.pairs[thread] : -1;
            if (thread < taken && (items.requests[thread].refused || thread == 0)) {
                const int32_t end = __ldg(starts + thread + (items.requests[thread].refused ? 1 : 0));
                clear_queries<HD>(p, thread == 0 ? 0 : query_of(p, __ldg(starts + thread)), query_of(p, end), 0, 1);
            }
        }
        clear_queries<HD>(p, taken == 0 ? 0 : query_of(p, __ldg(starts + taken)), p.queries,
                          blockIdx.x * THREADS + thread, static_cast<int64_t>(gridDim.x) * THREADS);
    }
};

template <typename T, int HD, int M>
__device__ __forceinline__ void attend_clustered(const BoxCall &call) {
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    let_next_begin();
    ClusterTile<T, HD, M>(call, shared_memory).run();
}

}  // namespace attention
}  // namespace specrs
#endif
