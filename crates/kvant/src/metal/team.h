// The threads of a threadgroup that share a row, and sums over them.
#ifndef KVANT_TEAM_H
#define KVANT_TEAM_H
#include <metal_stdlib>
using namespace metal;

struct Team {
    uint index; // of the thread
    uint size;  // threads, a multiple of 32
    uint lane;  // of the SIMD-group
    uint simd;  // which SIMD-group
};

// Floats of threadgroup memory that one exchange takes: one for each SIMD-group, or each 128 coordinates of a row.
constant constexpr uint EXCHANGE = 32;

// The sum over all threads. `room` holds EXCHANGE floats that nobody uses; there is one barrier, before they are read.
inline float team_sum(float x, threadgroup float *room, Team team) {
    x = simd_sum(x);
    if (team.lane == 0) {
        room[team.simd] = x;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0;
    for (uint i = 0; i < team.size / 32; i++) {
        sum += room[i];
    }
    return sum;
}

// The largest of numbers that are not negative; as team_sum.
inline float team_max(float x, threadgroup float *room, Team team) {
    x = simd_max(x);
    if (team.lane == 0) {
        room[team.simd] = x;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float largest = 0;
    for (uint i = 0; i < team.size / 32; i++) {
        largest = max(largest, room[i]);
    }
    return largest;
}

// By the bits: a compiler that takes all numbers for finite may not fold it.
inline bool is_nan_or_infinite(float x) {
    return (as_type<uint>(x) & 0x7F800000) == 0x7F800000;
}

// The power of two that brings x, at least 0, to about 1: 2^-126 to 2^126.
inline float unit_of(float x) {
    const int exponent = int(as_type<uint>(x) >> 23) - 127;
    return as_type<float>(uint(127 - clamp(exponent, -126, 126)) << 23);
}

#endif
