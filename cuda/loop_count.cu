// The condition of a graph's loop: the last kernel of its body, one thread. Two kernels that set one condition would race,
// so a body has one such kernel.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(1) loop_count(const __grid_constant__ specrs::LoopCountParams p) {
    int32_t *left = reinterpret_cast<int32_t *>(p.left);
    const int32_t *stop = reinterpret_cast<const int32_t *>(p.stop);
    // The subtraction cannot underflow: a counter that is 0 or less ends the loop.
    const int32_t now = *left > 0 ? *left - 1 : 0;
    *left = now;
    const bool on = now > 0 && (stop == nullptr || *stop == 0);
    cudaGraphSetConditional(p.handle, on ? 1u : 0u);
}
