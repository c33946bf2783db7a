// Bounds checks of every kernel, and how a violation, or a score that is no number, reaches the host.
//
// A kernel never traps and never skips silently: `in_bounds` says whether an access may happen, and where it may not
// the kernel leaves it out and calls `record_fault` once for it (from one thread: the index is the same for all).
//
// There are two records behind one another, of accesses and of probes, and two claim words, so that scores that are no
// numbers hide no access.
//
// Protocol of a fault record: the first fault of an epoch wins. The word that decides it lies in device memory,
// since atomics on mapped host memory are only atomic as far as the bus allows. The winner alone writes the
// record, `ready` last. The host starts the next epoch only after it has read a ready record, so no writer of an old
// epoch can still be under way then: every other thread of that epoch has lost the claim.
#pragma once

#include "params.cuh"  // written by build.rs from src/device/params

namespace specrs {

// Lets the launch behind this one begin, where that is an early one: its blocks take their places once every block of this
// launch has said so, or has ended.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// Waits until the launch in front of this one has ended and its writes can be read: first thing, but for what no launch of
// a round writes, in a kernel that is launched early (`Module::early_function` in driver.rs). Until then it writes nothing
// either, since the launch in front may still read there. It waits even where it takes nothing from that launch: by this
// chain alone is all earlier work over.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// `bound` is a capacity, never negative; one unsigned comparison then covers a negative index too.
__device__ __forceinline__ bool in_bounds(int32_t index, int32_t bound) {
    return static_cast<uint32_t>(index) < static_cast<uint32_t>(bound);
}

// A row of the page table; the caller has checked that it has one.
__device__ __forceinline__ int32_t *table_row(const PageTable &table, int32_t row) {
    return reinterpret_cast<int32_t *>(table.pages) + static_cast<int64_t>(row) * table.columns;
}

static __device__ __forceinline__ void write_record_inline(uint64_t record_address, uint64_t claim_address,
                                                           Kernel kernel, Buffer buffer, int32_t request,
                                                           int32_t step, int64_t index, int64_t bound, Probe probe,
                                                           int32_t position) {
    volatile FaultRecord *record = reinterpret_cast<volatile FaultRecord *>(record_address);
    unsigned int *claim = reinterpret_cast<unsigned int *>(claim_address);
    const unsigned int epoch = record->epoch;
    if (atomicMax(claim, epoch) >= epoch) {
        return;  // an earlier fault of this epoch is, or is being, recorded
    }
    record->kernel = kernel;
    record->buffer = buffer;
    record->request = request;
    record->step = step;
    record->index = index;
    record->bound = bound;
    record->probe = probe;
    record->position = position;
    __threadfence_system();  // the host must not see `ready` before the fields
    record->ready = epoch;
}

// Not inlined: it runs only on a fault, and the kernel's registers are for the other path.
static __device__ __noinline__ void write_record(uint64_t record_address, uint64_t claim_address, Kernel kernel,
                                                 Buffer buffer, int32_t request, int32_t step, int64_t index,
                                                 int64_t bound, Probe probe, int32_t position) {
    write_record_inline(record_address, claim_address, kernel, buffer, request, step, index, bound, probe, position);
}

// An access that was left out.
static __device__ __forceinline__ void record_fault(const Report &report, Kernel kernel, Buffer buffer, int32_t request,
                                                    int32_t step, int64_t index, int64_t bound) {
    write_record(report.record, report.claim, kernel, buffer, request, step, index, bound, PROBE_NONE, -1);
}

// A score from which nothing can be chosen: `row` and `column` of the operand `buffer`, for the token at `position`.
static __device__ __forceinline__ void record_probe(const Report &report, Kernel kernel, Buffer buffer, Probe probe,
                                                    int32_t request, int32_t row, int64_t column, int32_t position) {
    write_record(report.record + sizeof(FaultRecord), report.claim + sizeof(unsigned int), kernel, buffer, request, row,
                 column, 0, probe, position);
}

}  // namespace specrs
