// The parameters and options of the kernels of delta_rule, and its gates.
#ifndef KVANT_DELTA_RULE_GATES_H
#define KVANT_DELTA_RULE_GATES_H
#include "elements.h"

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

constant uint QKV_DTYPE [[function_constant(0)]];
constant uint A_DTYPE [[function_constant(1)]];
constant uint B_DTYPE [[function_constant(2)]];
constant uint OUT_DTYPE [[function_constant(3)]];
constant uint KEY_DIM [[function_constant(4)]];

constant constexpr float NORM_EPS = 1e-6f;
constant constexpr uint MAX_KEPT = 16; // rows of a run that writes states after each: StateRuns::MAX_KEPT

// log(1 + y) for y from 0 to 1: the quotient corrects the rounding of 1 + y.
inline float log1p_of(float y) {
    const float sum = 1.0f + y;
    return sum == 1.0f ? y : log(sum) * (y / (sum - 1.0f));
}

inline float softplus(float x) {
    return max(x, 0.0f) + log1p_of(exp(-abs(x)));
}

inline float decay_of(float rate, float x) {
    return exp(rate * softplus(x));
}

inline float beta_of(float x) {
    return 1.0f / (1.0f + exp(-x));
}

#endif
