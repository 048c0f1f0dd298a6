// Page means in attend_short_quantised.cu: their contributions to scores and to sums of values. A block's keys are in
// few pages (MAX_PAGES), whose means are in shared memory, one copied by each warp.
#ifndef KVANT_CUDA_ATTEND_SHORT_QUANTISED_MEANS_H
#define KVANT_CUDA_ATTEND_SHORT_QUANTISED_MEANS_H
#include "attend/short_quantised/copies.h"
#include "attend/short_quantised/queries.h"
#include "attend/short_quantised/values.h"

constexpr bool HAS_MEANS = K_CENTRED || V_CENTRED;
static_assert(!HAS_MEANS || PAGE_SHIFT >= 5, "attend: the pages of a block's keys, 128 at most");
constexpr uint MAX_PAGES = 8;
// A row has the codes, then the scale. Rows that lanes read together have no bank conflicts.
constexpr uint MEAN_PITCH = HEAD_DIM + 16;
constexpr uint K_MEANS = K_CENTRED ? MAX_PAGES * MEAN_PITCH : 16;
constexpr uint V_MEANS = V_CENTRED ? MAX_PAGES * MEAN_PITCH : 16;

inline float scale_of_mean(const uchar *row) {
    return *reinterpret_cast<const float *>(row + HEAD_DIM);
}

// The index, among the block's pages, of the page with its key `i`.
inline uint page_of_key(const Own &own, uint i) {
    return page_index(own.slot + i) - page_index(own.slot);
}

// The page whose means the warp copies; NONE if the block has no key of it, or if the page does not exist.
inline uint page_of_warp(const Own &own) {
    const uint i = threadIdx.x / 32;
    if (!HAS_MEANS || own.count == 0 || i > page_of_key(own, own.count - 1)) {
        return NONE;
    }
    return own.pages.of(own.slot + (i << PAGE_SHIFT));
}

// Begins to copy a mean of one side; zeros if the page does not exist.
inline void copy_mean(const uchar *means, uint page, uint head, uchar *rows) {
    const uint to = shared_address(rows + threadIdx.x / 32 * MEAN_PITCH);
    const uchar *from = means + page_bytes_or_zero(page) + head / SHARES * mean_bytes(HEAD_DIM);
    for (uint word = threadIdx.x % 32; word <= HEAD_DIM / 4; word += 32) {
        copy_async<4>(to + word * 4, from + word * 4, page != NONE);
    }
}

// The products of query rows 2t and 2t + 1 with two means, rows x and y. They include the means' scales, and have the
// unit of products with centroids.
inline void multiply_means(const uchar *x, const uchar *y, const uint4 *queries, float (&s)[4]) {
    const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float sums[2][4] = {};
#pragma unroll
    for (uint i = 0; i < HEAD_DIM / 16; i += 4) {
        const uint coord = i / (CHUNK / 16) * CHUNK + KeyCodes::coord(t, i % (CHUNK / 16) * 4);
        uint of_x[4], of_y[4];
        read_bytes<16>(x + coord, of_x);
        read_bytes<16>(y + coord, of_y);
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const uint2 low = halves_of_mean(of_x[j]), high = halves_of_mean(of_y[j]);
            const uint a[4] = {low.x, high.x, low.y, high.y};
            const uint4 q = g < GROUP ? queries[(i + j) / 2 * 32 + lane] : make_uint4(0, 0, 0, 0);
            mma<true>(sums[j % 2], a, j % 2 == 0 ? make_uint2(q.x, q.y) : make_uint2(q.z, q.w));
        }
    }
    const float scales[2] = {scale_of_mean(x) * KeyTable::SCALE, scale_of_mean(y) * KeyTable::SCALE};
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        s[c] = (sums[0][c] + sums[1][c]) * scales[c / 2];
    }
}

// The sums of a warp's weights by pages: a lane gets those of page g and query rows 2t and 2t + 1.
inline float2 sum_by_pages(const Own &own, const float (&weights)[4]) {
    const uint warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    // A operands: 1 for keys in page g, 0 for other keys.
    uint a[4] = {};
#pragma unroll
    for (uint i = 0; i < 2; i++) {
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            const uint page = page_of_key(own, (2 * t + j) * own.length + warp * 2 + i);
            a[2 * i] |= page == g ? 0x3C00u << 16 * j : 0;
        }
    }
    // Two f16 terms for each sum, because a mean may be large.
    uint first[2], second[2];
    split<true>(weights[0], weights[1], first);
    split<true>(weights[2], weights[3], second);
    float sums[4] = {};
#pragma unroll
    for (uint term = 0; term < 2; term++) {
        mma<true>(sums, a, make_uint2(transpose8(first[term]), transpose8(second[term])));
    }
    return make_float2(sums[0], sums[1]);
}

// The means of values of a warp's slice times weights. A lane has weights of query row g and pages 2t and 2t + 1.
struct MeanSums {
    // Layout of the sums of values, in units of `unit`.
    float o[4][4];
    float unit;

    MeanSums() : o(), unit(0) {}

    void add(const uchar *rows, uint slice, float2 masses) {
        const uint g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const uchar *x = rows + 2 * t * MEAN_PITCH, *y = x + MEAN_PITCH;
        const float scales[2] = {scale_of_mean(x), scale_of_mean(y)};
        float largest = fmaxf(fabsf(scales[0]), fabsf(scales[1]));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
        // The weights of a block's keys are at most 128.
        constexpr float UP = 256;
        const float power = power_above(largest), up = UP * inverse_of_power(power);
        unit = power * (1 / UP);
        // A mean whose keys have no weight may be NaN.
        uint terms[2];
        split<true>(masses.x == 0 ? 0 : masses.x * (scales[0] * up), masses.y == 0 ? 0 : masses.y * (scales[1] * up), terms);
        uint codes[2][2];
        read_bytes<8>(x + slice * SLICE + 8 * g, codes[0]);
        read_bytes<8>(y + slice * SLICE + 8 * g, codes[1]);
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            const uint4 of = operands_of_means(codes[0][i / 2], codes[1][i / 2], i % 2 == 1);
            const uint a[4] = {of.x, of.y, of.z, of.w};
            mma<true>(o[i], a, make_uint2(terms[0], terms[1]));
        }
    }
};

#endif
