// From products of queries and dense keys to scores, and from these to weights that are sums of two 16-bit numbers.
#ifndef KVANT_ATTEND_WEIGHTS_H
#define KVANT_ATTEND_WEIGHTS_H
#include "attend_plan.h"
#include "attend_softmax.h"
#include "fragments.h"

constexpr bool HALF = DTYPE == F16;

// Weights in f16 are scaled up, so that small ones keep their bits.
constexpr float WEIGHT_SCALE = HALF ? 16384.0f : 1.0f;

// In units of log 2.
inline float score_of(const AttendParams &p, float product) {
    if (SOFTCAP) {
        return p.softcap * LOG2_E * tanhf(product * (p.scale / p.softcap));
    }
    return product * (p.scale * LOG2_E);
}

inline float max_or_nan(float a, float b) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
    return m;
}

// The weights of a product's 16 keys: of keys g and g + 8 by query rows 2t and 2t + 1, as the tensor cores leave scores. Then
// by row g, of keys 2t and 2t + 1, and of 2t + 8 and 2t + 9: leading terms and the rest.
struct Weights {
    uint2 leading;
    uint2 rest;
};

// Weights are relative to the largest of their row.
inline Weights two_terms(const float (&weights)[4], const bool (&seen)[4]) {
    // Both terms are above zero: an infinite value times either has the same sign. So no weight of a key that is seen may
    // vanish; what that adds is far below what the output can show.
    constexpr float LEAST = HALF ? 1.0f / (1 << 24) : 1.0f / (1ull << 60);
    constexpr uint CUT = HALF ? 0x1000 : 0x8000;
    float leading[4], rest[4];
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        const float scaled = weights[c] * WEIGHT_SCALE;
        // Half a unit less, cut off: what is left is half a unit at least.
        const uint bits = max(__float_as_uint(scaled), CUT) - CUT & ~(2 * CUT - 1);
        leading[c] = seen[c] ? max_or_nan(__uint_as_float(bits), LEAST) : 0;
        rest[c] = seen[c] ? fmaxf(scaled - leading[c], LEAST) : 0;
    }
    return {{transpose8(pack<HALF>(leading[0], leading[1])), transpose8(pack<HALF>(leading[2], leading[3]))},
            {transpose8(pack<HALF>(rest[0], rest[1])), transpose8(pack<HALF>(rest[2], rest[3]))}};
}

#endif
