// The activations of gates.
#ifndef KVANT_CUDA_DEVICE_ACTIVATION_H
#define KVANT_CUDA_DEVICE_ACTIVATION_H
#include "device/convert.h"

// The numbers of gpu/gate.rs. GELU is its approximation by tanh.
constexpr uint GELU = 0;
constexpr uint SILU = 1;
constexpr uint CLAMPED_SWISH = 2;
constexpr uint SIGMOID = 3;
constexpr uint IDENTITY = 4;

// Every activation except the sigmoid and the identity is x / (1 + e^-z). SiLU: z = x. Clamped swish: z = 1.702 x.
// GELU: (1 + tanh u) / 2 = 1 / (1 + e^-2u). `activation` is a constant.
inline float activate(float x, uint activation) {
    if (activation == IDENTITY) {
        return x;
    }
    if (activation == SIGMOID) {
        return 1.0f / (1.0f + expf(-x));
    }
    if (activation == CLAMPED_SWISH) {
        // Not fminf(), which drops a NaN.
        x = x > 7.0f ? 7.0f : x;
        return x / (1.0f + expf(-1.702f * x));
    }
    // 2 sqrt(2 / pi), and 0.044715 times that.
    const float z = activation == GELU ? x * (1.5957691216f + 0.0713548163f * x * x) : x;
    return x / (1.0f + expf(-z));
}

// The factor that multiplies the activated number.
inline float factor_of(float up, uint activation) {
    if (activation == CLAMPED_SWISH) {
        return (up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up) + 1.0f;
    }
    return up;
}

#endif
