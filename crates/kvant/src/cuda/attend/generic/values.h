// Weighted sums of a tile's values, for attend_generic.cu.
#ifndef KVANT_CUDA_ATTEND_GENERIC_VALUES_H
#define KVANT_CUDA_ATTEND_GENERIC_VALUES_H
#include "attend/generic/scores.h"
#include "attend/generic/tiles.h"

// Sums of V^T P^T, by coordinates and query columns. Small terms have sums of their own with SMALL_WEIGHTS.
constexpr bool SMALL_WEIGHTS = OUT_DTYPE == F32 && P_TERMS * V_PARTS > 1;
using Sums = float[SMALL_WEIGHTS ? 2 : 1][PRODUCTS][NT][4];

// Adds the products of a tile, for this warp's slice. `filter` may change operands. It gets the group of 16 keys, the
// operands, whether they are multiplied by a later term of the weights, and that term.
template <typename Filter>
inline void multiply(const Shared &shared, const uchar *buffer, Sums &sums, Filter filter) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint slice = warp * SLICE;
    const uint variant = VARIANTS == 2 ? slice / 256 : 0;
    const uint2 *weights = shared.weights() + variant * P_TERMS * KEY_GROUPS * NT * 32 + lane;
    const uint *table = shared.v_table() + lane % LANE_COPIES;
#pragma unroll 2
    for (uint group = 0; group < KEY_GROUPS; group++) {
        uint2 w[P_TERMS][NT];
#pragma unroll
        for (uint term = 0; term < P_TERMS; term++) {
#pragma unroll
            for (uint n = 0; n < NT; n++) {
                w[term][n] = weights[((term * KEY_GROUPS + group) * NT + n) * 32];
            }
        }
#pragma unroll
        for (uint i = 0; i < Values::LOADS; i++) {
            Values::operands(buffer, buffer + V_HIGH, group * 16, slice, i, g, t, table,
                             [&](uint product, const uint(&a)[V_PARTS][4]) {
#pragma unroll
                                 for (uint part = 0; part < V_PARTS; part++) {
#pragma unroll
                                     for (uint term = 0; term < P_TERMS; term++) {
                                         uint kept[4] = {a[part][0], a[part][1], a[part][2], a[part][3]};
                                         filter(group, kept, term > 0);
#pragma unroll
                                         for (uint n = 0; n < NT; n++) {
                                             const bool small = SMALL_WEIGHTS && part + term > 0;
                                             mma<V::HALF>(sums[small][product][n], kept, w[term][n]);
                                         }
                                     }
                                 }
                             });
        }
    }
}

inline bool is_finite(float x) {
    return (__float_as_uint(x) & 0x7F800000) != 0x7F800000;
}

// The halves of a pair that are finite, zeros in place of the others.
inline uint keep_finite(uint pair) {
    constexpr uint EXPONENT = V::HALF ? 0x7C00 : 0x7F80;
    const uint low = (pair & EXPONENT) == EXPONENT ? 0 : 0xFFFF;
    const uint high = (pair >> 16 & EXPONENT) == EXPONENT ? 0 : 0xFFFF0000;
    return pair & (low | high);
}

// As `multiply`, for values that are not finite: row by row, over the keys that the row sees, because 0 times infinity
// is NaN. An infinite value is multiplied by the leading term of the weight only, because the terms differ in sign.
inline void multiply_by_rows(const Buffers &b, const Shared &shared, const uchar *buffer, const Segment &segment, uint first,
                             Sums &sums) {
    const uint t = threadIdx.x % 4;
#pragma unroll 1
    for (uint r = 0; r < ROWS; r++) {
        const Range seen = shared.rows()[r].seen;
        Sums of_row = {};
        multiply(shared, buffer, of_row, [&](uint group, uint(&a)[4], bool small) {
            uint mask[2] = {0, 0};
#pragma unroll
            for (uint k = 0; k < 4; k++) {
                const uint position = segment.position(b, first, group * 16 + 2 * t + k % 2 + k / 2 * 8);
                const bool sees = position >= seen.first && position < seen.end;
                mask[k / 2] |= sees ? 0xFFFF << 16 * (k % 2) : 0;
            }
#pragma unroll
            for (uint j = 0; j < 4; j++) {
                a[j] = (small ? keep_finite(a[j]) : a[j]) & mask[j / 2];
            }
        });
        if (r % 8 / 2 == t) {
#pragma unroll
            for (uint n = 0; n < NT; n++) {
#pragma unroll
                for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
                    for (uint c = 0; c < 4; c++) {
                        if (n == r / 8 && c % 2 == r % 2) {
                            sums[0][i][n][c] = of_row[0][i][n][c] + (SMALL_WEIGHTS ? of_row[SMALL_WEIGHTS][i][n][c] : 0);
                            if (SMALL_WEIGHTS) {
                                sums[SMALL_WEIGHTS][i][n][c] = 0;
                            }
                        }
                    }
                }
            }
        }
    }
}

// O^T += V^T P^T over the tile that begins with key `first`.
inline void add_values(const Buffers &b, const Shared &shared, const uchar *buffer, const Segment &segment, uint first,
                       Accumulators &acc) {
    Sums sums = {};
    multiply(shared, buffer, sums, [](uint, uint(&)[4], bool) {});
    if (!V::QUANTISED) {
        float check = 0;
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
            for (uint n = 0; n < NT; n++) {
#pragma unroll
                for (uint c = 0; c < 4; c++) {
                    check += (sums[0][i][n][c] + (SMALL_WEIGHTS ? sums[SMALL_WEIGHTS][i][n][c] : 0)) * 0.0f;
                }
            }
        }
        if (__any_sync(0xFFFFFFFF, !is_finite(check))) {
            multiply_by_rows(b, shared, buffer, segment, first, sums);
        }
    }
#pragma unroll
    for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
        for (uint n = 0; n < NT; n++) {
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                acc.o[i][n][c] += sums[0][i][n][c] + (SMALL_WEIGHTS ? sums[SMALL_WEIGHTS][i][n][c] : 0);
            }
        }
    }
}

#endif
