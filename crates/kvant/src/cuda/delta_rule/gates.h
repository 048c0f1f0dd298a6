// The parameters of both kernels of delta_rule, and its gates.
#ifndef KVANT_CUDA_DELTA_RULE_GATES_H
#define KVANT_CUDA_DELTA_RULE_GATES_H
#include "device/elements.h"

struct DeltaRuleParams {
    uint rows;
    uint states;
    uint stride; // floats between states
    uint heads;
    uint key_heads;
    uint key_repeats; // adjacent heads with one key head
    uint value_dim;
};

constexpr float NORM_EPS = 1e-6f; // added to a sum of squares

// exp(rate * softplus(x)), where rate is negative.
inline float decay_of(float rate, float x) {
    return expf(rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)))));
}

inline float beta_of(float b) {
    return 1.0f / (1.0f + expf(-b));
}

#endif
