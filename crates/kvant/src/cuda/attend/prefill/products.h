// The products of attend_prefill.cu: scores, weights, sums of values.
#ifndef KVANT_CUDA_ATTEND_PREFILL_PRODUCTS_H
#define KVANT_CUDA_ATTEND_PREFILL_PRODUCTS_H
#include "attend/prefill/copies.h"
#include "attend/softmax.h"
#include "device/products.h"

// Weights in f16 are scaled up, so that small ones keep their bits.
constexpr int WEIGHT_BITS = HALF ? 14 : 0;

// A thread's share of the work: of rows g and g + 8 of its warp the maximum, its part of the sum, and the output.
struct Work {
    float m[2];
    float l[2];
    float o[CHUNKS * PARTS][WIDTH / 2];
};

// The positions that a thread's rows, and all of its warp's rows, see of a segment.
struct Seen {
    Range row[2];
    Range all;
    // The end of the segment's keys.
    uint end;
    // Over pages: those of the sequence.
    Pages pages;

    // Over pages: the lane's entry for the tile that begins with `first` (entry_of_lane), and which units of 16 keys of
    // the tile pages hold, as bits, from the entries of all lanes.
    uint entry(uint first) const {
        return entry_of_lane(pages, first, end);
    }
    uint held(uint entry) const {
        return PAGE_SHIFT > 0 ? __ballot_sync(0xFFFFFFFF, pages.page(entry) != NONE) : 0;
    }
    static bool holds(uint held, uint unit) {
        return PAGE_SHIFT == 0 || (held >> unit & 1) != 0;
    }
    static bool holds_all(uint held) {
        return PAGE_SHIFT == 0 || held == (1u << TILE / 16) - 1;
    }

    // Whether all of the warp's rows see all keys of the tile that begins with `first`.
    bool all_see(uint first) const {
        return first >= all.first && first < all.end && all.end - first >= TILE;
    }
};

// The item's row that is the thread's first (c = 0) or second (1).
inline uint own_row(uint c) {
    return (SHARED_ROWS ? 0 : threadIdx.x / 128 * 64) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * c;
}

inline void clear(Work &work) {
    work.m[0] = work.m[1] = nothing();
    work.l[0] = work.l[1] = 0;
#pragma unroll
    for (uint i = 0; i < CHUNKS * PARTS; i++) {
#pragma unroll
        for (uint j = 0; j < WIDTH / 2; j++) {
            work.o[i][j] = 0;
        }
    }
}

// hold() makes the scaling end before the products that add to it begin: compilers move arithmetic over their fence.
inline void scale(Work &work, const float (&f)[2]) {
#pragma unroll
    for (uint i = 0; i < CHUNKS * PARTS; i++) {
#pragma unroll
        for (uint j = 0; j < WIDTH / 2; j++) {
            work.o[i][j] *= f[j / 2 % 2];
        }
        hold(work.o[i]);
    }
}

inline void release(uint base, uint stage) {
    barrier_arrive_warp(base + AT_FREE + stage * 8);
}

// Products of warps are done when they have begun: their chunk is released at once.
inline void release_if_done(uint base, uint stage) {
    if constexpr (!WARPGROUP_PRODUCTS) {
        release(base, stage);
    }
}

// Begins S = q K^T for the tile at the cursor, and releases all chunks of keys except the last.
inline void begin_scores(uint base, Copier &copier, Cursor &cursor, float (&s)[TILE / 2]) {
    const uint queries = base + (SHARED_ROWS ? 0 : threadIdx.x / 128 * 64 * 128);
#pragma unroll
    for (uint chunk = 0; chunk < CHUNKS; chunk++) {
        copier.next();
        barrier_wait(base + AT_FULL + cursor.stage * 8, cursor.parity);
        products_begin();
        const uint keys = base + AT_RING + cursor.stage * CHUNK;
#pragma unroll
        for (uint i = 0; i < COLUMNS / 16; i++) {
            const ulong a = matrix(queries + (chunk * COLUMNS / 64 + i / 4) * Q_BLOCK + i % 4 * 32, 16);
            const ulong b = matrix(keys + i / 4 * BLOCK + i % 4 * 32, 16);
            multiply<HALF>(s, a, b, chunk + i > 0);
        }
        products_commit();
        if (WARPGROUP_PRODUCTS && chunk > 0) {
            products_wait<1>();
            release(base, cursor.before());
        }
        release_if_done(base, cursor.stage);
        cursor.next();
    }
}

// Waits for the products, and releases the last chunk of keys; the cursor is behind it.
inline void end_scores(uint base, const Cursor &cursor, float (&s)[TILE / 2]) {
    products_wait<0>();
    hold(s);
    if constexpr (WARPGROUP_PRODUCTS) {
        release(base, cursor.before());
    }
}

// Begins O += P V for the tile at the cursor.
inline void begin_values(uint base, Copier &copier, Cursor &cursor, const uint (&w)[TILE / 16][4], Work &work) {
    const uint own_block = SHARED_ROWS ? threadIdx.x / 128 * BLOCK : 0;
#pragma unroll
    for (uint chunk = 0; chunk < CHUNKS; chunk++) {
        copier.next();
        barrier_wait(base + AT_FULL + cursor.stage * 8, cursor.parity);
        products_begin();
        const uint values = base + AT_RING + cursor.stage * CHUNK + own_block;
#pragma unroll
        for (uint i = 0; i < TILE / 16; i++) {
#pragma unroll
            for (uint part = 0; part < PARTS; part++) {
                const ulong b = matrix(values + part * (WIDTH / 64) * BLOCK + i * 2048, BLOCK);
                multiply_rows<HALF>(work.o[chunk * PARTS + part], w[i], b);
            }
        }
        products_commit();
        release_if_done(base, cursor.stage);
        cursor.next();
    }
}

// Waits for the products, and releases their chunks.
inline void end_values(uint base, Cursor used, Work &work) {
    products_wait<0>();
#pragma unroll
    for (uint i = 0; i < CHUNKS * PARTS; i++) {
        hold(work.o[i]);
    }
    if constexpr (WARPGROUP_PRODUCTS) {
#pragma unroll
        for (uint i = 0; i < CHUNKS; i++) {
            release(base, used.stage);
            used.next();
        }
    }
}

// From scores to weights, and the factors of what was summed before. Pages hold the units `held`.
inline void soften(const AttendParams &p, const Seen &seen, uint first, uint held, float (&s)[TILE / 2], Work &work,
                   float (&f)[2]) {
    const uint t = threadIdx.x % 4;
    float factor = p.scale * LOG2_E;
    if (SOFTCAP) {
        factor = p.softcap * LOG2_E;
        const float inner = p.scale / p.softcap;
#pragma unroll
        for (uint i = 0; i < TILE / 2; i++) {
            s[i] = tanhf(s[i] * inner);
        }
    }
    if (!(seen.holds_all(held) && seen.all_see(first))) {
#pragma unroll
        for (uint i = 0; i < TILE / 2; i++) {
            const Range row = seen.row[i / 2 % 2];
            const uint position = first + i / 4 * 8 + 2 * t + i % 2;
            s[i] = position >= row.first && position < row.end && seen.holds(held, i / 8) ? s[i] : nothing();
        }
    }
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        float m = fmaxf(s[2 * c], s[2 * c + 1]);
#pragma unroll
        for (uint i = 4; i < TILE / 2; i += 4) {
            m = fmaxf(m, fmaxf(s[i + 2 * c], s[i + 2 * c + 1]));
        }
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, 2));
        m = fmaxf(work.m[c], m * factor);
        f[c] = factor_of(work.m[c], m);
        work.m[c] = m;
        const float shift = (m == nothing() ? 0 : m) - WEIGHT_BITS;
        float l = 0;
#pragma unroll
        for (uint i = 0; i < TILE / 2; i += 4) {
#pragma unroll
            for (uint j = 2 * c; j < 2 * c + 2; j++) {
                s[i + j] = exp2_fast(fmaf(s[i + j], factor, -shift));
                l += s[i + j];
            }
        }
        work.l[c] = work.l[c] * f[c] + l;
    }
}

// Weights as operands, rounded to the dtype of the values.
inline void make_operands(const float (&s)[TILE / 2], uint (&w)[TILE / 16][4]) {
#pragma unroll
    for (uint i = 0; i < TILE / 16; i++) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            w[i][j] = pack<HALF>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
        }
    }
}

#endif
