// Values and results of attend_prefill.cu that are not finite.
#ifndef KVANT_CUDA_ATTEND_PREFILL_NONFINITE_H
#define KVANT_CUDA_ATTEND_PREFILL_NONFINITE_H
#include "attend/prefill/products.h"

inline uint load_shared(uint at) {
    uint x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

// Whether `found` is true in any of the threads that meet.
inline bool any_of(bool found, uint barrier, uint threads) {
    __syncwarp();
    uint any;
    asm volatile("{\n.reg .pred own, any;\nsetp.ne.u32 own, %1, 0;\nbar.red.or.pred any, %2, %3, own;\nselp.u32 %0, 1, 0, any;\n}"
                 : "=r"(any)
                 : "r"(uint(found)), "r"(barrier), "r"(threads)
                 : "memory");
    return of_warp(any) != 0;
}

// Whether any of the values at the cursor that this warpgroup needs is not finite.
inline bool values_are_nonfinite(uint base, Cursor cursor) {
    constexpr uint EXPONENT = HALF ? 0x7C00 : 0x7F80;
    const uint group = threadIdx.x / 128;
    bool found = false;
#pragma unroll 1
    for (uint chunk = 0; chunk < CHUNKS; chunk++) {
        barrier_wait(base + AT_FULL + cursor.stage * 8, cursor.parity);
        const uint values = base + AT_RING + cursor.stage * CHUNK + (SHARED_ROWS ? group * BLOCK : 0);
#pragma unroll 1
        for (uint at = threadIdx.x % 128 * 4; at < (SHARED_ROWS ? BLOCK : CHUNK); at += 512) {
            const uint pair = load_shared(values + at);
            found = found || (pair & EXPONENT) == EXPONENT || (pair >> 16 & EXPONENT) == EXPONENT;
        }
        cursor.next();
    }
    return any_of(found, 2 + group, 128);
}

// O += P V for the tile at the cursor, whose first key is `first`, key by key over those that a row sees.
inline void add_by_keys(uint base, Copier &copier, Cursor &cursor, const uint (&w)[TILE / 16][4], const Seen &seen, uint first,
                        uint held, Accumulators &acc) {
    const uint t = threadIdx.x % 4, own_block = SHARED_ROWS ? threadIdx.x / 128 * BLOCK : 0;
    // Far below the precision of the output, but not 0, for an infinite value.
    constexpr float LEAST = 1.0f / (1ull << 60);
#pragma unroll
    for (uint chunk = 0; chunk < CHUNKS; chunk++) {
        copier.next();
        const uint values = base + AT_RING + cursor.stage * CHUNK + own_block + t * 4;
#pragma unroll 1
        for (uint key = 0; key < TILE; key++) {
            // Lane t of a row has the weights of keys 2t and 2t + 1 of every 8.
            float weight[2] = {0, 0};
#pragma unroll
            for (uint i = 0; i < TILE / 8; i++) {
#pragma unroll
                for (uint c = 0; c < 2; c++) {
                    const float2 pair = unpack<HALF>(w[i / 2][i % 2 * 2 + c]);
                    weight[c] = key / 8 == i ? (key % 2 == 0 ? pair.x : pair.y) : weight[c];
                }
            }
            const uint position = first + key;
            bool sees[2];
#pragma unroll
            for (uint c = 0; c < 2; c++) {
                sees[c] = position >= seen.row[c].first && position < seen.row[c].end && seen.holds(held, key / 16);
                weight[c] = __shfl_sync(0xFFFFFFFF, weight[c], key % 8 / 2, 4);
                weight[c] = weight[c] < LEAST ? LEAST : weight[c];
            }
#pragma unroll
            for (uint part = 0; part < PARTS; part++) {
#pragma unroll
                for (uint j = 0; j < WIDTH / 8; j++) {
                    const uint block = (part * WIDTH + j * 8) / 64 * BLOCK;
                    const float2 value = unpack<HALF>(load_shared(values + block + key * 128 + (j % 8 ^ key % 8) * 16));
#pragma unroll
                    for (uint c = 0; c < 2; c++) {
                        float *o = acc.o[chunk * PARTS + part] + 4 * j + 2 * c;
                        o[0] += sees[c] ? weight[c] * value.x : 0;
                        o[1] += sees[c] ? weight[c] * value.y : 0;
                    }
                }
            }
        }
        release_if_done(base, cursor.stage);
        cursor.next();
    }
}

// Whether any of the thread's results is not finite.
inline bool results_are_nonfinite(const Item &item, const Accumulators &acc) {
    bool found = false;
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        float check = 0;
#pragma unroll
        for (uint i = 0; i < CHUNKS * PARTS; i++) {
#pragma unroll
            for (uint j = 2 * c; j < WIDTH / 2; j += 4) {
                check += acc.o[i][j] * 0.0f + acc.o[i][j + 1] * 0.0f;
            }
        }
        found = found || (!(check == 0) && own_row(c) < item.rows);
    }
    return found;
}

#endif
