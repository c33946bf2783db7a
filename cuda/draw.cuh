// The functions that decide a drawn token, operation by operation as on the host: the random number of a position, the
// integer weight of a logit, masses of weights, ranks, penalties. The twin of `src/round/philox.rs`,
// `src/round/weight.rs`, `rank_key` in `src/host/sample/scan.rs` and `Penalty` in `src/host/sample/history.rs`.
//
// Plain C++ on the host too, so that a test compiles it without nvcc and compares it with the Rust functions
// (`src/host/sample/twin.rs`). Every floating-point operation is rounded once, by name: a compiler must not contract or
// reorder them, so the host is compiled with -ffp-contract=off.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define SPECRS_DRAW __host__ __device__ __forceinline__
#else
#define SPECRS_DRAW inline
#endif
#ifndef __CUDA_ARCH__
#include <math.h>
#include <string.h>
#endif

namespace specrs {
namespace draw {

// Quanta of the most probable token: exp(0).
constexpr uint64_t ONE = 1ull << 40;

#ifdef __CUDA_ARCH__
SPECRS_DRAW float fma32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
SPECRS_DRAW float add32(float a, float b) { return __fadd_rn(a, b); }
SPECRS_DRAW float sub32(float a, float b) { return __fsub_rn(a, b); }
SPECRS_DRAW float mul32(float a, float b) { return __fmul_rn(a, b); }
SPECRS_DRAW float div32(float a, float b) { return __fdiv_rn(a, b); }
SPECRS_DRAW double add64(double a, double b) { return __dadd_rn(a, b); }
SPECRS_DRAW double mul64(double a, double b) { return __dmul_rn(a, b); }
SPECRS_DRAW double of_u64(uint64_t a) { return __ull2double_rn(a); }
SPECRS_DRAW uint32_t bits32(float a) { return __float_as_uint(a); }
SPECRS_DRAW float float_of(uint32_t a) { return __uint_as_float(a); }
SPECRS_DRAW uint64_t bits64(double a) { return static_cast<uint64_t>(__double_as_longlong(a)); }
SPECRS_DRAW double double_of(uint64_t a) { return __longlong_as_double(static_cast<long long>(a)); }
#else
SPECRS_DRAW float fma32(float a, float b, float c) { return fmaf(a, b, c); }
SPECRS_DRAW float add32(float a, float b) { return a + b; }
SPECRS_DRAW float sub32(float a, float b) { return a - b; }
SPECRS_DRAW float mul32(float a, float b) { return a * b; }
SPECRS_DRAW float div32(float a, float b) { return a / b; }
SPECRS_DRAW double add64(double a, double b) { return a + b; }
SPECRS_DRAW double mul64(double a, double b) { return a * b; }
SPECRS_DRAW double of_u64(uint64_t a) { return static_cast<double>(a); }
SPECRS_DRAW uint32_t bits32(float a) {
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}
SPECRS_DRAW float float_of(uint32_t a) {
    float value;
    memcpy(&value, &a, sizeof value);
    return value;
}
SPECRS_DRAW uint64_t bits64(double a) {
    uint64_t bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}
SPECRS_DRAW double double_of(uint64_t a) {
    double value;
    memcpy(&value, &a, sizeof value);
    return value;
}
#endif

// The top 53 bits of Philox4x32-10 on the counter (position, purpose, 0, 0) under the key seed.
SPECRS_DRAW uint64_t uniform53(uint64_t seed, uint32_t position, uint32_t purpose) {
    uint32_t c0 = position, c1 = purpose, c2 = 0, c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0;
        const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(b);
        c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (static_cast<uint64_t>(c0) << 32 | c1) >> 11;
}

// exp(x) for x <= 0, to about one ulp; below exp(-40) nothing is left in quanta. NaN counts as -40.
SPECRS_DRAW float exp_neg(float given) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held by the low bits
    const float x = given > -40.0f ? given : -40.0f;
    const float t = fma32(x, 1.44269504f, magic);
    const float n = sub32(t, magic);
    const float r = fma32(n, 2.1219444e-4f, fma32(n, -0.6933594f, x));
    float p = fma32(1.9875691e-4f, r, 1.3981999e-3f);
    p = fma32(p, r, 8.333452e-3f);
    p = fma32(p, r, 4.1665796e-2f);
    p = fma32(p, r, 1.6666665e-1f);
    p = fma32(p, r, 0.5f);
    p = add32(fma32(p, mul32(r, r), r), 1.0f);
    return float_of((bits32(t) << 23) + bits32(p));  // p * 2^n
}

// (x - max) / T, at most 0; monotone in x.
SPECRS_DRAW float log_weight(float x, float max, float inv_t) { return mul32(sub32(x, max), inv_t); }

// True if every logit up to the one with this log-weight surely has weight 0: exp(-29) * 2^40 < 1/3.
SPECRS_DRAW bool vanishes(float log_weight) { return log_weight < -29.0f; }

// Quanta of a log-weight. One ulp in [2^12, 2^13) is 2^-40: adding 4096 rounds to the quantum, the bits count the quanta.
SPECRS_DRAW uint64_t weight(float log_weight) {
    return bits64(add64(static_cast<double>(exp_neg(log_weight)), 4096.0)) - 0x40B0000000000000ull;
}

// Smallest integer mass that is at least `p` of `total`, and at least 1. `p` in (0, 1], `total` from 1 on.
SPECRS_DRAW uint64_t mass(double p, uint64_t total) {
    const uint64_t up = static_cast<uint64_t>(ceil(mul64(p, of_u64(total))));
    return up < 1 ? 1 : up > total ? total : up;
}

// floor(u * 2^-53 * total), exactly; below `total`.
SPECRS_DRAW uint64_t fraction(uint64_t u, uint64_t total) {
#ifdef __CUDA_ARCH__
    const uint64_t high = __umul64hi(u, total);
#else
    const uint64_t u_low = static_cast<uint32_t>(u), u_high = u >> 32;
    const uint64_t t_low = static_cast<uint32_t>(total), t_high = total >> 32;
    const uint64_t cross = u_high * t_low + (u_low * t_low >> 32);
    const uint64_t other = u_low * t_high + static_cast<uint32_t>(cross);
    const uint64_t high = u_high * t_high + (cross >> 32) + (other >> 32);
#endif
    return high << 11 | (u * total) >> 53;
}

// Ascending keys are descending logits; 0.0 and -0.0 are one. The upper half of the host's rank key.
SPECRS_DRAW uint32_t rank_of(float x) {
    const uint32_t bits = bits32(add32(x, 0.0f));
    return ~(bits >> 31 ? ~bits : bits | 0x80000000u);
}

// The logit of a rank, with -0.0 as 0.0.
SPECRS_DRAW float logit_of(uint32_t rank) {
    const uint32_t ascending = ~rank;
    return float_of(ascending >> 31 ? ascending & 0x7FFFFFFFu : ~ascending);
}

// The logit of a token seen in prompt or output, `outputs` times in the output.
SPECRS_DRAW float penalised(float x, uint32_t outputs, float repetition, float presence, float frequency) {
    const float y = x > 0.0f ? div32(x, repetition) : mul32(x, repetition);
    return outputs == 0 ? y : sub32(sub32(y, mul32(frequency, static_cast<float>(outputs))), presence);
}

}  // namespace draw
}  // namespace specrs

#undef SPECRS_DRAW
