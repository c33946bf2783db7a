// Verification by sampling: draw the target's token at each node that a request's walk reaches, and follow the child that
// carries it.
//
//   node = root; repeat:
//       token = draw(logits of node, sampling parameters, tokens so far, position)
//       node = the first child of node that carries token, or stop
//
// `draw` is the host's, token for token (src/host/sample): logit bias and penalties, temperature, top-k, top-p, min-p, then
// the inverse CDF in the order of ids at a random number that depends on seed and position alone. Weights are integers
// (cuda/draw.cuh), so sums are exact in any order and nothing depends on the grid; temperature 0 is the largest logit.
//
// Two modes with the same result, as in greedy verification:
//   walk  a CTA a request, row after row along the path. For batches.
//   full  a CTA a node: the token that would be drawn there, were its path accepted; the last CTA to finish walks all trees.
//         For as many nodes as there are multiprocessors, where it takes the time of one row.
//
// A row is read once from memory and then from L2. The needs of each parameter:
//
//   every row              one pass: the largest logit, NaN, +inf; each thread keeps the largest of its own
//   top-k up to 1024       the k-th largest of the threads' largest is at most the k-th largest logit: one pass gathers the
//                          tokens from there on, in shared memory, where the rest happens
//   top-p without top-k    one pass: the weight of all, and a histogram in bins of 1/32 of log-weight of those that the nucleus
//                          can need; the bin in which it ends is found, and one pass gathers the tokens down to it
//   more than 1024 tokens  such a bin alone is gathered and sorted, or, with more than 1024 tokens in it, searched digit by
//     down to there        digit of the rank; then as without top-k and top-p
//   no top-k, no top-p     one pass: weight of each tile of 16384; the tile of the random number is read once more
//
// Edits (bias, penalties) come as a list a request, sorted by token, and the tokens of the walk: a bitmap of edited tokens in
// shared memory says which logits to look up, so a row without edits is read as it is.
//
// A row that cannot be sampled (NaN, +inf, nothing finite) ends its request's walk and is recorded; indices outside their
// arrays are recorded, and leave the request out. Other requests go on. Every slot of every output is written.
//
// Cost: bytes of the row once from memory, two more reads of it from L2.
#include "draw.cuh"
#include "logits.cuh"
#include "walk.cuh"

namespace specrs {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
// Logits of a tile that a thread reads, in vectors of 16 bytes.
constexpr int UNROLL = 16;
constexpr int TILE = THREADS * UNROLL;
constexpr int BINS = 1024;
constexpr int CANDIDATES = 1024;
constexpr int MAX_VOCAB = 1 << 18;
// Tiles of a whole row, and one for the elements before the first aligned vector.
constexpr int TILES = MAX_VOCAB / TILE + 2;
constexpr int ID_BITS = 18;
constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;
// Longest path of mode full, whose tokens lie in shared memory.
constexpr int FULL_PATH = 256;

struct Shared {
    uint32_t edited[MAX_VOCAB / 32];
    // A histogram, or candidates: never both at once.
    union {
        struct {
            uint64_t weight[BINS];
            uint32_t count[BINS];
        } bins;
        uint64_t keys[CANDIDATES];
    };
    uint64_t tiles[TILES];
    uint64_t warp_sums[WARPS];
    uint64_t found_weight;
    uint64_t found_rank;
    uint32_t found_bin;
    uint32_t found_before;
    uint32_t found_count;
    int32_t gathered;
    int32_t token;
};

// The kept tokens: those of the bins before `bin`, and in `bin` those up to `rank`.
struct Cut {
    uint32_t bin;
    uint64_t rank;
};

constexpr uint64_t NO_RANK = ~0ull;

// A row of logits and what edits it.
template <typename L>
struct Row {
    const typename L::Storage *logits;
    int32_t vocab;
    bool edits;
    bool penalises;
    // Edits in the request's list, sorted by token: outputs is -1 for a token that has a bias and was never seen.
    const int32_t *tokens;
    const uint32_t *biases;
    const int32_t *outputs;
    int32_t listed;
    // Path of the walk so far.
    const int32_t *path;
    int32_t depth;
    float repetition, presence, frequency;
};

// The logit of an edited token. Out of line: few tokens are.
template <typename L>
__device__ __noinline__ float edit(const Row<L> &row, int32_t id, float x) {
    int32_t low = 0, high = row.listed;
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (__ldg(row.tokens + middle) < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    int32_t outputs = -1;
    if (low < row.listed && __ldg(row.tokens + low) == id) {
        x = draw::add32(x, __uint_as_float(__ldg(row.biases + low)));
        outputs = __ldg(row.outputs + low);
    }
    if (!row.penalises) {
        return x;
    }
    uint32_t on_path = 0;
    for (int32_t i = 0; i < row.depth; ++i) {
        on_path += row.path[i] == id;
    }
    if (outputs < 0 && on_path == 0) {
        return x;
    }
    const uint32_t all = (outputs < 0 ? 0u : static_cast<uint32_t>(outputs)) + on_path;
    return draw::penalised(x, all, row.repetition, row.presence, row.frequency);
}

template <typename L>
__device__ __forceinline__ float edited(const Row<L> &row, const Shared &shared, int32_t id, float x) {
    if (row.edits && (shared.edited[id >> 5] >> (id & 31) & 1) != 0) {
        x = edit(row, id, x);
    }
    return x;
}

// Logits before the first aligned vector of the row.
template <typename L>
__device__ __forceinline__ int32_t head_of(const Row<L> &row) {
    const int32_t misaligned = static_cast<int32_t>(reinterpret_cast<uint64_t>(row.logits) % 16 / sizeof(*row.logits));
    return min(misaligned == 0 ? 0 : L::WIDE - misaligned, row.vocab);
}

// Call `f(id, x, tile)` for each logit of the row; lanes without one have id -1. All lanes of a warp call together, tiles come
// in ascending order. Tile 0 are the logits before the first aligned vector, the others are TILE logits each.
template <typename L, typename F>
__device__ __forceinline__ void each(const Row<L> &row, const Shared &shared, F f) {
    constexpr int VECTORS = UNROLL / L::WIDE;
    const int32_t head = head_of(row), thread = threadIdx.x;
    const auto one = [&](int32_t id, bool live, int tile) {
        f(live ? id : -1, live ? edited(row, shared, id, L::load(row.logits[id])) : 0.0f, tile);
    };
    if (head > 0) {
        one(thread, thread < head, 0);
    }
    const int32_t vectors = (row.vocab - head) / L::WIDE;
    const uint4 *wide = reinterpret_cast<const uint4 *>(row.logits + head);
    int tile = 1;
    for (int32_t base = 0; base < vectors; base += THREADS * VECTORS, ++tile) {
        LogitVector<L> v[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            const int32_t i = base + k * THREADS + thread;
            v[k].vector = i < vectors ? wide[i] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            const int32_t i = base + k * THREADS + thread;
#pragma unroll
            for (int j = 0; j < L::WIDE; ++j) {
                const int32_t id = i < vectors ? head + i * L::WIDE + j : -1;
                float x = L::load(v[k].bits[j]);
                if (row.edits && id >= 0) {
                    x = edited(row, shared, id, x);
                }
                f(id, x, tile);
            }
        }
    }
    const int32_t tail = head + vectors * L::WIDE;
    if (tail < row.vocab) {
        one(tail + thread, tail + thread < row.vocab, (tail - head) / TILE + 1);
    }
}

__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, d);
    }
    return x;
}

// Sum of `x` over this thread and those before it; `total` is that of all. Begins and ends with a barrier.
__device__ __forceinline__ uint64_t scan(Shared &shared, uint64_t x, uint64_t &total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint64_t y = __shfl_up_sync(ALL_LANES, x, d);
        x += lane >= d ? y : 0;
    }
    __syncthreads();
    if (lane == 31) {
        shared.warp_sums[warp] = x;
    }
    __syncthreads();
    uint64_t sum = shared.warp_sums[lane];  // there are as many warps as lanes
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint64_t y = __shfl_up_sync(ALL_LANES, sum, d);
        sum += lane >= d ? y : 0;
    }
    total = __shfl_sync(ALL_LANES, sum, 31);
    const uint64_t before = __shfl_sync(ALL_LANES, sum, warp > 0 ? warp - 1 : 0);
    __syncthreads();
    return x + (warp > 0 ? before : 0);
}
static_assert(WARPS == 32, "scan() sums the warps in one warp");

// Sort `shared.keys[0..size]` ascending; `size` is a power of two, at most CANDIDATES. Begins and ends with a barrier.
__device__ void sort(Shared &shared, int size) {
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        for (int d = run / 2; d > 0; d /= 2) {
            const int i = threadIdx.x, j = i ^ d;
            if (i < size && j > i) {
                const uint64_t a = shared.keys[i], b = shared.keys[j];
                if ((a > b) == ((i & run) == 0)) {
                    shared.keys[i] = b;
                    shared.keys[j] = a;
                }
            }
            __syncthreads();
        }
    }
}

__device__ __forceinline__ int power_of_two(int n) { return n <= 2 ? 2 : 1 << (32 - __clz(n - 1)); }

// Smaller is better: by logit, ties by id. 50 bits.
__device__ __forceinline__ uint64_t rank(float x, int32_t id) {
    return static_cast<uint64_t>(draw::rank_of(x)) << ID_BITS | static_cast<uint32_t>(id);
}

// Weights of one row.
struct Softmax {
    float max;
    float inv_t;

    __device__ __forceinline__ float log_weight(float x) const { return draw::log_weight(x, max, inv_t); }
    // Bins of descending logits; only for log-weights that do not vanish, so below 29 * 32.
    __device__ __forceinline__ static uint32_t bin(float log_weight) {
        const uint32_t b = static_cast<uint32_t>(-log_weight * 32.0f);
        return b < BINS ? b : BINS - 1;
    }
};

__device__ __forceinline__ bool within(const Cut &cut, uint32_t bin, float x, int32_t id) {
    return bin < cut.bin || (bin == cut.bin && (cut.rank == NO_RANK || rank(x, id) <= cut.rank));
}

__device__ __forceinline__ void clear_bins(Shared &shared) {
    __syncthreads();
    shared.bins.weight[threadIdx.x] = 0;
    shared.bins.count[threadIdx.x] = 0;
    __syncthreads();
}
static_assert(BINS == THREADS, "a thread has one bin");

// Count a token. All lanes call together; `bin` is -1 in those that have none. A flat row puts whole warps into one bin.
template <bool WEIGHTS>
__device__ __forceinline__ void add_to_bin(Shared &shared, int32_t bin, uint64_t weight) {
    if (!__any_sync(ALL_LANES, bin >= 0)) {
        return;
    }
    if (__all_sync(ALL_LANES, bin == __shfl_sync(ALL_LANES, bin, 0))) {
        if (WEIGHTS) {
            weight = warp_sum(weight);
        }
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&shared.bins.count[bin], 32u);
            if (WEIGHTS) {
                atomicAdd(reinterpret_cast<unsigned long long *>(&shared.bins.weight[bin]),
                          static_cast<unsigned long long>(weight));
            }
        }
    } else if (bin >= 0) {
        atomicAdd(&shared.bins.count[bin], 1u);
        if (WEIGHTS) {
            atomicAdd(reinterpret_cast<unsigned long long *>(&shared.bins.weight[bin]),
                      static_cast<unsigned long long>(weight));
        }
    }
}

// Count the tokens within `cut` whose log-weight is at least `least`, in a histogram; with WEIGHTS, return the weight
// of all within `cut`, whatever their log-weight.
template <bool WEIGHTS, typename L>
__device__ __noinline__ uint64_t histogram(const Row<L> &row, Shared &shared, Softmax softmax, Cut cut, float least) {
    clear_bins(shared);
    uint64_t own = 0;
    each(row, shared, [&](int32_t id, float x, int) {
        int32_t bin = -1;
        uint64_t weight = 0;
        const float log_weight = softmax.log_weight(x);
        if (id >= 0 && !draw::vanishes(log_weight)) {
            const uint32_t b = Softmax::bin(log_weight);
            if (within(cut, b, x, id)) {
                weight = WEIGHTS ? draw::weight(log_weight) : 0;
                own += weight;
                bin = log_weight >= least ? static_cast<int32_t>(b) : -1;
            }
        }
        add_to_bin<WEIGHTS>(shared, bin, weight);
    });
    uint64_t total = 0;
    if (WEIGHTS) {
        scan(shared, own, total);
    }
    __syncthreads();
    return total;
}

// The bin in which the sum of counts, or of weights, reaches `need`, from the first bin on: `found_bin`, `found_count` (its
// tokens), `found_before` and `found_weight` (the sums before it). False where all bins hold less. `total` is the sum of all.
template <bool WEIGHTS>
__device__ __forceinline__ bool find_bin(Shared &shared, uint64_t need, uint64_t &total) {
    const uint32_t own_count = shared.bins.count[threadIdx.x];
    const uint64_t own_weight = shared.bins.weight[threadIdx.x];
    uint64_t counts, weights = 0;
    const uint64_t count = scan(shared, own_count, counts);
    const uint64_t weight = WEIGHTS ? scan(shared, own_weight, weights) : 0;
    total = WEIGHTS ? weights : counts;
    const uint64_t sum = WEIGHTS ? weight : count, own = WEIGHTS ? own_weight : own_count;
    if (sum >= need && sum - own < need) {
        shared.found_bin = threadIdx.x;
        shared.found_count = own_count;
        shared.found_before = static_cast<uint32_t>(count - own_count);
        shared.found_weight = weight - own_weight;
    }
    __syncthreads();
    return total >= need;
}

// Put the ranks of the tokens for which `keep(id, x)` holds into `keys`, in any order, and fill the rest of a power of
// two up. Returns how many there are; at most CANDIDATES are kept.
template <typename L, typename Keep>
__device__ __forceinline__ int gather(const Row<L> &row, Shared &shared, Keep keep) {
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.gathered = 0;
    }
    __syncthreads();
    each(row, shared, [&](int32_t id, float x, int) {
        if (id >= 0 && keep(id, x)) {
            const int at = atomicAdd(&shared.gathered, 1);
            if (at < CANDIDATES) {
                shared.keys[at] = rank(x, id);
            }
        }
    });
    __syncthreads();
    const int n = shared.gathered;
    if (n <= CANDIDATES && static_cast<int>(threadIdx.x) >= n && static_cast<int>(threadIdx.x) < power_of_two(n)) {
        shared.keys[threadIdx.x] = NO_RANK;
    }
    return n;
}

// Take the tokens of the bins from `first` to that of `cut`, within both cuts.
template <typename L>
__device__ __noinline__ int gather_bins(const Row<L> &row, Shared &shared, Softmax softmax, Cut cut, uint32_t first,
                                        Cut also) {
    return gather(row, shared, [&](int32_t id, float x) {
        const float log_weight = softmax.log_weight(x);
        if (draw::vanishes(log_weight)) {
            return false;
        }
        const uint32_t bin = Softmax::bin(log_weight);
        return bin >= first && within(cut, bin, x, id) && within(also, bin, x, id);
    });
}

// Take the tokens of at least this logit.
template <typename L>
__device__ __noinline__ int gather_from(const Row<L> &row, Shared &shared, float bound) {
    return gather(row, shared, [&](int32_t, float x) { return x >= bound; });
}

// The rank within bin `bin` at which the sum of counts, or of weights, reaches `need` >= 1, of the tokens within `cut`.
// `members` of them are in the bin, and reach it together.
template <bool WEIGHTS, typename L>
__device__ __noinline__ uint64_t refine(const Row<L> &row, Shared &shared, Softmax softmax, Cut cut, uint32_t bin,
                                        uint32_t members, uint64_t need) {
    if (members <= CANDIDATES) {
        const int n = gather_bins(row, shared, softmax, Cut{bin, NO_RANK}, bin, cut);
        sort(shared, power_of_two(n));
        const bool live = static_cast<int>(threadIdx.x) < n;
        const uint64_t key = live ? shared.keys[threadIdx.x] : NO_RANK;
        uint64_t own = live;
        if (WEIGHTS && live) {
            own = draw::weight(softmax.log_weight(draw::logit_of(static_cast<uint32_t>(key >> ID_BITS))));
        }
        uint64_t total;
        const uint64_t sum = scan(shared, own, total);
        if (sum >= need && sum - own < need) {
            shared.found_rank = key;
        }
        __syncthreads();
        return shared.found_rank;
    }
    // Digit by digit: five of ten bits.
    uint64_t prefix = 0;
    for (int shift = 40; shift >= 0; shift -= 10) {
        clear_bins(shared);
        each(row, shared, [&](int32_t id, float x, int) {
            int32_t digit = -1;
            uint64_t weight = 0;
            if (id >= 0) {
                const float log_weight = softmax.log_weight(x);
                if (!draw::vanishes(log_weight) && Softmax::bin(log_weight) == bin && within(cut, bin, x, id)) {
                    const uint64_t key = rank(x, id);
                    if (shift == 40 || key >> (shift + 10) == prefix) {
                        digit = static_cast<int32_t>(key >> shift & (BINS - 1));
                        weight = WEIGHTS ? draw::weight(log_weight) : 0;
                    }
                }
            }
            add_to_bin<WEIGHTS>(shared, digit, weight);
        });
        __syncthreads();
        uint64_t total;
        find_bin<WEIGHTS>(shared, need, total);
        need -= WEIGHTS ? shared.found_weight : shared.found_before;
        prefix = prefix << 10 | shared.found_bin;
        __syncthreads();
    }
    return prefix;
}

// Inverse CDF over the tokens within `cut` (all, where not CUT) whose weight is at least `floor`, in the order of ids, at the random number `u`.
template <bool CUT, typename L>
__device__ __noinline__ int32_t invert_row(const Row<L> &row, Shared &shared, Softmax softmax, Cut cut, uint64_t floor,
                                           uint64_t u) {
    const auto kept = [&](int32_t id, float x) -> uint64_t {
        const float log_weight = softmax.log_weight(x);
        if (draw::vanishes(log_weight) || (CUT && !within(cut, Softmax::bin(log_weight), x, id))) {
            return 0;
        }
        const uint64_t weight = draw::weight(log_weight);
        return weight >= floor ? weight : 0;
    };
    __syncthreads();
    if (threadIdx.x < TILES) {
        shared.tiles[threadIdx.x] = 0;
    }
    __syncthreads();
    uint64_t own = 0;
    int last = 0;
    const auto flush = [&](int tile) {
        const uint64_t sum = warp_sum(own);
        if (threadIdx.x % 32 == 0 && sum != 0) {
            atomicAdd(reinterpret_cast<unsigned long long *>(&shared.tiles[tile]), static_cast<unsigned long long>(sum));
        }
        own = 0;
    };
    each(row, shared, [&](int32_t id, float x, int tile) {
        if (tile != last) {
            flush(last);
            last = tile;
        }
        own += id < 0 ? 0 : kept(id, x);
    });
    flush(last);
    __syncthreads();
    uint64_t total = 0;
    for (int i = 0; i < TILES; ++i) {
        total += shared.tiles[i];
    }
    uint64_t left = draw::fraction(u, total);
    int tile = 0;
    while (tile < TILES - 1 && left >= shared.tiles[tile]) {
        left -= shared.tiles[tile];
        ++tile;
    }
    // Consecutive ids a thread.
    const int32_t head = head_of(row);
    const int32_t first = tile == 0 ? threadIdx.x * UNROLL : head + (tile - 1) * TILE + threadIdx.x * UNROLL;
    const int32_t end = min(first + UNROLL, tile == 0 ? head : row.vocab);
    const auto weight_at = [&](int32_t id) { return kept(id, edited(row, shared, id, L::load(row.logits[id]))); };
    own = 0;
    for (int32_t id = first; id < end; ++id) {
        own += weight_at(id);
    }
    const uint64_t sum = scan(shared, own, total);
    if (sum > left && sum - own <= left) {
        left -= sum - own;
        int32_t id = first;
        for (uint64_t weight; id < end - 1 && left >= (weight = weight_at(id)); ++id) {
            left -= weight;
        }
        shared.token = id;
    }
    __syncthreads();
    return shared.token;
}

// Top-k, top-p and min-p among `n` gathered tokens, which hold all that top-k and top-p keep, and the draw. `top_k` 0 is none;
// `target` is the mass that top-p keeps where top-k is none, or 0 for what `p` is of the k best.
__device__ __noinline__ int32_t draw_gathered(Shared &shared, Softmax softmax, int n, uint32_t top_k, bool by_p, double p,
                                              uint64_t target, uint64_t floor, uint64_t u) {
    sort(shared, power_of_two(n));
    const int i = threadIdx.x;
    const int best = top_k != 0 && top_k < static_cast<uint32_t>(n) ? static_cast<int>(top_k) : n;
    const uint64_t key = i < best ? shared.keys[i] : NO_RANK;
    const uint64_t weight =
        i < best ? draw::weight(softmax.log_weight(draw::logit_of(static_cast<uint32_t>(key >> ID_BITS)))) : 0;
    uint64_t total;
    const uint64_t above = scan(shared, weight, total) - weight;
    if (by_p && target == 0) {
        target = draw::mass(p, total);
    }
    const bool kept = i < best && weight >= floor && (!by_p || above < target);
    // Sort by id. Kept tokens come first in the ranking, so the rest is behind them; 41 bits hold any weight.
    const int count = __syncthreads_count(kept);
    const int size = power_of_two(count);
    if (i < size) {
        shared.keys[i] = kept ? (key & ((1ull << ID_BITS) - 1)) << 41 | weight : NO_RANK;
    }
    sort(shared, size);
    const uint64_t entry = i < count ? shared.keys[i] : 0;
    const uint64_t own = entry & ((1ull << 41) - 1);
    const uint64_t sum = scan(shared, own, total);
    const uint64_t left = draw::fraction(u, total);
    if (sum > left && sum - own <= left) {
        shared.token = static_cast<int32_t>(entry >> 41);
    }
    __syncthreads();
    return shared.token;
}

// Reason why no token can be drawn, and its place.
struct Fault {
    Probe probe;
    Buffer buffer;
    int64_t column;
};

// The token of one row; NO_TOKEN where none can be drawn.
template <typename L>
__device__ int32_t draw_token(const Row<L> &row, Shared &shared, const SamplerRow &sampler, uint32_t position,
                              Fault &fault) {
    uint64_t best = 0;
    if (row.edits) {
        each(row, shared, [&](int32_t id, float x, int) {
            if (id >= 0) {
                best = larger(best, rank_key(x, static_cast<uint32_t>(id)));
            }
        });
    } else {
        best = best_key<L>(row.logits, 0, row.vocab);
    }
    const uint64_t own_best = best;
    best = block_max(best, shared.warp_sums);
    fault.probe = key_probe(best);
    if (fault.probe != PROBE_NONE) {
        fault.buffer = BUFFER_TARGET_LOGITS;
        if (row.edits) {
            // A fault of the model's own logits comes first.
            const uint64_t own = block_max(best_key<L>(row.logits, 0, row.vocab), shared.warp_sums);
            if (key_probe(own) != PROBE_NONE) {
                best = own;
                fault.probe = key_probe(own);
            } else {
                fault.buffer = BUFFER_EDITED_LOGITS;
            }
        }
        fault.column = probe_column(best, fault.probe);
        return NO_TOKEN;
    }
    const float inv_t = __uint_as_float(sampler.inv_t);
    if (inv_t == 0.0f) {
        return static_cast<int32_t>(key_index(best));
    }
    const Softmax softmax{key_logit(best), inv_t};
    const uint64_t u = draw::uniform53(sampler.seed, position, 0);
    const uint32_t top_k = sampler.top_k < static_cast<uint32_t>(row.vocab) ? sampler.top_k : 0;
    const double top_p = draw::double_of(sampler.top_p);
    const bool by_p = top_p < 1.0;
    const Cut all{BINS, NO_RANK};
    Cut cut = all;
    if (top_k != 0 && top_k <= CANDIDATES) {
        // Each thread's largest logit is one of its own, so the k-th largest of these has k - 1 logits above it.
        // Threads without a logit stand behind all: then everything is gathered.
        __syncthreads();
        shared.keys[threadIdx.x] = ~own_best;
        sort(shared, CANDIDATES);
        const uint64_t bound = ~shared.keys[top_k - 1];
        const int n = gather_from(row, shared, bound == 0 ? __int_as_float(0xff800000) : key_logit(bound));
        if (n <= CANDIDATES) {
            return draw_gathered(shared, softmax, n, top_k, by_p, top_p, 0, sampler.min_weight, u);
        }
    }
    if (top_k != 0) {
        uint64_t total;
        histogram<false>(row, shared, softmax, all, -__int_as_float(0x7f800000));
        // If fewer tokens than k have a weight, all of them are kept.
        if (find_bin<false>(shared, top_k, total)) {
            const uint32_t bin = shared.found_bin, before = shared.found_before, members = shared.found_count;
            if (before + members <= CANDIDATES) {
                const int n = gather_bins(row, shared, softmax, Cut{bin, NO_RANK}, 0, all);
                return draw_gathered(shared, softmax, n, top_k, by_p, top_p, 0, sampler.min_weight, u);
            }
            cut = Cut{bin, refine<false>(row, shared, softmax, all, bin, members, top_k - before)};
        }
    }
    if (by_p) {
        // All tokens lighter than (total - target) / V together weigh less than what the nucleus leaves out; the total is at
        // least the weight of one. Where rounding made the bound too tight, the bin is not found, and all are counted.
        const float least = __logf(static_cast<float>(1.0 - top_p) / static_cast<float>(row.vocab)) - 1.0f;
        uint64_t ignored;
        const uint64_t total = histogram<true>(row, shared, softmax, cut, least);
        const uint64_t target = draw::mass(top_p, total);
        if (!find_bin<true>(shared, target, ignored)) {
            histogram<true>(row, shared, softmax, cut, -__int_as_float(0x7f800000));
            find_bin<true>(shared, target, ignored);
        }
        const uint32_t bin = shared.found_bin, before = shared.found_before, members = shared.found_count;
        const uint64_t above = shared.found_weight;
        if (before + members <= CANDIDATES) {
            const int n = gather_bins(row, shared, softmax, Cut{bin, NO_RANK}, 0, cut);
            return draw_gathered(shared, softmax, n, 0, true, top_p, target, sampler.min_weight, u);
        }
        cut = Cut{bin, refine<true>(row, shared, softmax, cut, bin, members, target - above)};
    }
    if (cut.bin == BINS) {
        return invert_row<false>(row, shared, softmax, cut, sampler.min_weight, u);
    }
    return invert_row<true>(row, shared, softmax, cut, sampler.min_weight, u);
}

// Mark the tokens that edits name; false if the list lies outside its arrays or names an id that is no token, which is
// recorded.
template <typename L>
__device__ bool begin_edits(const SampleParams &p, Row<L> &row, Shared &shared, int32_t request) {
    const int32_t begin = reinterpret_cast<const int32_t *>(p.edit_begins)[request];
    const int32_t listed = reinterpret_cast<const int32_t *>(p.edit_counts)[request];
    if (begin < 0 || listed < 0 || begin > p.edits - listed) {
        if (threadIdx.x == 0) {
            const int64_t index = begin < 0 ? begin : listed < 0 ? listed : static_cast<int64_t>(begin) + listed - 1;
            record_fault(p.verify.report, KERNEL_SAMPLE_VERIFY, BUFFER_EDITS, request, -1, index, p.edits);
        }
        return false;
    }
    row.tokens = reinterpret_cast<const int32_t *>(p.edit_tokens) + begin;
    row.biases = reinterpret_cast<const uint32_t *>(p.edit_biases) + begin;
    row.outputs = reinterpret_cast<const int32_t *>(p.edit_outputs) + begin;
    row.listed = listed;
    row.edits = listed > 0 || row.penalises;
    if (!row.edits) {
        return true;
    }
    for (int32_t w = threadIdx.x; w < (row.vocab + 31) / 32; w += THREADS) {
        shared.edited[w] = 0;
    }
    __syncthreads();
    bool bad = false;
    for (int32_t i = threadIdx.x; i < listed; i += THREADS) {
        const int32_t token = row.tokens[i];
        if (in_bounds(token, row.vocab)) {
            atomicOr(&shared.edited[token >> 5], 1u << (token & 31));
        } else {
            bad = true;
            record_fault(p.verify.report, KERNEL_SAMPLE_VERIFY, BUFFER_EDIT_TOKENS, request, i, token, row.vocab);
        }
    }
    return __syncthreads_or(bad) == 0;
}

// Parameters of the request that a row is drawn for.
template <typename L>
__device__ __forceinline__ Row<L> row_of(const SampleParams &p, const SamplerRow &sampler) {
    Row<L> row{};
    row.vocab = p.verify.vocab;
    row.penalises = sampler.penalises != 0;
    row.repetition = __uint_as_float(sampler.repetition);
    row.presence = __uint_as_float(sampler.presence);
    row.frequency = __uint_as_float(sampler.frequency);
    return row;
}

template <typename L>
__device__ __forceinline__ const typename L::Storage *logits_of(const SampleParams &p, int32_t at) {
    return reinterpret_cast<const typename L::Storage *>(p.verify.logits) +
           static_cast<int64_t>(at) * p.verify.logits_stride;
}

__device__ __forceinline__ uint32_t position_of(const SampleParams &p, int32_t request, int32_t depth) {
    return static_cast<uint32_t>(reinterpret_cast<const int32_t *>(p.verify.lens)[request]) +
           static_cast<uint32_t>(depth) + 1;
}

__device__ __forceinline__ void report(const SampleParams &p, int32_t request, int32_t at, uint32_t position,
                                       const Fault &fault) {
    record_probe(p.verify.report, KERNEL_SAMPLE_VERIFY, fault.buffer, fault.probe, request, at, fault.column,
                 static_cast<int32_t>(position));
    reinterpret_cast<int32_t *>(p.verify.faults)[request] = fault.probe;
}

template <typename L>
__device__ __forceinline__ void sample_walk(const SampleParams &p) {
    __shared__ Shared shared;
    const int32_t request = blockIdx.x;
    const bool writer = threadIdx.x == 0;
    const int32_t live = live_rows(p.verify.live, p.verify.requests, p.verify.report, KERNEL_SAMPLE_VERIFY,
                                   writer && request == 0);
    Range range = nodes_of(p.verify, KERNEL_SAMPLE_VERIFY, request, live, writer);
    if (writer) {
        reinterpret_cast<int32_t *>(p.verify.faults)[request] = PROBE_NONE;
    }
    const SamplerRow sampler = reinterpret_cast<const SamplerRow *>(p.samplers)[request];
    Row<L> row = row_of<L>(p, sampler);
    row.path =
        reinterpret_cast<const int32_t *>(p.verify.walk_tokens) + static_cast<int64_t>(request) * p.verify.max_path;
    if (range.size > 0 && !begin_edits(p, row, shared, request)) {
        range.size = 0;
    }
    const int32_t *parents = reinterpret_cast<const int32_t *>(p.verify.tree_parents) + range.begin;
    const int32_t *tokens = reinterpret_cast<const int32_t *>(p.verify.tree_tokens) + range.begin;
    Walk walk = {0, 0};
    bool more = range.size > 0;
    while (more) {
        const int32_t at = range.begin + walk.node;
        const uint32_t position = position_of(p, request, walk.length);
        row.logits = logits_of<L>(p, at);
        row.depth = walk.length;
        Fault fault;
        const int32_t token = draw_token(row, shared, sampler, position, fault);
        __syncthreads();  // all have read what follows changes
        if (writer && token == NO_TOKEN) {
            report(p, request, at, position, fault);
        }
        if (writer && token != NO_TOKEN && row.penalises) {
            shared.edited[token >> 5] |= 1u << (token & 31);
        }
        more = step(p.verify, KERNEL_SAMPLE_VERIFY, request, range, parents, tokens, token, walk, writer);
        __syncthreads();
    }
    if (writer) {
        reinterpret_cast<int32_t *>(p.verify.walk_lengths)[request] = walk.length;
    }
    if (last_block(p.verify.counter, gridDim.x)) {
        gather_walks(p.verify, live);
    }
}

// The result of a node's draw, in 64 bits: the token in the lowest 32 (NO_TOKEN: none), the probe in the next 4, in the
// next 4 whether edits made the fault (1) or the request is left out (2), above them the column. A row that no walk
// reaches has 0.
constexpr uint64_t DRAWN_EDITED = 1;
constexpr uint64_t DRAWN_LEFT_OUT = 2;

__device__ __forceinline__ uint64_t drawn(int32_t token, Probe probe, uint64_t flag, int64_t column) {
    return static_cast<uint32_t>(token) | static_cast<uint64_t>(probe) << 32 | flag << 36 |
           static_cast<uint64_t>(column) << 40;
}

// Draw the token of node `at` of the concatenated trees.
template <typename L>
__device__ __forceinline__ uint64_t draw_node(const SampleParams &p, Shared &shared, int32_t live, int32_t at) {
    __shared__ int32_t path[FULL_PATH];
    __shared__ int32_t owner, above;
    if (threadIdx.x == 0) {
        owner = -1;
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < live; i += THREADS) {
        const Range range = nodes_of(p.verify, KERNEL_SAMPLE_VERIFY, i, live, false);
        if (at >= range.begin && at - range.begin < range.size) {
            owner = i;  // if offsets overlap, either may win: such a batch has a fault of its own
        }
    }
    __syncthreads();
    const int32_t request = owner;
    if (request < 0) {
        return 0;
    }
    const Range range = nodes_of(p.verify, KERNEL_SAMPLE_VERIFY, request, live, false);
    const int32_t *parents = reinterpret_cast<const int32_t *>(p.verify.tree_parents) + range.begin;
    const int32_t *tokens = reinterpret_cast<const int32_t *>(p.verify.tree_tokens) + range.begin;
    if (threadIdx.x == 0) {
        // Walk up to the root; a node that is deeper than a path may be, or whose parents are invalid, is not reached.
        int32_t depth = 0, node = at - range.begin;
        const int32_t room = min(p.verify.max_path - 1, FULL_PATH);
        while (node > 0 && depth < room && in_bounds(parents[node], node)) {
            path[depth++] = tokens[node];
            node = parents[node];
        }
        above = node == 0 ? depth : -1;
    }
    __syncthreads();
    const int32_t depth = above;
    if (depth < 0) {
        return 0;
    }
    const SamplerRow sampler = reinterpret_cast<const SamplerRow *>(p.samplers)[request];
    Row<L> row = row_of<L>(p, sampler);
    row.path = path;
    row.depth = depth;
    row.logits = logits_of<L>(p, at);
    if (!begin_edits(p, row, shared, request)) {
        return drawn(NO_TOKEN, PROBE_NONE, DRAWN_LEFT_OUT, 0);
    }
    if (row.penalises) {
        // A draft outside the vocabulary is never drawn, so nothing below it is reached.
        for (int32_t i = threadIdx.x; i < depth; i += THREADS) {
            if (in_bounds(path[i], p.verify.vocab)) {
                atomicOr(&shared.edited[path[i] >> 5], 1u << (path[i] & 31));
            }
        }
        __syncthreads();
    }
    Fault fault;
    const int32_t token = draw_token(row, shared, sampler, position_of(p, request, depth), fault);
    if (token != NO_TOKEN) {
        return drawn(token, PROBE_NONE, 0, 0);
    }
    return drawn(token, fault.probe, fault.buffer == BUFFER_EDITED_LOGITS ? DRAWN_EDITED : 0, fault.column);
}

template <typename L>
__device__ __forceinline__ void sample_full(const SampleParams &p) {
    __shared__ Shared shared;
    const int32_t live =
        live_rows(p.verify.live, p.verify.requests, p.verify.report, KERNEL_SAMPLE_VERIFY,
                  threadIdx.x == 0 && blockIdx.x == 0);
    uint64_t *results = reinterpret_cast<uint64_t *>(p.verify.row_keys);
    const uint64_t result = draw_node<L>(p, shared, live, static_cast<int32_t>(blockIdx.x));
    if (threadIdx.x == 0) {
        results[blockIdx.x] = result;
    }
    if (!last_block(p.verify.counter, gridDim.x)) {
        return;
    }
    for (int32_t request = threadIdx.x / 32; request < p.verify.requests; request += WARPS) {
        const bool writer = threadIdx.x % 32 == 0;
        Range range = nodes_of(p.verify, KERNEL_SAMPLE_VERIFY, request, live, writer);
        if (writer) {
            reinterpret_cast<int32_t *>(p.verify.faults)[request] = PROBE_NONE;
        }
        __syncwarp();
        if (range.size > 0 && (__ldcg(results + range.begin) >> 36 & 0xF) == DRAWN_LEFT_OUT) {
            range.size = 0;
        }
        Walk walk = {0, 0};
        bool more = range.size > 0;
        while (more) {
            const int32_t at = range.begin + walk.node;
            const uint64_t result = __ldcg(results + at);
            const int32_t token = static_cast<int32_t>(static_cast<uint32_t>(result));
            if (writer && token == NO_TOKEN) {
                const bool edited = (result >> 36 & 0xF) == DRAWN_EDITED;
                report(p, request, at, position_of(p, request, walk.length),
                       Fault{static_cast<Probe>(result >> 32 & 0xF), edited ? BUFFER_EDITED_LOGITS : BUFFER_TARGET_LOGITS,
                             static_cast<int64_t>(result >> 40)});
            }
            more = step(p.verify, KERNEL_SAMPLE_VERIFY, request, range,
                        reinterpret_cast<const int32_t *>(p.verify.tree_parents) + range.begin,
                        reinterpret_cast<const int32_t *>(p.verify.tree_tokens) + range.begin, token, walk, writer);
        }
        if (writer) {
            reinterpret_cast<int32_t *>(p.verify.walk_lengths)[request] = walk.length;
        }
    }
    __threadfence();
    __syncthreads();
    for (int32_t i = threadIdx.x; i < p.verify.nodes; i += THREADS) {
        results[i] = 0;  // greedy verification may be given the same scratch
    }
    gather_walks(p.verify, live);
}

}  // namespace specrs

#define SPECRS_SAMPLE(name, mode, logit)                                                                           \
    extern "C" __global__ void __launch_bounds__(1024) name(const __grid_constant__ specrs::SampleParams p) {      \
        specrs::mode<specrs::logit>(p);                                                                            \
    }
SPECRS_SAMPLE(sample_walk_f32, sample_walk, LogitF32)
SPECRS_SAMPLE(sample_walk_bf16, sample_walk, LogitBf16)
SPECRS_SAMPLE(sample_walk_f16, sample_walk, LogitF16)
SPECRS_SAMPLE(sample_full_f32, sample_full, LogitF32)
SPECRS_SAMPLE(sample_full_bf16, sample_full, LogitBf16)
SPECRS_SAMPLE(sample_full_f16, sample_full, LogitF16)
