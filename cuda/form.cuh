// Every element of a step as a function: the functions of `src/plan/form`, under the same names and line for line.
//
// A kernel that plans on the device calls these for its own element. They are plain C++ on the host too, so that
// `tests/plan/form_twin.rs` compiles them without nvcc and compares each with its Rust twin over a small domain. The Rust
// side documents shapes and meanings. Indices are the caller's to check, as everywhere in a kernel.
#pragma once

#include "params.cuh"  // written by build.rs from src/device/params

#ifdef __CUDACC__
#define SPECRS_FORM __host__ __device__ __forceinline__
#else
#define SPECRS_FORM inline
#endif

namespace specrs {
namespace form {

constexpr uint32_t EXTEND = 0;
constexpr uint32_t DECODE = 1;
constexpr uint32_t DRAFT = 2;
constexpr uint32_t VERIFY = 3;

using specrs::Step;

SPECRS_FORM uint32_t count_ones(uint64_t word) {
#ifdef __CUDA_ARCH__
    return static_cast<uint32_t>(__popcll(word));
#else
    return static_cast<uint32_t>(__builtin_popcountll(word));
#endif
}

// `word` is not 0.
SPECRS_FORM uint32_t trailing_zeros(uint64_t word) { return count_ones((word & (~word + 1)) - 1); }

SPECRS_FORM uint32_t column(Step s, uint32_t pos) { return pos >> s.shift; }

SPECRS_FORM int32_t slot(Step s, int32_t page, uint32_t pos) {
    return (page << s.shift) | static_cast<int32_t>(pos & ((1u << s.shift) - 1));
}

SPECRS_FORM int32_t row_slot(Step s, const int32_t *row, uint32_t pos) { return slot(s, row[column(s, pos)], pos); }

SPECRS_FORM uint32_t pages(Step s, uint32_t tokens) { return (tokens + (1u << s.shift) - 1) >> s.shift; }

SPECRS_FORM uint32_t remainder(Step s, uint32_t len) { return len & ((1u << s.shift) - 1); }

SPECRS_FORM uint32_t stride(Step s, uint32_t len) {
    return s.holey == 0 ? s.steps : pages(s, remainder(s, len) + s.steps) << s.shift;
}

SPECRS_FORM uint32_t draft_pos(Step s, uint32_t len, uint32_t b, uint32_t t) { return len + b * stride(s, len) + t; }

SPECRS_FORM uint32_t hole_len(Step s, uint32_t len, uint32_t b) {
    return s.holey == 0 || b == 0 ? 0 : remainder(s, len);
}

SPECRS_FORM bool alive(Step s, uint32_t len) { return s.phase != DRAFT || len + s.step < s.context; }

SPECRS_FORM uint32_t queries(Step s, uint32_t n) { return s.phase == DRAFT ? s.topk : s.phase == DECODE ? 1 : n; }

SPECRS_FORM uint32_t prefix(Step s, uint32_t len) { return alive(s, len) ? len : 0; }

SPECRS_FORM uint32_t row_pos(Step s, uint32_t len, uint32_t j) {
    return s.phase == DRAFT ? draft_pos(s, len, j, s.step) : len + j;
}

SPECRS_FORM uint32_t rope_pos(Step s, uint32_t len, uint32_t j, uint32_t depth) {
    if (!alive(s, len)) {
        return 0;
    }
    return s.phase == DRAFT ? len + s.step : s.phase == VERIFY ? len + depth : len + j;
}

SPECRS_FORM int32_t out_slot(Step s, uint32_t len, const int32_t *row, uint32_t j) {
    return alive(s, len) ? row_slot(s, row, row_pos(s, len, j)) : 0;
}

SPECRS_FORM uint32_t mask_words(Step s) {
    return s.phase == DRAFT ? (s.topk * s.steps + 63) >> 6 : s.phase == VERIFY ? (s.nodes + 63) >> 6 : 0;
}

SPECRS_FORM uint64_t run_word(uint32_t first, uint32_t end, uint32_t w) {
    const uint32_t base = w * 64;
    const uint32_t low = first > base ? first - base : 0;
    const uint32_t high = end > base ? end - base : 0;
    const uint64_t below = high < 64 ? (1ull << high) - 1 : ~0ull;
    return low < 64 ? below & (~0ull << low) : 0;
}

SPECRS_FORM uint32_t own_bit(Step s, uint32_t j) { return s.phase == DRAFT ? j * s.steps + s.step : j; }

SPECRS_FORM uint64_t lane_word(Step s, uint32_t j, uint32_t w) {
    return run_word(j * s.steps, own_bit(s, j) + 1, w);
}

SPECRS_FORM uint64_t earlier_word(Step s, uint32_t w) {
    uint64_t word = 0;
    for (uint32_t b = 0; b < s.topk; ++b) {
        word |= run_word(b * s.steps, b * s.steps + s.step, w);
    }
    return word;
}

SPECRS_FORM uint64_t node_word(const int32_t *parents, uint32_t j, uint32_t w) {
    uint64_t word = 0;
    for (int32_t node = static_cast<int32_t>(j); node >= 0; node = parents[node]) {
        word |= run_word(static_cast<uint32_t>(node), static_cast<uint32_t>(node) + 1, w);
    }
    return word;
}

SPECRS_FORM uint32_t node_depth(const int32_t *parents, uint32_t j) {
    uint32_t depth = 0;
    for (int32_t node = parents[j]; node >= 0; node = parents[node]) {
        ++depth;
    }
    return depth;
}

SPECRS_FORM uint32_t bits(const uint64_t *mask, uint32_t words) {
    uint32_t n = 0;
    for (uint32_t w = 0; w < words; ++w) {
        n += count_ones(mask[w]);
    }
    return n;
}

SPECRS_FORM uint32_t nth_bit(const uint64_t *mask, uint32_t n) {
    uint32_t left = n;
    uint32_t w = 0;
    while (count_ones(mask[w]) <= left) {
        left -= count_ones(mask[w]);
        ++w;
    }
    uint64_t word = mask[w];
    for (; left > 0; --left) {
        word &= word - 1;
    }
    return w * 64 + trailing_zeros(word);
}

SPECRS_FORM uint32_t bit_pos(Step s, uint32_t len, uint32_t bit) {
    return s.phase == DRAFT ? draft_pos(s, len, bit / s.steps, bit % s.steps) : len + bit;
}

SPECRS_FORM uint32_t keys(Step s, uint32_t len, uint32_t j, const uint64_t *mask) {
    return mask_words(s) == 0 ? len + j + 1 : prefix(s, len) + bits(mask, mask_words(s));
}

SPECRS_FORM uint32_t key_pos(Step s, uint32_t len, const uint64_t *mask, uint32_t k) {
    return k < len || mask_words(s) == 0 ? k : bit_pos(s, len, nth_bit(mask, k - len));
}

namespace lists {

SPECRS_FORM bool per_query(Step s) { return s.phase == DRAFT || s.phase == DECODE; }

SPECRS_FORM uint32_t query_len(Step s, uint32_t len, const uint64_t *mask) { return keys(s, len, 0, mask); }

SPECRS_FORM int32_t query_slot(Step s, uint32_t len, const int32_t *row, const uint64_t *mask, uint32_t o) {
    return row_slot(s, row, key_pos(s, len, mask, o));
}

SPECRS_FORM uint32_t request_len(uint32_t len, uint32_t n, uint32_t own) { return n == 0 ? 0 : len + own * n; }

SPECRS_FORM int32_t request_slot(Step s, const int32_t *row, uint32_t o) { return row_slot(s, row, o); }

SPECRS_FORM uint64_t mask_len(uint32_t len, uint32_t n) {
    return static_cast<uint64_t>(n) * (static_cast<uint64_t>(len) + n);
}

SPECRS_FORM uint64_t packed_len(uint32_t len, uint32_t n) { return (mask_len(len, n) + 7) >> 3; }

SPECRS_FORM uint8_t mask_at(Step s, uint32_t len, uint32_t n, const uint64_t *mask, uint64_t e) {
    const uint64_t width = static_cast<uint64_t>(len) + n;
    const uint64_t j = e / width;
    const uint64_t key = e % width;
    if (key < len) {
        return 1;
    }
    const uint64_t bit = key - len;
    return static_cast<uint8_t>(mask[j * mask_words(s) + (bit >> 6)] >> (bit & 63) & 1);
}

SPECRS_FORM uint8_t packed_at(Step s, uint32_t len, uint32_t n, const uint64_t *mask, uint64_t x) {
    uint32_t byte = 0;
    for (uint64_t i = 0; i < 8 && x * 8 + i < mask_len(len, n); ++i) {
        byte |= static_cast<uint32_t>(mask_at(s, len, n, mask, x * 8 + i)) << i;
    }
    return static_cast<uint8_t>(byte);
}

}  // namespace lists

namespace tables {

constexpr uint32_t ONE = 0;
constexpr uint32_t SLOTS = 1;
constexpr uint32_t PAGES = 2;

SPECRS_FORM uint32_t passes(Step s) {
    if (s.phase == VERIFY) {
        return SLOTS;
    }
    if (s.phase != DRAFT || s.topk == 1) {
        return ONE;
    }
    return s.holey == 0 ? SLOTS : PAGES;
}

SPECRS_FORM uint32_t tokens(Step s, uint32_t prefix, uint32_t keys) {
    const uint32_t p = passes(s);
    return p == ONE ? keys : p == SLOTS ? prefix : prefix - remainder(s, prefix);
}

SPECRS_FORM uint32_t len_at(Step s, uint32_t len, uint32_t n) {
    const uint32_t own = s.phase == DRAFT ? s.step + 1 : n;
    return n == 0 || !alive(s, len) ? 0 : tokens(s, len, len + own);
}

SPECRS_FORM int32_t page_at(Step s, uint32_t len, uint32_t n, const int32_t *row, uint32_t c) {
    return c < pages(s, len_at(s, len, n)) ? row[c] : 0;
}

SPECRS_FORM uint32_t expand_len_at(Step s, uint32_t len, const uint64_t *mask) {
    if (!alive(s, len)) {
        return 0;
    }
    return passes(s) == PAGES ? remainder(s, len) + s.step + 1 : bits(mask, mask_words(s));
}

SPECRS_FORM int32_t expand_at(Step s, uint32_t len, const int32_t *row, const uint64_t *mask, uint32_t j, uint32_t c) {
    const uint32_t n = expand_len_at(s, len, mask);
    if (passes(s) == PAGES) {
        const uint32_t first = column(s, draft_pos(s, len, j, 0));
        return c < pages(s, n) ? row[first + c] : 0;
    }
    return c < n ? row_slot(s, row, bit_pos(s, len, nth_bit(mask, c))) : 0;
}

}  // namespace tables

}  // namespace form
}  // namespace specrs

#undef SPECRS_FORM
