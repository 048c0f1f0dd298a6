// Reduces one value per thread of a threadgroup: over each SIMD-group, then over their results.
#ifndef KVANT_REDUCE_H
#define KVANT_REDUCE_H
#include <metal_stdlib>
using namespace metal;

// The index of a thread in its threadgroup, whose threads are whole SIMD-groups of 32.
struct Place {
    uint lane;
    uint simdgroup;
    uint simdgroups;
};

inline uint index_of(Place place) {
    return place.simdgroup * 32 + place.lane;
}

inline uint threads_of(Place place) {
    return place.simdgroups * 32;
}

// A barrier of the threads that share a place. A threadgroup may have several places if each is one SIMD-group.
inline void wait_for(Place place) {
    if (place.simdgroups == 1) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

struct Sum {
    static float over_simd(float x) { return simd_sum(x); }
    static uint over_simd(uint x) { return simd_sum(x); }
    static constant constexpr uint none = 0;
};

struct Max {
    // The maximum of numbers that are not negative.
    static float over_simd(float x) { return simd_max(x); }
    static uint over_simd(uint x) { return simd_max(x); }
    static constant constexpr uint none = 0;
};

struct Min {
    static uint over_simd(uint x) { return simd_min(x); }
    static constant constexpr uint none = 0xFFFFFFFF;
};

// All threads of the threadgroup call it, and all get the result. `shared` holds one value per SIMD-group, and may be
// reused by the next call. The order of the additions depends only on the number of threads.
template <typename Op, typename T>
inline T reduce(T x, threadgroup T *shared, Place place) {
    x = Op::over_simd(x);
    if (place.simdgroups == 1) {
        return x;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (place.lane == 0) {
        shared[place.simdgroup] = x;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return Op::over_simd(place.lane < place.simdgroups ? shared[place.lane] : T(Op::none));
}

#endif
