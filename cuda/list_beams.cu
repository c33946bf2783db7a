// Candidates of a batch from the lists of a block drafter's levels, where a token's score depends on the token before it
// by DSpark's Markov head or DFlash2's selector: `draft::ListBeams` of the host. `tree_build` makes trees of them.
//
// Each level looks at the `topk` best prefixes, the beams. A warp has a beam, and a lane one of the level's listed
// tokens: it changes the token's log-probability by the product of two rows of low rank, those of the token before and
// of the token itself, whose elements may have factors that follow from the level's row. Tokens that are not listed
// count in the sum of the distribution as they are, or not at all where none but the listed have a chance. The best `topk`
// tokens behind a beam are candidates, and the best candidates are the beams of the next level. One block a request.
#include "rows.cuh"
#include "trees.cuh"

namespace specrs {

constexpr int MOST_BEAMS = 32;  // `MAX_DEVICE_TOPK` of src/device/kernels/draft_select.rs
constexpr int BEAM_WARPS = 8;
constexpr uint32_t ALL_LANES = 0xffffffffu;

// Prefixes of the present level.
struct Prefixes {
    int32_t candidates[MOST_BEAMS];  // -1 of the root
    int32_t tokens[MOST_BEAMS];      // in the target's vocabulary
    float scores[MOST_BEAMS];
};

__device__ __forceinline__ double lane_sum(double x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, step);
    }
    return x;
}

__device__ __forceinline__ double lane_max(double x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x = fmax(x, __shfl_xor_sync(ALL_LANES, x, step));
    }
    return x;
}

// The product of a row of each table, with the factors of row `level` of all levels if there are any.
template <typename Half>
__device__ __forceinline__ float pair_product(const ListBeamsParams &p, int64_t level, int32_t before, int32_t id) {
    const uint4 *a = reinterpret_cast<const uint4 *>(p.before + 2 * static_cast<uint64_t>(before) * p.rank);
    const uint4 *b = reinterpret_cast<const uint4 *>(p.behind + 2 * static_cast<uint64_t>(id) * p.rank);
    const uint4 *w = reinterpret_cast<const uint4 *>(p.weights + 2 * static_cast<uint64_t>(level) * p.rank);
    float sum = 0.0f;
#pragma unroll 4
    for (int32_t i = 0; i < p.rank / WIDTH; ++i) {
        Vector8 left, right, weight;
        left.vector = a[i];
        right.vector = b[i];
        if (p.weights != 0) {
            weight.vector = w[i];
        }
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            const float x = Half::load(left.bits[k]);
            sum = fmaf(p.weights != 0 ? x * Half::load(weight.bits[k]) : x, Half::load(right.bits[k]), sum);
        }
    }
    return sum;
}

// The candidates behind a beam, `topk` places from `first` on; places that nothing takes have a score of -inf. Returns
// whether all biases are finite. A warp calls it.
template <typename Half>
__device__ __forceinline__ bool behind_beam(const ListBeamsParams &p, int32_t request, int32_t level,
                                            const Prefixes &beams, int32_t beam, int32_t first, float *scores,
                                            int32_t *tokens) {
    const int32_t lane = threadIdx.x % 32;
    const float none = __uint_as_float(0xff800000u);
    const int64_t row = static_cast<int64_t>(request) * p.levels + level;
    const bool here = lane < p.width;
    const int32_t id = here ? reinterpret_cast<const int32_t *>(p.ids)[row * p.width + lane] : 0;
    const int32_t before = beams.tokens[beam];
    const bool begins = in_bounds(before, p.vocab);
    if (lane == 0 && !begins) {
        record_fault(p.report, KERNEL_LIST_BEAMS, BUFFER_TOKENS_BEFORE, request, level, before, p.vocab);
    }
    if (here && !in_bounds(id, p.draft_vocab)) {
        record_fault(p.report, KERNEL_LIST_BEAMS, BUFFER_TARGET_IDS, request, level, id, p.draft_vocab);
    }
    const bool reads = here && begins && in_bounds(id, p.draft_vocab);
    const float listed = reads ? score_at(reinterpret_cast<const float *>(p.scores), row * p.width + lane) : none;
    const float heat = reinterpret_cast<const float *>(p.heats)[row];
    const float bias = reads ? pair_product<Half>(p, row, before, id) * heat : 0.0f;
    if (__ballot_sync(ALL_LANES, !isfinite(bias)) != 0) {
        return false;
    }
    // As on the host, in double precision.
    const double value = static_cast<double>(listed) + static_cast<double>(bias);
    const double left = p.closed != 0 ? 0.0 : fmax(1.0 - lane_sum(exp(static_cast<double>(listed))), 0.0);
    const double most = lane_max(fmax(value, 0.0));
    const double sum = lane_sum(exp(value - most)) + left * exp(-most);
    const double all = most + log(sum);
    int32_t place = 0;
#pragma unroll
    for (int other = 0; other < 32; ++other) {
        const double theirs = __shfl_sync(ALL_LANES, value, other);
        place += theirs > value || (theirs == value && other < lane);
    }
    if (place < p.drafts.topk) {
        const bool counts = value > static_cast<double>(none);
        int32_t token = counts ? id : 0;
        if (counts && p.to_target != 0) {
            token = reinterpret_cast<const int32_t *>(p.to_target)[id];
        }
        scores[first + place] = counts ? beams.scores[beam] + fminf(static_cast<float>(value - all), 0.0f) : none;
        tokens[first + place] = token;
    }
    return true;
}

template <typename Half>
__device__ __forceinline__ void list_beams(const ListBeamsParams &p) {
    __shared__ Prefixes beams;
    __shared__ float scores[MOST_BEAMS * MOST_BEAMS];
    __shared__ int32_t tokens[MOST_BEAMS * MOST_BEAMS];
    const int32_t request = blockIdx.x;
    const int32_t x = threadIdx.x;
    const int32_t k = p.drafts.topk;
    const float none = __uint_as_float(0xff800000u);
    const int32_t live = live_rows(p.live, p.requests, p.report, KERNEL_LIST_BEAMS, x == 0 && request == 0);
    const bool lives = request < live;
    const int32_t levels =
        lives ? min(max(reinterpret_cast<const int32_t *>(p.max_depths)[request], 0), p.levels) : 0;
    bool sound = true;
    for (int32_t level = 0; level < levels; ++level) {
        const int64_t row = static_cast<int64_t>(request) * p.levels + level;
        sound = sound && reinterpret_cast<const int32_t *>(p.sound)[row] != 0;
    }
    float *all_scores = reinterpret_cast<float *>(p.drafts.scores) + static_cast<int64_t>(request) * p.drafts.candidates;
    int32_t *all_tokens =
        reinterpret_cast<int32_t *>(p.drafts.tokens) + static_cast<int64_t>(request) * p.drafts.candidates;
    int32_t *parents =
        reinterpret_cast<int32_t *>(p.drafts.parents) + static_cast<int64_t>(request) * p.drafts.candidates;
    if (x == 0) {
        beams.candidates[0] = -1;
        beams.tokens[0] = lives ? reinterpret_cast<const int32_t *>(p.roots)[request] : 0;
        beams.scores[0] = 0.0f;
    }
    int32_t count = 1;  // beams
    for (int32_t level = 0; level < p.levels; ++level) {
        // Every place of a level is written, whether anything takes it or not.
        const int32_t begin = level == 0 ? 0 : k + (level - 1) * k * k;
        const int32_t places = level == 0 ? k : k * k;
        for (int32_t i = x; i < places; i += blockDim.x) {
            scores[i] = none;
            tokens[i] = 0;
        }
        __syncthreads();
        bool finite = true;
        if (sound && level < levels) {
            for (int32_t beam = x / 32; beam < count; beam += BEAM_WARPS) {
                finite = behind_beam<Half>(p, request, level, beams, beam, beam * k, scores, tokens) && finite;
            }
        }
        sound = __syncthreads_and(sound && finite);
        for (int32_t i = x; i < places; i += blockDim.x) {
            all_scores[begin + i] = scores[i];
            all_tokens[begin + i] = tokens[i];
            parents[begin + i] = i / k < count ? beams.candidates[i / k] : -1;
        }
        __syncthreads();
        // The next beams: the best candidates, of equal ones the first.
        int32_t found = 0;
        for (int32_t i = x; i < places; i += blockDim.x) {
            int32_t rank = 0;
            for (int32_t other = 0; other < places; ++other) {
                rank += scores[other] > scores[i] || (scores[other] == scores[i] && other < i);
            }
            if (scores[i] > none && rank < k) {
                beams.candidates[rank] = begin + i;
                beams.tokens[rank] = tokens[i];
                beams.scores[rank] = scores[i];
                found += 1;
            }
        }
        count = 0;
        for (int32_t left = __syncthreads_count(found > 0); left > 0; left = __syncthreads_count(found > 0)) {
            count += left;
            found -= 1;
        }
    }
    if (x == 0) {
        reinterpret_cast<int32_t *>(p.drafts.sound)[request] = sound ? p.drafts.steps : 0;
    }
}

}  // namespace specrs

extern "C" __global__ void __launch_bounds__(256) list_beams_bf16(const __grid_constant__ specrs::ListBeamsParams p) {
    specrs::list_beams<specrs::Bf16>(p);
}

extern "C" __global__ void __launch_bounds__(256) list_beams_f16(const __grid_constant__ specrs::ListBeamsParams p) {
    specrs::list_beams<specrs::F16>(p);
}
