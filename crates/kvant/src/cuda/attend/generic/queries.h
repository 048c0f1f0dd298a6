// Queries of attend_generic.cu as B operands.
#ifndef KVANT_CUDA_ATTEND_GENERIC_QUERIES_H
#define KVANT_CUDA_ATTEND_GENERIC_QUERIES_H
#include "attend/generic/key_bias.h"
#include "codec/rotate_warp.h"
#include "device/fragments.h"

// Loads the rows of an item, rotated if keys are, as B operands. Rows that do not exist are zeros.
inline void load_queries(const AttendParams &p, const Buffers &b, const Shared &shared, Range item, uint head) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ushort *to = reinterpret_cast<ushort *>(shared.queries());
#pragma unroll 1
    for (uint r = warp; r < ROWS; r += WARPS) {
        if (r >= item.len()) {
            for (uint i = lane; i < Q_TERMS * STEPS * 4; i += 32) {
                shared.queries()[(i / 4 * NT + r / 8) * 32 + r % 8 * 4 + i % 4] = make_uint2(0, 0);
            }
            if (lane == 0) {
                shared.rows()[r].factor = 0;
            }
            for (uint i = lane; KEY_BIAS && i < HEAD_DIM; i += 32) {
                shared.biased(r)[i] = 0;
            }
            continue;
        }
        float x[LANE_COORDS];
        const uint row = item.first + r;
        const ulong at =
            (ulong(row / p.group) * p.kv_heads * p.group + head * p.group + row % p.group) * HEAD_DIM + lane;
        float largest = 0;
#pragma unroll
        for (uint i = 0; i < LANE_COORDS; i++) {
            x[i] = has_coord(i, lane) ? load(b.q, at + 32 * i, Q_DTYPE) : 0;
        }
        float unscale = 1;
        if constexpr (KEY_BIAS) {
            unscale = leave_products(b, shared, r, head, x);
        }
        if constexpr (ROTATE_Q) {
            rotate<HEAD_DIM>(x, lane);
        }
#pragma unroll
        for (uint i = 0; i < LANE_COORDS; i++) {
            largest = fmaxf(largest, fabsf(x[i]));
        }
        float2 range = make_float2(1, 1);
        if constexpr (K::HALF) {
#pragma unroll
            for (uint step = 1; step < 32; step *= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
            }
            range = to_half_range(largest);
        }
#pragma unroll
        for (uint i = 0; i < LANE_COORDS; i++) {
            if (!has_coord(i, lane)) {
                continue;
            }
            uint terms[Q_TERMS];
            split<K::HALF, Q_TERMS>(x[i] * range.x, 0, terms);
            const uint3 place = K::key_place(lane + 32 * i);
#pragma unroll
            for (uint term = 0; term < Q_TERMS; term++) {
                const uint fragment = (term * STEPS + place.x) * NT + r / 8;
                to[(fragment * 32 + r % 8 * 4 + place.y) * 4 + place.z] = ushort(terms[term]);
            }
        }
        if (KEY_BIAS && lane == 0) {
            shared.bias_factors()[r] = unscale * range.x;
        }
        if (lane == 0) {
            shared.rows()[r].factor = p.scale * range.y * (SOFTCAP ? 1 / p.softcap : 1.4426950408889634f);
        }
    }
}

#endif
