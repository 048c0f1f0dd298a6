// Queries of attend_short_quantised.cu, as operands of the products with keys. A warp rotates one query.
#ifndef KVANT_CUDA_ATTEND_SHORT_QUANTISED_QUERIES_H
#define KVANT_CUDA_ATTEND_SHORT_QUANTISED_QUERIES_H
#include "attend/codes.h"
#include "attend/softmax.h"
#include "attend/work.h"
#include "codec/rotate_warp.h"
#include "device/elements.h"

using KeyCodes = Codes<K_CODEC, 4>;
using KeyTable = Table<K_CODEC>;
constexpr int LOG2_DIM = 6 + (HEAD_DIM > 64) + (HEAD_DIM > 128) + (HEAD_DIM > 256);

// The factor that makes a transform a rotation.
inline float norm_of_rotation() {
    return 1.0f / sqrtf(float(HEAD_DIM));
}

// The largest of a warp's.
inline uint max_of_warp(uint x) {
    uint most;
    asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(most) : "r"(x));
    return most;
}

using QueryRuns = Runs<HEAD_DIM>;

// A lane's coordinates of a query.
inline void load_query(const uchar *q, ulong row, float (&x)[HEAD_DIM / 32]) {
    constexpr uint RUN = QueryRuns::RUN;
#pragma unroll
    for (uint i = 0; i < HEAD_DIM / 32; i += RUN) {
        const ulong at = row * HEAD_DIM + QueryRuns::coord(i / RUN, threadIdx.x % 32);
        if constexpr (RUN == 4) {
            const float4 four = load4(q, at, Q_DTYPE);
            x[i] = four.x;
            x[i + 1] = four.y;
            x[i + 2] = four.z;
            x[i + 3] = four.w;
        } else {
            x[i] = load(q, at, Q_DTYPE);
            x[i + 1] = load(q, at + 1, Q_DTYPE);
        }
    }
}

// Rotates query `r` if keys are rotated, and stores it as B operands, with the factor from its products to scores.
inline void leave_query(const AttendParams &p, float (&x)[HEAD_DIM / 32], const QueryRuns &runs, uint r, uint4 *queries,
                        float *factors) {
    const uint lane = threadIdx.x % 32;
    uint largest = 0;
#pragma unroll
    for (uint i = 0; i < HEAD_DIM / 32; i++) {
        largest = max(largest, __float_as_uint(fabsf(x[i])));
    }
    // The maximum is taken before the rotation, so that the rotation need not wait for it: a coordinate of the
    // unnormalised rotation is at most D times as large.
    const float2 range = to_half_range(__uint_as_float(max_of_warp(largest)), ROTATE_Q ? LOG2_DIM : 0);
    if (ROTATE_Q) {
        float none = 0;
        runs.flip(x);
        transform_warp<HEAD_DIM>(x, none, lane);
    }
    ushort *to = reinterpret_cast<ushort *>(queries);
#pragma unroll
    for (uint i = 0; i < HEAD_DIM / 32; i += 2) {
        // Neighbouring coordinates are adjacent.
        const uint at = query_place<KeyCodes>(r, QueryRuns::coord(i / QueryRuns::RUN, lane) + i % QueryRuns::RUN);
        *reinterpret_cast<uint *>(to + at) = pack<true>(x[i] * range.x, x[i + 1] * range.x);
    }
    if (lane == 0) {
        const float unit = SOFTCAP ? 1 / p.softcap : LOG2_E;
        factors[r] = p.scale * range.y * unit * ((ROTATE_Q ? norm_of_rotation() : 1) / KeyTable::SCALE);
    }
}

#endif
