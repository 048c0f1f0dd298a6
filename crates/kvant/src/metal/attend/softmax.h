// The online softmax: scores, the state over some keys, and the merge of two states.
#ifndef KVANT_ATTEND_SOFTMAX_H
#define KVANT_ATTEND_SOFTMAX_H
#include "attend/params.h"

// The softmax state of some keys: m, the largest score in base 2, and l, the sum of 2^(score - m). The sum o of
// 2^(score - m) * value is kept elsewhere. Without keys, m is -inf, and l and o are 0. With keys, m is at least
// -FLT_MAX: scores of -inf have no weight if another is finite, and l is 0 if all are -inf. Therefore m, not l, shows
// whether the state has keys.
struct State {
    float m;
    float l;
};

inline float2 packed(State state) {
    return float2(state.m, state.l);
}

inline State unpacked(float2 state) {
    return State{state.x, state.y};
}

inline State no_keys() {
    return State{-INFINITY, 0};
}

// Merges `part` into `into`. Returns the factors of their o, which are added after the multiplication.
inline float2 merge(thread State &into, State part) {
    const float m = part.m > into.m ? part.m : into.m;
    // Equal maxima, infinite ones included, need no factor. A NaN stays in l and o.
    const float2 factors =
        float2(into.m == m ? 1 : precise::exp2(into.m - m), part.m == m ? 1 : precise::exp2(part.m - m));
    into = State{m, into.l * factors.x + part.l * factors.y};
    return factors;
}

// The maximum of m and the score of an existing key. A NaN is ignored here; its weight is NaN.
inline float raised(float m, float score) {
    return score > m ? score : max(m, -FLT_MAX);
}

// Merges the result of an earlier call, whose end is `end`, into a state. Returns the factors of o and of the result,
// which are added after the multiplication.
inline float2 with_earlier(thread State &state, float end) {
    return end == -INFINITY ? float2(1, 0) : merge(state, State{end, 1});
}

// log2 of the sum of 2^score, which a merge needs in addition to the result. -inf without keys, or if all scores are
// -inf.
inline float end_of(State state) {
    return state.l != 0 ? state.m + precise::log2(state.l) : -INFINITY;
}

// The factor from o to the result of attention: 0 without keys. If all scores are -inf, o is 0, and the factor infinity
// makes the result NaN; if a later call merges the result, the factor is 0.
inline float finish(State state) {
    return state.l != 0 ? 1 / state.l : ENDS || state.m == -INFINITY ? 0 : INFINITY;
}

// The state with the sink of a query row's head: a score without a value.
inline State with_sink(State state, device const float *sinks, uint row, constant MetalAttendParams &p) {
    if (SINKS) {
        state.l += precise::exp2(sinks[row % p.heads] * M_LOG2E_F - state.m);
    }
    return state;
}

// The score of a dot product, in base 2.
inline float score_of(float product, constant MetalAttendParams &p) {
    float score = product * p.scale;
    if (SOFTCAP) {
        score = p.softcap * precise::tanh(score / p.softcap);
    }
    return score * M_LOG2E_F;
}

#endif
