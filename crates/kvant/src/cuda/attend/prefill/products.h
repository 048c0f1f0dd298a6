// The products of attend_prefill.cu: scores, weights, and sums of values.
#ifndef KVANT_CUDA_ATTEND_PREFILL_PRODUCTS_H
#define KVANT_CUDA_ATTEND_PREFILL_PRODUCTS_H
#include "attend/prefill/copies.h"
#include "attend/softmax.h"
#include "device/products.h"

// Weights in f16 are scaled up, so that small ones keep their bits.
constexpr int WEIGHT_BITS = HALF ? 14 : 0;

// A thread's share of the work, for rows g and g + 8 of its warp: the maximum, its part of the sum, and the output.
struct Accumulators {
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
    // Over pages: the pages of the sequence.
    Pages pages;

    // Over pages: entry() is the lane's entry for the tile that begins with `first` (entry_of_lane); the function below
    // it computes, from the entries of all lanes, a bit for each unit of 16 keys that pages hold.
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

// The thread's first (c = 0) or second (c = 1) row, as a row of the item.
inline uint own_row(uint c) {
    return (SHARED_ROWS ? 0 : threadIdx.x / 128 * 64) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * c;
}

// With SHARED_ROWS: the first of the tile's keys whose scores the warpgroup computes.
inline uint first_scored() {
    return SHARED_ROWS ? threadIdx.x / 128 * SCORED : 0;
}

inline void clear(Accumulators &acc) {
    acc.m[0] = acc.m[1] = nothing();
    acc.l[0] = acc.l[1] = 0;
#pragma unroll
    for (uint i = 0; i < CHUNKS * PARTS; i++) {
#pragma unroll
        for (uint j = 0; j < WIDTH / 2; j++) {
            acc.o[i][j] = 0;
        }
    }
}

// hold() completes the scaling before the products that add to it begin: compilers move arithmetic over their fence.
inline void scale(float (&o)[WIDTH / 2], const float (&f)[2]) {
#pragma unroll
    for (uint j = 0; j < WIDTH / 2; j++) {
        o[j] *= f[j / 2 % 2];
    }
    hold(o);
}
inline void scale(Accumulators &acc, const float (&f)[2]) {
#pragma unroll
    for (uint i = 0; i < CHUNKS * PARTS; i++) {
        scale(acc.o[i], f);
    }
}

// Waits for the chunk at the cursor.
inline void wait_for_chunk(uint base, const Cursor &cursor) {
    barrier_wait(base + AT_FULL + cursor.stage * 8, cursor.parity);
    if constexpr (COPIES_ARRIVE) {
        show_to_products();
    }
}

inline void release(uint base, uint stage) {
    barrier_arrive_warp(base + AT_FREE + stage * 8);
}

// Products of warps are synchronous: their chunk is released at once.
inline void release_if_done(uint base, uint stage) {
    if constexpr (!WARPGROUP_PRODUCTS) {
        release(base, stage);
    }
}

// Begins S = q K^T for the tile at the cursor, and releases all chunks of keys except the last. Calls meanwhile(chunk)
// when the products of a chunk have begun.
template <typename Meanwhile>
inline void begin_scores(uint base, Copier &copier, Cursor &cursor, float (&s)[SCORED / 2], Meanwhile meanwhile) {
    const uint queries = base + (SHARED_ROWS ? 0 : threadIdx.x / 128 * 64 * 128);
#pragma unroll
    for (uint chunk = 0; chunk < CHUNKS; chunk++) {
        copier.next();
        wait_for_chunk(base, cursor);
        products_begin();
        const uint keys = base + AT_RING + cursor.stage * CHUNK + first_scored() * 128;
#pragma unroll
        for (uint i = 0; i < COLUMNS / 16; i++) {
            const ulong a = matrix(queries + (chunk * COLUMNS / 64 + i / 4) * Q_BLOCK + i % 4 * 32, 16);
            const ulong b = matrix(keys + i / 4 * BLOCK + i % 4 * 32, 16);
            multiply<HALF>(s, a, b, chunk + i > 0);
        }
        products_commit();
        meanwhile(chunk);
        if (WARPGROUP_PRODUCTS && chunk > 0) {
            products_wait<1>();
            release(base, cursor.before());
        }
        release_if_done(base, cursor.stage);
        cursor.next();
    }
}

inline void begin_scores(uint base, Copier &copier, Cursor &cursor, float (&s)[SCORED / 2]) {
    begin_scores(base, copier, cursor, s, [](uint) {});
}

// Waits for the products, and releases the last chunk of keys; the cursor is behind it.
inline void end_scores(uint base, const Cursor &cursor, float (&s)[SCORED / 2]) {
    products_wait<0>();
    hold(s);
    if constexpr (WARPGROUP_PRODUCTS) {
        release(base, cursor.before());
    }
}

// Begins O += P V for the tile at the cursor.
inline void begin_values(uint base, Copier &copier, Cursor &cursor, const uint (&w)[TILE / 16][4], Accumulators &acc) {
    const uint own_block = SHARED_ROWS ? threadIdx.x / 128 * BLOCK : 0;
#pragma unroll
    for (uint chunk = 0; chunk < CHUNKS; chunk++) {
        copier.next();
        wait_for_chunk(base, cursor);
        products_begin();
        const uint values = base + AT_RING + cursor.stage * CHUNK + own_block;
#pragma unroll
        for (uint i = 0; i < TILE / 16; i++) {
#pragma unroll
            for (uint part = 0; part < PARTS; part++) {
                const ulong b = matrix(values + part * (WIDTH / 64) * BLOCK + i * 2048, BLOCK);
                multiply_rows<HALF>(acc.o[chunk * PARTS + part], w[i], b);
            }
        }
        products_commit();
        release_if_done(base, cursor.stage);
        cursor.next();
    }
}

// Waits for the products, and releases their chunks.
inline void end_values(uint base, Cursor used, Accumulators &acc) {
    products_wait<0>();
#pragma unroll
    for (uint i = 0; i < CHUNKS * PARTS; i++) {
        hold(acc.o[i]);
    }
    if constexpr (WARPGROUP_PRODUCTS) {
#pragma unroll
        for (uint i = 0; i < CHUNKS; i++) {
            release(base, used.stage);
            used.next();
        }
    }
}

// With SHARED_ROWS: gives the other warpgroup a number of each of the thread's rows, and returns the other's. Lanes of
// a row have the same numbers.
//
// Warps with equal rows meet twice for each tile: here, for the maximum, and between send_weights() and take_weights().
// A tile's numbers are written after the second meeting of the previous tile; by then, the previous numbers have been
// read. A tile's weights are written after the meeting here; by then, the previous weights have been read.
inline float2 exchange(const Shared &shared, const float (&own)[2]) {
    const uint group = threadIdx.x / 128;
    if (threadIdx.x % 4 == 0) {
        shared.numbers(group)[own_row(0)] = own[0];
        shared.numbers(group)[own_row(1)] = own[1];
    }
    meet_partner();
    const float *others = shared.numbers(1 - group);
    return make_float2(others[own_row(0)], others[own_row(1)]);
}

// Converts scores to weights, and returns the factors of earlier sums. Pages hold the units `held` of the tile that
// begins with `first`.
inline void soften(const AttendParams &p, const Shared &shared, const Seen &seen, uint first, uint held,
                   float (&s)[SCORED / 2], Accumulators &acc, float (&f)[2]) {
    const uint t = threadIdx.x % 4;
    float factor = p.scale * LOG2_E;
    if (SOFTCAP) {
        factor = p.softcap * LOG2_E;
        const float inner = p.scale / p.softcap;
#pragma unroll
        for (uint i = 0; i < SCORED / 2; i++) {
            s[i] = tanhf(s[i] * inner);
        }
    }
    if (!(seen.holds_all(held) && seen.all_see(first))) {
        const uint scored = first + first_scored(), held_scored = held >> first_scored() / 16;
#pragma unroll
        for (uint i = 0; i < SCORED / 2; i++) {
            const Range row = seen.row[i / 2 % 2];
            const uint position = scored + i / 4 * 8 + 2 * t + i % 2;
            s[i] = position >= row.first && position < row.end && seen.holds(held_scored, i / 8) ? s[i] : nothing();
        }
    }
    float m[2];
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        m[c] = fmaxf(s[2 * c], s[2 * c + 1]);
#pragma unroll
        for (uint i = 4; i < SCORED / 2; i += 4) {
            m[c] = fmaxf(m[c], fmaxf(s[i + 2 * c], s[i + 2 * c + 1]));
        }
        m[c] = fmaxf(m[c], __shfl_xor_sync(0xFFFFFFFF, m[c], 1));
        m[c] = fmaxf(m[c], __shfl_xor_sync(0xFFFFFFFF, m[c], 2));
    }
    if constexpr (SHARED_ROWS) {
        const float2 others = exchange(shared, m);
        m[0] = fmaxf(m[0], others.x);
        m[1] = fmaxf(m[1], others.y);
    }
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        m[c] = fmaxf(acc.m[c], m[c] * factor);
        f[c] = factor_of(acc.m[c], m[c]);
        acc.m[c] = m[c];
        const float shift = (m[c] == nothing() ? 0 : m[c]) - WEIGHT_BITS;
        float l = 0;
#pragma unroll
        for (uint i = 0; i < SCORED / 2; i += 4) {
#pragma unroll
            for (uint j = 2 * c; j < 2 * c + 2; j++) {
                s[i + j] = exp2_fast(fmaf(s[i + j], factor, -shift));
                l += s[i + j];
            }
        }
        acc.l[c] = acc.l[c] * f[c] + l;
    }
}

// Keeps later waits for products behind the softmax. ptxas moves waits ahead of arithmetic, but not ahead of stores.
// This store of the sums, the last results of the softmax, is never executed.
inline void finish_softmax(uint base, const Accumulators &acc) {
    const float last = acc.l[0] + acc.l[1];
    asm volatile("{\n.reg .pred any;\nsetp.lt.f32 any, %0, 0f00000000;\n@any st.shared.f32 [%1], %0;\n}" ::"f"(last),
                 "r"(base)
                 : "memory");
}

// Word `i` of a thread's weights as operands, rounded to the dtype of the values.
inline uint operand(const float (&s)[SCORED / 2], uint i) {
    return pack<HALF>(s[2 * i], s[2 * i + 1]);
}

// With SHARED_ROWS: stores the weights for both warpgroups.
inline void send_weights(const Shared &shared, const float (&s)[SCORED / 2]) {
    if constexpr (SHARED_ROWS) {
#pragma unroll
        for (uint i = 0; i < WEIGHT_PIECES; i++) {
            // Half of a tile of 16 keys has half a piece.
            constexpr bool WHOLE = SCORED % 16 == 0;
            *shared.weights(i, threadIdx.x) =
                make_uint4(operand(s, 4 * i), operand(s, 4 * i + 1), WHOLE ? operand(s, 4 * i + 2) : 0,
                           WHOLE ? operand(s, 4 * i + 3) : 0);
        }
    }
}

// Weights as operands. With SHARED_ROWS, both warpgroups have sent weights: the partner thread in the other warpgroup
// has the same rows, and the same columns of its half.
inline void take_weights(const Shared &shared, const float (&s)[SCORED / 2], uint (&w)[TILE / 16][4]) {
    if constexpr (SHARED_ROWS) {
        meet_partner();
    }
#pragma unroll
    for (uint i = 0; i < TILE / 4; i++) {
        if constexpr (SHARED_ROWS) {
            const uint of_half = i % (SCORED / 4);
            const uint4 piece = *shared.weights(of_half / 4, i / (SCORED / 4) * 128 + threadIdx.x % 128);
            const uint words[4] = {piece.x, piece.y, piece.z, piece.w};
            w[i / 4][i % 4] = words[of_half % 4];
        } else {
            w[i / 4][i % 4] = operand(s, i);
        }
    }
}

#endif
