// The rotation of rows by a warp: y = H (s x) / sqrt(D), and back. A lane holds the coordinates lane + 32 i.
#ifndef KVANT_ATTEND_ROTATE_H
#define KVANT_ATTEND_ROTATE_H
#include "butterflies.h"
#include "convert.h"
#include "signs.h"

template <uint DIM>
inline void flip_signs(float (&x)[DIM / 32], uint lane) {
#pragma unroll
    for (uint i = 0; i < DIM / 32; i++) {
        // Sign j of dimension D is bit D + j.
        x[i] = (SIGN_BITS[DIM / 32 + i] >> lane & 1) != 0 ? -x[i] : x[i];
    }
}

// H x / sqrt(D).
template <uint DIM>
inline void hadamard_warp(float (&x)[DIM / 32], uint lane) {
#pragma unroll 1
    for (uint step = 1; step < 32; step *= 2) {
#pragma unroll
        for (uint i = 0; i < DIM / 32; i++) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, x[i], step);
            x[i] = (lane & step) != 0 ? other - x[i] : x[i] + other;
        }
    }
    transform(x);
    const float norm = 1.0f / sqrtf(float(DIM));
#pragma unroll
    for (uint i = 0; i < DIM / 32; i++) {
        x[i] *= norm;
    }
}

template <uint DIM>
inline void rotate(float (&x)[DIM / 32], uint lane) {
    flip_signs<DIM>(x, lane);
    hadamard_warp<DIM>(x, lane);
}

template <uint DIM>
inline void unrotate(float (&x)[DIM / 32], uint lane) {
    hadamard_warp<DIM>(x, lane);
    flip_signs<DIM>(x, lane);
}

#endif
