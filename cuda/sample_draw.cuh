// The draw of one row by a group of blocks, as the host's (src/host/sample), token for token: temperature, top-k, top-p, min-p,
// then the inverse CDF in the order of ids at a random number that depends on seed and position alone. Weights are integers
// (draw.cuh), so sums are exact in any order and nothing depends on the group; temperature 0 is the largest logit.
//
// Ranks order the tokens from the best on, by logit and then by id. Top-k and top-p each keep the tokens up to some rank:
//
//   k best     the k-th of the largest logits of 256 parts of the row bounds the k-th of all from below: few tokens are at least
//              that large, and all blocks draw from them (draw_best)
//   histogram  how many tokens each of 256 bins of log-weight has, or about what they weigh: says in which bin the rank is
//   gather     the exact weight before and in that bin, and its tokens
//   then       few in that bin: their ranks are compared, and the rank is known (pick)
//              else the bin is divided into bins of ranks, and so on
//   invert     sums of weights in the order of ids, by which block, warp and lane of the random number are found; gather has them
//              already (draw_kept)
#pragma once

#include "sample_ranks.cuh"
#include "walk.cuh"

namespace specrs {

// The token of this warp at which the sum of `kept(id, x)`, in the order of ids, exceeds `left`. For a whole warp, one of the
// group, which then tells all.
template <typename L, typename Kept>
__device__ __forceinline__ void find(const Team &team, const Row<L> &row, uint64_t left, Kept kept) {
    const int32_t lane = threadIdx.x % 32;
    int32_t drawn = -1;
    each_piece(row, [&](int32_t from, int32_t count) {
        const float4 *held = reinterpret_cast<const float4 *>(held_piece(row.piece)) + lane;
        for (int32_t base = 0; base < count && drawn < 0; base += TURN) {
            const float4 four = held[base / 4];
            const int32_t id = row.first - row.lead + from + base + 4 * lane;
            const uint64_t weights[4] = {kept(id, four.x), kept(id + 1, four.y), kept(id + 2, four.z), kept(id + 3, four.w)};
            const uint64_t own = weights[0] + weights[1] + weights[2] + weights[3];
            const uint64_t all = warp_sum(own);
            if (left >= all) {
                left -= all;
                continue;
            }
            uint64_t upto = warp_scan(own) - own;
            int32_t reached = -1;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                reached = left >= upto && left - upto < weights[k] ? id + k : reached;
                upto += weights[k];
            }
            drawn = __reduce_max_sync(ALL_LANES, reached);
        }
    });
    publish(static_cast<uint32_t>(drawn), team.group);
}

// What a token weighs that is kept up to rank `last` if its weight is at least `floor`.
struct Kept {
    Softmax softmax;
    uint64_t last, floor;

    __device__ __forceinline__ bool all() const { return last == NO_RANK && floor == 0; }
    __device__ __forceinline__ uint64_t operator()(int32_t id, float x) const {
        const uint64_t weight = draw::weight(softmax.log_weight(x));
        const bool cut = rank(x, id) > last, light = weight < floor;
        return cut | light ? 0 : weight;
    }
};

// Inverse CDF over the kept tokens, in the order of ids, at the random number `u`.
template <typename L>
__device__ __forceinline__ int32_t invert(Team &team, const Row<L> &row, const Kept kept, uint64_t u) {
    uint64_t own = 0, begin;
    const auto add = [&](int32_t, float, uint64_t weight) { own += weight; };
    if (kept.all()) {
        each(row, [&](int32_t, float x) { return draw::weight(kept.softmax.log_weight(x)); }, add);
    } else {
        each(row, kept, add);
    }
    own = warp_sum(own);
    const uint64_t left = draw::fraction(u, sum_warps(team, own, begin, [] {}));
    if (left >= begin && left - begin < own) {
        find(team, row, left - begin, kept);
    }
    return static_cast<int32_t>(published(team));
}

// The same where `found` is what `narrow` gathered by weight to find the last rank, and no token up to there is below the floor.
template <typename L>
__device__ __forceinline__ int32_t draw_kept(Team &team, const Row<L> &row, const Kept kept, const Gathered found,
                                             uint64_t u) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = team.group.rank;
    // The sum of each block, in a warp.
    for (uint32_t block = warp; block < team.group.size; block += WARPS) {
        const uint32_t begin = found.begin_of(block), end = begin + found.tokens_of(block);
        uint64_t own = lane == 0 ? found.above_of(block) : 0;
        for (uint32_t i = begin + lane; i < end; i += 32) {
            const Entry entry = shared.by_rank[i];
            own += entry.key <= kept.last ? entry.weight : 0;
        }
        own = warp_sum(own);
        if (lane == 0) {
            shared.kept[block] = own;
        }
    }
    __syncthreads();
    const uint64_t block = lane < team.group.size ? shared.kept[lane] : 0, total = warp_sum(block);
    const uint64_t begin = warp_sum(lane < rank ? block : 0), left = draw::fraction(u, total);
    if (left >= begin && left - begin < shared.kept[rank]) {
        // In this block; then the sum of a warp likewise.
        const uint32_t first = found.begin_of(rank), end = first + found.tokens_of(rank);
        uint64_t own = lane == 0 ? found.own_above : 0;
        for (uint32_t i = first + lane; i < end; i += 32) {
            const Entry entry = shared.by_rank[i];
            const int32_t at = static_cast<int32_t>(entry.key & (MAX_VOCAB - 1)) + row.lead - row.first;
            own += in_bounds(at, row.size) && entry.key <= kept.last ? entry.weight : 0;
        }
        own = warp_sum(own);
        // The next post is one of the largest logits, which leaves this place alone.
        uint64_t *warp_sums = shared.warp_sums[team.turn][MOST_SUMS - 1];
        if (lane == 0) {
            warp_sums[warp] = own;
        }
        __syncthreads();
        const uint64_t before = begin + warp_sum(lane < warp ? warp_sums[lane % WARPS] : 0);
        if (left >= before && left - before < own) {
            find(team, row, left - before, kept);
        }
    }
    return static_cast<int32_t>(published(team));
}

// Top-k, top-p and min-p among the gathered tokens, which hold the `top_k` best, and the draw. All blocks draw alike.
__device__ __forceinline__ int32_t draw_best(const Team &team, Softmax softmax, const Gathered gathered, uint32_t top_k,
                                             bool by_p, double p, uint64_t floor, uint64_t u) {
    // A count in the upper bits, since weights are below 2^41.
    constexpr int COUNT_AT = 54;
    constexpr uint64_t WEIGHT = (1ull << COUNT_AT) - 1;
    static_assert(CANDIDATES < 1 << (64 - COUNT_AT) && CANDIDATES <= 1 << (COUNT_AT - 41), "sums fit their bits");
    const int n = static_cast<int>(gathered.tokens), best = min(n, static_cast<int>(top_k));
    unpack(team, gathered, [&](uint64_t key) { return 1ull << COUNT_AT | softmax.weight_of(key); });
    int place;
    const uint64_t upto = sum_upto(shared.by_rank, n, place);
    const Entry own = place < n ? shared.by_rank[place] : Entry{NO_RANK, 0};
    uint64_t target = ~0ull;
    if (by_p) {
        if (place < n && upto >> COUNT_AT == best) {
            shared.found = upto & WEIGHT;
        }
        __syncthreads();
        target = draw::mass(p, shared.found);
    }
    const uint64_t weight = own.weight & WEIGHT;
    const bool kept = upto >> COUNT_AT <= best && weight >= floor && (upto & WEIGHT) - weight < target;
    if (place < n) {
        shared.by_id[place] = {own.key & (MAX_VOCAB - 1), kept ? weight : 0};
    }
    __syncthreads();
    const uint64_t by_id = sum_upto(shared.by_id, n, place);
    uint64_t total = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) {
        total += shared.by_id[i].weight;
    }
    const uint64_t left = draw::fraction(u, warp_sum(total));
    if (place < n && by_id > left && by_id - (kept ? weight : 0) <= left) {
        shared.found = own.key & (MAX_VOCAB - 1);
    }
    __syncthreads();
    return static_cast<int32_t>(shared.found);
}

// A logit that at least `k` tokens reach, and about as few as can be told by the largest ones of TOPS parts of the row; -inf if
// those are not enough. `top` is the upper half of the key of this thread's largest logit.
__device__ __forceinline__ float bound_of_best(Team &team, uint32_t top, uint32_t k) {
    const uint32_t lane = threadIdx.x % 32, own_parts = TOPS / team.group.size, lanes = THREADS / own_parts;
    for (uint32_t d = 1; d < lanes; d *= 2) {
        top = max(top, __shfl_xor_sync(ALL_LANES, top, d));
    }
    uint32_t *own = shared.tops + team.group.rank * own_parts;
    if (lane % lanes == 0) {
        own[threadIdx.x / lanes] = top;
    }
    let_send();
    __syncthreads();
    share(team, own, own_parts * sizeof *own, BOX_TOPS);
    team.receive_shares(BOX_TOPS, own_parts * sizeof *own);
    constexpr int OWN = TOPS / 32;
    uint32_t tops[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        tops[i] = shared.tops[i * 32 + lane];
    }
    // Of parts that have logits, if those are enough.
    uint32_t low = ~0u, high = 0, reach = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const bool has = tops[i] > KEY_NEGATIVE_INFINITY;
        low = has ? min(low, tops[i]) : low;
        high = max(high, tops[i]);
        reach += has;
    }
    low = __reduce_min_sync(ALL_LANES, low);
    high = __reduce_max_sync(ALL_LANES, high) + 1;
    reach = __reduce_add_sync(ALL_LANES, reach);
    if (reach < k) {
        return __uint_as_float(0xff800000u);
    }
    while (reach > k + k / 8 && high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        uint32_t reached = 0;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            reached += tops[i] >= middle;
        }
        reached = __reduce_add_sync(ALL_LANES, reached);
        if (reached >= k) {
            low = middle;
            reach = reached;
        } else {
            high = middle;
        }
    }
    return key_logit(static_cast<uint64_t>(low) << 32);
}

// Reason why no token can be drawn, and its place.
struct Fault {
    Probe probe;
    Buffer buffer;
    int64_t column;
};

// The fault of a row whose largest key says that it has one. One of the model's own logits comes before one that edits made.
template <typename L>
__device__ __noinline__ Fault fault_of(Team team, const Row<L> row, uint64_t best) {
    Buffer buffer = BUFFER_TARGET_LOGITS;
    best = largest(team, warp_largest(own_best(row)));
    if (row.edits.any()) {
        const uint64_t own = largest(team, warp_largest(own_best_unedited(row)));
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
    const float inv_t = __uint_as_float(sampler.inv_t);
    const uint64_t own = inv_t == 0.0f ? own_best(row) : own_most(row);
    const uint64_t best = largest(team, warp_largest(own));
    if (key_probe(best) != PROBE_NONE) {
        fault = fault_of(team, row, best);
        return NO_TOKEN;
    }
    if (inv_t == 0.0f) {
        return static_cast<int32_t>(key_index(best));
    }
    const Softmax softmax{key_logit(best), inv_t};
    const uint64_t u = draw::uniform53(sampler.seed, position, 0);
    const uint32_t top_k = sampler.top_k < static_cast<uint32_t>(row.vocab) ? sampler.top_k : 0;
    const double top_p = draw::double_of(sampler.top_p);
    const bool by_p = top_p < 1.0;
    Kept kept{softmax, NO_RANK, sampler.min_weight};
    if (top_k != 0) {
        if (top_k <= TOPS / 2) {
            const float least = bound_of_best(team, static_cast<uint32_t>(own >> 32), top_k);
            const Gathered found = gather_best(team, row, softmax, least);
            if (found.fits) {
                return draw_best(team, softmax, found, top_k, by_p, top_p, sampler.min_weight, u);
            }
        }
        const Ranks range = Ranks::of_log_weights(29.0f, NO_RANK);
        narrow<false>(team, row, softmax, range, top_k, 1.0, kept.last);
    }
    if (by_p) {
        const Ranks range = Ranks::of_log_weights(nats_of_nucleus(top_p, row.vocab), kept.last);
        const Gathered found = narrow<true>(team, row, softmax, range, 0, top_p, kept.last);
        if (softmax.weight_of(kept.last) >= kept.floor) {
            return draw_kept(team, row, kept, found, u);
        }
    }
    return invert(team, row, kept, u);
}

}  // namespace specrs
