// moe_route: the top_k largest logits of each token in falling order, the lower expert first among equals, NaN last;
// the softmax over just those (or over all), times a factor per expert. moe_combine: out[t] = sum over j of weights[t,
// j] * x[t * top_k + j].
//
// logits is [tokens, experts], x is [tokens * top_k, dim], out is [tokens, dim], each f32, f16 or bf16; expert_scale is
// [experts], ids and weights are [tokens, top_k].
#include "vectors.h"
#include "ordered.h"

struct MoeRouteParams {
    uint tokens;
    uint experts;
    uint top_k;
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

// A SIMD-group per token. Each round finds the largest logit behind the one of the round before.
kernel void moe_route(device const uchar *logits [[buffer(0)]],
                      device const float *expert_scale [[buffer(1), function_constant(HAS_SCALE)]],
                      device uint *ids [[buffer(2)]],
                      device float *weights [[buffer(3)]],
                      constant MoeRouteParams &p [[buffer(4)]],
                      uint group [[threadgroup_position_in_grid]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]]) {
    const uint token = group * simdgroups + simdgroup;
    if (token >= p.tokens) {
        return;
    }
    const ulong row = ulong(token) * p.experts, to = ulong(token) * p.top_k;
    uint last_key = 0xFFFFFFFF, last_id = 0;
    float largest = 0, sum = 0;
    for (uint j = 0; j < p.top_k; j++) {
        uint key = 0, id = 0xFFFFFFFF;
        for (uint e = lane; e < p.experts; e += 32) {
            const uint other = ordered(load(logits, row + e, X_DTYPE));
            const bool left = other < last_key || (other == last_key && e > last_id);
            // The experts of a lane come in rising order, so the first of equals stays.
            if (left && (other > key || id == 0xFFFFFFFF)) {
                key = other;
                id = e;
            }
        }
        last_key = simd_max(id == 0xFFFFFFFF ? 0 : key);
        last_id = simd_min(key == last_key ? id : 0xFFFFFFFF);
        const float logit = load(logits, row + last_id, X_DTYPE);
        largest = j == 0 ? logit : largest;
        const float exponential = precise::exp(logit - largest);
        sum += exponential;
        // The same lane finishes it below.
        if (lane == j % 32) {
            ids[to + j] = last_id;
            weights[to + j] = exponential;
        }
    }
    if (!NORMALISE) {
        sum = 0;
        for (uint e = lane; e < p.experts; e += 32) {
            sum += precise::exp(load(logits, row + e, X_DTYPE) - largest);
        }
        sum = simd_sum(sum);
    }
    for (uint j = lane; j < p.top_k; j += 32) {
        float weight = weights[to + j] / sum;
        if (HAS_SCALE) {
            weight *= expert_scale[ids[to + j]];
        }
        weights[to + j] = weight;
    }
}

// One thread per four elements of a row: x counts those, y the tokens.
kernel void moe_combine(device const uchar *x [[buffer(0)]],
                        device const float *weights [[buffer(1)]],
                        device uchar *out [[buffer(2)]],
                        constant MoeCombineParams &p [[buffer(3)]],
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
    store4(out, ulong(at.y) * p.dim + i, count, sum, OUT_DTYPE, ALIGNED);
}
