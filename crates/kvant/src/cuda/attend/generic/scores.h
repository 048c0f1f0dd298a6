// Scores of the keys of a tile, and weights of its values, for attend_generic.cu.
#ifndef KVANT_CUDA_ATTEND_GENERIC_SCORES_H
#define KVANT_CUDA_ATTEND_GENERIC_SCORES_H
#include "attend/generic/layout.h"
#include "device/fragments.h"

// A thread's share of the block's softmax state: m and l of its columns, o of its coordinates.
struct Accumulators {
    // By tile of columns: columns 2t and 2t + 1. All warps have equal maxima; l is this lane's part of the sum.
    float m[NT][2];
    float l[NT][2];
    // Coordinates are rows, queries are columns.
    float o[PRODUCTS][NT][4];
    // The largest norm of the values so far, rounded up to a power of two.
    float norm;
};

// A pair of 16-bit numbers, with infinities replaced by the largest finite numbers.
template <bool HALF> inline uint made_finite(uint pair) {
    uint y;
    if constexpr (HALF) {
        asm("{\n.reg .b32 t;\nmin.f16x2 t, %1, %2;\nmax.f16x2 %0, t, %3;\n}" : "=r"(y) : "r"(pair), "r"(0x7BFF7BFF), "r"(0xFBFFFBFF));
    } else {
        asm("{\n.reg .b32 t;\nmin.bf16x2 t, %1, %2;\nmax.bf16x2 %0, t, %3;\n}" : "=r"(y) : "r"(pair), "r"(0x7F7F7F7F), "r"(0xFF7FFF7F));
    }
    return y;
}

// Norm i of those at `norms`.
template <bool CENTRED> inline float norm_at(const uchar *norms, uint i) {
    return CENTRED ? half_to_float(reinterpret_cast<const ushort *>(norms)[i])
                   : reinterpret_cast<const float *>(norms)[i];
}

// S^T of 16 keys: raw products, with the keys' norms.
inline void scores(const Shared &shared, const uchar *buffer, uint group, float (&s)[NT][4]) {
    const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint2 *queries = shared.queries() + lane;
    const uint *table = shared.k_table() + lane % LANE_COPIES;
    const uchar *norms = buffer + K_NORMS;
    float sums[CHAINS][NT][4] = {};
    const uint row = group * 16 + g;
    constexpr uint HALVES = K::BLOCKS == 2 ? 2 : 1;
#pragma unroll
    for (uint half = 0; half < HALVES; half++) {
        constexpr uint LOADS = K::LOADS / HALVES;
        // Chains are registers: their indices must be constants.
        constexpr uint TOGETHER = LOADS % 4 == 0 ? 4 : LOADS;
#pragma unroll (TOGETHER)
        for (uint j = 0; j < LOADS; j++) {
            const uint i = half * LOADS + j;
            typename K::KeyWords x, y;
            K::load_key(buffer, buffer + K_HIGH, row, i, t, x);
            K::load_key(buffer, buffer + K_HIGH, row + 8, i, t, y);
#pragma unroll
            for (uint step = 0; step < K::LOAD_STEPS; step++) {
                uint a[K_PARTS][4];
                K::key_operand(x, y, step, table, a);
                // An infinite coordinate is multiplied by a query's first term only: a later term may be 0, which would
                // make it NaN.
                constexpr bool INFINITE = Q_TERMS > 1 && !K::QUANTISED;
                uint finite[4];
                if (INFINITE) {
#pragma unroll
                    for (uint i = 0; i < 4; i++) {
                        finite[i] = made_finite<K::HALF>(a[0][i]);
                    }
                }
#pragma unroll
                for (uint term = 0; term < Q_TERMS; term++) {
#pragma unroll
                    for (uint n = 0; n < NT; n++) {
                        const uint2 q = queries[((term * STEPS + i * K::LOAD_STEPS + step) * NT + n) * 32];
#pragma unroll
                        for (uint part = 0; part < K_PARTS; part++) {
                            mma<K::HALF>(sums[chain_of(step + j, term, part)][n],
                                         INFINITE && term > 0 && part == 0 ? finite : a[part], q);
                        }
                    }
                }
            }
        }
        const float of_g = K::QUANTISED ? norm_at<K_CENTRED>(norms, row * K::BLOCKS + half) : 1;
        const float of_g8 = K::QUANTISED ? norm_at<K_CENTRED>(norms, (row + 8) * K::BLOCKS + half) : 1;
#pragma unroll
        for (uint n = 0; n < NT; n++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                float sum = 0;
#pragma unroll
                for (uint chain = 0; chain < CHAINS; chain++) {
                    sum += sums[chain][n][c];
                    sums[chain][n][c] = 0;
                }
                if (K::QUANTISED) {
                    sum *= c < 2 ? of_g : of_g8;
                }
                s[n][c] = half == 0 ? sum : s[n][c] + sum;
            }
        }
    }
}

// Scores in units of log 2; minus infinity if the row does not see the key.
inline void shape_scores(const AttendParams &p, const Shared &shared, uint position_g, uint position_g8, bool all,
                         float (&s)[NT][4]) {
    const uint t = threadIdx.x % 4;
    const float cap = p.softcap * 1.4426950408889634f;
#pragma unroll
    for (uint n = 0; n < NT; n++) {
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            const Row &row = shared.rows()[n * 8 + 2 * t + c % 2];
            float score = s[n][c] * row.factor;
            if (SOFTCAP) {
                score = cap * tanhf(score);
            }
            if (!all) {
                const uint position = c < 2 ? position_g : position_g8;
                score = position >= row.seen.first && position < row.seen.end ? score : nothing();
            }
            s[n][c] = score;
        }
    }
}

// The largest norm of this lane's values of 16 keys. `seen`: which of the lane's two keys any row may see. With page
// means, the norms of unseen keys are finite, too, and must be excluded.
inline float largest_norm(const uchar *buffer, uint group, const bool (&seen)[2]) {
    const uint g = threadIdx.x % 32 / 4;
    const uchar *norms = buffer + V_NORMS + group * 16 * V_NORM_BYTES;
    float largest = 0;
#pragma unroll
    for (uint i = 0; i < 2; i++) {
#pragma unroll
        for (uint block = 0; block + 1 <= V::BLOCKS; block++) {
            const float norm = fabsf(norm_at<V_CENTRED>(norms, (g + 8 * i) * V::BLOCKS + block));
            largest = fmaxf(largest, !V_CENTRED || seen[i] ? norm : 0);
        }
    }
    return largest;
}

// Stores the sums of the weights of 16 keys for columns 2t and 2t + 1 of a tile. Each lane has a part of a sum.
inline void leave_masses(const Shared &shared, uint group, uint n, float2 mass) {
    const uint lane = threadIdx.x % 32;
    mass = make_float2(column_sum(mass.x), column_sum(mass.y));
    if (lane < 4) {
        *reinterpret_cast<float2 *>(shared.masses() + group * ROWS + n * 8 + 2 * lane) = mass;
    }
}

// Weights of 16 keys, from their scores and the new maxima, as B operands; adds them to l.
inline void weights(const Shared &shared, const uchar *buffer, uint group, const float (&s)[NT][4], Accumulators &acc) {
    const uint lane = threadIdx.x % 32, g = lane / 4;
    const uchar *norms = buffer + V_NORMS + group * 16 * V_NORM_BYTES;
    float scale[VARIANTS][2];
#pragma unroll
    for (uint variant = 0; variant < VARIANTS; variant++) {
        scale[variant][0] = scale[variant][1] = WEIGHT_SCALE;
        if (V::QUANTISED) {
            const float inverse = WEIGHT_SCALE / acc.norm;
            scale[variant][0] = norm_at<V_CENTRED>(norms, g * V::BLOCKS + variant) * inverse;
            scale[variant][1] = norm_at<V_CENTRED>(norms, (g + 8) * V::BLOCKS + variant) * inverse;
        }
    }
#pragma unroll
    for (uint n = 0; n < NT; n++) {
        float w[4];
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            w[c] = s[n][c] == nothing() ? 0 : exp2_fast(s[n][c] - acc.m[n][c % 2]);
            acc.l[n][c % 2] += w[c];
        }
        if constexpr (V_CENTRED) {
            leave_masses(shared, group, n, make_float2(w[0] + w[2], w[1] + w[3]));
        }
#pragma unroll
        for (uint variant = 0; variant < VARIANTS; variant++) {
            uint low[P_TERMS], high[P_TERMS];
            float scaled[4];
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                // The norm of a value that is not seen may be NaN.
                scaled[c] = s[n][c] == nothing() ? 0 : w[c] * scale[variant][c / 2];
            }
            split<V::HALF, P_TERMS>(scaled[0], scaled[1], low);
            split<V::HALF, P_TERMS>(scaled[2], scaled[3], high);
#pragma unroll
            for (uint term = 0; term < P_TERMS; term++) {
                const uint2 pair = make_uint2(transpose8(low[term]), transpose8(high[term]));
                shared.weights()[(((variant * P_TERMS + term) * KEY_GROUPS + group) * NT + n) * 32 + lane] = pair;
            }
        }
    }
}

#endif
