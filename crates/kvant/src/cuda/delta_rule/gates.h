// The parameters of the kernels of delta_rule, and its gates.
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
    uint max_rows; // longer runs are skipped
};

constexpr uint MAX_KEPT = 16; // rows of a run that writes states after each: StateRuns::MAX_KEPT
constexpr float NORM_EPS = 1e-6f; // added to a sum of squares

// The logarithm of the decay: rate * softplus(x), where rate is negative.
inline float log_decay_of(float rate, float x) {
    return rate * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
}

inline float decay_of(float rate, float x) {
    return expf(log_decay_of(rate, x));
}

inline float beta_of(float b) {
    return 1.0f / (1.0f + expf(-b));
}

#endif
