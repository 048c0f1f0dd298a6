// Decode over dense 16-bit keys: queries as operands, scores of products, and weights as sums of two 16-bit numbers.
#ifndef KVANT_CUDA_ATTEND_DENSE_H
#define KVANT_CUDA_ATTEND_DENSE_H
#include "attend/softmax.h"
#include "attend/work.h"
#include "device/elements.h"
#include "device/fragments.h"

constexpr bool HALF = DTYPE == F16;
// Bytes of a row, and 16-byte loads of a lane that reads its quarter.
constexpr uint ROW = HEAD_DIM * 2;
constexpr uint LOADS = HEAD_DIM / 32;

// GROUP queries as B operands; the remaining columns are zeros. A lane takes coordinates of queries in the order in
// which scores() takes coordinates of keys.
inline void load_queries(const uchar *q, const QueryRows &rows, uint4 (&queries)[LOADS]) {
    const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (uint i = 0; i < LOADS; i++) {
        queries[i] = make_uint4(0, 0, 0, 0);
        if (g < GROUP) {
            queries[i] = *reinterpret_cast<const uint4 *>(q + rows.at(g) * ROW + t * 32 + i / 2 * 128 + i % 2 * 16);
        }
    }
}

// Weights in f16 are scaled up, so that small ones keep their bits.
constexpr float WEIGHT_SCALE = HALF ? 16384.0f : 1.0f;

// The score of a product, in units of log 2.
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

// The weights of a product's 16 keys as operands of row g: of keys 2t and 2t + 1, and of keys 2t + 8 and 2t + 9. Each
// weight is the sum of a leading term and a rest.
struct Weights {
    uint2 leading;
    uint2 rest;
};

// Splits weights, relative to the largest of their row, into two terms. A lane has the weights in the layout of scores:
// keys g and g + 8, rows 2t and 2t + 1.
inline Weights two_terms(const float (&weights)[4], const bool (&seen)[4]) {
    // Both terms are positive, so that an infinite value times either term has one sign. No weight of a visible key may
    // be 0; the error is far below the precision of the output.
    constexpr float LEAST = HALF ? 1.0f / (1 << 24) : 1.0f / (1ull << 60);
    constexpr uint CUT = HALF ? 0x1000 : 0x8000;
    float leading[4], rest[4];
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        const float scaled = weights[c] * WEIGHT_SCALE;
        // Subtracts half a unit and truncates: the rest is at least half a unit.
        const uint bits = max(__float_as_uint(scaled), CUT) - CUT & ~(2 * CUT - 1);
        leading[c] = seen[c] ? max_or_nan(__uint_as_float(bits), LEAST) : 0;
        rest[c] = seen[c] ? fmaxf(scaled - leading[c], LEAST) : 0;
    }
    return {{transpose8(pack<HALF>(leading[0], leading[1])), transpose8(pack<HALF>(leading[2], leading[3]))},
            {transpose8(pack<HALF>(rest[0], rest[1])), transpose8(pack<HALF>(rest[2], rest[3]))}};
}

#endif
