// Thin wrappers of the instructions that a tensor-core kernel for compute capability 8.0 is made of: asynchronous copies
// into shared memory, matrix loads from it, and the 16x8x16 product with fp32 accumulators. PTX ISA, sections "cp.async",
// "ldmatrix", "mma.m16n8k16" and "ex2"; the names of the fragments' registers are the manual's.
#pragma once

#include "shared.cuh"

namespace specrs {

// Copy 16 bytes past L1. With `live` false nothing is read and the 16 bytes of shared memory become zero.
__device__ __forceinline__ void copy_async(uint32_t shared, const void *global, bool live) {
    const int bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Clear 16 bytes of shared memory.
__device__ __forceinline__ void clear_shared(uint32_t shared) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(shared), "r"(0) : "memory");
}

// Close the group of this thread's copies since the last call.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Wait until at most `PENDING` of this thread's newest groups are under way. Other threads' copies need a barrier too.
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&d)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared)
                 : "memory");
}

// Two 8x8 matrices, transposed; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void load_two_matrices_transposed(uint32_t (&d)[2], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(shared)
                 : "memory");
}

// 2^x as every exact kernel computes it: one instruction, whose bits the hardware fixes.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// bfloat16 pairs in a register: the element with the lower index in the lower half.
struct Bf16 {
    // Round to nearest even.
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        uint32_t d;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
        return d;
    }
    static __device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
    static __device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

    // d += a * b for a 16x16 row-major a and a 16x8 column-major b: one k16 step.
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// float16 pairs, likewise.
struct F16 {
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        uint32_t d;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
        return d;
    }
    static __device__ __forceinline__ float low(uint32_t pair) { return single(static_cast<uint16_t>(pair)); }
    static __device__ __forceinline__ float high(uint32_t pair) { return single(static_cast<uint16_t>(pair >> 16)); }

    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }

  private:
    static __device__ __forceinline__ float single(uint16_t half) {
        float f;
        asm("cvt.f32.f16 %0, %1;\n" : "=f"(f) : "h"(half));
        return f;
    }
};

}  // namespace specrs
