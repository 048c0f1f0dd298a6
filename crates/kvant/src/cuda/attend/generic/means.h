// Page means in attend_generic.cu: their contributions to scores and to sums of values. Tiles begin at multiples of
// TILE, so that a tile consists of whole pages or is a part of one page, and 16 keys are in one page.
#ifndef KVANT_CUDA_ATTEND_GENERIC_MEANS_H
#define KVANT_CUDA_ATTEND_GENERIC_MEANS_H
#include "attend/generic/scores.h"
#include "attend/generic/tiles.h"

// PAGES_AT_ONCE pages, a lot, are multiplied at a time: the lot of a key, and the index of the key's page in the lot.
inline uint lot_of(uint key) {
    return page_index(key) / PAGES_AT_ONCE;
}
inline uint page_in_lot(uint key) {
    return page_index(key) % PAGES_AT_ONCE;
}

// The mean of page i of a lot; null if the segment has no key of it.
inline const uchar *mean_of(const Planes &planes, const Segment &segment, uint lot, uint i) {
    const uint index = lot * PAGES_AT_ONCE + i;
    if (index < page_index(segment.keys.first) || index > page_index(segment.keys.end - 1)) {
        return nullptr;
    }
    const uint page = segment.pages.page(segment.pages.at(index));
    return page == NONE ? nullptr : planes.means + page_bytes_or_zero(page) + segment.mean;
}

inline float scale_of(const uchar *mean) {
    return mean == nullptr ? 0 : *reinterpret_cast<const float *>(mean + HEAD_DIM);
}

// Stores the products of all queries and a lot's means of keys, scaled, and the scales of its means of values. Codes
// are exact in f16. A barrier must separate this function from the reads of its results.
inline void multiply_means(const Buffers &b, const Shared &shared, const Segment &segment, uint lot) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (V_CENTRED) {
        if (threadIdx.x < PAGES_AT_ONCE) {
            shared.scales()[threadIdx.x] = scale_of(mean_of(b.v, segment, lot, threadIdx.x));
        }
    }
    if constexpr (K_CENTRED) {
        const uchar *means[2] = {mean_of(b.k, segment, lot, g), mean_of(b.k, segment, lot, g + 8)};
        const uint2 *queries = shared.queries() + lane;
        for (uint n = warp; n < NT; n += WARPS) {
            float sums[2][4] = {};
#pragma unroll
            for (uint i = 0; i < K::LOADS; i++) {
#pragma unroll
                for (uint step = 0; step < K::LOAD_STEPS; step++) {
                    uint a[4];
#pragma unroll
                    for (uint j = 0; j < 2; j++) {
                        const uint at = K::key_coord(i, t) + 4 * step;
                        const uint codes = means[j] == nullptr ? 0 : *reinterpret_cast<const uint *>(means[j] + at);
                        a[j] = pack<true>(code_of_four(codes, 0), code_of_four(codes, 1));
                        a[2 + j] = pack<true>(code_of_four(codes, 2), code_of_four(codes, 3));
                    }
#pragma unroll
                    for (uint term = 0; term < Q_TERMS; term++) {
                        const uint2 q = queries[((term * STEPS + i * K::LOAD_STEPS + step) * NT + n) * 32];
                        mma<true>(sums[term > 0], a, q);
                    }
                }
            }
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                const uint at = (g + c / 2 * 8) * ROWS + n * 8 + 2 * t + c % 2;
                shared.products()[at] = (sums[0][c] + sums[1][c]) * scale_of(means[c / 2]);
            }
        }
    }
}

// Adds to the raw products of 16 keys, from `key` on, the product of their page's mean.
inline void add_products(const Shared &shared, uint key, float (&s)[NT][4]) {
    const float *products = shared.products() + page_in_lot(key) * ROWS + threadIdx.x % 4 * 2;
#pragma unroll
    for (uint n = 0; n < NT; n++) {
        const float2 two = *reinterpret_cast<const float2 *>(products + n * 8);
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            s[n][c] += c % 2 == 0 ? two.x : two.y;
        }
    }
}

// The minimum norm to which sums over a page with a mean are relative. It keeps coordinates of the mean, at most 127
// times its scale, in range; values 2^20 times smaller keep their bits.
inline float norm_of_mean(const Shared &shared, uint key) {
    return shared.scales()[page_in_lot(key)] * (127.0f / (1 << 20));
}

// Adds to O^T, for the tile in `buffer`, the means of its pages times the sums of their weights.
inline void add_means(const Shared &shared, const uchar *buffer, Accumulators &acc) {
    constexpr uint GROUPS = KEY_GROUPS / TILE_PAGES;
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (uint page = 0; page < TILE_PAGES; page++) {
        const uchar *mean = buffer + V_MEANS + page * MEAN_BYTES;
        const float scale = scale_of(mean) * (WEIGHT_SCALE / acc.norm);
        float codes[2 * PRODUCTS];
#pragma unroll
        for (uint e = 0; e < 2 * PRODUCTS; e++) {
            const uint code = mean[warp * SLICE + Values::coord(e, g)];
            codes[e] = code_of_four(code, 0);
        }
#pragma unroll
        for (uint n = 0; n < NT; n++) {
#pragma unroll
            for (uint column = 0; column < 2; column++) {
                float mass = 0;
#pragma unroll
                for (uint i = 0; i < GROUPS; i++) {
                    mass += shared.masses()[(page * GROUPS + i) * ROWS + n * 8 + 2 * t + column];
                }
                // The mean of a page that the row does not see may be NaN.
                const float factor = mass == 0 ? 0 : mass * scale;
#pragma unroll
                for (uint i = 0; i < PRODUCTS; i++) {
                    acc.o[i][n][column] = fmaf(factor, codes[2 * i], acc.o[i][n][column]);
                    acc.o[i][n][2 + column] = fmaf(factor, codes[2 * i + 1], acc.o[i][n][2 + column]);
                }
            }
        }
    }
}

#endif
