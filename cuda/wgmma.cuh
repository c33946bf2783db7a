// Wrappers of Hopper's warpgroup products (sm_90a): 64 rows in the registers of four warps times a matrix in shared
// memory. A step of 16 has the bits of the same step by mma.sync: which products share it, and the order of the steps, is
// all that counts (measured on an H200). PTX ISA, section "wgmma"; the layout of a shared matrix is that of its
// "128-byte swizzle": panels of 64 elements, each a column of rows of 128 bytes whose 16-byte pieces are exchanged by
// the row's index modulo 8.
#pragma once

#include "mma.cuh"

namespace specrs {

// A matrix in panels of 128-byte rows at `shared`, 1024-byte aligned but for whole steps along a row or whole groups of 8
// rows. `panel`: bytes from one panel to the next, for a product that takes its columns from several.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t shared, uint32_t panel) {
    constexpr uint64_t GROUP_OF_ROWS = 1024;  // 8 rows of 128 bytes
    constexpr uint64_t SWIZZLE_128 = 1;
    return static_cast<uint64_t>((shared & 0x3ffff) >> 4) | static_cast<uint64_t>(panel >> 4) << 16 |
           GROUP_OF_ROWS >> 4 << 32 | SWIZZLE_128 << 62;
}

// Before the first product after registers of an operand were written otherwise.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Wait until at most `PENDING` of this warpgroup's newest groups of products are under way.
template <int PENDING = 0>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}

// Make this thread's writes to shared memory visible to products; a barrier must follow.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// Barriers in shared memory that count arrivals, `count` a phase; waits are for the end of a phase of parity `parity`. PTX ISA,
// section "mbarrier".
__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrive once this thread's copies so far are there; the thread goes on.
__device__ __forceinline__ void barrier_arrive_copied(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred ended;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra again;\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// A warpgroup's share of the registers changes, for all its threads.
template <int REGISTERS>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

// Ends this thread. A `return` would let the compiler end all threads at one place, where shares of the registers differ: it
// then compiles for the share that they began with.
__device__ __forceinline__ void end_thread() { asm volatile("exit;\n"); }

// Lists of a product's operands: registers of d under a constraint, and their numbers in the instruction.
#define SPECRS_FOUR(C, d, i) C(d[i][0]), C(d[i][1]), C(d[i][2]), C(d[i][3])
#define SPECRS_32(C, d)                                                                                       \
    SPECRS_FOUR(C, d, 0), SPECRS_FOUR(C, d, 1), SPECRS_FOUR(C, d, 2), SPECRS_FOUR(C, d, 3), SPECRS_FOUR(C, d, 4), \
        SPECRS_FOUR(C, d, 5), SPECRS_FOUR(C, d, 6), SPECRS_FOUR(C, d, 7)
#define SPECRS_64(C, d)                                                                                             \
    SPECRS_32(C, d), SPECRS_FOUR(C, d, 8), SPECRS_FOUR(C, d, 9), SPECRS_FOUR(C, d, 10), SPECRS_FOUR(C, d, 11),      \
        SPECRS_FOUR(C, d, 12), SPECRS_FOUR(C, d, 13), SPECRS_FOUR(C, d, 14), SPECRS_FOUR(C, d, 15)
#define SPECRS_NUMBERS_32                                                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define SPECRS_NUMBERS_64                                                                                           \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "    \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, " \
    "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
// An instruction; `accumulate` is 0 where d is written, not read.
#define SPECRS_WGMMA(shape, type, accumulate, operands)                                             \
    "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " accumulate ", 0;\n"                       \
    "wgmma.mma_async.sync.aligned." shape "k16.f32." type "." type " " operands ";\n}\n"

// Products of one element type for N columns. `mma`: d += a * b for a 64x16 a, in fragments as those of mma.sync for each
// warp's 16 rows or (128 columns) in rows of shared memory as b's columns; b is 16xN at a descriptor, its 16 elements of a
// column side by side, or (TRANSPOSED) its columns. `first`: d = a * b.
template <typename T, int N, int TRANSPOSED>
struct Warpgroup;

#define SPECRS_WARPGROUP(T, type)                                                                                        \
    template <int TRANSPOSED>                                                                                            \
    struct Warpgroup<T, 64, TRANSPOSED> {                                                                                \
        static __device__ __forceinline__ void mma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {               \
            asm volatile(SPECRS_WGMMA("m64n64", type, "1", SPECRS_NUMBERS_32 ", {%32, %33, %34, %35}, %36, accumulate, 1, 1, %37") \
                         : SPECRS_32("+f", d)                                                                            \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));                         \
        }                                                                                                                \
    };                                                                                                                   \
    template <int TRANSPOSED>                                                                                            \
    struct Warpgroup<T, 128, TRANSPOSED> {                                                                               \
        static __device__ __forceinline__ void mma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {              \
            asm volatile(SPECRS_WGMMA("m64n128", type, "1", SPECRS_NUMBERS_64 ", {%64, %65, %66, %67}, %68, accumulate, 1, 1, %69") \
                         : SPECRS_64("+f", d)                                                                            \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));                         \
        }                                                                                                                \
        static __device__ __forceinline__ void mma(float (&d)[16][4], uint64_t a, uint64_t b) {                          \
            static_assert(TRANSPOSED == 0, "a product of rows with rows");                                               \
            asm volatile(SPECRS_WGMMA("m64n128", type, "1", SPECRS_NUMBERS_64 ", %64, %65, accumulate, 1, 1, 0, 0")      \
                         : SPECRS_64("+f", d)                                                                            \
                         : "l"(a), "l"(b));                                                                              \
        }                                                                                                                \
        static __device__ __forceinline__ void first(float (&d)[16][4], uint64_t a, uint64_t b) {                        \
            static_assert(TRANSPOSED == 0, "a product of rows with rows");                                               \
            asm volatile(SPECRS_WGMMA("m64n128", type, "0", SPECRS_NUMBERS_64 ", %64, %65, accumulate, 1, 1, 0, 0")      \
                         : SPECRS_64("=f", d)                                                                            \
                         : "l"(a), "l"(b));                                                                              \
        }                                                                                                                \
    };

SPECRS_WARPGROUP(Bf16, "bf16")
SPECRS_WARPGROUP(F16, "f16")

#undef SPECRS_WARPGROUP
#undef SPECRS_WGMMA
#undef SPECRS_NUMBERS_64
#undef SPECRS_NUMBERS_32
#undef SPECRS_64
#undef SPECRS_32
#undef SPECRS_FOUR

}  // namespace specrs
