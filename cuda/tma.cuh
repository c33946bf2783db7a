// The copy engine of compute capability 9.0, which moves boxes of a matrix into shared memory by itself. PTX ISA, section
// "cp.async.bulk.tensor".
#pragma once

#include <stdint.h>

namespace specrs {

// A tensor map of the driver, which has no fields for a kernel.
struct alignas(128) TensorMap {
    uint64_t words[16];
};

// Copy the box of a matrix that begins at column x of row y; `barrier` counts its bytes.
__device__ __forceinline__ void load_box(uint32_t to, const TensorMap &map, int32_t x, int32_t y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];\n" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// Arrive, and let the phase wait for so many bytes of copies, too.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// Make barriers that this thread initialised visible to the copy engine; a barrier of the threads must follow.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

}  // namespace specrs
