// The parameter structs of every kernel, mirrored by `src/device/params.rs`. Both sides assert the same sizes and
// offsets, so a field added on one side alone does not compile.
//
// Addresses are 64-bit integers that the kernel casts: the layout is then the same for every compiler.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specrs {

// What a kernel did not do, and why. One per device, in pinned host memory mapped into the device's address space:
// the host reads it without a copy or a synchronisation. See common.cuh for the protocol.
struct FaultRecord {
    uint32_t epoch;   // host: number of the fault that may be recorded next, counted from 1
    uint32_t ready;   // device: written last; the fields below are complete when it equals `epoch`
    int32_t kernel;   // Kernel
    int32_t buffer;   // Buffer
    int32_t request;  // row of the batch
    int32_t step;     // move, branch, step or node within the request; -1 where none applies
    int64_t index;    // the index that was computed
    int64_t bound;    // one past the largest allowed index
};
static_assert(sizeof(FaultRecord) == 40, "mirror of src/device/params.rs");
static_assert(offsetof(FaultRecord, ready) == 4, "mirror of src/device/params.rs");
static_assert(offsetof(FaultRecord, kernel) == 8, "mirror of src/device/params.rs");
static_assert(offsetof(FaultRecord, buffer) == 12, "mirror of src/device/params.rs");
static_assert(offsetof(FaultRecord, request) == 16, "mirror of src/device/params.rs");
static_assert(offsetof(FaultRecord, step) == 20, "mirror of src/device/params.rs");
static_assert(offsetof(FaultRecord, index) == 24, "mirror of src/device/params.rs");
static_assert(offsetof(FaultRecord, bound) == 32, "mirror of src/device/params.rs");

// Values of FaultRecord::kernel.
enum Kernel : int32_t {
    KERNEL_KV_MOVE = 1,
};

// Values of FaultRecord::buffer.
enum Buffer : int32_t {
    BUFFER_CACHE_SRC = 1,      // source slot of a move
    BUFFER_CACHE_DST = 2,      // destination slot of a move
    BUFFER_MOVES = 3,          // the src and dst arrays
    BUFFER_OFFSETS_ORDER = 4,  // offsets[i + 1] < offsets[i]
};

// kv_move.cu. Always the last parameter of its kernels, passed by value.
struct KvMoveParams {
    uint64_t cache;        // bytes of [planes][num_slots][row]; a plane is K or V of one layer
    uint64_t src;          // int32[moves]
    uint64_t dst;          // int32[moves]
    uint64_t offsets;      // int32[requests + 1]
    uint64_t record;       // FaultRecord in mapped host memory
    uint64_t claim;        // uint32 in device memory: the last epoch whose record was claimed
    uint64_t plane_bytes;  // bytes of a plane: num_slots * row
    int32_t num_slots;     // slots of a plane; slot 0 is the sink
    int32_t moves;         // capacity of src and of dst
    int32_t requests;      // rows of the batch; offsets holds one more
    uint32_t planes;       // 2 * layers
    uint32_t columns;      // vectors of the kernel's width in a row
    uint32_t reserved;     // zero; keeps the size a multiple of 8
};
static_assert(sizeof(KvMoveParams) == 80, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, src) == 8, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, dst) == 16, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, offsets) == 24, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, record) == 32, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, claim) == 40, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, plane_bytes) == 48, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, num_slots) == 56, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, moves) == 60, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, requests) == 64, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, planes) == 68, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, columns) == 72, "mirror of src/device/params.rs");
static_assert(offsetof(KvMoveParams, reserved) == 76, "mirror of src/device/params.rs");

}  // namespace specrs
