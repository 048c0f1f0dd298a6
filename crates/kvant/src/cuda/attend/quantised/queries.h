// Queries of attend_quantised.cu, as operands of the products with keys.
#ifndef KVANT_CUDA_ATTEND_QUANTISED_QUERIES_H
#define KVANT_CUDA_ATTEND_QUANTISED_QUERIES_H
#include "attend/quantised/layout.h"

// Loads the heads of an item as B operands, rotated if keys are rotated; missing rows are zeros.
inline void load_queries(const AttendParams &p, const Buffers &b, uint token, uint head) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const QueryRows rows(p, token, head);
    ushort *to = shared_at<ushort>(AT_QUERIES);
#pragma unroll 1
    for (uint r = warp; r < ROWS; r += WARPS) {
        if (r >= p.group) {
            for (uint i = lane; i < BLOCKS * PRODUCTS * 2; i += 32) {
                shared_at<uint4>(AT_QUERIES)[i / 4 * 32 + r * 4 + i % 4] = make_uint4(0, 0, 0, 0);
            }
            if (lane == 0) {
                shared_at<float>(AT_FACTORS)[r] = 0;
            }
            continue;
        }
        float x[HEAD_DIM / 32];
        const ulong at = rows.at(r) * HEAD_DIM + lane;
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            x[i] = load(b.q, at + 32 * i, Q_DTYPE);
        }
        if (ROTATE_Q) {
            rotate<HEAD_DIM>(x, lane);
        }
        float largest = 0;
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            largest = fmaxf(largest, fabsf(x[i]));
        }
#pragma unroll
        for (uint step = 1; step < 32; step *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
        }
        const float2 range = to_half_range(largest);
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            to[query_place<KeyCodes>(r, lane + 32 * i)] = float_to_half(x[i] * range.x);
        }
        if (lane == 0) {
            const float unit = SOFTCAP ? 1 / p.softcap : 1.4426950408889634f;
            shared_at<float>(AT_FACTORS)[r] = p.scale * range.y * unit * (1 / Table<K_CODEC>::SCALE);
        }
    }
}

// The B operands of two products at a time: the first QUERIES_HELD from registers, the others from shared memory.
struct Queries {
    const uint4 *shared;
    // Whether the lane's head exists. Zeros of missing heads are not read.
    bool there;
    uint4 held[QUERIES_HELD > 0 ? QUERIES_HELD : 1];

    Queries(const AttendParams &p, uint block)
        : shared(shared_at<uint4>(AT_QUERIES) + block * (PRODUCTS / 2) * 32 + threadIdx.x % 32),
          there(threadIdx.x % 32 / 4 < p.group) {
#pragma unroll
        for (uint i = 0; i < min(QUERIES_HELD, PRODUCTS / 2); i++) {
            held[i] = read(i);
        }
    }
    uint4 read(uint i) const {
        uint4 q = make_uint4(0, 0, 0, 0);
        if (there) {
            q = shared[i * 32];
        }
        return q;
    }
    uint4 at(uint i) const {
        return i + 1 > QUERIES_HELD ? read(i) : held[i];
    }
};

#endif
