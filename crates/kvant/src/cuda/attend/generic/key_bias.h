// The key bias (device/key_bias.h) in attend_generic.cu: keys are stored without it, so its product with the query is
// added to scores.
//
// The product of a query and the turned bias is a sum over pairs of coordinates, x cos + y sin. x and y are computed
// once for each query row (leave_products). Rotated to a page's first position, they are B operands; the rotations
// within a page are A operands, equal for all pages. Both operands are sums of two f16 numbers.
#ifndef KVANT_CUDA_ATTEND_GENERIC_KEY_BIAS_H
#define KVANT_CUDA_ATTEND_GENERIC_KEY_BIAS_H
#include "attend/generic/layout.h"
#include "device/fragments.h"

// Stores x and y of a query row, scaled into the range of f16; returns the inverse scale. A lane holds coordinates
// lane, lane + 32 and so on of the query, before its Hadamard rotation. Missing rows are zeros. A warp calls it.
inline float leave_products(const Buffers &b, const Shared &shared, uint r, uint head, const float (&q)[LANE_COORDS]) {
    const uint lane = threadIdx.x % 32;
    constexpr uint HALF_DIM = HEAD_DIM / 2, PAIRS = (HALF_DIM + 31) / 32;
    float *to = shared.biased(r);
#pragma unroll
    for (uint i = 0; i < LANE_COORDS; i++) {
        to[b.bias.places[lane + 32 * i]] = q[i];
    }
    __syncwarp();
    const float *pairs = b.bias.pairs + ulong(head) * HEAD_DIM;
    float x[PAIRS], y[PAIRS], largest = 0;
#pragma unroll
    for (uint k = 0; k < PAIRS; k++) {
        const uint i = lane + 32 * k;
        const float first = to[i], second = to[HALF_DIM + i];
        x[k] = first * pairs[i] + second * pairs[HALF_DIM + i];
        y[k] = second * pairs[i] - first * pairs[HALF_DIM + i];
        largest = fmaxf(largest, fmaxf(fabsf(x[k]), fabsf(y[k])));
    }
#pragma unroll
    for (uint step = 1; step < 32; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
    }
    // After the rotation to a position they are up to sqrt(2) times larger.
    const float2 range = to_half_range(largest, 1);
#pragma unroll
    for (uint k = 0; k < PAIRS; k++) {
        to[lane + 32 * k] = x[k] * range.x;
        to[HALF_DIM + lane + 32 * k] = y[k] * range.x;
    }
    return range.y;
}

// Adds to the raw products of 16 keys, from `key` on, the products of the queries and the keys' bias.
inline void add_bias(const Buffers &b, const Shared &shared, uint key, float (&s)[NT][4]) {
    const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr uint HALF_DIM = HEAD_DIM / 2;
    const float *start = b.bias.starts + ulong(page_index(key)) * HEAD_DIM;
    const float *steps = b.bias.steps + ulong(slot_in_page(key) + g) * HEAD_DIM;
    float sums[NT][2][4] = {};
#pragma unroll 2
    for (uint step = 0; step < HEAD_DIM / 16; step++) {
        // Two terms of A: the cosine and sine of pairs i and i + 4, of keys g and g + 8.
        const uint i = step * 8 + t;
        uint a[2][4];
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const float *turn = steps + (j % 2) * (8 * HEAD_DIM) + i + j / 2 * 4;
            uint terms[2];
            split<true, 2>(turn[0], turn[HALF_DIM], terms);
            a[0][j] = terms[0];
            a[1][j] = terms[1];
        }
        const float cosine[2] = {start[i], start[i + 4]}, sine[2] = {start[HALF_DIM + i], start[HALF_DIM + i + 4]};
#pragma unroll
        for (uint n = 0; n < NT; n++) {
            const float *row = shared.biased(n * 8 + g) + i;
            uint terms[2][2];
#pragma unroll
            for (uint j = 0; j < 2; j++) {
                const float x = row[4 * j], y = row[HALF_DIM + 4 * j];
                split<true, 2>(x * cosine[j] + y * sine[j], y * cosine[j] - x * sine[j], terms[j]);
            }
            const uint2 high = make_uint2(terms[0][0], terms[1][0]), low = make_uint2(terms[0][1], terms[1][1]);
            mma<true>(sums[n][0], a[0], high);
            mma<true>(sums[n][1], a[1], high);
            mma<true>(sums[n][1], a[0], low);
        }
    }
#pragma unroll
    for (uint n = 0; n < NT; n++) {
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            s[n][c] += (sums[n][0][c] + sums[n][1][c]) * shared.bias_factors()[n * 8 + 2 * t + c % 2];
        }
    }
}

#endif
