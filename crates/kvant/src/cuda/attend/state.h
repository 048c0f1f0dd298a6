// The state of a softmax over some of a row's keys, and its merge.
//
//   m   the largest score, in units of log 2;
//   l   the sum of the weights, 2^(score - m);
//   o   the sum of weights times values: four coordinates here, a quad.
//
// The states of two disjoint sets of keys merge into the state of both:
//
//   m = max(m1, m2),   f1 = 2^(m1 - m),   f2 = 2^(m2 - m),   l = l1 f1 + l2 f2,   o = o1 f1 + o2 f2.
//
// The empty state, m = -inf and l = o = 0, is neutral. The merge is associative and commutative up to rounding. Every
// kernel merges in a fixed order, so that results are reproducible bit by bit. The output of a row is o / l.
#ifndef KVANT_CUDA_ATTEND_STATE_H
#define KVANT_CUDA_ATTEND_STATE_H
#include "attend/softmax.h"

// o += f x.
inline void add_scaled(float4 &o, float4 x, float f) {
    o = make_float4(o.x + x.x * f, o.y + x.y * f, o.z + x.z * f, o.w + x.w * f);
}

struct SoftmaxState {
    float m = nothing();
    float l = 0;
    float4 o = make_float4(0, 0, 0, 0);

    // Sets m to the maximum of several states, before the first of them is merged.
    void merge_max(float other) {
        m = fmaxf(m, other);
    }
    // Raises m to at least `to`, and rescales l and o.
    void rescale(float to) {
        const float f = factor_of(m, to);
        m = to;
        l *= f;
        o = make_float4(o.x * f, o.y * f, o.z * f, o.w * f);
    }
    // Merges l and o of a state, whose factor is f.
    void merge(float other_l, float4 x, float f) {
        l += other_l * f;
        add_scaled(o, x, f);
    }
    // Merges a state, given as m and l, and o. Its maximum is at most m.
    void merge(float2 ml, float4 x) {
        merge(ml.y, x, factor_of(ml.x, m));
    }
};

// The factors f1 and f2 of two states that are merged; f1 times `scale`, if l and o of the first state are scaled.
struct MergeFactors {
    float first;
    float second;

    MergeFactors(float m1, float m2, float scale = 1) {
        const float m = fmaxf(m1, m2);
        first = factor_of(m1, m) * scale;
        second = factor_of(m2, m);
    }
    // l or a coordinate of o.
    float merge(float x1, float x2) const {
        return x1 * first + x2 * second;
    }
};

#endif
