// Selects drafts, one step in one launch: the K best tokens of each row of draft logits with their log-probabilities,
// and the K best beams of each request among their K*K continuations (EAGLE-2, arXiv:2406.16858). `DraftBeams::start`
// and `advance` of `src/host/select` do the same.
//
// A block takes one chunk of a row, a warp of it one tile after the other. The last block of a request merges its rows'
// lists and sums, and makes the beams. Choices by logit are the host's (`logits.cuh`). Log-probabilities are f32 sums over
// tiles of a fixed size, folded in one tree: they differ from the host's in the last bits, but are a function of the row
// alone, whatever the chunks, the batch and the graph bucket.
//
// A row with a NaN, a +inf or nothing but -inf has no distribution: its request stops drafting (`sound` stays behind), the
// probe is recorded, and its beams go on as placeholders with valid tokens. Dead requests of a static batch get token
// 0, the parent row of their place, and no ancestors.
#include "block.cuh"
#include "logits.cuh"

namespace specrs {

constexpr int TILE = 512;       // columns whose sum is one partial: part of the numbers, so a constant
constexpr int LIST = 32;        // largest K: a list lies in the lanes of a warp
constexpr int PAIRS = LIST * LIST;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int TURNS = 4;        // tiles of a warp, which it holds in registers

// The K best keys seen, best first, in lanes 0..K; 0 where there is none.
struct TopList {
    uint64_t mine;
    uint64_t least;  // key of lane K - 1, the one to beat
};

// Put each lane's key into the list, one after the other, if it beats the list. Keys are unique.
__device__ __forceinline__ void insert(TopList &list, uint64_t key, int32_t k) {
    const uint32_t lane = threadIdx.x % 32;
    bool pending = key > list.least;
    for (uint32_t mask = __ballot_sync(0xffffffffu, pending); mask != 0;
         mask = __ballot_sync(0xffffffffu, pending && key > list.least)) {
        const int from = __ffs(mask) - 1;
        const uint64_t next = __shfl_sync(0xffffffffu, key, from);
        pending = pending && lane != static_cast<uint32_t>(from);
        const uint64_t above = __shfl_up_sync(0xffffffffu, list.mine, 1);
        if (list.mine < next) {
            list.mine = lane > 0 && above < next ? above : next;
        }
        list.least = __shfl_sync(0xffffffffu, list.mine, k - 1);
    }
}

// Merge R keys a lane into the list; 0 is no key. Few keys can be among the K best: those at or above the K-th of the
// lanes' largest, or, once the list is full, above its least. They are gathered in `room` (32 places of the warp's own) and
// ranked by counting, where they fit; else inserted.
template <int R>
__device__ __forceinline__ void merge(TopList &list, const uint64_t (&keys)[R], int32_t k, uint64_t *room) {
    const int32_t lane = threadIdx.x % 32;
    uint64_t below = list.least;
    if (list.least == 0) {
        uint64_t top = keys[0];
#pragma unroll
        for (int r = 1; r < R; ++r) {
            top = larger(top, keys[r]);
        }
        int32_t rank = 0;
#pragma unroll
        for (int other = 0; other < 32; ++other) {
            rank += __shfl_sync(0xffffffffu, top, other) > top;
        }
        const uint32_t at = __ballot_sync(0xffffffffu, rank == k - 1 && top != 0);
        below = at == 0 ? 0 : __shfl_sync(0xffffffffu, top, __ffs(at) - 1) - 1;
    }
    int32_t found = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        found += __popc(__ballot_sync(0xffffffffu, keys[r] > below));
    }
    if (found == 0) {
        return;
    }
    const bool holds = lane < k && list.mine != 0;
    const int32_t held = __popc(__ballot_sync(0xffffffffu, holds));
    if (held + found > 32) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            insert(list, keys[r] > below ? keys[r] : 0, k);
        }
        return;
    }
    if (holds) {
        room[lane] = list.mine;
    }
    int32_t next = held;
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const uint32_t mask = __ballot_sync(0xffffffffu, keys[r] > below);
        if (keys[r] > below) {
            room[next + __popc(mask & ((1u << lane) - 1))] = keys[r];
        }
        next += __popc(mask);
    }
    __syncwarp();
    const uint64_t own = lane < next ? room[lane] : 0;
    int32_t rank = 0;
    for (int32_t other = 0; other < next; ++other) {
        rank += room[other] > own;
    }
    __syncwarp();
    if (lane < next) {
        room[rank] = own;
    }
    __syncwarp();
    list.mine = lane < min(next, k) ? room[lane] : 0;
    list.least = next >= k ? room[k - 1] : 0;
    __syncwarp();
}

// Maximum over the warp of any values; NaN where one is.
__device__ __forceinline__ float warp_max_float(float x) {
    const uint32_t high = static_cast<uint32_t>(rank_key(x, 0) >> 32);
    return key_logit(static_cast<uint64_t>(__reduce_max_sync(0xffffffffu, high)) << 32);
}

// A tile of a row, held by a warp as it lies in memory: lane l has columns (j / WIDE * 32 + l) * WIDE + j % WIDE of it,
// whatever the alignment; -inf behind the row's end.
template <typename L>
struct Tile {
    static constexpr int EACH = TILE / 32;
    static constexpr int VECTORS = EACH / L::WIDE;
    LogitVector<L> vectors[VECTORS];

    __device__ __forceinline__ static int32_t column(int i) {
        return (i / L::WIDE * 32 + static_cast<int32_t>(threadIdx.x % 32)) * L::WIDE + i % L::WIDE;
    }

    __device__ __forceinline__ float value(int i) const { return L::load(vectors[i / L::WIDE].bits[i % L::WIDE]); }

    __device__ __forceinline__ void read(const typename L::Storage *from, int32_t columns, bool wide) {
        if (wide && columns >= TILE) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                vectors[v].vector = reinterpret_cast<const uint4 *>(from)[v * 32 + threadIdx.x % 32];
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                vectors[i / L::WIDE].bits[i % L::WIDE] = column(i) < columns ? from[column(i)] : L::LEAST;
            }
        }
    }
};

// State that the block's warps share while they look for the best keys of its tiles.
struct Search {
    uint64_t room[THREADS];     // keys that may be among the K best
    uint32_t bounds[WARPS];     // upper halves of keys
    int32_t found;
};

// Put the K best of each warp's tiles, one after the other, into `room`, where 0 is none: for rows in which many values
// are as good as the K-th. The block calls it; out of line, since it is rare.
template <typename L>
__device__ __noinline__ void crowded(const typename L::Storage *row, int32_t first, int32_t tiles, int32_t vocab, int32_t k,
                                     Search &search) {
    const int32_t lane = threadIdx.x % 32;
    TopList list = {0, 0};
    for (int32_t tile = threadIdx.x / 32; tile < tiles; tile += WARPS) {
        for (int32_t at = (first + tile) * TILE + lane, n = 0; n < TILE / 32; ++n, at += 32) {
            insert(list, at < vocab ? rank_key(L::load(row[at]), at) : 0, k);
        }
    }
    __syncthreads();  // all have read the count
    search.room[threadIdx.x] = lane < k ? list.mine : 0;
    if (threadIdx.x == 0) {
        search.found = THREADS;
    }
    __syncthreads();
}

// Put the K best keys of `tiles` tiles of a row, from tile `first` on, into `lists`, 0 where there are fewer, and into
// `partials` each tile's maximum and sum of exponentials below it. The block calls it.
//
// A warp's lanes have K largest values or more at or above the K-th largest of their maxima, so no smaller value of the block is
// among its K best; few are as large. All tiles are in registers, on their way at once.
template <typename L>
__device__ __forceinline__ void search_tiles(const typename L::Storage *row, const Tile<L> (&held)[TURNS], int32_t first,
                                             int32_t tiles, int32_t vocab, int32_t k, Search &search, float2 *partials,
                                             uint64_t *lists) {
    constexpr int EACH = Tile<L>::EACH;
    const int32_t warp = threadIdx.x / 32;
    const int32_t lane = threadIdx.x % 32;
    const int32_t turns = warp < tiles ? (tiles - warp + WARPS - 1) / WARPS : 0;
    if (threadIdx.x == 0) {
        search.found = 0;
    }
    float tops[TURNS];
    float top = __uint_as_float(0xff800000u);
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
        tops[t] = held[t].value(0);
#pragma unroll
        for (int i = 1; i < EACH; ++i) {
            tops[t] = max_nan(tops[t], held[t].value(i));
        }
        top = max_nan(top, t < turns ? tops[t] : top);
    }
    {
        const bool some = turns > 0 && (first + warp) * TILE + Tile<L>::column(0) < vocab;
        const uint32_t mine = some ? static_cast<uint32_t>(rank_key(top, 0) >> 32) : 0;
        int32_t before = 0;  // lanes that come before this one
#pragma unroll
        for (int other = 0; other < 32; ++other) {
            const uint32_t theirs = __shfl_sync(0xffffffffu, mine, other);
            before += theirs > mine || (theirs == mine && other < lane);
        }
        if (before == k - 1) {
            search.bounds[warp] = mine;
        }
    }
    __syncthreads();
    uint32_t most = search.bounds[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
        most = max(most, search.bounds[w]);
    }
    const float bound = most == 0 ? __uint_as_float(0xff800000u) : key_logit(static_cast<uint64_t>(most) << 32);
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
        const int32_t begin = (first + warp + t * WARPS) * TILE;
        if (t < turns && !(tops[t] < bound)) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (!(held[t].value(i) < bound) && begin + Tile<L>::column(i) < vocab) {
                    const int32_t at = atomicAdd(&search.found, 1);
                    if (at < THREADS) {
                        search.room[at] = rank_key(held[t].value(i), begin + Tile<L>::column(i));
                    }
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
        if (t < turns) {
            const float tile_max = warp_max_float(tops[t]);
            const float shift = tile_max == __uint_as_float(0xff800000u) ? 0.0f : tile_max;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                sum = __fadd_rn(sum, __expf(__fsub_rn(held[t].value(i), shift)));
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                partials[first + warp + t * WARPS] = make_float2(tile_max, sum);
            }
        }
    }
    __syncthreads();
    if (search.found > THREADS) {
        crowded<L>(row, first, tiles, vocab, k, search);
    }
    const int32_t found = search.found;
    const uint64_t own = threadIdx.x < found ? search.room[threadIdx.x] : 0;
    int32_t rank = 0;
    for (int32_t other = 0; other < found; ++other) {
        rank += search.room[other] > own;
    }
    if (own != 0 && rank < k) {
        lists[rank] = own;
    }
    // There may be fewer keys than K.
    const int32_t keys = __syncthreads_count(own != 0);
    if (static_cast<int32_t>(threadIdx.x) >= keys && static_cast<int32_t>(threadIdx.x) < k) {
        lists[threadIdx.x] = 0;
    }
}

// Merge the lists of a row, fold its tiles, and write its K children: log-probabilities and draft ids. Returns the row's
// largest key. By a warp.
__device__ __forceinline__ uint64_t finish_row(const DraftSelectParams &p, int32_t row, int32_t b, float *log_probs,
                                               int32_t *ids, uint64_t *room) {
    constexpr int EACH = 4;
    const int32_t lane = threadIdx.x % 32;
    const int32_t k = p.drafts.topk;
    const int32_t entries = p.chunks * k;
    const uint64_t *lists = reinterpret_cast<const uint64_t *>(p.lists) + static_cast<uint64_t>(row) * entries;
    const float2 *partials = reinterpret_cast<const float2 *>(p.partials) + static_cast<uint64_t>(row) * p.tiles;
    const float2 nothing = make_float2(__uint_as_float(0xff800000u), 0.0f);
    // The first of both are on their way before anything is done with either.
    float2 early[EACH];
#pragma unroll
    for (int t = 0; t < EACH; ++t) {
        early[t] = t * 32 + lane < p.tiles ? __ldcg(partials + t * 32 + lane) : nothing;
    }
    TopList list = {0, 0};
    for (int32_t first = 0; first < entries; first += 32 * EACH) {
        uint64_t keys[EACH];
#pragma unroll
        for (int r = 0; r < EACH; ++r) {
            const int32_t i = first + r * 32 + lane;
            keys[r] = i < entries ? __ldcg(lists + i) : 0;
        }
        merge(list, keys, k, room);
    }
    const uint64_t best = __shfl_sync(0xffffffffu, list.mine, 0);
    if (key_probe(best) != PROBE_NONE) {
        if (lane < k) {
            log_probs[b * k + lane] = __uint_as_float(0xff800000u);
            ids[b * k + lane] = lane;
        }
        return best;
    }
    const float top = key_logit(best);
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < EACH; ++t) {
        sum = __fmaf_rn(early[t].y, __expf(__fsub_rn(early[t].x, top)), sum);
    }
    for (int32_t t = 32 * EACH + lane; t < p.tiles; t += 32) {
        const float2 partial = __ldcg(partials + t);
        sum = __fmaf_rn(partial.y, __expf(__fsub_rn(partial.x, top)), sum);
    }
    const float log_total = logf(warp_sum(sum));
    if (lane < k) {
        // Never above 0, so that a child never scores above its parent: trees are closed under ancestors.
        log_probs[b * k + lane] = fminf(__fsub_rn(__fsub_rn(key_logit(list.mine), top), log_total), 0.0f);
        ids[b * k + lane] = static_cast<int32_t>(key_index(list.mine));
    }
    return best;
}

// The beams of a request from the children of its rows. By a block.
__device__ __forceinline__ void finish_request(const DraftSelectParams &p, int32_t request, uint64_t (*rooms)[LIST]) {
    __shared__ float scores[PAIRS];
    __shared__ int32_t tokens[PAIRS];
    __shared__ int32_t beams[LIST];
    __shared__ int32_t parents[LIST];
    __shared__ float parent_scores[LIST];
    __shared__ uint64_t best[LIST];
    __shared__ uint64_t above[LIST * 32];  // ancestors so far: K * S <= LIST * 64 bits a beam
    const int32_t k = p.drafts.topk;
    const int32_t rows = p.step == 0 ? 1 : k;
    const int32_t children = rows * k;
    const uint64_t base = static_cast<uint64_t>(request) * p.drafts.candidates;
    const int32_t first = p.step == 0 ? 0 : k + (p.step - 1) * k * k;
    float *all_scores = reinterpret_cast<float *>(p.drafts.scores) + base;
    int32_t *all_beams = reinterpret_cast<int32_t *>(p.beams) + static_cast<uint64_t>(request) * k;
    const uint32_t words = static_cast<uint32_t>(k * p.drafts.steps + 63) / 64;
    uint64_t *ancestors = reinterpret_cast<uint64_t *>(p.ancestors) + static_cast<uint64_t>(request) * k * words;
    const int32_t entries = k * static_cast<int32_t>(words);
    int32_t *sound = reinterpret_cast<int32_t *>(p.drafts.sound) + request;
    // Values that the end needs are on their way while the warps merge lists.
    const int32_t before = p.step == 0 ? 0 : *sound;
    for (int32_t i = threadIdx.x; p.step > 0 && i < entries; i += THREADS) {
        above[i] = ancestors[i];
    }
    const int32_t b = threadIdx.x - (THREADS - LIST);
    if (b >= 0 && b < rows) {
        int32_t parent = p.step == 0 ? -1 : all_beams[b];
        if (p.step > 0 && !in_bounds(parent, first)) {
            record_fault(p.report, KERNEL_DRAFT_SELECT, BUFFER_BEAMS, request, b, parent, first);
            parent = 0;
        }
        parents[b] = parent;
        parent_scores[b] = p.step == 0 ? 0.0f : all_scores[parent];
    }
    __syncwarp();
    for (int32_t row = threadIdx.x / 32; row < rows; row += WARPS) {
        const uint64_t key = finish_row(p, request * rows + row, row, scores, tokens, rooms[threadIdx.x / 32]);
        if (threadIdx.x % 32 == 0) {
            best[row] = key;
        }
    }
    __syncthreads();
    for (int32_t c = threadIdx.x; c < children; c += THREADS) {
        const int32_t parent = parents[c / k];
        const float score = p.step == 0 ? scores[c] : __fadd_rn(parent_scores[c / k], scores[c]);
        int32_t token = tokens[c];
        if (p.to_target != 0) {
            token = reinterpret_cast<const int32_t *>(p.to_target)[token];
            if (!in_bounds(token, p.vocab)) {
                record_fault(p.report, KERNEL_DRAFT_SELECT, BUFFER_TARGET_IDS, request, c, token, p.vocab);
                token = 0;
            }
        }
        scores[c] = score;
        tokens[c] = token;
        all_scores[first + c] = score;
        reinterpret_cast<int32_t *>(p.drafts.tokens)[base + first + c] = token;
        reinterpret_cast<int32_t *>(p.drafts.parents)[base + first + c] = parent;
    }
    __syncthreads();
    constexpr int PARTS = 4;  // threads that count for one child
    for (int32_t base = 0; base < children; base += THREADS / PARTS) {
        // Number of children that come before this one: better, or as good and of a lower index.
        const int32_t c = base + static_cast<int32_t>(threadIdx.x) / PARTS;
        const float score = c < children ? scores[c] : 0.0f;
        int32_t rank = 0;
        for (int32_t other = threadIdx.x % PARTS; other < children; other += PARTS) {
            rank += scores[other] > score || (scores[other] == score && other < c);
        }
        rank += __shfl_xor_sync(0xffffffffu, rank, 1);
        rank += __shfl_xor_sync(0xffffffffu, rank, 2);
        if (c < children && threadIdx.x % PARTS == 0 && rank < k) {
            beams[rank] = c;
        }
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < entries; i += THREADS) {
        const int32_t b = i / static_cast<int32_t>(words);
        const uint32_t w = i % words;
        const uint32_t slot = b * p.drafts.steps + p.step;
        const uint64_t own = slot / 64 == w ? 1ull << (slot % 64) : 0;
        ancestors[i] = (p.step == 0 ? 0 : above[beams[b] / k * words + w]) | own;
    }
    for (int32_t b = threadIdx.x; b < k; b += THREADS) {
        const int32_t c = beams[b];
        all_beams[b] = first + c;
        reinterpret_cast<int32_t *>(p.tokens)[request * k + b] = tokens[c];
        reinterpret_cast<int32_t *>(p.parents)[request * k + b] = p.step == 0 ? request : request * k + c / k;
    }
    if (threadIdx.x == 0) {
        int32_t row = 0;
        while (row < rows && key_probe(best[row]) == PROBE_NONE) {
            ++row;
        }
        *sound = before == p.step && row == rows ? p.step + 1 : before;
        if (before == p.step && row < rows) {  // the request's first fault, and of its rows the first
            const Probe probe = key_probe(best[row]);
            record_probe(p.report, KERNEL_DRAFT_SELECT, BUFFER_DRAFT_LOGITS, probe, request,
                         request * rows + row, probe_column(best[row], probe), -1);
        }
    }
}

// Write what the lanes of an absent request hold.
__device__ __forceinline__ void dead_request(const DraftSelectParams &p, int32_t request) {
    const int32_t k = p.drafts.topk;
    const uint32_t words = static_cast<uint32_t>(k * p.drafts.steps + 63) / 64;
    uint64_t *ancestors = reinterpret_cast<uint64_t *>(p.ancestors) + static_cast<uint64_t>(request) * k * words;
    for (int32_t i = threadIdx.x; i < k * static_cast<int32_t>(words); i += THREADS) {
        ancestors[i] = 0;
    }
    for (int32_t b = threadIdx.x; b < k; b += THREADS) {
        reinterpret_cast<int32_t *>(p.beams)[request * k + b] = b;
        reinterpret_cast<int32_t *>(p.tokens)[request * k + b] = 0;
        reinterpret_cast<int32_t *>(p.parents)[request * k + b] = p.step == 0 ? request : request * k + b;
    }
    if (threadIdx.x == 0) {
        reinterpret_cast<int32_t *>(p.drafts.sound)[request] = 0;
    }
}

template <typename L>
__device__ __forceinline__ void draft_select(const DraftSelectParams &p) {
    __shared__ Search search;
    __shared__ uint64_t rooms[WARPS][LIST];
    const int32_t chunk = blockIdx.x;
    const int32_t row = blockIdx.y;
    const int32_t k = p.drafts.topk;
    const int32_t rows = p.step == 0 ? 1 : k;
    const int32_t request = row / rows;
    const int32_t warp = threadIdx.x / 32;
    const typename L::Storage *logits =
        reinterpret_cast<const typename L::Storage *>(p.logits) + static_cast<uint64_t>(row) * p.logits_stride;
    const bool wide = reinterpret_cast<uint64_t>(logits) % 16 == 0;
    const int32_t each = (p.tiles + p.chunks - 1) / p.chunks;  // at most TURNS * WARPS
    const int32_t first = chunk * each;
    const int32_t tiles = max(0, min(p.tiles - first, each));
    Tile<L> held[TURNS];
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
        const int32_t tile = warp + t * WARPS;
        if (tile < tiles) {
            const int32_t begin = (first + tile) * TILE;
            held[t].read(logits + begin, p.draft_vocab - begin, wide);
        }
    }
    const int32_t live = live_rows(p.live, p.requests, p.report, KERNEL_DRAFT_SELECT,
                                   blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0);
    if (request >= live) {
        if (chunk == 0 && row == request * rows) {
            dead_request(p, request);
        }
        return;
    }
    search_tiles(logits, held, first, tiles, p.draft_vocab, k, search,
                 reinterpret_cast<float2 *>(p.partials) + static_cast<uint64_t>(row) * p.tiles,
                 reinterpret_cast<uint64_t *>(p.lists) + (static_cast<uint64_t>(row) * p.chunks + chunk) * k);
    if (last_block(p.counters + request * sizeof(uint32_t), p.chunks * rows)) {
        finish_request(p, request, rooms);
    }
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(256, 2) draft_select_f32(const __grid_constant__ specrs::DraftSelectParams p) {
    specrs::draft_select<specrs::LogitF32>(p);
}
extern "C" __global__ void __launch_bounds__(256, 2) draft_select_bf16(const __grid_constant__ specrs::DraftSelectParams p) {
    specrs::draft_select<specrs::LogitBf16>(p);
}
extern "C" __global__ void __launch_bounds__(256, 2) draft_select_f16(const __grid_constant__ specrs::DraftSelectParams p) {
    specrs::draft_select<specrs::LogitF16>(p);
}
