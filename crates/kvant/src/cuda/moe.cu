// moe_route: the top_k largest logits of each token in falling order, the lower expert first among equals, NaN last;
// the softmax over just those (or over all), times a factor per expert. With SCORES: the largest scores plus bias among
// the experts of the chosen groups, and these scores without the bias, divided by their sum. moe_combine: out[t] = sum
// over j of weights[t, j] * x[t * top_k + j], plus added_weights[t] * added[t].
//
// logits is [tokens, experts], x is [tokens * top_k, dim], added and out are [tokens, dim], each f32, f16 or bf16;
// expert_scale and bias are [experts], ids and weights are [tokens, top_k], added_weights is [tokens].
#include "device/dependent_launch.h"
#include "device/float_order.h"
#include "device/reduce.h"
#include "device/vectors.h"

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

#if KERNEL_moe_route

// SCORES is 0 for softmax over logits, without bias and groups.
constexpr uint SIGMOID = 2;

// The functions from a logit to a score: a sigmoid, or its part of a softmax.
struct Scores {
    float largest;
    float sum;

    float of(float logit) const { return SCORES == SIGMOID ? 1 / (1 + expf(-logit)) : expf(logit - largest) / sum; }
};

// The keys of the two largest corrected scores of a group. Keys are larger than 0, which stands for none.
struct BestTwo {
    uint first;
    uint second;

    void add(float corrected) {
        const uint key = ordered(corrected) + 1;
        second = max(second, min(first, key));
        first = max(first, key);
    }

    // All lanes of the warp call it, and all get the sum.
    float over_warp(uint lane) const {
        const uint best = __reduce_max_sync(ALL, first);
        const uint holder = __reduce_min_sync(ALL, first == best ? lane : 32);
        const uint next = __reduce_max_sync(ALL, lane == holder ? second : first);
        return from_ordered(best - 1) + from_ordered(next - 1);
    }
};

// A bit for each of the groups with the largest values. Lane g holds the key of group g, or 0.
inline uint largest_groups(uint key, uint lane, uint count) {
    uint chosen = 0;
    for (uint j = 0; j < count; j++) {
        const uint best = __reduce_max_sync(ALL, key);
        const uint group = __reduce_min_sync(ALL, key == best ? lane : 32);
        chosen |= 1u << group;
        key = lane == group ? 0 : key;
    }
    return chosen;
}

// The divisor of scores with the given sum. A NaN stays.
inline float divisor(float sum, const MoeRouteParams &p) {
    return NORMALISE ? (sum < p.min_sum ? p.min_sum : sum) + p.epsilon : 1;
}

#endif

#if KERNEL_moe_route && PER_LANE

// A warp per token, for at most 32 choices among 32 * PER_LANE experts: expert e belongs to lane e % 32, which holds
// its logit, factor, bias and score in registers. Factors and biases are read before the previous kernel has ended.
extern "C" __global__ void __launch_bounds__(128)
    KVANT_KERNEL(const uchar *logits, const float *expert_scale, uint *ids, float *weights, const MoeRouteParams p,
                 const float *bias) {
    const uint lane = threadIdx.x % 32;
    const uint token = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    float scales[PER_LANE];
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        const uint e = k * 32 + lane;
        scales[k] = HAS_SCALE && e < p.experts ? expert_scale[e] : 1;
    }
    float biases[PER_LANE];
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        const uint e = k * 32 + lane;
        biases[k] = HAS_BIAS && e < p.experts ? bias[e] : 0;
    }
    take_turn_early();
    if (token >= p.tokens) {
        return;
    }
    const ulong row = ulong(token) * p.experts, to = ulong(token) * p.top_k;
    float values[PER_LANE];
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        const uint e = k * 32 + lane;
        values[k] = e < p.experts ? load(logits, row + e, X_DTYPE) : 0;
    }
    float scores[PER_LANE];
    if (SCORES) {
        Scores rule{0, 0};
        if (SCORES != SIGMOID) {
            uint own_largest = 0;
#pragma unroll
            for (uint k = 0; k < PER_LANE; k++) {
                own_largest = max(own_largest, k * 32 + lane < p.experts ? ordered(values[k]) : 0);
            }
            rule.largest = from_ordered(__reduce_max_sync(ALL, own_largest));
            float own_sum = 0;
#pragma unroll
            for (uint k = 0; k < PER_LANE; k++) {
                own_sum += k * 32 + lane < p.experts ? expf(values[k] - rule.largest) : 0;
            }
            rule.sum = over_warp<Sum>(own_sum);
        }
#pragma unroll
        for (uint k = 0; k < PER_LANE; k++) {
            scores[k] = rule.of(values[k]);
        }
    }
    uint groups = 0xFFFFFFFF;
    if (GROUPED) {
        uint group_key = 0;
        for (uint g = 0; g < p.groups; g++) {
            BestTwo two{0, 0};
#pragma unroll
            for (uint k = 0; k < PER_LANE; k++) {
                const uint e = k * 32 + lane;
                if (e < p.experts && e / p.group_size == g) {
                    two.add(HAS_BIAS ? scores[k] + biases[k] : scores[k]);
                }
            }
            const float value = two.over_warp(lane);
            group_key = lane == g ? ordered(value) + 1 : group_key;
        }
        groups = largest_groups(group_key, lane, p.chosen_groups);
    }
    // 0 for experts that are absent, excluded or chosen; `ordered` is below 2^32 - 1. Scores rise with logits, but
    // different logits may have the same score.
    uint keys[PER_LANE];
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        const uint e = k * 32 + lane;
        const bool is_candidate = e < p.experts && (!GROUPED || (groups >> (e / p.group_size) & 1));
        keys[k] = is_candidate ? ordered(HAS_BIAS ? scores[k] + biases[k] : values[k]) + 1 : 0;
    }
    float largest = 0, sum = 0, own_weight = 0;
    uint own_id = 0;
    for (uint j = 0; j < p.top_k; j++) {
        uint own_key = 0;
#pragma unroll
        for (uint k = 0; k < PER_LANE; k++) {
            own_key = max(own_key, keys[k]);
        }
        const uint key = __reduce_max_sync(ALL, own_key);
        uint id = 0xFFFFFFFF;
#pragma unroll
        for (uint k = PER_LANE; k-- > 0;) {
            id = keys[k] == key ? k * 32 + lane : id;
        }
        id = __reduce_min_sync(ALL, id);
#pragma unroll
        for (uint k = 0; k < PER_LANE; k++) {
            keys[k] = id == k * 32 + lane ? 0 : keys[k];
        }
        const float logit = from_ordered(key - 1);
        largest = j == 0 ? logit : largest;
        const float exponential = expf(logit - largest);
        sum += exponential;
        if (lane == j) {
            own_id = id;
            own_weight = exponential;
        }
    }
    if (SCORES) {
#pragma unroll
        for (uint k = 0; k < PER_LANE; k++) {
            const float other = __shfl_sync(ALL, scores[k], own_id % 32);
            own_weight = own_id / 32 == k ? other : own_weight;
        }
        sum = divisor(over_warp<Sum>(lane < p.top_k ? own_weight : 0), p);
    } else if (!NORMALISE) {
        sum = 0;
#pragma unroll
        for (uint k = 0; k < PER_LANE; k++) {
            sum += k * 32 + lane < p.experts ? expf(values[k] - largest) : 0;
        }
        sum = over_warp<Sum>(sum);
    }
    float scale = 1;
    if (HAS_SCALE) {
#pragma unroll
        for (uint k = 0; k < PER_LANE; k++) {
            const float other = __shfl_sync(ALL, scales[k], own_id % 32);
            scale = own_id / 32 == k ? other : scale;
        }
    }
    if (SCORES) {
        scale *= p.scale;
    }
    if (lane < p.top_k) {
        ids[to + lane] = own_id;
        weights[to + lane] = HAS_SCALE || SCORES ? own_weight / sum * scale : own_weight / sum;
    }
}

#elif KERNEL_moe_route

// Any number of experts and choices, a warp per token. Each round finds the largest logit or corrected score behind the
// one of the round before.
extern "C" __global__ void KVANT_KERNEL(const uchar *logits, const float *expert_scale, uint *ids, float *weights,
                                     const MoeRouteParams p, const float *bias) {
    take_turn_early();
    const uint lane = threadIdx.x % 32;
    const uint token = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (token >= p.tokens) {
        return;
    }
    const ulong row = ulong(token) * p.experts, to = ulong(token) * p.top_k;
    Scores rule{0, 0};
    if (SCORES && SCORES != SIGMOID) {
        uint own_largest = 0;
        for (uint e = lane; e < p.experts; e += 32) {
            own_largest = max(own_largest, ordered(load(logits, row + e, X_DTYPE)));
        }
        rule.largest = from_ordered(over_warp<Max>(own_largest));
        float own_sum = 0;
        for (uint e = lane; e < p.experts; e += 32) {
            own_sum += expf(load(logits, row + e, X_DTYPE) - rule.largest);
        }
        rule.sum = over_warp<Sum>(own_sum);
    }
    uint groups = 0xFFFFFFFF;
    if (GROUPED) {
        uint group_key = 0;
        for (uint g = 0; g < p.groups; g++) {
            BestTwo two{0, 0};
            const uint end = (g + 1) * p.group_size;
            for (uint e = g * p.group_size + lane; e < end; e += 32) {
                const float score = rule.of(load(logits, row + e, X_DTYPE));
                two.add(HAS_BIAS ? score + bias[e] : score);
            }
            const float value = two.over_warp(lane);
            group_key = lane == g ? ordered(value) + 1 : group_key;
        }
        groups = largest_groups(group_key, lane, p.chosen_groups);
    }
    uint last_key = 0xFFFFFFFF, last_id = 0;
    float largest = 0, sum = 0;
    for (uint j = 0; j < p.top_k; j++) {
        uint key = 0, id = 0xFFFFFFFF;
        for (uint e = lane; e < p.experts; e += 32) {
            if (GROUPED && !(groups >> (e / p.group_size) & 1)) {
                continue;
            }
            // Scores rise with logits, but different logits may have the same score.
            const float value = load(logits, row + e, X_DTYPE);
            const uint other = ordered(HAS_BIAS ? rule.of(value) + bias[e] : value);
            const bool left = other < last_key || (other == last_key && e > last_id);
            // The experts of a lane come in rising order, so the first of equals stays.
            if (left && (other > key || id == 0xFFFFFFFF)) {
                key = other;
                id = e;
            }
        }
        last_key = over_warp<Max>(id == 0xFFFFFFFF ? 0 : key);
        last_id = over_warp<Min>(key == last_key ? id : 0xFFFFFFFF);
        const float logit = load(logits, row + last_id, X_DTYPE);
        largest = j == 0 ? logit : largest;
        const float score = SCORES ? rule.of(logit) : expf(logit - largest);
        sum += score;
        // The lane that finishes the expert below.
        if (lane == j % 32) {
            ids[to + j] = last_id;
            weights[to + j] = score;
        }
    }
    if (SCORES) {
        sum = divisor(sum, p);
    } else if (!NORMALISE) {
        sum = 0;
        for (uint e = lane; e < p.experts; e += 32) {
            sum += expf(load(logits, row + e, X_DTYPE) - largest);
        }
        sum = over_warp<Sum>(sum);
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

#else

// One thread per four elements of a row.
extern "C" __global__ void KVANT_KERNEL(const uchar *x, const float *weights, uchar *out, const MoeCombineParams p,
                                     const uchar *added, const float *added_weights) {
    take_turn_early();
    const uint2 at = row_and_four();
    const uint i = at.y * 4;
    if (i >= p.dim || at.x >= p.tokens) {
        return;
    }
    const uint count = p.dim - i;
    float4 sum = all4(0);
    for (uint j = 0; j < p.top_k; j++) {
        const ulong choice = ulong(at.x) * p.top_k + j;
        sum = sum + weights[choice] * load4(x, choice * p.dim + i, count, X_DTYPE, ALIGNED);
    }
    if (HAS_ADDED) {
        const float4 other = load4(added, ulong(at.x) * p.dim + i, count, ADDED_DTYPE, ALIGNED);
        sum = sum + (HAS_ADDED_WEIGHTS ? added_weights[at.x] : 1) * other;
    }
    store4(out, ulong(at.x) * p.dim + i, count, sum, OUT_DTYPE, ALIGNED);
}

#endif
