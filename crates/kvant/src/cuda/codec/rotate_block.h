// The randomised Hadamard rotation of rows in shared memory: y = H·(s ⊙ x)/√D. The inverse is x = s ⊙ (H·y)/√D.
//
// H is Sylvester's matrix; s are the constant signs of codec/signs.rs. The fast transform has butterflies of distance
// 1, 2, …, D/2. A thread loads four elements and computes the butterflies of two distances, so that two distances need
// one barrier.
#ifndef KVANT_CUDA_CODEC_ROTATE_BLOCK_H
#define KVANT_CUDA_CODEC_ROTATE_BLOCK_H
#include "codec/signs.h"
#include "device/vectors.h"

// Sign j of dimension dim, whose bits begin at bit dim of the table.
inline float sign_of(uint dim, uint j) {
    const uint bit = dim + j;
    return (SIGN_BITS[bit / 32] >> (bit % 32) & 1) != 0 ? -1.0f : 1.0f;
}

inline float4 signs_of(uint dim, uint4 j) {
    return make_float4(sign_of(dim, j.x), sign_of(dim, j.y), sign_of(dim, j.z), sign_of(dim, j.w));
}

// 1/√dim, rounded once.
inline float rotation_scale(uint dim) {
    const int log2 = 31 - __clz(dim);
    return ldexpf(log2 % 2 != 0 ? 0.70710678118654752f : 1.0f, -(log2 / 2));
}

// Rotates `rows` consecutive rows of `dim` elements; dim is a power of two, 2 to 4096. All threads of the block call
// it, as thread `index` of `threads`. It begins and ends with a barrier.
inline void rotate(float *x, uint rows, uint dim, bool inverse, uint index, uint threads) {
    // Elements are scaled down first, so that a sum overflows only if the result is close to overflow.
    const float scale = rotation_scale(dim);
    const uint column = dim - 1;
    uint distance = 1;
    __syncthreads();
    if (__clz(dim) % 2 == 0) {
        // With an odd number of distances, the first one is done alone.
        for (uint i = 2 * index; i < rows * dim; i += 2 * threads) {
            const float s0 = sign_of(dim, i & column), s1 = sign_of(dim, (i + 1) & column);
            const float a = x[i] * (inverse ? scale : scale * s0), b = x[i + 1] * (inverse ? scale : scale * s1);
            const bool last = inverse && dim == 2;
            x[i] = (a + b) * (last ? s0 : 1.0f);
            x[i + 1] = (a - b) * (last ? s1 : 1.0f);
        }
        distance = 2;
        __syncthreads();
    }
    for (; distance < dim; distance *= 4) {
        for (uint k = index; k < rows * dim / 4; k += threads) {
            // The bits of k below the distance keep their place; the upper bits move up by two, for the element's
            // number of four.
            const uint low = k & (distance - 1);
            const uint at = (k - low) * 4 + low;
            const uint4 columns = make_uint4(at & column, (at + distance) & column, (at + 2 * distance) & column,
                                             (at + 3 * distance) & column);
            float4 v = make_float4(x[at], x[at + distance], x[at + 2 * distance], x[at + 3 * distance]);
            if (distance == 1) {
                v = scale * (inverse ? v : v * signs_of(dim, columns));
            }
            v = make_float4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
            v = make_float4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
            if (inverse && distance * 4 == dim) {
                v = v * signs_of(dim, columns);
            }
            x[at] = v.x;
            x[at + distance] = v.y;
            x[at + 2 * distance] = v.z;
            x[at + 3 * distance] = v.w;
        }
        __syncthreads();
    }
}

#endif
