// From a group of 16 keys to scores, weights and sums, for attend_quantised.cu.
#ifndef KVANT_CUDA_ATTEND_QUANTISED_SCORES_H
#define KVANT_CUDA_ATTEND_QUANTISED_SCORES_H
#include "attend/quantised/copies.h"
#include "attend/quantised/queries.h"
#include "device/mbarrier.h"

// A lane's share of a warp's state. For columns 2t and 2t + 1: the maximum, equal in lanes of one t, and its part of l;
// sums of coordinates by row and column.
struct Accumulators {
    float m[2];
    float l[2];
    float o[PRODUCTS][4];
    // Largest norm of a value so far, up to the next power of 2.
    float norm;
    // Number of times that the team has added up scores.
    uint turn;
    // With means of values: sums of weights in columns 2t and 2t + 1. `masses` is the sum of the lot's page g; the
    // other is the lane's part of the current page's sum, which is not in l yet (means.h).
    float masses[2];
    float of_page[2];
};

constexpr float LOWEST = -3.402823466e38f;
constexpr float SMALLEST_NORM = 7.888609052210118e-31f;

// S^T of a group: the products of the warp's coordinates, with the keys' norms.
inline void multiply_keys(const Lookup<K_CODEC> &lookup, const Queries &queries, const Keys &keys, const Norms &norms,
                          float (&s)[4]) {
    float sums[2][4] = {};
#pragma unroll
    for (uint i = 0; i < KeyCodes::LOADS; i++) {
#pragma unroll
        for (uint unit = 0; unit < KeyCodes::UNITS; unit++) {
            uint4 q[2];
#pragma unroll
            for (uint j = 0; j < 2; j++) {
                q[j] = queries.at((i * KeyCodes::UNITS + unit) * 2 + j);
            }
            key_operands(keys[0], keys[1], i, unit, lookup, [&](uint product, const uint(&a)[4]) {
                const uint4 of = q[product / 2];
                mma<true>(sums[product % 2], a, product % 2 == 0 ? make_uint2(of.x, of.y) : make_uint2(of.z, of.w));
            });
        }
    }
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        s[c] = (sums[0][c] + sums[1][c]) * __uint_as_float(norms[c / 2]);
    }
}

// Waits until all warps of the team are here for the same `turn`, counted from 0. Every thread arrives at an mbarrier:
// compute-sanitizer's racecheck follows neither bar.sync of part of a block nor one arrival per warp.
inline void wait_for_team(uint turn) {
    const uint barrier = team_barrier(threadIdx.x / 32 / TEAM);
    barrier_arrive(barrier);
    barrier_wait(barrier, turn % 2);
}

// Adds up the scores of a team. Two buffers in turn: a warp is at most one group ahead of the other.
inline void add_up(float (&s)[4], uint &turn) {
    if constexpr (TEAM > 1) {
        const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float4 *scores = shared_at<float4>(AT_SCORES) + turn % 2 * (WARPS * 32) + lane;
        scores[warp * 32] = make_float4(s[0], s[1], s[2], s[3]);
        wait_for_team(turn);
        turn++;
        const float4 other = scores[(warp ^ 1) * 32];
        s[0] += other.x;
        s[1] += other.y;
        s[2] += other.z;
        s[3] += other.w;
    }
}

// O^T of the warp's coordinates.
inline void multiply_values(const Lookup<V_CODEC> &lookup, const Values &values, uint2 weights, Accumulators &acc) {
#pragma unroll
    for (uint i = 0; i < ValueCodes::LOADS; i++) {
#pragma unroll
        for (uint unit = 0; unit < ValueCodes::UNITS; unit++) {
            value_operands(values, i, unit, lookup, [&](uint product, const uint(&a)[4]) {
                mma<true>(acc.o[(i * ValueCodes::UNITS + unit) * 8 + product], a, weights);
            });
        }
    }
}

// Raises the maxima and the norm to those of all lanes, and rescales the sums so far.
inline void grow(const float (&s)[4], float norm, Accumulators &acc) {
    float m[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (uint step = 4; step < 32; step *= 2) {
        m[0] = fmaxf(m[0], __shfl_xor_sync(0xFFFFFFFF, m[0], step));
        m[1] = fmaxf(m[1], __shfl_xor_sync(0xFFFFFFFF, m[1], step));
        norm = fmaxf(norm, __shfl_xor_sync(0xFFFFFFFF, norm, step));
    }
    const float grown = fmaxf(acc.norm, power_above(norm));
    const float decay = acc.norm * inverse_of_power(grown);
    acc.norm = grown;
    float factor[2];
#pragma unroll
    for (uint c = 0; c < 2; c++) {
        m[c] = fmaxf(m[c], acc.m[c]);
        factor[c] = factor_of(acc.m[c], m[c]);
        acc.m[c] = m[c];
        acc.l[c] *= factor[c];
        acc.of_page[c] *= factor[c];
        acc.masses[c] *= factor[c];
        factor[c] *= decay;
    }
#pragma unroll
    for (uint i = 0; i < PRODUCTS; i++) {
#pragma unroll
        for (uint c = 0; c < 4; c++) {
            acc.o[i][c] *= factor[c % 2];
        }
    }
}

// The weights of a group's keys from their raw scores, as B operands.
inline uint2 weigh(const AttendParams &p, const Group &group, const float (&factor)[2], Norms &norms, float (&s)[4], Accumulators &acc) {
    const uint g = threadIdx.x % 32 / 4;
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        s[c] *= factor[c % 2];
        if (SOFTCAP) {
            s[c] = p.softcap * 1.4426950408889634f * tanhf(s[c]);
        }
    }
    if (group.lacks_any()) {
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            if (group.lacks(g + 8 * i)) {
                s[2 * i] = s[2 * i + 1] = nothing();
                norms[i] = 0;
            }
        }
    }
    const float norm = fmaxf(fabsf(__uint_as_float(norms[0])), fabsf(__uint_as_float(norms[1])));
    const bool grows = fmaxf(s[0], s[2]) > acc.m[0] || fmaxf(s[1], s[3]) > acc.m[1] || norm >= acc.norm;
    if (__any_sync(0xFFFFFFFF, grows)) {
        grow(s, norm, acc);
    }
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        s[c] = exp2_fast(s[c] - acc.m[c % 2]);
        (V_CENTRED ? acc.of_page : acc.l)[c % 2] += s[c];
    }
    const float inverse = WEIGHT_SCALE * inverse_of_power(acc.norm);
    const float low = __uint_as_float(norms[0]) * inverse, high = __uint_as_float(norms[1]) * inverse;
    return make_uint2(transpose8(pack<true>(s[0] * low, s[1] * low)), transpose8(pack<true>(s[2] * high, s[3] * high)));
}

#endif
