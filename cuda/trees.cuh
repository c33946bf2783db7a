// Parts of the kernels that make trees of a batch: its offsets, the nodes behind its last tree, and the links, depths
// and ancestor bits that follow from parents.
#pragma once

#include "common.cuh"
#include "form.cuh"

namespace specrs {

// A score that is NaN, which no draft step writes, counts as the least.
__device__ __forceinline__ float score_at(const float *scores, uint64_t at) {
    return fmaxf(scores[at], __uint_as_float(0xff800000u));
}

// Most nodes of a request's tree, root included; a root alone where its limit is none.
__device__ __forceinline__ int32_t max_nodes_of(const Trees &trees, const Report &report, Kernel kernel,
                                                int32_t request, bool reporter) {
    const int32_t nodes = reinterpret_cast<const int32_t *>(trees.max_nodes)[request];
    if (nodes >= 1 && nodes <= trees.draft_tokens) {
        return nodes;
    }
    if (reporter) {
        record_fault(report, kernel, BUFFER_MAX_NODES, request, -1, nodes,
                     static_cast<int64_t>(trees.draft_tokens) + 1);
    }
    return 1;
}

// Write the beginning of a request's tree, and behind the last request's the end of all. One thread of its block calls
// it.
__device__ __forceinline__ void write_offsets(const Trees &trees, int32_t request, int32_t begin, int32_t total) {
    int32_t *offsets = reinterpret_cast<int32_t *>(trees.offsets);
    offsets[request] = begin;
    if (request == trees.requests - 1) {
        offsets[trees.requests] = total;
    }
}

// Dead lanes, behind the last tree; all blocks share them.
__device__ __forceinline__ void write_dead_nodes(const Trees &trees, int32_t request, int32_t total) {
    const uint32_t words = static_cast<uint32_t>(trees.draft_tokens + 63) / 64;
    const int32_t capacity = trees.requests * trees.draft_tokens;
    for (int32_t i = total + request * blockDim.x + threadIdx.x; i < capacity; i += trees.requests * blockDim.x) {
        reinterpret_cast<int32_t *>(trees.tokens)[i] = 0;
        reinterpret_cast<int32_t *>(trees.depths)[i] = 0;
        reinterpret_cast<int32_t *>(trees.parents)[i] = -1;
        reinterpret_cast<int32_t *>(trees.next_child)[i] = -1;
        reinterpret_cast<int32_t *>(trees.next_sibling)[i] = -1;
        reinterpret_cast<float *>(trees.scores)[i] = 0.0f;
        for (uint32_t w = 0; trees.masks != 0 && w < words; ++w) {
            reinterpret_cast<uint64_t *>(trees.masks)[static_cast<uint64_t>(i) * words + w] = 0;
        }
    }
}

// Write what follows from the parents of a tree's `size` nodes, each below its children; the nodes lie from `begin` on.
__device__ __forceinline__ void write_links(const Trees &trees, const int32_t *parents, int32_t begin, int32_t size) {
    const uint32_t words = static_cast<uint32_t>(trees.draft_tokens + 63) / 64;
    for (int32_t j = threadIdx.x; j < size; j += blockDim.x) {
        int32_t child = -1;
        int32_t sibling = -1;
#pragma unroll 8
        for (int32_t k = size - 1; k > j; --k) {
            child = parents[k] == j ? k : child;
            sibling = parents[k] == parents[j] ? k : sibling;
        }
        reinterpret_cast<int32_t *>(trees.parents)[begin + j] = parents[j];
        reinterpret_cast<int32_t *>(trees.depths)[begin + j] = static_cast<int32_t>(form::node_depth(parents, j));
        reinterpret_cast<int32_t *>(trees.next_child)[begin + j] = child;
        reinterpret_cast<int32_t *>(trees.next_sibling)[begin + j] = sibling;
        for (uint32_t w = 0; trees.masks != 0 && w < words; ++w) {
            reinterpret_cast<uint64_t *>(trees.masks)[static_cast<uint64_t>(begin + j) * words + w] =
                form::node_word(parents, j, w);
        }
    }
}

}  // namespace specrs
