// Verification by sampling: draw the target's token at each node that a request's walk reaches, and follow the child that
// carries it.
//
//   node = root; repeat:
//       token = draw(logits of node, sampling parameters, tokens so far, position)
//       node = the first child of node that carries token, or stop
//
// A group of blocks walks a request's tree (group.cuh), 16 in a small batch and 8, 4 or 2 in others: sample_row.cuh reads the rows,
// sample_team.cuh sums over the group, sample_ranks.cuh finds what top-k and top-p keep, sample_draw.cuh draws.
//
// A row that cannot be sampled (NaN, +inf, nothing finite) ends its request's walk and is recorded; indices outside their
// arrays, and samplers that no host makes, are recorded and leave the request out. Other requests go on. Every slot of every
// output is written.
//
// Cost: bytes of the rows on the walks, once from memory; of rows that do not fit their group's shared memory, once more from L2
// in each pass.
#include "sample_draw.cuh"

namespace specrs {

// A request's list of edits. None lies outside its arrays: that is recorded, and `sound` tells.
__device__ __forceinline__ Edits edits_of(const SampleParams &p, int32_t request, bool writer, bool &sound) {
    const int32_t begin = reinterpret_cast<const int32_t *>(p.edit_begins)[request];
    const int32_t listed = reinterpret_cast<const int32_t *>(p.edit_counts)[request];
    sound = begin >= 0 && listed >= 0 && begin <= p.edits - listed;
    if (!sound && writer) {
        const int64_t index = begin < 0 ? begin : listed < 0 ? listed : static_cast<int64_t>(begin) + listed - 1;
        record_fault(p.verify.report, KERNEL_SAMPLE_VERIFY, BUFFER_EDITS, request, -1, index, p.edits);
    }
    Edits edits{};
    edits.tokens = reinterpret_cast<const int32_t *>(p.edit_tokens) + begin;
    edits.biases = reinterpret_cast<const uint32_t *>(p.edit_biases) + begin;
    edits.outputs = reinterpret_cast<const int32_t *>(p.edit_outputs) + begin;
    edits.listed = sound ? listed : 0;
    return edits;
}

// Whether this thread found an id in a request's list that is no token, which is recorded.
__device__ __noinline__ bool has_bad_token(const SampleParams &p, const Group group, const int32_t *tokens, int32_t listed,
                                           int32_t request) {
    bool bad = false;
    for (int32_t i = group.rank * THREADS + threadIdx.x; i < listed; i += group.size * THREADS) {
        const int32_t token = __ldg(tokens + i);
        if (!in_bounds(token, p.verify.vocab)) {
            bad = true;
            record_fault(p.verify.report, KERNEL_SAMPLE_VERIFY, BUFFER_EDIT_TOKENS, request, i, token, p.verify.vocab);
        }
    }
    return bad;
}

// Whether a request's sampler is in the bounds of those that the host makes, by which the best token has a weight and sums of
// weights fit their bits; recorded if not. Bits of floats that are not negative ascend as the floats do.
__device__ __forceinline__ bool sound_sampler(const SampleParams &p, const SamplerRow &sampler, int32_t request, bool writer) {
    const uint64_t infinity = 0x7f800000u, one = 0x3ff0000000000000ull;
    const uint64_t values[3] = {sampler.inv_t, sampler.min_weight, sampler.top_p};
    const uint64_t bounds[3] = {infinity, draw::ONE + 1, one + 1};
    bool sound = true;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        if (values[i] >= bounds[i]) {
            sound = false;
            if (writer) {
                record_fault(p.verify.report, KERNEL_SAMPLE_VERIFY, BUFFER_SAMPLERS, request, i,
                             static_cast<int64_t>(values[i]), static_cast<int64_t>(bounds[i]));
            }
        }
    }
    return sound;
}

// The row of a request before its first one: the warp's stretch and its part of the edits.
template <typename L>
__device__ __forceinline__ Row<L> row_of(const SampleParams &p, const Group &group, const SamplerRow &sampler,
                                         const Edits &given) {
    Row<L> row{};
    row.vocab = p.verify.vocab;
    row.piece = p.piece;
    row.size = stretch_of(row.vocab, L::WIDE, group.size);
    row.first = (static_cast<int32_t>(group.rank) * WARPS + static_cast<int32_t>(threadIdx.x / 32)) * row.size;
    row.edits = given;
    row.edits.penalises = sampler.penalises != 0;
    row.edits.repetition = __uint_as_float(sampler.repetition);
    row.edits.presence = __uint_as_float(sampler.presence);
    row.edits.frequency = __uint_as_float(sampler.frequency);
    if (given.listed > 0) {
        // Ids are up to WIDE - 1 behind their places.
        row.edits.begin = first_from(given.tokens, given.listed, row.first - (L::WIDE - 1));
        row.edits.end = first_from(given.tokens, given.listed, row.first + row.size);
    }
    return row;
}

// A request's tree, if it is no larger: each step looks through it.
constexpr int HELD_NODES = 128;
__shared__ int32_t held_parents[HELD_NODES], held_tokens[HELD_NODES];

template <typename L>
__device__ __forceinline__ void sample_walk(const SampleParams &p) {
    Team team = begin_team();
    const int32_t request = blockIdx.x / team.group.size;
    const bool writer = team.group.leads() && threadIdx.x == 0;
    const int32_t live = live_rows(p.verify.live, p.verify.requests, p.verify.report, KERNEL_SAMPLE_VERIFY,
                                   writer && request == 0);
    const Range nodes = nodes_of(p.verify, KERNEL_SAMPLE_VERIFY, request, live, writer);
    if (writer) {
        reinterpret_cast<int32_t *>(p.verify.faults)[request] = PROBE_NONE;
    }
    const SamplerRow sampler = reinterpret_cast<const SamplerRow *>(p.samplers)[request];
    const int32_t *lens = reinterpret_cast<const int32_t *>(p.verify.lens);
    const int32_t *parents = reinterpret_cast<const int32_t *>(p.verify.tree_parents) + nodes.begin;
    const int32_t *tokens = reinterpret_cast<const int32_t *>(p.verify.tree_tokens) + nodes.begin;
    bool more;
    const Edits edits = edits_of(p, request, writer && nodes.size > 0, more);
    more = more && nodes.size > 0 && sound_sampler(p, sampler, request, writer);
    Walk walk = {0, 0};
    Row<L> row = row_of<L>(p, team.group, sampler, edits);
    const typename L::Storage *logits = reinterpret_cast<const typename L::Storage *>(p.verify.logits);
    if (more) {
        begin_row(row, logits + static_cast<int64_t>(nodes.begin) * p.verify.logits_stride);
    }
    if (nodes.size <= HELD_NODES) {
        for (int32_t i = threadIdx.x; i < nodes.size; i += THREADS) {
            held_parents[i] = parents[i];
            held_tokens[i] = tokens[i];
        }
        parents = held_parents;
        tokens = held_tokens;
    }
    group_arrive();
    group_wait();
    if (more && edits.listed > 0) {
        const bool bad = has_bad_token(p, team.group, edits.tokens, edits.listed, request);
        more = largest(team, __any_sync(ALL_LANES, bad)) == 0;
    }
    while (more) {
        const int32_t at = nodes.begin + walk.node;
        const uint32_t position = static_cast<uint32_t>(lens[request]) + static_cast<uint32_t>(walk.length) + 1;
        Fault fault;
        const int32_t token = draw_token(team, row, sampler, position, fault);
        if (writer && token == NO_TOKEN) {
            record_probe(p.verify.report, KERNEL_SAMPLE_VERIFY, fault.buffer, fault.probe, request, at, fault.column,
                         static_cast<int32_t>(position));
            reinterpret_cast<int32_t *>(p.verify.faults)[request] = fault.probe;
        }
        more = step(p.verify, KERNEL_SAMPLE_VERIFY, request, nodes, parents, tokens, token, walk, writer);
        if (more) {
            if (row.edits.penalises) {
                if (threadIdx.x == 0) {
                    walk_path[row.edits.depth] = token;
                }
                __syncthreads();
            }
            row.edits.depth = walk.length;
            begin_row(row, logits + static_cast<int64_t>(nodes.begin + walk.node) * p.verify.logits_stride);
        }
    }
    group_arrive();
    if (team.group.leads()) {
        if (writer) {
            reinterpret_cast<int32_t *>(p.verify.walk_lengths)[request] = walk.length;
        }
        if (last_block(p.verify.counter, p.verify.requests)) {
            gather_walks(p.verify, live);
        }
    }
    group_wait();
}

}  // namespace specrs

#define SPECRS_SAMPLE(name, logit)                                                                                 \
    extern "C" __global__ void __launch_bounds__(specrs::THREADS, 1)                                               \
        name(const __grid_constant__ specrs::SampleParams p) {                                                     \
        specrs::sample_walk<specrs::logit>(p);                                                                     \
    }
SPECRS_SAMPLE(sample_walk_f32, LogitF32)
SPECRS_SAMPLE(sample_walk_bf16, LogitBf16)
SPECRS_SAMPLE(sample_walk_f16, LogitF16)
