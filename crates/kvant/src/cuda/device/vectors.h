// Four numbers at a time: arithmetic, and neighbouring elements of a tensor.
#ifndef KVANT_CUDA_DEVICE_VECTORS_H
#define KVANT_CUDA_DEVICE_VECTORS_H
#include "device/elements.h"

inline float4 all4(float x) {
    return make_float4(x, x, x, x);
}

inline float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

inline float4 operator*(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

inline float4 operator*(float a, float4 b) {
    return make_float4(a * b.x, a * b.y, a * b.z, a * b.w);
}

inline float dot(float4 a, float4 b) {
    return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}

inline float total(float4 a) {
    return (a.x + a.y) + (a.z + a.w);
}

// Element j of 4; j is known when the loop around the call is unrolled.
inline float part(float4 a, uint j) {
    return j == 0 ? a.x : j == 1 ? a.y : j == 2 ? a.z : a.w;
}

// The row of a thread, x, and its group of four elements in the row, y: the grid of cuda/grids.rs.
inline uint2 row_and_four() {
    return make_uint2(blockIdx.x * blockDim.y + threadIdx.y, blockIdx.y * blockDim.x + threadIdx.x);
}

// Elements i .. i+3: `count` of them exist, and the others are zero. `aligned`, a constant: all exist, and their
// address is a multiple of the bytes of four elements.
inline float4 load4(const uchar *x, ulong i, uint count, uint dtype, bool aligned) {
    if (aligned) {
        return load4(x, i, dtype);
    }
    return make_float4(count > 0 ? load(x, i, dtype) : 0, count > 1 ? load(x, i + 1, dtype) : 0,
                       count > 2 ? load(x, i + 2, dtype) : 0, count > 3 ? load(x, i + 3, dtype) : 0);
}

inline void store4(uchar *x, ulong i, uint count, float4 values, uint dtype, bool aligned) {
    if (aligned) {
        store4(x, i, values, dtype);
        return;
    }
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        if (j < count) {
            store(x, i + j, part(values, j), dtype);
        }
    }
}

// The values after rounding to `dtype`.
inline float4 rounded4(float4 v, uint dtype) {
    return make_float4(rounded(v.x, dtype), rounded(v.y, dtype), rounded(v.z, dtype), rounded(v.w, dtype));
}

// Moves a row of `count` elements; copies their bits if the dtypes are equal. Thread `index` of `threads` calls it.
// `aligned`, a constant: both rows and their length are multiples of four elements.
inline void move_row(const uchar *from, ulong i, uint from_dtype, uchar *to, ulong j, uint to_dtype, uint count, bool aligned,
                     uint index, uint threads) {
    if (aligned) {
        for (uint at = 4 * index; at < count; at += 4 * threads) {
            if (from_dtype == to_dtype && from_dtype == F32) {
                *reinterpret_cast<uint4 *>(to + (j + at) * 4) = *reinterpret_cast<const uint4 *>(from + (i + at) * 4);
            } else if (from_dtype == to_dtype) {
                *reinterpret_cast<uint2 *>(to + (j + at) * 2) = *reinterpret_cast<const uint2 *>(from + (i + at) * 2);
            } else {
                store4(to, j + at, load4(from, i + at, from_dtype), to_dtype);
            }
        }
        return;
    }
    for (uint at = index; at < count; at += threads) {
        if (from_dtype == to_dtype) {
            copy_element(from, i + at, to, j + at, from_dtype);
        } else {
            store(to, j + at, load(from, i + at, from_dtype), to_dtype);
        }
    }
}

#endif
