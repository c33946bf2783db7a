// The draw of one row by a group of blocks, as the host's (src/host/sample), token for token: temperature, top-k, top-p, min-p,
// then the inverse CDF in the order of ids at a random number that depends on seed and position alone. Weights are integers
// (draw.cuh), so sums are exact in any order and nothing depends on the group; temperature 0 is the largest logit.
//
// Ranks order the tokens from the best on, by logit and then by id. Top-k and top-p each keep the tokens up to some rank:
//
//   histogram  how many tokens each of 1024 bins of log-weight has: says in which bin the rank is, or about in which by weight
//   gather     the exact weight before and in that bin, and its tokens, or with them those before it if they are few
//   then       few tokens up to there: the leading block sorts them and draws (draw_gathered)
//              few in that bin: it sorts these and finds the rank (pick)
//              else the bin is divided into bins of ranks, and so on
//   invert     without top-k and top-p, or with many tokens up to their rank: sums of weights in the order of ids, by which the
//              block, the warp and the lane of the random number are found
#pragma once

#include "sample_team.cuh"
#include "walk.cuh"

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

// Tokens of the ranks from `first` to `last`, in bins from the best on: of log-weight, or of ranks alone.
struct Ranks {
    uint64_t first, last;
    // Bins a unit of log-weight; 0 for bins of 2^shift ranks.
    float per_nat;
    int32_t shift;

    // All tokens up to rank `last`; the bins but the last cover `nats` of log-weight.
    __device__ __forceinline__ static Ranks of_log_weights(float nats, uint64_t last) {
        return {0, last, static_cast<float>(BINS - 1) / nats, 0};
    }
    __device__ __forceinline__ static Ranks of_ranks(uint64_t first, uint64_t last) {
        int32_t shift = 0;
        while ((last - first) >> shift >= BINS - 1) {
            ++shift;
        }
        return {first, last, 0.0f, shift};
    }

    // All tokens, in bins of log-weight: what costs least.
    __device__ __forceinline__ bool all() const { return last == NO_RANK; }
    // The bin of a token, ascending with its rank; -1 if it is outside, or surely has no weight. `ALL` as `all`.
    template <bool ALL>
    __device__ __forceinline__ int32_t bin(float x, int32_t id, float log_weight) const {
        int32_t bin = min(static_cast<int32_t>(-log_weight * per_nat), BINS - 1);
        if (!ALL) {
            const uint64_t own = rank(x, id);
            bin = own < first || own > last ? -1 : per_nat == 0.0f ? static_cast<int32_t>((own - first) >> shift) : bin;
        }
        return draw::vanishes(log_weight) ? -1 : bin;
    }
    // About the weight of a token of a bin.
    __device__ __forceinline__ uint64_t weight_in(int32_t bin, Softmax softmax) const {
        return per_nat == 0.0f ? softmax.weight_of(first + (static_cast<uint64_t>(bin) << shift))
                               : draw::weight(-(static_cast<float>(bin) + 0.5f) / per_nat);
    }
};

// Count the tokens of `range` in `sums`; with WEIGHTS, return the weight of all. The last bin, that of all the rest, stays 0.
template <bool WEIGHTS, typename L>
__device__ __noinline__ uint64_t histogram(Team &team, const Row<L> &row, Softmax softmax, const Ranks range) {
    struct Token {
        int32_t bin;
        uint64_t weight;
    };
    uint64_t own = 0;
    const auto count = [&](auto all) {
        const auto token = [&](int32_t id, float x) {
            const float log_weight = softmax.log_weight(x);
            const int32_t bin = range.bin<decltype(all)::value>(x, id, log_weight);
            return Token{bin, WEIGHTS && bin >= 0 ? draw::weight(log_weight) : 0};
        };
        each(row, token, [&](int32_t, float, const Token &token) {
            own += token.weight;
            if (static_cast<uint32_t>(token.bin) < BINS - 1) {
                atomicAdd(&shared.bins[token.bin], 1u);
            }
        });
    };
    if (range.all()) {
        count(Yes{});
    } else {
        count(No{});
    }
    // Each block adds up its share of the bins, for all.
    const uint32_t blocks = team.group.size, shift = 31 - __clz(static_cast<int32_t>(BINS / blocks)), share = 1u << shift;
    __syncthreads();
    for (uint32_t bin = threadIdx.x; bin < BINS; bin += THREADS) {
        send(shared.parts[(team.group.rank << shift) + (bin & (share - 1))], bin >> shift, shared.bins[bin],
             shared.mailboxes[BOX_PARTS]);
        shared.bins[bin] = 0;
    }
    const uint64_t sum[1] = {WEIGHTS ? warp_sum(own) : 0};
    uint64_t before[1], total[1] = {0};
    if (WEIGHTS) {
        sum_warps(team, sum, before, total);
    }
    team.receive(BOX_PARTS, sizeof(shared.parts));
    for (uint32_t i = threadIdx.x; i < share; i += THREADS) {
        uint32_t all = 0;
        for (uint32_t block = 0; block < blocks; ++block) {
            all += shared.parts[(block << shift) + i];
        }
        for (uint32_t block = 0; block < blocks; ++block) {
            send(shared.sums[(team.group.rank << shift) + i], block, all, shared.mailboxes[BOX_SUMS]);
        }
    }
    team.receive(BOX_SUMS, sizeof(shared.sums));
    return total[0];
}

// The first bin up to which the tokens of a histogram, or about their weights, reach `need`; the last bin if they never do. Between
// two calls lies a barrier of the block.
template <bool WEIGHTS>
__device__ __forceinline__ int32_t find_bin(const Ranks &range, Softmax softmax, uint64_t need) {
    constexpr int OWN = BINS / THREADS;
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.x * OWN;
    uint64_t own[OWN], all = 0;
    for (int i = 0; i < OWN; ++i) {
        const uint32_t tokens = shared.sums[first + i];
        own[i] = WEIGHTS ? tokens * range.weight_in(first + i, softmax) : tokens;
        all += own[i];
    }
    const uint64_t sum = warp_sum(all);
    if (lane == 0) {
        shared.warp_sums[0][warp] = sum;
    }
    if (threadIdx.x == 0) {
        shared.found_bin = BINS - 1;
    }
    __syncthreads();
    const uint64_t before = warp_sum(lane < warp ? shared.warp_sums[0][lane] : 0);
    if (before < need && before + sum >= need) {
        uint64_t upto = before + warp_scan(all) - all;
        for (int i = 0; i < OWN; ++i) {
            if (upto < need && upto + own[i] >= need) {
                shared.found_bin = first + i;
            }
            upto += own[i];
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

// What `gather` found. `own` and `at` say how many of the tokens this block has, and where they begin among the group's.
struct Gathered {
    uint64_t above, inside, tokens;
    int32_t own, at;
};

// Append the ranks of the lanes where `take` holds to this block's `keys`, of which those beyond their room are left out; how many
// it holds for. For a whole warp.
__device__ __forceinline__ int append(bool take, uint64_t rank) {
    const uint32_t takers = __ballot_sync(ALL_LANES, take);
    if (takers == 0) {
        return 0;
    }
    const int32_t lane = threadIdx.x % 32;
    int32_t at = 0;
    if (lane == 0) {
        at = atomicAdd(&shared.gathered, __popc(takers));
    }
    at = __shfl_sync(ALL_LANES, at, 0) + __popc(takers & ((1u << lane) - 1));
    if (take && at < CANDIDATES) {
        shared.keys[at] = rank;
    }
    return __popc(takers);
}

// Begin a list of gathered tokens.
__device__ __forceinline__ void begin_keys() {
    __syncthreads();  // all have read the length of the time before
    if (threadIdx.x == 0) {
        shared.gathered = 0;
    }
    __syncthreads();
}

// What the warps of the group have gathered.
__device__ __forceinline__ Gathered end_keys(Team &team, uint64_t above, uint64_t inside, uint32_t tokens) {
    const uint64_t own[3] = {warp_sum(above), warp_sum(inside), tokens};
    uint64_t at[3], total[3];
    sum_warps(team, own, at, total);
    return {total[0], total[1], total[2], shared.gathered, static_cast<int32_t>(at[2])};
}

// Gather in `keys` of each block the tokens of `range`, of log-weights, up to `bin`: few. Their count, or weight, is `inside`.
template <bool WEIGHTS, typename L>
__device__ __noinline__ Gathered gather_upto(Team &team, const Row<L> &row, Softmax softmax, const Ranks range,
                                             int32_t bin) {
    begin_keys();
    uint64_t inside = 0;
    uint32_t tokens = 0;
    const float end = static_cast<float>(bin + 1);  // as Ranks::bin, which rounds down
    const auto log_weight = [&](int32_t, float x) { return softmax.log_weight(x); };
    each(row, log_weight, [&](int32_t id, float x, float log_weight) {
        const bool take = -log_weight * range.per_nat < end && !draw::vanishes(log_weight) &&
                          (range.all() || rank(x, id) <= range.last);
        const int taken = append(take, rank(x, id));
        tokens += taken;
        if (take) {
            inside += WEIGHTS ? draw::weight(log_weight) : 1;
        }
    });
    return end_keys(team, 0, inside, tokens);
}

// Gather in `keys` of each block the tokens of `range` in `bin`; their count, or weight, and that of those before the bin.
template <bool WEIGHTS, typename L>
__device__ __noinline__ Gathered gather(Team &team, const Row<L> &row, Softmax softmax, const Ranks range, int32_t bin) {
    struct Token {
        int32_t bin;
        uint64_t weight;
    };
    begin_keys();
    uint64_t above = 0, inside = 0;
    uint32_t tokens = 0;
    const auto token = [&](int32_t id, float x) {
        const float log_weight = softmax.log_weight(x);
        const int32_t own = range.bin<false>(x, id, log_weight);
        return Token{own, own < 0 || own > bin ? 0 : WEIGHTS ? draw::weight(log_weight) : 1};
    };
    each(row, token, [&](int32_t id, float x, const Token &token) {
        const bool member = token.bin == bin;
        tokens += append(member, rank(x, id));
        above += member ? 0 : token.weight;
        inside += member ? token.weight : 0;
    });
    return end_keys(team, above, inside, tokens);
}

// Bring the gathered tokens, at most CANDIDATES of the group, to the leading block's `keys`, where its own are already.
__device__ __forceinline__ int bring(Team &team, const Gathered &gathered) {
    const int32_t thread = threadIdx.x, tokens = static_cast<int32_t>(gathered.tokens);
    if (team.group.leads()) {
        team.receive(BOX_KEYS, (tokens - gathered.own) * sizeof(uint64_t));
    } else if (thread < gathered.own) {
        send(shared.keys[gathered.at + thread], 0, shared.keys[thread], shared.mailboxes[BOX_KEYS]);
    }
    return tokens;
}

// The rank at which the count, or the sum of weights, of `n` tokens in the leading block's `keys` reaches `need`.
template <bool WEIGHTS>
__device__ __noinline__ uint64_t pick(Team &team, Softmax softmax, int n, uint64_t need) {
    const int threads = threads_for(n), i = threadIdx.x;
    if (team.group.leads() && i < threads) {
        const uint64_t key = sort(i < n ? shared.keys[i] : NO_RANK, threads);
        const uint64_t own = i >= n ? 0 : WEIGHTS ? softmax.weight_of(key) : 1;
        uint64_t total;
        const uint64_t sum = scan(own, threads, total);
        if (sum >= need && sum - own < need) {
            publish(key, team.group);
        }
    }
    return published(team);
}

// The range of the ranks in `bin` of `range`.
template <typename L>
__device__ __noinline__ Ranks inside(Team &team, const Row<L> &row, Softmax softmax, const Ranks range, int32_t bin) {
    uint64_t first = NO_RANK, last = 0;
    const auto own_bin = [&](int32_t id, float x) { return range.bin<false>(x, id, softmax.log_weight(x)); };
    each(row, own_bin, [&](int32_t id, float x, int32_t own) {
        if (own == bin) {
            first = min(first, rank(x, id));
            last = max(last, rank(x, id));
        }
    });
    first = ~largest(team, ~first);
    last = largest(team, last);
    return Ranks::of_ranks(first, last);
}

// Tokens of a histogram up to `bin`, for all threads; with the last bin, of which it has none, more than any. Ends with a barrier
// of the block.
__device__ __forceinline__ uint32_t tokens_upto(int32_t bin) {
    if (bin == BINS - 1) {
        return ~0u;
    }
    const int32_t lane = threadIdx.x % 32;
    uint32_t own = 0;
    for (int32_t i = threadIdx.x; i <= bin; i += THREADS) {
        own += shared.sums[i];
    }
    own = __reduce_add_sync(ALL_LANES, own);
    if (lane == 0) {
        shared.warp_sums[1][threadIdx.x / 32] = own;
    }
    __syncthreads();
    return static_cast<uint32_t>(warp_sum(lane < WARPS ? shared.warp_sums[1][lane] : 0));
}

// Find the rank at which the count, or the sum of weights, of the tokens of `range`, whose histogram stands in `sums`, reaches
// `need`, in `last`, which stays if all tokens with a weight are too few. If few tokens are up to there, they are in the leading
// block's `keys` instead: returns how many, else 0.
template <bool WEIGHTS, typename L>
__device__ __noinline__ int narrow(Team &team, const Row<L> &row, Softmax softmax, Ranks range, uint64_t need,
                                   uint64_t &last) {
    for (bool whole = true;; whole = false) {
        int32_t bin = find_bin<WEIGHTS>(range, softmax, need);
        if (!WEIGHTS && whole && bin == BINS - 1) {
            return 0;
        }
        if (whole && tokens_upto(bin) <= CANDIDATES) {
            const Gathered found = gather_upto<WEIGHTS>(team, row, softmax, range, bin);
            if (found.inside >= need) {
                return bring(team, found);
            }
        }
        // By weight the bin is a guess: the exact sums have the last word.
        Gathered found = gather<WEIGHTS>(team, row, softmax, range, bin);
        while (found.above >= need && bin > 0) {
            bin = next_bin(bin, -1);
            found = gather<WEIGHTS>(team, row, softmax, range, bin);
        }
        while (found.above + found.inside < need && bin < BINS - 1) {
            bin = next_bin(bin, 1);
            found = gather<WEIGHTS>(team, row, softmax, range, bin);
        }
        need -= found.above;
        if (found.tokens <= CANDIDATES) {
            last = pick<WEIGHTS>(team, softmax, bring(team, found), need);
            return 0;
        }
        range = inside(team, row, softmax, range, bin);
        histogram<WEIGHTS>(team, row, softmax, range);
    }
}

// ---- Draws ----

// Inverse CDF over the tokens up to rank `last` whose weight is at least `floor`, in the order of ids, at the random number `u`.
template <typename L>
__device__ __noinline__ int32_t invert(Team &team, const Row<L> &row, Softmax softmax, uint64_t last, uint64_t floor,
                                       uint64_t u) {
    const auto kept = [&](int32_t id, float x) -> uint64_t {
        const float log_weight = softmax.log_weight(x);
        const uint64_t weight = draw::weight(log_weight);
        const bool cut = last != NO_RANK && rank(x, id) > last;
        return cut || draw::vanishes(log_weight) || weight < floor ? 0 : weight;
    };
    uint64_t own = 0;
    each(row, kept, [&](int32_t, float, uint64_t weight) { own += weight; });
    const uint64_t sum[1] = {warp_sum(own)};
    uint64_t before[1], total[1];
    sum_warps(team, sum, before, total);
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t left = draw::fraction(u, total[0]);
    // This warp's part of the sum: from `begin` on.
    const uint64_t begin = before[0] + warp_sum(lane < warp ? shared.warp_sums[0][lane] : 0);
    if (left >= begin && left - begin < sum[0]) {
        left -= begin;
        int32_t drawn = -1;
        each_piece(row, [&](int32_t from, int32_t count) {
            // Consecutive ids a lane, at most 32; then a lane each of those of the lane in which the sum is reached.
            const int32_t ids = count / 32, first = row.first - row.lead + from;
            const float *held = held_piece(row.piece);
            uint64_t own = 0;
#pragma unroll 4
            for (int32_t i = lane * ids; i < (lane + 1) * ids; ++i) {
                own += kept(first + i, held[i]);
            }
            const uint64_t sum = warp_scan(own), all = __shfl_sync(ALL_LANES, sum, 31);
            if (drawn < 0 && left < all) {
                const int32_t reached = __ffs(__ballot_sync(ALL_LANES, sum > left)) - 1, i = reached * ids + lane;
                left -= __shfl_sync(ALL_LANES, sum - own, reached);
                const uint64_t upto = warp_scan(lane < ids ? kept(first + i, held[i]) : 0);
                drawn = first + reached * ids + __ffs(__ballot_sync(ALL_LANES, upto > left)) - 1;
            } else {
                left -= all;
            }
        });
        if (lane == 0) {
            publish(static_cast<uint32_t>(drawn), team.group);
        }
    }
    return static_cast<int32_t>(published(team));
}

// Top-k, top-p and min-p among `n` tokens in the leading block's `keys`, which hold all that top-k and top-p keep, and the draw.
// `top_k` 0 is none; `target` is the mass that top-p keeps where top-k is none, or 0 for what `p` is of the k best.
__device__ __noinline__ int32_t draw_gathered(Team &team, Softmax softmax, int n, uint32_t top_k, bool by_p, double p,
                                              uint64_t target, uint64_t floor, uint64_t u) {
    const int threads = threads_for(n), i = threadIdx.x;
    if (team.group.leads() && i < threads) {
        const uint64_t key = sort(i < n ? shared.keys[i] : NO_RANK, threads);
        const int best = top_k != 0 && top_k < static_cast<uint32_t>(n) ? static_cast<int>(top_k) : n;
        const uint64_t weight = i < best ? softmax.weight_of(key) : 0;
        uint64_t total;
        const uint64_t above = scan(weight, threads, total) - weight;
        if (by_p && target == 0) {
            target = draw::mass(p, total);
        }
        const bool kept = i < best && weight >= floor && (!by_p || above < target);
        // By id; 41 bits hold any weight.
        const uint64_t by_id = kept ? (key & ((1ull << ID_BITS) - 1)) << 41 | weight : NO_RANK;
        const uint64_t entry = sort(by_id, threads);
        const uint64_t own = entry == NO_RANK ? 0 : entry & ((1ull << 41) - 1);
        const uint64_t sum = scan(own, threads, total);
        const uint64_t left = draw::fraction(u, total);
        if (sum > left && sum - own <= left) {
            publish(entry >> 41, team.group);
        }
    }
    return static_cast<int32_t>(published(team));
}

// Reason why no token can be drawn, and its place.
struct Fault {
    Probe probe;
    Buffer buffer;
    int64_t column;
};

// The fault of a row whose largest key says that it has one. One of the model's own logits comes before one that edits made.
template <typename L>
__device__ __noinline__ Fault fault_of(Team &team, const Row<L> &row, uint64_t best) {
    Buffer buffer = BUFFER_TARGET_LOGITS;
    if (row.edits.any()) {
        const uint64_t own = largest(team, own_best_unedited(row));
        if (key_probe(own) != PROBE_NONE) {
            best = own;
        } else {
            buffer = BUFFER_EDITED_LOGITS;
        }
    }
    const Probe probe = key_probe(best);
    return {probe, buffer, probe_column(best, probe)};
}

// Log-weights below 0 that a histogram of weights divides. All tokens lighter than (total - target) / V together weigh less than
// what the nucleus leaves out, and the total is at least the weight of one; beyond 29 there is no weight.
__device__ __forceinline__ float nats_of_nucleus(double top_p, int32_t vocab) {
    const float least = __logf(static_cast<float>(1.0 - top_p) / static_cast<float>(vocab)) - 1.0f;
    return fminf(29.0f, -least);
}

// The token of one row; NO_TOKEN, and `fault`, where none can be drawn.
template <typename L>
__device__ int32_t draw_token(Team &team, const Row<L> &row, const SamplerRow &sampler, uint32_t position,
                              Fault &fault) {
    const uint64_t best = largest(team, own_best(row));
    if (key_probe(best) != PROBE_NONE) {
        fault = fault_of(team, row, best);
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
    uint64_t last = NO_RANK;  // all tokens up to it are kept
    if (top_k != 0) {
        const Ranks range = Ranks::of_log_weights(29.0f, NO_RANK);
        histogram<false>(team, row, softmax, range);
        // If fewer tokens than k have a weight, all of them are kept.
        const int n = narrow<false>(team, row, softmax, range, top_k, last);
        if (n > 0) {
            return draw_gathered(team, softmax, n, top_k, by_p, top_p, 0, sampler.min_weight, u);
        }
    }
    if (by_p) {
        const Ranks range = Ranks::of_log_weights(nats_of_nucleus(top_p, row.vocab), last);
        const uint64_t target = draw::mass(top_p, histogram<true>(team, row, softmax, range));
        const int n = narrow<true>(team, row, softmax, range, target, last);
        if (n > 0) {
            return draw_gathered(team, softmax, n, 0, true, top_p, target, sampler.min_weight, u);
        }
    }
    return invert(team, row, softmax, last, sampler.min_weight, u);
}

}  // namespace specrs
