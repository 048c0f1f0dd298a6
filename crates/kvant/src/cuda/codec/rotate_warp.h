// The rotation of rows by a warp: y = H (s x) / sqrt(D), and its inverse. A lane holds the coordinates lane + 32 i.
#ifndef KVANT_CUDA_CODEC_ROTATE_WARP_H
#define KVANT_CUDA_CODEC_ROTATE_WARP_H
#include "codec/butterflies.h"
#include "codec/signs.h"
#include "device/convert.h"

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

// The rotation if a lane holds runs of up to four coordinates: the transform is unchanged, the signs differ.
template <uint DIM>
struct Runs {
    static constexpr uint RUN = DIM < 128 ? DIM / 32 : 4;
    static constexpr uint COUNT = DIM / 32 / RUN;
    // Bit j of a run is the sign of its coordinate j.
    uint signs[COUNT];

    Runs(uint lane) {
#pragma unroll
        for (uint i = 0; i < COUNT; i++) {
            signs[i] = SIGN_BITS[(DIM + coord(i, lane)) / 32] >> coord(i, lane) % 32;
        }
    }
    // The first coordinate of a run.
    static uint coord(uint i, uint lane) {
        return (i * 32 + lane) * RUN;
    }
    void flip(float (&x)[DIM / 32]) const {
#pragma unroll
        for (uint i = 0; i < DIM / 32; i++) {
            x[i] = (signs[i / RUN] >> i % RUN & 1) != 0 ? -x[i] : x[i];
        }
    }
};

// sqrt(D) H x, and the sum of `sum` over the lanes. Unrolled, for kernels that call it once and wait for the result.
template <uint DIM>
inline void transform_warp(float (&x)[DIM / 32], float &sum, uint lane) {
#pragma unroll
    for (uint step = 1; step < 32; step *= 2) {
        const float sign = (lane & step) != 0 ? -1.0f : 1.0f;
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
#pragma unroll
        for (uint i = 0; i < DIM / 32; i++) {
            x[i] = fmaf(x[i], sign, __shfl_xor_sync(0xFFFFFFFF, x[i], step));
        }
    }
    transform(x);
}

template <uint DIM, uint N>
inline void rotate(float (&x)[N], uint lane) {
    static_assert(N * 32 == DIM, "rotate: a lane holds every 32nd coordinate");
    flip_signs<DIM>(x, lane);
    hadamard_warp<DIM>(x, lane);
}

template <uint DIM, uint N>
inline void unrotate(float (&x)[N], uint lane) {
    static_assert(N * 32 == DIM, "unrotate: a lane holds every 32nd coordinate");
    hadamard_warp<DIM>(x, lane);
    flip_signs<DIM>(x, lane);
}

#endif
