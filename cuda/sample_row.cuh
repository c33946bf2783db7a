// A row of logits as the blocks of a group hold it in shared memory, with bias and penalties: read from memory once, where the
// group is large enough, else piece by piece in each pass.
//
// Each warp of the group has a stretch of the row, the warps in the order of ids, and room for a piece of it. Nothing but
// the warp itself touches its piece, so a pass over the row needs no barrier.
//
// Edits (bias, penalties) come as a list a request, sorted by token, and the tokens of the walk: each warp finds its part of the
// list once a request, and changes the logits of its piece by it.
#pragma once

#include "draw.cuh"
#include "group.cuh"
#include "logits.cuh"

namespace specrs {

// What all warps do alike costs time with each of them, so a block has no more than reading needs.
constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

// The pieces of the warps of this block, SampleParams::piece logits each.
extern __shared__ float4 held_pieces[];

__device__ __forceinline__ float *held_piece(int32_t piece) {
    return reinterpret_cast<float *>(held_pieces) + threadIdx.x / 32 * piece;
}

// Tokens of the walk so far. The longest is MAX_DRAFT_TOKENS of the host.
constexpr int MOST_PATH = 1024;
__shared__ int32_t walk_path[MOST_PATH];

// What edits the logits of a request.
struct Edits {
    // The request's list, sorted by token: outputs is -1 for a token that has a bias and was never seen.
    const int32_t *tokens;
    const uint32_t *biases;
    const int32_t *outputs;
    int32_t listed;
    // This warp's part of the list, and perhaps a few tokens more.
    int32_t begin, end;
    // Tokens of the walk so far.
    int32_t depth;
    bool penalises;
    float repetition, presence, frequency;

    __device__ __forceinline__ bool any() const { return listed > 0 || (penalises && depth > 0); }
};

// Times that `token` is among the first `end` of the path.
__device__ __forceinline__ uint32_t times_on_path(int32_t token, int32_t end) {
    uint32_t times = 0;
    for (int32_t i = 0; i < end; ++i) {
        times += walk_path[i] == token;
    }
    return times;
}

// Edit the `count` logits that this warp holds, those of the ids from `first` on. Out of line: few rows need it.
static __device__ __noinline__ void edit(const Edits edits, int32_t piece, int32_t first, int32_t count) {
    const int32_t lane = threadIdx.x % 32;
    float *held = held_piece(piece);
    for (int32_t i = edits.begin + lane; i < edits.end; i += 32) {
        const int32_t token = __ldg(edits.tokens + i), at = token - first;
        if (!in_bounds(at, count)) {
            continue;
        }
        float x = draw::add32(held[at], __uint_as_float(__ldg(edits.biases + i)));
        if (edits.penalises) {
            const int32_t outputs = __ldg(edits.outputs + i);
            const uint32_t on_path = times_on_path(token, edits.depth);
            if (outputs >= 0 || on_path > 0) {
                const uint32_t all = static_cast<uint32_t>(max(outputs, 0)) + on_path;
                x = draw::penalised(x, all, edits.repetition, edits.presence, edits.frequency);
            }
        }
        held[at] = x;
    }
    // Tokens of the path that are not in the list, each where it comes first.
    for (int32_t i = lane; edits.penalises && i < edits.depth; i += 32) {
        const int32_t token = walk_path[i], at = token - first;
        if (!in_bounds(at, count) || times_on_path(token, i) > 0) {
            continue;
        }
        int32_t low = edits.begin, high = edits.end;
        while (low < high) {
            const int32_t middle = (low + high) / 2;
            if (__ldg(edits.tokens + middle) < token) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        if (low == edits.end || __ldg(edits.tokens + low) != token) {
            const uint32_t all = times_on_path(token, edits.depth);
            held[at] = draw::penalised(held[at], all, edits.repetition, edits.presence, edits.frequency);
        }
    }
    __syncwarp();
}

// The first of `n` ascending tokens that is at least `id`; n if none is. For a whole warp.
static __device__ __noinline__ int32_t first_from(const int32_t *tokens, int32_t n, int32_t id) {
    int32_t low = 0, high = n;
    while (low < high) {
        const int32_t stride = (high - low + 31) / 32;
        const int32_t at = low + static_cast<int32_t>(threadIdx.x % 32) * stride;
        const int32_t less = __popc(__ballot_sync(ALL_LANES, at < high && __ldg(tokens + at) < id));
        if (less == 0) {
            break;
        }
        high = min(high, low + less * stride);
        low += (less - 1) * stride + 1;
    }
    return low;
}

// Logits of a turn of a warp: four a lane, and a stretch is whole turns.
constexpr int32_t TURN = 128;

// Logits of a warp's stretch.
__device__ __forceinline__ int32_t stretch_of(int32_t vocab, int32_t wide, uint32_t blocks) {
    const int32_t warps = static_cast<int32_t>(blocks) * WARPS;
    return ((vocab + wide - 1 + warps - 1) / warps + TURN - 1) / TURN * TURN;
}

// A row of logits, as one warp sees it. Places count the elements from the last 16-byte boundary up to the row's first on;
// those outside the row read as -inf.
template <typename L>
struct Row {
    const typename L::Storage *logits;
    int32_t vocab;
    // Elements before the row's first one.
    int32_t lead;
    // The stretch: its first place and size; multiples of TURN.
    int32_t first, size;
    // Most logits that the warp holds; a multiple of TURN.
    int32_t piece;
    Edits edits;

    __device__ __forceinline__ bool whole() const { return size <= piece; }
};

// The vector of logits from `id` on, a part of which may lie outside the row: that is -inf.
template <typename L>
__device__ __noinline__ uint4 load_edge(const typename L::Storage *logits, int32_t id, int32_t vocab) {
    LogitVector<L> v;
#pragma unroll
    for (int j = 0; j < L::WIDE; ++j) {
        v.bits[j] = in_bounds(id + j, vocab) ? logits[id + j] : L::LEAST;
    }
    return v.vector;
}

// Copy 16 bytes into shared memory, which are there once `end_copies` has been called.
__device__ __forceinline__ void begin_copy(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Load the logits of `count` places of the stretch from `from` on. For a whole warp.
template <typename L>
__device__ __forceinline__ void load(const Row<L> &row, int32_t from, int32_t count) {
    constexpr int GROUP = 4;  // vectors in flight
    float *held = held_piece(row.piece);
    const int32_t first = row.first + from - row.lead;
    const auto inside = [&](int32_t id) { return id >= 0 && id + L::WIDE <= row.vocab; };
    __syncwarp();  // all lanes have read what was held
    for (int32_t base = static_cast<int32_t>(threadIdx.x % 32) * L::WIDE; base < count; base += 32 * L::WIDE * GROUP) {
        LogitVector<L> v[GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const int32_t i = base + g * 32 * L::WIDE, id = first + i;
            if (i >= count) {
                continue;
            }
            if (!inside(id)) {
                v[g].vector = load_edge<L>(row.logits, id, row.vocab);
            } else if (sizeof(typename L::Storage) == sizeof(float)) {
                begin_copy(held + i, row.logits + id);
            } else {
                v[g].vector = __ldg(reinterpret_cast<const uint4 *>(row.logits + id));
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const int32_t i = base + g * 32 * L::WIDE;
            if (i < count && !(sizeof(typename L::Storage) == sizeof(float) && inside(first + i))) {
#pragma unroll
                for (int j = 0; j < L::WIDE; j += 4) {
                    *reinterpret_cast<float4 *>(held + i + j) =
                        make_float4(L::load(v[g].bits[j]), L::load(v[g].bits[j + 1]), L::load(v[g].bits[j + 2]),
                                    L::load(v[g].bits[j + 3]));
                }
            }
        }
    }
    end_copies();
    __syncwarp();
    if (row.edits.any()) {
        edit(row.edits, row.piece, first, count);
    }
}

// The same out of line, for rows that are not held whole.
template <typename L>
__device__ __noinline__ void load_piece(const Row<L> row, int32_t from, int32_t count) {
    load(row, from, count);
}

// Call `f(from, count)` for each piece of the stretch, when it is held. For a whole warp.
template <typename L, typename F>
__device__ __forceinline__ void each_piece(const Row<L> &row, F f) {
    for (int32_t from = 0; from < row.size; from += row.piece) {
        const int32_t count = min(row.piece, row.size - from);
        if (!row.whole()) {
            load_piece(row, from, count);
        }
        f(from, count);
    }
}

// Call `use(id, x, made(id, x))` for each logit of the stretch, edited; ids ascend in a lane, and all lanes call together. Places
// outside the row come too, with -inf, so what has no weight must not count. `made` only computes: four calls of it overlap.
template <typename L, typename Made, typename Use>
__device__ __forceinline__ void each(const Row<L> &row, Made made, Use use) {
    const int32_t lane = threadIdx.x % 32, first = row.first - row.lead + 4 * lane;
    const float4 *held = reinterpret_cast<const float4 *>(held_piece(row.piece)) + lane;
    each_piece(row, [&](int32_t from, int32_t count) {
#pragma unroll 1
        for (int32_t base = 0; base < count; base += TURN) {
            const float4 four = held[base / 4];
            const float x[4] = {four.x, four.y, four.z, four.w};
            decltype(made(0, 0.0f)) of[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                of[k] = made(first + from + base + k, x[k]);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                use(first + from + base + k, x[k], of[k]);
            }
        }
    });
}

// The same for those logits alone that are `worth` it: each lane goes from one to its next, and calls with -inf once it has no more.
// Where they are few a warp takes as many calls as its lane with the most of them has.
template <typename L, typename Worth, typename Made, typename Use>
__device__ __forceinline__ void each_of(const Row<L> &row, Worth worth, Made made, Use use) {
    constexpr int AT_ONCE = 2;    // calls of `made` that overlap
    constexpr int32_t TURNS = 8;  // a lane's logits of which are the bits of a word
    const int32_t lane = threadIdx.x % 32, first = row.first - row.lead + 4 * lane;
    const float *held = held_piece(row.piece) + 4 * lane;
    each_piece(row, [&](int32_t from, int32_t count) {
#pragma unroll 1
        for (int32_t base = 0; base < count; base += TURNS * TURN) {
            uint32_t left = 0;
#pragma unroll
            for (int32_t turn = 0; turn < TURNS; ++turn) {
                if (base + turn * TURN < count) {
                    const float4 x = *reinterpret_cast<const float4 *>(held + base + turn * TURN);
                    const uint32_t four = worth(x.x) | worth(x.y) << 1 | worth(x.z) << 2 | worth(x.w) << 3;
                    left |= four << 4 * turn;
                }
            }
            while (__any_sync(ALL_LANES, left != 0)) {
                int32_t id[AT_ONCE];
                float x[AT_ONCE];
                decltype(made(0, 0.0f)) of[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    const int32_t bit = max(__ffs(left) - 1, 0), at = base + bit / 4 * TURN + bit % 4;
                    id[k] = first + from + at;
                    x[k] = left != 0 ? held[at] : __uint_as_float(0xff800000u);
                    of[k] = made(id[k], x[k]);
                    left &= left - 1;
                }
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    use(id[k], x[k], of[k]);
                }
            }
        }
    });
}

// Go on to the row at `logits`.
template <typename L>
__device__ __forceinline__ void begin_row(Row<L> &row, const typename L::Storage *logits) {
    row.logits = logits;
    row.lead = static_cast<int32_t>(reinterpret_cast<uint64_t>(logits) % 16 / sizeof(*logits));
    if (row.whole()) {
        load(row, 0, row.size);
    }
}

// The largest key of this thread's logits, edited.
template <typename L>
__device__ __forceinline__ uint64_t own_best(const Row<L> &row) {
    float top = __uint_as_float(0xff800000u);
    int32_t at = 0;
    const auto itself = [](int32_t, float x) { return x; };
    each(row, itself, [&](int32_t id, float x, float) {
        const bool better = !(x <= top) && top == top;  // larger, or the first NaN
        top = better ? x : top;
        at = better ? id : at;
    });
    return rank_key(top, static_cast<uint32_t>(at));
}

// A key of this thread's largest logit, edited, that does not say where it is.
template <typename L>
__device__ __forceinline__ uint64_t own_most(const Row<L> &row) {
    float top = __uint_as_float(0xff800000u);
    const auto itself = [](int32_t, float x) { return x; };
    each(row, itself, [&](int32_t, float x, float) { top = max_nan(top, x); });
    return rank_key(top, 0);
}

// The same as `own_best` of the logits before edits.
template <typename L>
__device__ __noinline__ uint64_t own_best_unedited(const Row<L> row) {
    uint64_t best = 0;
    for (int32_t i = threadIdx.x % 32; i < row.size; i += 32) {
        const int32_t id = row.first - row.lead + i;
        if (in_bounds(id, row.vocab)) {
            best = larger(best, rank_key(L::load(row.logits[id]), static_cast<uint32_t>(id)));
        }
    }
    return best;
}

}  // namespace specrs
