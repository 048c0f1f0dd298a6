// The elements of 8x8 matrices that a lane holds.
//
// A lane holds two neighbouring elements of a row, at positions that are equal on all Apple GPUs so far; MLX's kernels
// rely on this, too. Matrices of coordinates are processed in pairs, which hold 16 neighbouring coordinates: a lane
// loads and stores four, a quad, at once. Column c of the even matrix is coordinate 2c, column c of the odd one 2c
// + 1.
#ifndef KVANT_ATTEND_FRAGMENTS_H
#define KVANT_ATTEND_FRAGMENTS_H
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

inline uint fragment_row(uint lane) {
    return (lane >> 2 & 4) | (lane >> 1 & 3);
}

// The first of the two columns.
inline uint fragment_column(uint lane) {
    return (lane >> 1 & 4) | (lane << 1 & 2);
}

// The lane that holds row `row` of columns `column` and `column + 1`.
inline uint lane_of_fragment(uint row, uint column) {
    return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column & 2) >> 1;
}

inline float4 quad_of_pair(simdgroup_float8x8 even, simdgroup_float8x8 odd) {
    return float4(even.thread_elements()[0], odd.thread_elements()[0], even.thread_elements()[1],
                  odd.thread_elements()[1]);
}

template <typename T>
inline void set_pair(thread simdgroup_matrix<T, 8, 8> &even, thread simdgroup_matrix<T, 8, 8> &odd, vec<T, 4> quad) {
    even.thread_elements()[0] = quad.x;
    odd.thread_elements()[0] = quad.y;
    even.thread_elements()[1] = quad.z;
    odd.thread_elements()[1] = quad.w;
}

inline void add_to_pair(thread simdgroup_float8x8 &even, thread simdgroup_float8x8 &odd, float4 quad) {
    set_pair(even, odd, quad_of_pair(even, odd) + quad);
}

// A pair whose rows are vectors in memory: the quad of the lane's row.
template <typename T>
inline void load_quad(threadgroup const T *quad, thread simdgroup_matrix<T, 8, 8> &even,
                      thread simdgroup_matrix<T, 8, 8> &odd) {
    typedef vec<T, 4> Quad;
    set_pair(even, odd, *reinterpret_cast<threadgroup const Quad *>(quad));
}

// A pair whose columns are vectors: two coordinates of the vector of the lane's first column, and of the next.
template <typename T>
inline void set_columns(thread simdgroup_matrix<T, 8, 8> &even, thread simdgroup_matrix<T, 8, 8> &odd, vec<T, 2> first,
                        vec<T, 2> second) {
    even.thread_elements()[0] = first.x;
    even.thread_elements()[1] = second.x;
    odd.thread_elements()[0] = first.y;
    odd.thread_elements()[1] = second.y;
}

// Loads a pair whose columns are vectors in memory.
template <typename T>
inline void load_columns(threadgroup const T *first, threadgroup const T *second,
                         thread simdgroup_matrix<T, 8, 8> &even, thread simdgroup_matrix<T, 8, 8> &odd) {
    typedef vec<T, 2> Two;
    set_columns(even, odd, *reinterpret_cast<threadgroup const Two *>(first),
                *reinterpret_cast<threadgroup const Two *>(second));
}

inline float4 quad_at(threadgroup const half *quad) {
    return float4(*reinterpret_cast<threadgroup const half4 *>(quad));
}

inline float4 quad_at(threadgroup const float *quad) {
    return *reinterpret_cast<threadgroup const float4 *>(quad);
}

// Whether both halves in `bits` are finite.
inline bool are_finite_halves(uint bits) {
    return (bits & 0x7C00) != 0x7C00 && (bits & 0x7C000000) != 0x7C000000;
}

#endif
