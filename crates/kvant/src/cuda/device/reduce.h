// Sums, minima and maxima over the threads of a warp or of a block.
//
// The order of additions depends only on the number of threads.
#ifndef KVANT_CUDA_DEVICE_REDUCE_H
#define KVANT_CUDA_DEVICE_REDUCE_H
#include "device/convert.h"

constexpr uint ALL = 0xFFFFFFFF;

struct Sum {
    static float of(float a, float b) { return a + b; }
    static constexpr float none = 0;
};

struct Max {
    template <typename T> static T of(T a, T b) { return a > b ? a : b; }
    static constexpr uint none = 0;
};

struct Min {
    static uint of(uint a, uint b) { return a < b ? a : b; }
    static constexpr uint none = 0xFFFFFFFF;
};

// All lanes of the warp call it, and all get the result.
template <typename Op, typename T> inline T over_warp(T x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x = Op::of(x, __shfl_xor_sync(ALL, x, distance));
    }
    return x;
}

// The threads that share a row: whole warps of 32.
struct Team {
    uint index; // of the thread
    uint size;  // threads
    uint lane;  // of the warp
    uint warp;  // which warp
};

inline Team whole_block() {
    return Team{threadIdx.x, blockDim.x, threadIdx.x % 32, threadIdx.x / 32};
}

// Floats of shared memory of one exchange: one for each warp, or for each 128 coordinates of a row.
constexpr uint EXCHANGE = 32;

// All threads of the block call it, and all get the result. `room` has memory for EXCHANGE values, which must be
// unused. The function has one barrier, before it reads them.
template <typename Op, typename T> inline T over_team(T x, T *room, Team team) {
    x = over_warp<Op>(x);
    if (team.lane == 0) {
        room[team.warp] = x;
    }
    __syncthreads();
    return over_warp<Op>(team.lane < team.size / 32 ? room[team.lane] : T(Op::none));
}

// As over_team, for two values with one barrier; `room` has memory for 2 * EXCHANGE values.
template <typename Op> inline float2 over_team2(float2 x, float *room, Team team) {
    x = make_float2(over_warp<Op>(x.x), over_warp<Op>(x.y));
    if (team.lane == 0) {
        room[team.warp] = x.x;
        room[EXCHANGE + team.warp] = x.y;
    }
    __syncthreads();
    const bool has_value = team.lane < team.size / 32;
    return make_float2(over_warp<Op>(has_value ? room[team.lane] : float(Op::none)),
                       over_warp<Op>(has_value ? room[EXCHANGE + team.lane] : float(Op::none)));
}

inline bool is_nan_or_infinite(float x) {
    return (__float_as_uint(x) & 0x7F800000) == 0x7F800000;
}

// The power of two that scales x, which is at least 0, to about 1: 2^-126 to 2^126.
inline float unit_of(float x) {
    const int exponent = int(__float_as_uint(x) >> 23) - 127;
    return __uint_as_float(uint(127 - max(-126, min(exponent, 126))) << 23);
}

#endif
