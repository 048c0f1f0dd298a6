// Numbers of the softmax. Scores are in units of log 2; sums are relative to the largest score so far.
#ifndef KVANT_CUDA_ATTEND_SOFTMAX_H
#define KVANT_CUDA_ATTEND_SOFTMAX_H
#include "device/convert.h"

constexpr float LOG2_E = 1.4426950408889634f;

// The maximum of no scores.
inline float nothing() {
    return __uint_as_float(0xFF800000);
}

inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The sum over the eight lanes that have the same columns of a product: those with equal lane % 4.
inline float column_sum(float x) {
#pragma unroll
    for (uint step = 4; step < 32; step *= 2) {
        x += __shfl_xor_sync(0xFFFFFFFF, x, step);
    }
    return x;
}

// exp2(part - whole), also if both are infinite or there are no scores.
inline float factor_of(float part, float whole) {
    return part == whole ? 1 : exp2_fast(part - whole);
}

// The smallest power of two above x, in the range that can be inverted.
inline float power_above(float x) {
    const uint exponent = __float_as_uint(x) >> 23 & 255;
    return __uint_as_float(min(max(exponent + 1, 27u), 227u) << 23);
}

// The inverse of a power of two that `power_above` returns.
inline float inverse_of_power(float x) {
    return __uint_as_float((254 << 23) - __float_as_uint(x));
}

// The largest of N numbers, one for each warp of a block.
template <uint N>
inline float largest(const float (&x)[N]) {
    float m = x[0];
#pragma unroll
    for (uint w = 1; w < N; w++) {
        m = fmaxf(m, x[w]);
    }
    return m;
}

// A power of two that scales numbers of up to 2^`more` times `largest` exactly to at most about 2^12, and its inverse.
inline float2 to_half_range(float largest, int more = 0) {
    const int exponent = int(__float_as_uint(largest) >> 23 & 255) - 127;
    const int up = largest == 0 || exponent == 128 ? 0 : min(max(12 - more - exponent, -100), 100);
    return make_float2(__uint_as_float(uint(127 + up) << 23), __uint_as_float(uint(127 - up) << 23));
}

#endif
