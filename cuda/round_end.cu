// The end of a round: lanes advance or end, and the host learns of it from mapped memory (`round::round_end` of the host).
//
// Block 0 has the lanes, the others copy what the round found into the ring. The last block to be through makes the
// slot whole: a reader that reads its sequence word by an acquire sees all of it. A slot's word is r while round r
// writes it, which the round before marks, and r + 1 from then on: a reader that finds the same word before and after
// has read one round.
//
// With SPECRS_LOOP the kernel also says whether the conditional node that runs the rounds goes on. It is then the one
// kernel of the body that does, and its last block's one thread: two writers would race.
#include "block.cuh"
#include "rows.cuh"

#ifdef SPECRS_LOOP
// The driver resolves it when it compiles the PTX.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
#endif

namespace specrs {

constexpr uint32_t LANE_THREADS = 8;  // threads of a lane: a path has a few tokens

// Words that the host writes, or that atomics of other blocks do.
__device__ __forceinline__ uint32_t fresh(uint64_t address) {
    return *reinterpret_cast<const volatile uint32_t *>(address);
}

__device__ __forceinline__ const int32_t *ints(uint64_t address) {
    return reinterpret_cast<const int32_t *>(address);
}

// True if the numbers of a lane make sense; `reporter` records why they do not.
__device__ __forceinline__ bool in_order(const RoundEndParams &p, int32_t lane, int32_t begin, int32_t end, int32_t len,
                                         int32_t new_len, int32_t stops, bool reporter) {
    Buffer buffer = BUFFER_PATH;
    int64_t index = 0;
    int64_t bound = static_cast<int64_t>(p.entries) + 1;
    const bool begins = begin >= 0 && begin <= p.entries;
    const int64_t want = static_cast<int64_t>(len) + (static_cast<int64_t>(end) - begin);
    if (!begins || end < 0 || end > p.entries) {
        index = begins ? end : begin;
    } else if (end <= begin) {
        buffer = BUFFER_OFFSETS_DECREASE;
        index = end;
    } else if (len < 0 || new_len != want) {
        buffer = BUFFER_NEW_LENGTHS;
        index = len < 0 ? len : new_len;
        bound = want + 1;
    } else if (stops < 0 || stops > p.places) {
        buffer = BUFFER_STOPS;
        index = stops;
        bound = static_cast<int64_t>(p.places) + 1;
    } else {
        return true;
    }
    if (reporter) {
        record_fault(p.report, KERNEL_ROUND_END, buffer, lane, -1, index, bound);
    }
    return false;
}

// Advance or end the lanes, and publish what they began with. Returns this thread's exit bits.
__device__ __forceinline__ uint32_t end_lanes(const RoundEndParams &p, int32_t live, int32_t *slot) {
    int32_t *lens = reinterpret_cast<int32_t *>(p.lens);
    int32_t *roots = reinterpret_cast<int32_t *>(p.roots);
    int32_t *depths = reinterpret_cast<int32_t *>(p.depths);
    int32_t *done = reinterpret_cast<int32_t *>(p.done);
    const uint32_t member = threadIdx.x % LANE_THREADS;
    const bool leader = member == 0;
    const uint32_t group = 0xffu << (threadIdx.x % 32 / LANE_THREADS * LANE_THREADS);
    uint32_t exits = 0;
    // All members of a group have the same lane, so that every branch but the leader's is theirs together.
    for (int32_t lane = threadIdx.x / LANE_THREADS; lane < p.batch; lane += blockDim.x / LANE_THREADS) {
        const int32_t len = lens[lane];
        const int32_t depth = depths[lane];
        const bool ended = done[lane] != 0;
        __syncwarp(group);  // all have read before the leader writes
        if (leader) {
            slot[p.lens_at + lane] = len;
            slot[p.depths_at + lane] = depth;
        }
        if (lane >= live) {
            continue;
        }
        if (ended) {
            exits |= EXIT_DONE;
            if (leader) {
                depths[lane] = 0;
            }
            continue;
        }
        const int32_t begin = ints(p.offsets)[lane];
        const int32_t end = ints(p.offsets)[lane + 1];
        const int32_t new_len = ints(p.new_lens)[lane];
        const int32_t limit = ints(p.limits)[lane];
        const int32_t stops = ints(p.stop_counts)[lane];
        bool ends = true;
        if (ints(p.faults)[lane] != 0) {
            exits |= EXIT_NAN;
        } else if (!in_order(p, lane, begin, end, len, new_len, stops, leader)) {
            exits |= EXIT_FAULT;
        } else {
            bool stopped = false;
            for (int32_t j = begin + static_cast<int32_t>(member); j < end; j += LANE_THREADS) {
                const int32_t token = ints(p.tokens)[j];
                for (int32_t k = 0; k < stops; ++k) {
                    stopped = stopped || token == ints(p.stops)[static_cast<int64_t>(lane) * p.places + k];
                }
            }
            ends = __any_sync(group, stopped) != 0 || new_len >= limit;
        }
        if (!leader) {
            continue;
        }
        if (depth > 0 && ints(p.sound)[lane] == 0) {
            exits |= EXIT_UNSOUND;
        }
        if (ends) {
            exits |= EXIT_DONE;
            done[lane] = 1;
            depths[lane] = 0;
        } else {
            lens[lane] = new_len;
            roots[lane] = ints(p.roots_found)[lane];
            depths[lane] = max(min(ints(p.caps)[lane], limit - new_len - 1), 0);  // new_len is at least 1, and below limit
        }
    }
    return exits;
}

// Block 0: the lanes, and the slot's header.
__device__ __forceinline__ void head_block(const RoundEndParams &p, uint32_t round, int32_t *slot) {
    __shared__ uint32_t all;
    const bool first = threadIdx.x == 0;
    uint32_t asked = 0;
    uint32_t epoch = 0;
    if (first) {
        all = 0;
        // Both come over the bus: asked for now, used at the end.
        asked = fresh(p.stop);
        epoch = fresh(p.report.record);
    }
    const int32_t live = live_rows(p.live, p.batch, p.report, KERNEL_ROUND_END, first);
    __syncthreads();
    const uint32_t exits = end_lanes(p, live, slot);
    if (exits != 0) {
        atomicOr(&all, exits);
    }
    __syncthreads();
    if (!first) {
        return;
    }
    uint32_t exit = all;
    if (live != ints(p.live)[0]) {
        exit |= EXIT_FAULT;
    }
    // The record is taken where the claim has reached its epoch.
    if (fresh(p.report.claim) >= epoch) {
        exit |= EXIT_FAULT;
    }
    if (asked != 0) {
        exit |= EXIT_ASKED;
    }
    int32_t *control = reinterpret_cast<int32_t *>(p.control);
    if (p.handle != 0) {
        const int32_t left = max(control[CONTROL_LEFT], 1) - 1;
        control[CONTROL_LEFT] = left;
        if (left == 0) {
            exit |= EXIT_BUDGET;
        }
    }
    control[CONTROL_EXIT] = static_cast<int32_t>(exit);
    slot[ROUND_NUMBER_AT] = static_cast<int32_t>(round);
    slot[ROUND_LIVE_AT] = live;
    slot[ROUND_EXIT_AT] = static_cast<int32_t>(exit);
    slot[ROUND_CONTINUES_AT] = p.handle != 0 && exit == 0;
    for (int32_t i = ROUND_CONTINUES_AT + 1; i < ROUND_HEADER; ++i) {
        if (i != ROUND_TIME_AT && i != ROUND_TIME_AT + 1) {  // the last block writes those
            slot[i] = 0;
        }
    }
}

// The other blocks: what the round found.
__device__ __forceinline__ void copy_found(const RoundEndParams &p, int32_t *slot) {
    const int32_t threads = static_cast<int32_t>((gridDim.x - 1) * blockDim.x);
    const int32_t first = static_cast<int32_t>((blockIdx.x - 1) * blockDim.x + threadIdx.x);
    const int32_t *from = ints(p.found);
    int32_t *to = slot + p.found_at;
    const int32_t vectors = p.wide != 0 ? p.words / 4 : 0;
    for (int32_t i = first; i < vectors; i += threads) {
        reinterpret_cast<int4 *>(to)[i] = reinterpret_cast<const int4 *>(from)[i];
    }
    for (int32_t i = 4 * vectors + first; i < p.words; i += threads) {
        to[i] = from[i];
    }
}

__device__ __forceinline__ void round_end(const RoundEndParams &p) {
    const uint32_t round = static_cast<uint32_t>(ints(p.control)[CONTROL_ROUNDS]);
    int32_t *ring = reinterpret_cast<int32_t *>(p.ring);
    int32_t *slot = ring + static_cast<uint64_t>(round & p.slot_mask) * p.slot_words;
    if (blockIdx.x == 0) {
        head_block(p, round, slot);
    } else {
        copy_found(p, slot);
    }
    __threadfence_system();  // makes this thread's writes visible before its block counts as through
    __syncthreads();
    if (threadIdx.x != 0) {
        return;
    }
    int32_t *control = reinterpret_cast<int32_t *>(p.control);
    unsigned int *ticket = reinterpret_cast<unsigned int *>(control + CONTROL_TICKET);
    if (atomicInc(ticket, gridDim.x - 1) != gridDim.x - 1) {
        return;
    }
    __threadfence_system();  // makes the other blocks' writes visible before the slot is whole
    const uint32_t next = round + 1;
    control[CONTROL_ROUNDS] = static_cast<int32_t>(next);
    int32_t *taken = ring + static_cast<uint64_t>(next & p.slot_mask) * p.slot_words;
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *reinterpret_cast<unsigned long long *>(slot + ROUND_TIME_AT) = now;
    *reinterpret_cast<volatile uint32_t *>(taken + ROUND_SEQUENCE_AT) = next;  // the next round writes there
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(slot + ROUND_SEQUENCE_AT), "r"(next) : "memory");
#ifdef SPECRS_LOOP
    if (p.handle != 0) {
        const uint32_t exit = fresh(p.control + sizeof(int32_t) * CONTROL_EXIT);
        cudaGraphSetConditional(p.handle, exit == 0 ? 1 : 0);
    }
#endif
}

}  // namespace specrs

#ifdef SPECRS_LOOP
extern "C" __global__ void __launch_bounds__(512) round_end_loop(const __grid_constant__ specrs::RoundEndParams p) {
    specrs::round_end(p);
}
#else
extern "C" __global__ void __launch_bounds__(512) round_end(const __grid_constant__ specrs::RoundEndParams p) {
    specrs::round_end(p);
}
#endif
