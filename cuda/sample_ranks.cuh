// The rank up to which top-k or top-p keeps a row's tokens: histograms over the group, and the few tokens that decide.
#pragma once

#include "sample_team.cuh"

namespace specrs {

constexpr int ID_BITS = 18;
constexpr int MAX_VOCAB = 1 << ID_BITS;
constexpr uint64_t NO_RANK = ~0ull;

// ---- Ranks and bins ----

// Smaller is better: by logit, ties by id. 50 bits.
__device__ __forceinline__ uint64_t rank(float x, int32_t id) {
    return static_cast<uint64_t>(draw::rank_of(x)) << ID_BITS | static_cast<uint32_t>(id);
}

// Weights of one row.
struct Softmax {
    float max;
    float inv_t;

    __device__ __forceinline__ float log_weight(float x) const { return draw::log_weight(x, max, inv_t); }
    __device__ __forceinline__ uint64_t weight_of(uint64_t rank) const {
        return draw::weight(log_weight(draw::logit_of(static_cast<uint32_t>(rank >> ID_BITS))));
    }
};

// Types for a choice that a loop is compiled for.
struct Yes {
    static constexpr bool value = true;
};
struct No {
    static constexpr bool value = false;
};

// What a histogram of weights counts for a token in the middle of a bin.
constexpr float UNIT = 8192.0f;

// Tokens of the ranks from `first` to `last`, in bins from the best on: of log-weight, or of ranks alone.
struct Ranks {
    uint64_t first, last;
    // Bins a unit of log-weight, and its inverse; 0 for bins of 2^shift ranks.
    float per_nat, nats;
    int32_t shift;

    // All tokens up to rank `last`; the bins but the last cover `nats` of log-weight.
    __device__ __forceinline__ static Ranks of_log_weights(float nats, uint64_t last) {
        return {0, last, static_cast<float>(BINS - 1) / nats, nats / static_cast<float>(BINS - 1), 0};
    }
    __device__ __forceinline__ static Ranks of_ranks(uint64_t first, uint64_t last) {
        int32_t shift = 0;
        while ((last - first) >> shift >= BINS - 1) {
            ++shift;
        }
        return {first, last, 0.0f, 0.0f, shift};
    }

    // All tokens, in bins of log-weight: what costs least.
    __device__ __forceinline__ bool all() const { return last == NO_RANK; }
    // The bin of a token, ascending with its rank; -1 if it comes before the range, BINS if behind or surely without a weight.
    // `ALL` as `all`. `middle` is the bin's number, where it is one of log-weight.
    template <bool ALL>
    __device__ __forceinline__ int32_t bin(float x, int32_t id, float log_weight, float &middle) const {
        const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held by the low bits
        const float sum = fminf(-log_weight * per_nat, BINS - 1) + magic;
        middle = sum - magic;
        int32_t bin = __float_as_int(sum) - __float_as_int(magic);
        if (!ALL) {
            const uint64_t own = rank(x, id);
            bin = per_nat == 0.0f ? static_cast<int32_t>((own - first) >> shift) : bin;
            bin = own < first ? -1 : own > last ? BINS : bin;
        }
        return draw::vanishes(log_weight) ? BINS : bin;
    }
    // A log-weight that no token up to a bin is below.
    __device__ __forceinline__ float least_of(int32_t bin, Softmax softmax) const {
        if (bin >= BINS - 1) {
            return __uint_as_float(0xff800000u);
        }
        const uint64_t end = min(last, first + (static_cast<uint64_t>(bin + 1) << shift));
        return per_nat == 0.0f ? softmax.log_weight(draw::logit_of(static_cast<uint32_t>(end >> ID_BITS)))
                               : static_cast<float>(bin + 1) * nats * -1.001f;
    }
    // What a histogram of weights counts of a token of a bin: its weight beside that of the bin's middle, or 1 in bins of ranks,
    // which weigh about the same.
    __device__ __forceinline__ uint32_t share(float middle, float log_weight) const {
        const float more = fmaf(middle, nats, log_weight), round = 8388608.0f;  // 2^23
        const float share = fmaf(UNIT, fmaf(more, 0.5f * more, more), UNIT + round);
        return per_nat == 0.0f ? 1 : __float_as_uint(share) - __float_as_uint(round);
    }
    // About the weight of a bin with this sum of shares.
    __device__ __forceinline__ uint64_t weight_of(int32_t bin, uint32_t shares, Softmax softmax) const {
        if (per_nat == 0.0f) {
            return shares * softmax.weight_of(first + (static_cast<uint64_t>(bin) << shift));
        }
        const float middle = static_cast<float>(draw::weight(-static_cast<float>(bin) * nats));
        return static_cast<uint64_t>(static_cast<float>(shares) * (middle / UNIT));
    }
};

// Sum what the tokens of `range` count in `sums`; with WEIGHTS, return the weight of all. The last bin, that of all the rest,
// stays 0.
template <bool WEIGHTS, typename L>
__device__ __forceinline__ uint64_t histogram(Team &team, const Row<L> &row, Softmax softmax, const Ranks range) {
    struct Token {
        int32_t bin;
        uint32_t count;
        uint64_t weight;
    };
    uint32_t *bins = shared.bins[team.group.rank];
    if (threadIdx.x < BINS) {
        bins[threadIdx.x] = 0;
    }
    __syncthreads();
    uint64_t own = 0;
    const auto count = [&](auto all) {
        const auto token = [&](int32_t id, float x) {
            const float log_weight = softmax.log_weight(x);
            float middle;
            const int32_t bin = range.bin<decltype(all)::value>(x, id, log_weight, middle);
            const uint64_t weight = WEIGHTS ? draw::weight(log_weight) : 0;
            return Token{bin, WEIGHTS ? range.share(middle, log_weight) : 1,
                         decltype(all)::value || in_bounds(bin, BINS) ? weight : 0};
        };
        each(row, token, [&](int32_t, float, const Token &token) {
            own += token.weight;
            if (in_bounds(token.bin, BINS - 1)) {
                atomicAdd(bins + token.bin, token.count);
            }
        });
    };
    if (range.all()) {
        count(Yes{});
    } else {
        count(No{});
    }
    let_send();
    const auto share_bins = [&] { share(team, bins, sizeof(shared.bins[0]), BOX_BINS); };
    uint64_t before, total = 0;
    if (WEIGHTS) {
        total = sum_warps(team, warp_sum(own), before, share_bins);
    } else {
        __syncthreads();
        share_bins();
    }
    team.receive_shares(BOX_BINS, sizeof(shared.bins[0]));
    if (threadIdx.x < BINS) {
        uint32_t sum = 0;
        for (uint32_t block = 0; block < team.group.size; ++block) {
            sum += shared.bins[block][threadIdx.x];
        }
        shared.sums[threadIdx.x] = sum;
    }
    return total;
}

// The first bin up to which the tokens of a histogram, or about their weights, reach `need`; the last bin if they never do.
// Begins and ends with a barrier of the block.
template <bool WEIGHTS>
__device__ __forceinline__ int32_t find_bin(const Ranks &range, Softmax softmax, uint64_t need) {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, bin = threadIdx.x;
    uint64_t own = 0;
    if (bin < BINS) {
        own = WEIGHTS ? range.weight_of(bin, shared.sums[bin], softmax) : shared.sums[bin];
    }
    const uint64_t sum = warp_sum(own);
    if (lane == 0) {
        shared.kept[warp] = sum;
    }
    if (threadIdx.x == 0) {
        shared.found_bin = BINS - 1;
    }
    __syncthreads();
    const uint64_t before = warp_sum(lane < warp ? shared.kept[lane % WARPS] : 0);
    if (before < need && before + sum >= need) {
        const uint64_t upto = before + warp_scan(own);
        if (upto >= need && upto - own < need) {
            shared.found_bin = bin;
        }
    }
    __syncthreads();
    return shared.found_bin;
}

// The next bin after `bin`, by steps of 1 or -1, in which a histogram has something; the last bin if there is none.
__device__ __forceinline__ int32_t next_bin(int32_t bin, int32_t step) {
    do {
        bin += step;
    } while (bin > 0 && bin < BINS - 1 && shared.sums[bin] == 0);
    return bin;
}

// ---- Gathered tokens ----

// What the group gathered: the count or weight of the gathered tokens, `inside`, and the weight of those before them, `above`, of
// the group and of this warp. `posts` and `keys` are the turns in which the blocks' own stand.
struct Gathered {
    uint64_t above, inside, own_above;
    uint32_t tokens;
    bool fits;
    uint32_t posts, keys;

    // Tokens of block `block`, and the weight of those before them.
    __device__ __forceinline__ uint32_t tokens_of(uint32_t block) const {
        return static_cast<uint32_t>(shared.posted[posts][2][block % MAX_GROUP]);
    }
    __device__ __forceinline__ uint64_t above_of(uint32_t block) const { return shared.posted[posts][0][block]; }
    // Where its tokens begin among all. For a whole warp.
    __device__ __forceinline__ uint32_t begin_of(uint32_t block) const {
        const uint32_t lane = threadIdx.x % 32;
        return __reduce_add_sync(ALL_LANES, lane < block ? tokens_of(lane) : 0);
    }
};

// A token, as `gather` sees it: gathered, or with a weight before those.
struct Place {
    bool gathered;
    uint64_t above, inside;
};

// Append the ranks of the lanes where `take` holds to `keys` of this block, which leave out those beyond their `room`. For a
// whole warp.
__device__ __forceinline__ void append(uint64_t *keys, int32_t room, bool take, uint64_t rank) {
    const uint32_t takers = __ballot_sync(ALL_LANES, take);
    if (takers == 0) {
        return;
    }
    const int32_t lane = threadIdx.x % 32;
    int32_t at = 0;
    if (lane == 0) {
        at = atomicAdd(&shared.gathered, __popc(takers));
    }
    at = __shfl_sync(ALL_LANES, at, 0) + __popc(takers & ((1u << lane) - 1));
    if (take && at < room) {
        keys[at] = rank;
    }
}

// Gather tokens: all blocks have them in `keys` then, if they fit. `pass(use)` calls `use(id, x, place)` for each that may be
// gathered or be before those.
template <typename Pass>
__device__ __forceinline__ Gathered gather(Team &team, Pass pass) {
    const int32_t lane = threadIdx.x % 32;
    const uint32_t turn = team.keys_turn;
    const Box box = turn == 0 ? BOX_KEYS : BOX_KEYS_NEXT;
    team.keys_turn ^= 1;
    const int32_t room = KEYS / team.group.size;
    uint64_t *keys = shared.keys[turn] + team.group.rank * room;
    uint64_t above = 0, inside = 0;
    uint32_t tokens = 0;
    pass([&](int32_t id, float x, const Place &place) {
        append(keys, room, place.gathered, rank(x, id));
        above += place.above;
        inside += place.inside;
        tokens += place.gathered;
    });
    const uint64_t own[3] = {warp_sum(above), warp_sum(inside), __reduce_add_sync(ALL_LANES, tokens)};
    let_send();
    const auto sum = [](uint64_t x) { return warp_sum(x); };
    const uint32_t posts = post(team, own, sum, [&] {
        if (threadIdx.x == 0) {
            shared.gathered = 0;
        }
        share(team, keys, room * sizeof *keys, box);
    });
    team.receive_shares(box, room * sizeof *keys);
    Gathered all{};
    all.own_above = own[0];
    all.posts = posts;
    all.keys = turn;
    const bool sent = lane < team.group.size;
    all.above = warp_sum(sent ? shared.posted[posts][0][lane] : 0);
    all.inside = warp_sum(sent ? shared.posted[posts][1][lane] : 0);
    const uint32_t theirs = sent ? all.tokens_of(lane) : 0;
    all.tokens = __reduce_add_sync(ALL_LANES, theirs);
    all.fits = __reduce_max_sync(ALL_LANES, theirs) <= room && all.tokens <= CANDIDATES;
    return all;
}

// Gather the tokens of `range` in `bin`.
template <bool WEIGHTS, typename L>
__device__ __forceinline__ Gathered gather_bin(Team &team, const Row<L> &row, Softmax softmax, const Ranks range,
                                               int32_t bin) {
    const float least = range.least_of(bin, softmax);
    return gather(team, [&](auto use) {
        const auto worth = [&](float x) { return !(softmax.log_weight(x) < least); };
        const auto take = [&](auto all) {
            const auto place = [&](int32_t id, float x) {
                const float log_weight = softmax.log_weight(x);
                float middle;
                const int32_t own = range.bin<decltype(all)::value>(x, id, log_weight, middle);
                const uint64_t counts = WEIGHTS ? draw::weight(log_weight) : !draw::vanishes(log_weight);
                return Place{own == bin, own < bin ? counts : 0, own == bin ? counts : 0};
            };
            each_of(row, worth, place, use);
        };
        if (range.all()) {
            take(Yes{});
        } else {
            take(No{});
        }
    });
}

// Gather the tokens with a logit of at least `least`.
template <typename L>
__device__ __forceinline__ Gathered gather_best(Team &team, const Row<L> &row, Softmax softmax, float least) {
    return gather(team, [&](auto use) {
        const auto place = [&](int32_t, float x) { return Place{!draw::vanishes(softmax.log_weight(x)), 0, 0}; };
        each_of(row, [&](float x) { return x >= least; }, place, use);
    });
}

// Bring all gathered tokens to `by_rank`, with `weight(key)` of each; ends with a barrier of the block.
template <typename Weight>
__device__ __forceinline__ void unpack(const Team &team, const Gathered &gathered, Weight weight) {
    for (uint32_t block = threadIdx.x / 32; block < team.group.size; block += WARPS) {
        const uint32_t begin = gathered.begin_of(block), tokens = gathered.tokens_of(block);
        for (uint32_t i = threadIdx.x % 32; i < tokens; i += 32) {
            const uint64_t key = shared.keys[gathered.keys][block * (KEYS / team.group.size) + i];
            shared.by_rank[begin + i] = {key, weight(key)};
        }
    }
    __syncthreads();
}

// The rank at which the count, or the sum of weights, of the gathered tokens, which fit, reaches `need`.
template <bool WEIGHTS>
__device__ __forceinline__ uint64_t pick(const Team &team, Softmax softmax, const Gathered &gathered, uint64_t need) {
    unpack(team, gathered, [&](uint64_t key) { return WEIGHTS ? softmax.weight_of(key) : 1; });
    int place;
    const int n = static_cast<int>(gathered.tokens);
    const uint64_t sum = sum_upto(shared.by_rank, n, place);
    if (place < n && sum >= need && sum - shared.by_rank[place].weight < need) {
        shared.found = shared.by_rank[place].key;
    }
    __syncthreads();
    return shared.found;
}

// The range of the ranks in `bin` of `range`.
template <typename L>
__device__ __forceinline__ Ranks inside(Team &team, const Row<L> &row, Softmax softmax, const Ranks range, int32_t bin) {
    uint64_t first = NO_RANK, last = 0;
    const auto own_bin = [&](int32_t id, float x) {
        float middle;
        return range.bin<false>(x, id, softmax.log_weight(x), middle);
    };
    each(row, own_bin, [&](int32_t id, float x, int32_t own) {
        if (own == bin) {
            first = min(first, rank(x, id));
            last = max(last, rank(x, id));
        }
    });
    first = ~largest(team, warp_largest(~first));
    last = largest(team, warp_largest(last));
    return Ranks::of_ranks(first, last);
}

// Find the rank at which the count of the tokens of `range`, or with WEIGHTS the share `p` of their weight, reaches `need`, in
// `last`, which stays if all tokens with a weight are too few. What was gathered around it.
template <bool WEIGHTS, typename L>
__device__ __forceinline__ Gathered narrow(Team &team, const Row<L> &row, Softmax softmax, Ranks range, uint64_t need,
                                           double p, uint64_t &last) {
    Gathered found{};
    for (bool whole = true;; whole = false) {
        const uint64_t total = histogram<WEIGHTS>(team, row, softmax, range);
        if (WEIGHTS && whole) {
            need = draw::mass(p, total);
        }
        int32_t bin = find_bin<WEIGHTS>(range, softmax, need - found.above);
        if (!WEIGHTS && whole && bin == BINS - 1) {
            // A post, by which all blocks have these bins before any block counts others in them.
            largest(team, 0);
            return found;
        }
        // By weight the bin is a guess: the exact sums have the last word.
        for (int32_t step = 0;;) {
            found = gather_bin<WEIGHTS>(team, row, softmax, range, bin);
            if (step <= 0 && found.above >= need && bin > 0) {
                step = -1;
            } else if (step >= 0 && found.above + found.inside < need && bin < BINS - 1) {
                step = 1;
            } else {
                break;
            }
            bin = next_bin(bin, step);
        }
        if (found.fits) {
            last = pick<WEIGHTS>(team, softmax, found, need - found.above);
            return found;
        }
        range = inside(team, row, softmax, range, bin);
    }
}

}  // namespace specrs
