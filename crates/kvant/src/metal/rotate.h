// The randomised Hadamard rotation of rows in threadgroup memory: y = H·(s ⊙ x)/√D, and its inverse x = s ⊙ (H·y)/√D.
//
// H is Sylvester's matrix, s the fixed signs of codec/signs.rs. The fast transform has butterflies of distance 1, 2, …,
// D/2. A thread takes four elements and computes two distances, so that every second distance needs a barrier.
#ifndef KVANT_ROTATE_H
#define KVANT_ROTATE_H
#include <metal_stdlib>
#include "signs.h"
using namespace metal;

// Sign j of dimension dim, whose bits begin at bit dim of the table.
inline float sign_of(uint dim, uint j) {
    const uint bit = dim + j;
    return (SIGN_BITS[bit / 32] >> (bit % 32) & 1) != 0 ? -1.0f : 1.0f;
}

inline float4 signs_of(uint dim, uint4 j) {
    return float4(sign_of(dim, j.x), sign_of(dim, j.y), sign_of(dim, j.z), sign_of(dim, j.w));
}

// 1/√dim, rounded once.
inline float rotation_scale(uint dim) {
    const int log2 = 31 - int(clz(dim));
    return ldexp(log2 % 2 != 0 ? M_SQRT1_2_F : 1.0f, -(log2 / 2));
}

// Rotates `rows` consecutive rows of `dim` elements; dim is a power of two, 2 to 4096. All threads
// of the threadgroup call it, thread `index` of `threads`. It begins and ends with a barrier: callers need none.
inline void rotate(threadgroup float *x, uint rows, uint dim, bool inverse, uint index, uint threads) {
    // Elements are scaled down first, so that a sum overflows only if the result is close to overflow.
    const float scale = rotation_scale(dim);
    const uint column = dim - 1;
    uint distance = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (clz(dim) % 2 == 0) {
        // The number of distances is odd: process the first one alone.
        for (uint i = 2 * index; i < rows * dim; i += 2 * threads) {
            const float2 signs = float2(sign_of(dim, i & column), sign_of(dim, (i + 1) & column));
            float2 v = float2(x[i], x[i + 1]) * (inverse ? float2(scale) : scale * signs);
            v = float2(v.x + v.y, v.x - v.y);
            if (inverse && dim == 2) {
                v *= signs;
            }
            x[i] = v.x;
            x[i + 1] = v.y;
        }
        distance = 2;
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (; distance < dim; distance *= 4) {
        for (uint k = index; k < rows * dim / 4; k += threads) {
            // Bits of k below the distance stay; higher ones are shifted to make room for two more.
            const uint low = k & (distance - 1);
            const uint4 at = (k - low) * 4 + low + distance * uint4(0, 1, 2, 3);
            float4 v = float4(x[at.x], x[at.y], x[at.z], x[at.w]);
            if (distance == 1) {
                v *= inverse ? float4(scale) : scale * signs_of(dim, at & column);
            }
            v = float4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
            v = float4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
            if (inverse && distance * 4 == dim) {
                v *= signs_of(dim, at & column);
            }
            x[at.x] = v.x;
            x[at.y] = v.y;
            x[at.z] = v.z;
            x[at.w] = v.w;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

#endif
