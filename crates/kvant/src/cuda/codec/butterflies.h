// The Hadamard transform of a thread's registers.
#ifndef KVANT_CUDA_CODEC_BUTTERFLIES_H
#define KVANT_CUDA_CODEC_BUTTERFLIES_H
#include "device/convert.h"

// y = H y, of N values, a power of two.
template <uint N> inline void transform(float (&y)[N]) {
#pragma unroll
    for (uint distance = 1; distance < N; distance *= 2) {
#pragma unroll
        for (uint j = 0; j < N; j++) {
            if ((j & distance) == 0) {
                const float a = y[j], b = y[j + distance];
                y[j] = a + b;
                y[j + distance] = a - b;
            }
        }
    }
}

#endif
