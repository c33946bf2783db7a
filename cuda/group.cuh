// A group of thread blocks that work on one request: on Hopper a cluster, whose blocks send one another values; elsewhere one
// block, which sends them to itself. Code over a group is the same for both.
//
// A value, or a copy of many, goes into a place in the receiving block's shared memory, and its bytes are counted by a mailbox
// there: a thread that waits for a number of bytes sees all the values. Barriers of the cluster come only at the begin and at the
// end, up to which blocks may read one another's memory: one makes every thread wait for all its memory accesses, and empties the
// L1.
#pragma once

#include "common.cuh"
#include "shared.cuh"

namespace specrs {

// Blocks of the largest group.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr int MAX_GROUP = 16;
#else
constexpr int MAX_GROUP = 1;
#endif

// A block's place in its group.
struct Group {
    uint32_t rank;
    uint32_t size;

    __device__ __forceinline__ bool leads() const { return rank == 0; }
};

__device__ __forceinline__ Group own_group() {
    Group group = {0, 1};
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(group.rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(group.size));
#endif
    return group;
}

// Say that this thread of the group has come here, and wait for all: slow.
__device__ __forceinline__ void group_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void group_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#else
    __syncthreads();
#endif
}

// Counts the bytes that arrive in a block's shared memory; an mbarrier of one arrival a phase.
struct Mailbox {
    uint64_t barrier;
};

// For one thread of each block, before a group barrier.
__device__ __forceinline__ void open_mailbox(Mailbox &mailbox) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&mailbox)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Send a value of 4 or 8 bytes to block `rank`, into the place that `at` is in it, counted by what `mailbox` is in it.
template <typename T>
__device__ __forceinline__ void send(T &at, uint32_t rank, T value, const Mailbox &mailbox) {
#if __CUDA_ARCH__ >= 900
    uint32_t place, counter;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared_address(&at)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(shared_address(&mailbox)), "r"(rank));
    if constexpr (sizeof(T) == 8) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(place),
                     "l"(value), "r"(counter)
                     : "memory");
    } else {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(place),
                     "r"(value), "r"(counter)
                     : "memory");
    }
#else
    at = value;
#endif
}

// What this thread wrote to shared memory, and others then wrote, can be sent by `send_bytes` after a barrier.
__device__ __forceinline__ void let_send() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Send the `bytes` at `at`, a multiple of 16, to the same place in another block, `rank`, counted by what `mailbox` is in it.
// They stay as they are until that block has them.
__device__ __forceinline__ void send_bytes(const void *at, uint32_t rank, uint32_t bytes, const Mailbox &mailbox) {
#if __CUDA_ARCH__ >= 900
    uint32_t place, counter;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared_address(at)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(shared_address(&mailbox)), "r"(rank));
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     place),
                 "r"(shared_address(at)), "r"(bytes), "r"(counter)
                 : "memory");
#endif
}

// Wait until `bytes` have arrived, for the `waits`-th time. All threads of the block call.
__device__ __forceinline__ void await(const Mailbox &mailbox, uint32_t bytes, uint32_t waits) {
#if __CUDA_ARCH__ >= 900
    const uint32_t address = shared_address(&mailbox);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    }
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], %1;\n"
        "@!arrived bra again;\n"
        "}\n" ::"r"(address),
        "r"(waits & 1)
        : "memory");
#endif
}

}  // namespace specrs
