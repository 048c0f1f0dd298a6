// Page means in attend_quantised.cu: their contributions to scores and to sums of values. A warp's groups are
// consecutive, so the groups of a page are, too. Eight pages, a lot, are multiplied at a time: as rows of a product
// with the queries before the lot's first group, and as columns of a product with the weights after its last group.
#ifndef KVANT_CUDA_ATTEND_QUANTISED_MEANS_H
#define KVANT_CUDA_ATTEND_QUANTISED_MEANS_H
#include "attend/quantised/scores.h"

static_assert(!HAS_MEANS || PAGE_SHIFT > 0, "attend: means are of pages");

// A warp's lot of means.
struct Means {
    // The rows of keys' and values' means of the head and the warp's block, in page 0.
    const uchar *k;
    const uchar *v;
    // The lot's first page, counted from the sequence's first page. Lane i has the page i of the lot, and the entry of
    // page i of the next lot, looked up a lot ahead.
    uint first;
    uint page;
    uint entry_after;

    // Looks up the entries of the lot that begins with page `from`; the warp has keys up to those of page `last`.
    void look_up(const Pages &pages, uint from, uint last) {
        const uint index = from + threadIdx.x % LOT;
        first = from - LOT;
        entry_after = index <= last ? pages.at(index) : NONE;
    }
    // Begins the lot that was looked up: begins to copy its means of keys.
    void begin(const Pages &pages, uint last) {
        page = pages.page(entry_after);
        if (K_CENTRED) {
            copy(k);
        }
        look_up(pages, first + 2 * LOT, last);
    }
    // Begins to copy the lot's means of one side; the mean of a missing page is zeros.
    void copy(const uchar *means) const {
        const uint lane = threadIdx.x % 32, to = shared_address(row(0));
        // Offset of the scale from the warp's block.
        const uint at_scale = HEAD_DIM - threadIdx.x / 32 % TEAM * CHUNK;
#pragma unroll 4
        for (uint i = 0; i < LOT; i++) {
            const uint of_row = __shfl_sync(0xFFFFFFFF, page, i);
            const uchar *from = means + page_bytes_or_zero(of_row);
#pragma unroll
            for (uint word = 0; word < CHUNK / 4; word += 32) {
                copy_async<4>(to + i * MEAN_PITCH + (word + lane) * 4, from + (word + lane) * 4, of_row != NONE);
            }
        }
        if (lane < LOT) {
            copy_async<4>(to + lane * MEAN_PITCH + AT_MEAN_SCALE, means + page_bytes_or_zero(page) + at_scale, page != NONE);
        }
    }
    // In shared memory, page `i` of the lot: its codes, then the scale and the products.
    static uchar *row(uint i) {
        return box_of(threadIdx.x / 32) + AT_BOX_MEANS + i * MEAN_PITCH;
    }
    static float scale(uint i) {
        return *reinterpret_cast<const float *>(row(i) + AT_MEAN_SCALE);
    }
    // By columns 2t and 2t + 1.
    static float2 *products(uint i) {
        return reinterpret_cast<float2 *>(row(i) + AT_MEAN_PRODUCTS) + threadIdx.x % 4;
    }

    // The products of the queries and the means of keys, in units of those with centroids: raw scores.
    static void multiply(const Queries &queries, uint &turn) {
        const uint g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        float sums[2][4] = {};
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i += 4) {
            uint codes[4];
            read_bytes<16>(row(g) + KeyCodes::coord(t, 4 * i), codes);
#pragma unroll
            for (uint j = 0; j < 4; j++) {
                const uint2 halves = halves_of_mean(codes[j]);
                const uint a[4] = {halves.x, 0, halves.y, 0};
                const uint4 q = queries.at((i + j) / 2);
                mma<true>(sums[j % 2], a, j % 2 == 0 ? make_uint2(q.x, q.y) : make_uint2(q.z, q.w));
            }
        }
        const float unit = scale(g) * Table<K_CODEC>::SCALE;
        float s[4] = {(sums[0][0] + sums[1][0]) * unit, (sums[0][1] + sums[1][1]) * unit, 0, 0};
        add_up(s, turn);
        *products(g) = make_float2(s[0], s[1]);
    }
    // Adds the product of a page's mean to the scores of its keys.
    static void add_product(uint i, float (&s)[4]) {
        const float2 x = *products(i);
        s[0] += x.x;
        s[1] += x.y;
        s[2] += x.x;
        s[3] += x.y;
    }

    // Called when the weights of a page are complete: stores their sum.
    static void end_page(uint i, Accumulators &acc) {
        const uint g = threadIdx.x % 32 / 4;
#pragma unroll
        for (uint c = 0; c < 2; c++) {
            acc.l[c] += acc.of_page[c];
            const float mass = column_sum(acc.of_page[c]);
            acc.masses[c] = g == i ? mass : acc.masses[c];
            acc.of_page[c] = 0;
        }
    }
    // O^T += the means of values times the sums of their pages' weights.
    static void add_values(Accumulators &acc) {
        const uint g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const float own = scale(g);
        float largest = fabsf(own);
#pragma unroll
        for (uint step = 4; step < 32; step *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
        }
        // Sums are in range, and values 2^20 times smaller than the mean's coordinates keep their bits.
        const float unit = power_above(largest), grown = fmaxf(acc.norm, unit * (1.0f / (1 << 13)));
        const float decay = acc.norm * inverse_of_power(grown);
        acc.norm = grown;
        // A page has up to 256 keys, and weights are up to 1.
        constexpr float UP = 128;
        const float factor = own * (UP * inverse_of_power(unit));
        const float unscale = unit * inverse_of_power(grown) * (WEIGHT_SCALE * Table<V_CODEC>::SCALE / UP);
        // A mean whose keys have no weight may be NaN. Two f16 terms, so that large means are not rounded to 11 bits.
        uint weights[2];
        split<true>(acc.masses[0] == 0 ? 0 : acc.masses[0] * factor, acc.masses[1] == 0 ? 0 : acc.masses[1] * factor, weights);
        acc.masses[0] = acc.masses[1] = 0;
        const uint leading = transpose8(weights[0]), rest = transpose8(weights[1]);
#pragma unroll
        for (uint i = 0; i < PRODUCTS; i += 8) {
            uint codes[2][4];
            read_bytes<16>(row(2 * t) + ValueCodes::coord(g, 2 * i), codes[0]);
            read_bytes<16>(row(2 * t + 1) + ValueCodes::coord(g, 2 * i), codes[1]);
#pragma unroll
            for (uint j = 0; j < 8; j++) {
                const uint4 of = operands_of_means(codes[0][j / 2], codes[1][j / 2], j % 2 == 1);
                const uint a[4] = {of.x, of.y, of.z, of.w};
                float sums[4] = {};
                mma<true>(sums, a, make_uint2(leading, rest));
#pragma unroll
                for (uint c = 0; c < 4; c++) {
                    acc.o[i + j][c] = acc.o[i + j][c] * decay + sums[c] * unscale;
                }
            }
        }
    }
};

#endif
