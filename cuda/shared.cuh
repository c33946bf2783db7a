// Addresses in shared memory, as instructions that name it take them.
#pragma once

#include <stdint.h>

namespace specrs {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace specrs
