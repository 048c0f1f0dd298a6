// moe_route: the top_k largest logits of each token in descending order, the lower expert first among equals, NaN last.
// Weights are the softmax over these logits (or over all), times a factor per expert. With SCORES: the largest scores
// plus bias among the experts of the chosen groups; weights are these scores without the bias, divided by their sum.
// moe_combine: out[t] = sum over j of weights[t, j] * x[t * top_k + j], plus added_weights[t] * added[t].
//
// logits is [tokens, experts], x is [tokens * top_k, dim], added and out are [tokens, dim], each f32, f16 or bf16;
// expert_scale and bias are [experts], ids and weights are [tokens, top_k], added_weights is [tokens].
#include "vectors.h"
#include "ordered.h"

struct MoeRouteParams {
    uint tokens;
    uint experts;
    uint top_k;
    uint group_size;
    uint groups; // at most 32
    uint chosen_groups;
    float min_sum;
    float epsilon;
    float scale;
};

struct MoeCombineParams {
    uint tokens;
    uint top_k;
    uint dim;
};

constant uint X_DTYPE [[function_constant(0)]];
constant uint OUT_DTYPE [[function_constant(1)]];
constant bool HAS_SCALE [[function_constant(2)]];
constant bool ALIGNED [[function_constant(3)]];
constant bool NORMALISE [[function_constant(4)]];
// 0: softmax over logits, and the next two constants are false; 1: softmax scores; 2: sigmoid scores.
constant uint SCORES [[function_constant(5)]];
constant bool HAS_BIAS [[function_constant(6)]];
constant bool GROUPED [[function_constant(7)]];
constant bool HAS_ADDED [[function_constant(8)]];
constant bool HAS_ADDED_WEIGHTS [[function_constant(9)]];
constant uint ADDED_DTYPE [[function_constant(10)]];

constant uint SIGMOID = 2;

// The logits of a token, and the function from a logit to a score: a sigmoid, or the logit's part of a softmax.
struct Scores {
    device const uchar *logits;
    device const float *bias;
    ulong row;
    float largest;
    float sum;

    float logit(uint e) const { return load(logits, row + e, X_DTYPE); }

    float of(uint e) const {
        return SCORES == SIGMOID ? 1 / (1 + precise::exp(-logit(e))) : precise::exp(logit(e) - largest) / sum;
    }

    float corrected(uint e) const { return HAS_BIAS ? of(e) + bias[e] : of(e); }

    // Scores increase with logits, but rounding can give different logits equal scores.
    uint key(uint e) const { return ordered(HAS_BIAS ? corrected(e) : logit(e)); }
};

// All lanes of the SIMD-group call it.
inline Scores scores_of(device const uchar *logits, device const float *bias, ulong row, uint lane, uint experts) {
    Scores scores{logits, bias, row, 0, 0};
    if (SCORES == SIGMOID) {
        return scores;
    }
    uint largest = 0;
    for (uint e = lane; e < experts; e += 32) {
        largest = max(largest, ordered(scores.logit(e)));
    }
    scores.largest = from_ordered(simd_max(largest));
    float sum = 0;
    for (uint e = lane; e < experts; e += 32) {
        sum += precise::exp(scores.logit(e) - scores.largest);
    }
    scores.sum = simd_sum(sum);
    return scores;
}

// A bit for each group that the token chooses. All lanes of the SIMD-group call it; lane g ranks group g.
inline uint chosen_groups(thread const Scores &scores, uint lane, constant MoeRouteParams &p) {
    // Keys of experts and groups are larger than 0, which means none.
    uint own = 0;
    for (uint g = 0; g < p.groups; g++) {
        uint best = 0, second = 0;
        for (uint e = lane; e < p.group_size; e += 32) {
            const uint key = ordered(scores.corrected(g * p.group_size + e)) + 1;
            second = max(second, min(best, key));
            best = max(best, key);
        }
        const uint first = simd_max(best);
        const uint holder = simd_min(best == first ? lane : 32u);
        second = simd_max(lane == holder ? second : best);
        const float value = from_ordered(first - 1) + from_ordered(second - 1);
        own = lane == g ? ordered(value) + 1 : own;
    }
    uint chosen = 0;
    for (uint j = 0; j < p.chosen_groups; j++) {
        const uint best = simd_max(own);
        const uint group = simd_min(own == best ? lane : 32u);
        chosen |= 1u << group;
        own = lane == group ? 0 : own;
    }
    return chosen;
}

// One SIMD-group per token. Each round finds the largest logit or corrected score after that of the previous round.
kernel void moe_route(device const uchar *logits [[buffer(0)]],
                      device const float *expert_scale [[buffer(1), function_constant(HAS_SCALE)]],
                      device uint *ids [[buffer(2)]],
                      device float *weights [[buffer(3)]],
                      constant MoeRouteParams &p [[buffer(4)]],
                      device const float *bias [[buffer(5), function_constant(HAS_BIAS)]],
                      uint group [[threadgroup_position_in_grid]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]]) {
    const uint token = group * simdgroups + simdgroup;
    if (token >= p.tokens) {
        return;
    }
    const ulong row = ulong(token) * p.experts, to = ulong(token) * p.top_k;
    Scores scores{logits, nullptr, row, 0, 0};
    uint groups = 0xFFFFFFFF;
    if (SCORES) {
        scores = scores_of(logits, HAS_BIAS ? bias : nullptr, row, lane, p.experts);
    }
    if (GROUPED) {
        groups = chosen_groups(scores, lane, p);
    }
    uint last_key = 0xFFFFFFFF, last_id = 0;
    float largest = 0, sum = 0;
    for (uint j = 0; j < p.top_k; j++) {
        uint key = 0, id = 0xFFFFFFFF;
        for (uint e = lane; e < p.experts; e += 32) {
            if (GROUPED && !(groups >> (e / p.group_size) & 1)) {
                continue;
            }
            const uint other = scores.key(e);
            const bool left = other < last_key || (other == last_key && e > last_id);
            // A lane visits its experts in ascending order, so the first of equals stays.
            if (left && (other > key || id == 0xFFFFFFFF)) {
                key = other;
                id = e;
            }
        }
        last_key = simd_max(id == 0xFFFFFFFF ? 0 : key);
        last_id = simd_min(key == last_key ? id : 0xFFFFFFFF);
        const float logit = scores.logit(last_id);
        largest = j == 0 ? logit : largest;
        const float score = SCORES ? scores.of(last_id) : precise::exp(logit - largest);
        sum += score;
        // This lane also finishes the weight below.
        if (lane == j % 32) {
            ids[to + j] = last_id;
            weights[to + j] = score;
        }
    }
    if (SCORES) {
        // The comparison leaves a NaN unchanged.
        sum = NORMALISE ? (sum < p.min_sum ? p.min_sum : sum) + p.epsilon : 1;
    } else if (!NORMALISE) {
        sum = 0;
        for (uint e = lane; e < p.experts; e += 32) {
            sum += precise::exp(load(logits, row + e, X_DTYPE) - largest);
        }
        sum = simd_sum(sum);
    }
    for (uint j = lane; j < p.top_k; j += 32) {
        float weight = weights[to + j] / sum;
        if (SCORES) {
            weight *= p.scale;
        }
        if (HAS_SCALE) {
            weight *= expert_scale[ids[to + j]];
        }
        weights[to + j] = weight;
    }
}

// One thread per four elements: x counts the fours of a row, y the tokens.
kernel void moe_combine(device const uchar *x [[buffer(0)]],
                        device const float *weights [[buffer(1)]],
                        device uchar *out [[buffer(2)]],
                        constant MoeCombineParams &p [[buffer(3)]],
                        device const uchar *added [[buffer(4), function_constant(HAS_ADDED)]],
                        device const float *added_weights [[buffer(5), function_constant(HAS_ADDED_WEIGHTS)]],
                        uint2 at [[thread_position_in_grid]]) {
    const uint i = at.x * 4;
    if (i >= p.dim || at.y >= p.tokens) {
        return;
    }
    const uint count = p.dim - i;
    float4 sum = 0;
    for (uint j = 0; j < p.top_k; j++) {
        const ulong choice = ulong(at.y) * p.top_k + j;
        sum += weights[choice] * load4(x, choice * p.dim + i, count, X_DTYPE, ALIGNED);
    }
    if (HAS_ADDED) {
        const float4 other = load4(added, ulong(at.y) * p.dim + i, count, ADDED_DTYPE, ALIGNED);
        sum += HAS_ADDED_WEIGHTS ? added_weights[at.y] * other : other;
    }
    store4(out, ulong(at.y) * p.dim + i, count, sum, OUT_DTYPE, ALIGNED);
}
