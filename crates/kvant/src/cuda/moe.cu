// moe_route: the top_k largest logits of each token in falling order, the lower expert first among equals, NaN last.
// Weights are the softmax over the chosen logits (or over all), times a factor per expert. With SCORES: the experts
// with the largest scores plus bias in the chosen groups; weights are their scores without the bias, divided by the
// sum. moe_combine: out[t] = sum over j of weights[t, j] * x[t * top_k + j], plus added_weights[t] * added[t].
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

// The function from a logit to a score: a sigmoid, or the logit's part of a softmax.
struct Scores {
    float largest;
    float sum;

    float of(float logit) const { return SCORES == SIGMOID ? 1 / (1 + expf(-logit)) : expf(logit - largest) / sum; }
};

// The keys of the two largest corrected scores of a group. Keys are larger than 0, which means none.
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

// The divisor of scores with this sum. A NaN stays NaN.
inline float divisor(float sum, const MoeRouteParams &p) {
    return NORMALISE ? (sum < p.min_sum ? p.min_sum : sum) + p.epsilon : 1;
}

#endif

#if KERNEL_moe_route && PER_LANE

// A lane's experts: lane e % 32 has expert e as its expert number e / 32.
struct Experts {
    const MoeRouteParams &p;
    uint lane;

    uint id(uint k) const { return k * 32 + lane; }
    bool has(uint k) const { return id(k) < p.experts; }
};

// The value in `own` of expert `id`, which any lane may hold; `number` if no lane does. All lanes of the warp call it.
inline float number_of(const float (&own)[PER_LANE], uint id, float number) {
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        const float other = __shfl_sync(ALL, own[k], id % 32);
        number = id / 32 == k ? other : number;
    }
    return number;
}

// The sum of exponentials of a token's logits.
inline float exponentials(const Experts &of, const float (&logits)[PER_LANE], float largest) {
    float own_sum = 0;
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        own_sum += of.has(k) ? expf(logits[k] - largest) : 0;
    }
    return over_warp<Sum>(own_sum);
}

inline void score(float (&scores)[PER_LANE], const Experts &of, const float (&logits)[PER_LANE]) {
    Scores rule{0, 0};
    if (SCORES != SIGMOID) {
        uint own_largest = 0;
#pragma unroll
        for (uint k = 0; k < PER_LANE; k++) {
            own_largest = max(own_largest, of.has(k) ? ordered(logits[k]) : 0);
        }
        rule.largest = from_ordered(__reduce_max_sync(ALL, own_largest));
        rule.sum = exponentials(of, logits, rule.largest);
    }
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        scores[k] = rule.of(logits[k]);
    }
}

// A bit for each chosen group.
inline uint choose_groups(const Experts &of, const float (&scores)[PER_LANE], const float (&biases)[PER_LANE]) {
    uint group_key = 0;
    for (uint g = 0; g < of.p.groups; g++) {
        BestTwo two{0, 0};
#pragma unroll
        for (uint k = 0; k < PER_LANE; k++) {
            if (of.has(k) && of.id(k) / of.p.group_size == g) {
                two.add(HAS_BIAS ? scores[k] + biases[k] : scores[k]);
            }
        }
        const float value = two.over_warp(of.lane);
        group_key = of.lane == g ? ordered(value) + 1 : group_key;
    }
    return largest_groups(group_key, of.lane, of.p.chosen_groups);
}

// The lane's choice and its exponential, if the lane has one; the largest logit and the sum of exponentials of all
// choices.
struct Choice {
    uint id = 0;
    float weight = 0;
    float largest = 0;
    float sum = 0;
};

// The expert with the largest key, the lowest among equals. Its key becomes 0.
inline uint take_expert(uint (&keys)[PER_LANE], uint key, uint lane) {
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
    return id;
}

// Lane j gets choice j. Keys are 0 for experts that are absent, excluded or chosen.
inline Choice choose(uint (&keys)[PER_LANE], const Experts &of) {
    Choice own;
    for (uint j = 0; j < of.p.top_k; j++) {
        uint own_key = 0;
#pragma unroll
        for (uint k = 0; k < PER_LANE; k++) {
            own_key = max(own_key, keys[k]);
        }
        const uint key = __reduce_max_sync(ALL, own_key);
        const uint id = take_expert(keys, key, of.lane);
        const float logit = from_ordered(key - 1);
        own.largest = j == 0 ? logit : own.largest;
        const float exponential = expf(logit - own.largest);
        own.sum += exponential;
        if (of.lane == j) {
            own.id = id;
            own.weight = exponential;
        }
    }
    return own;
}

// A warp per token, for at most 32 choices among 32 * PER_LANE experts: expert e belongs to lane e % 32, which holds
// its logit, factor, bias and score in registers. Factors and biases are read before the previous kernel has ended.
extern "C" __global__ void __launch_bounds__(128)
    KVANT_KERNEL(const uchar *logits, const float *expert_scale, uint *ids, float *weights, const MoeRouteParams p,
                 const float *bias) {
    const Experts of = {p, threadIdx.x % 32};
    const uint token = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    float scales[PER_LANE], biases[PER_LANE], values[PER_LANE], scores[PER_LANE];
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        scales[k] = HAS_SCALE && of.has(k) ? expert_scale[of.id(k)] : 1;
    }
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        biases[k] = HAS_BIAS && of.has(k) ? bias[of.id(k)] : 0;
    }
    take_turn_early();
    if (token >= p.tokens) {
        return;
    }
    const ulong row = ulong(token) * p.experts, to = ulong(token) * p.top_k;
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        values[k] = of.has(k) ? load(logits, row + of.id(k), X_DTYPE) : 0;
    }
    if (SCORES) {
        score(scores, of, values);
    }
    const uint groups = GROUPED ? choose_groups(of, scores, biases) : 0xFFFFFFFF;
    // `ordered` is below 2^32 - 1. Scores rise with logits, but different logits may have the same score.
    uint keys[PER_LANE];
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        const bool is_candidate = of.has(k) && (!GROUPED || (groups >> (of.id(k) / p.group_size) & 1));
        keys[k] = is_candidate ? ordered(HAS_BIAS ? scores[k] + biases[k] : values[k]) + 1 : 0;
    }
    Choice own = choose(keys, of);
    if (SCORES) {
        own.weight = number_of(scores, own.id, own.weight);
        own.sum = divisor(over_warp<Sum>(of.lane < p.top_k ? own.weight : 0), p);
    } else if (!NORMALISE) {
        own.sum = exponentials(of, values, own.largest);
    }
    float scale = HAS_SCALE ? number_of(scales, own.id, 1) : 1;
    if (SCORES) {
        scale *= p.scale;
    }
    if (of.lane < p.top_k) {
        ids[to + of.lane] = own.id;
        weights[to + of.lane] = HAS_SCALE || SCORES ? own.weight / own.sum * scale : own.weight / own.sum;
    }
}

#elif KERNEL_moe_route

// A token's logits, and the lane of the warp that has it.
struct Logits {
    const MoeRouteParams &p;
    const uchar *values;
    ulong row;
    uint lane;

    float of(uint expert) const { return load(values, row + expert, X_DTYPE); }
    // The sum of exponentials; each lane computes those of its experts.
    float exponentials(float largest) const {
        float own_sum = 0;
        for (uint e = lane; e < p.experts; e += 32) {
            own_sum += expf(of(e) - largest);
        }
        return over_warp<Sum>(own_sum);
    }
};

inline Scores rule_of(const Logits &logits) {
    Scores rule{0, 0};
    if (SCORES && SCORES != SIGMOID) {
        uint own_largest = 0;
        for (uint e = logits.lane; e < logits.p.experts; e += 32) {
            own_largest = max(own_largest, ordered(logits.of(e)));
        }
        rule.largest = from_ordered(over_warp<Max>(own_largest));
        rule.sum = logits.exponentials(rule.largest);
    }
    return rule;
}

// A bit for each chosen group.
inline uint choose_groups(const Logits &logits, Scores rule, const float *bias) {
    const MoeRouteParams &p = logits.p;
    uint group_key = 0;
    for (uint g = 0; g < p.groups; g++) {
        BestTwo two{0, 0};
        const uint end = (g + 1) * p.group_size;
        for (uint e = g * p.group_size + logits.lane; e < end; e += 32) {
            const float score = rule.of(logits.of(e));
            two.add(HAS_BIAS ? score + bias[e] : score);
        }
        const float value = two.over_warp(logits.lane);
        group_key = logits.lane == g ? ordered(value) + 1 : group_key;
    }
    return largest_groups(group_key, logits.lane, p.chosen_groups);
}

// The last choice: the expert, and the key of its logit or corrected score.
struct Last {
    uint key = 0xFFFFFFFF;
    uint id = 0;
};

// The next choice after the last one, in falling order of keys, then rising order of experts.
inline Last choose_next(const Logits &logits, Scores rule, const float *bias, uint groups, Last last) {
    uint key = 0, id = 0xFFFFFFFF;
    for (uint e = logits.lane; e < logits.p.experts; e += 32) {
        if (GROUPED && !(groups >> (e / logits.p.group_size) & 1)) {
            continue;
        }
        // Scores rise with logits, but different logits may have the same score.
        const float value = logits.of(e);
        const uint other = ordered(HAS_BIAS ? rule.of(value) + bias[e] : value);
        const bool left = other < last.key || (other == last.key && e > last.id);
        // The experts of a lane come in rising order, so the first of equals stays.
        if (left && (other > key || id == 0xFFFFFFFF)) {
            key = other;
            id = e;
        }
    }
    last.key = over_warp<Max>(id == 0xFFFFFFFF ? 0 : key);
    last.id = over_warp<Min>(key == last.key ? id : 0xFFFFFFFF);
    return last;
}

// Any number of experts and choices, a warp per token. Each round finds the largest logit or corrected score after the
// choice of the previous round.
extern "C" __global__ void KVANT_KERNEL(const uchar *logits, const float *expert_scale, uint *ids, float *weights,
                                     const MoeRouteParams p, const float *bias) {
    take_turn_early();
    const uint lane = threadIdx.x % 32;
    const uint token = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (token >= p.tokens) {
        return;
    }
    const Logits of = {p, logits, ulong(token) * p.experts, lane};
    const ulong to = ulong(token) * p.top_k;
    const Scores rule = rule_of(of);
    const uint groups = GROUPED ? choose_groups(of, rule, bias) : 0xFFFFFFFF;
    Last last;
    float largest = 0, sum = 0;
    for (uint j = 0; j < p.top_k; j++) {
        last = choose_next(of, rule, bias, groups, last);
        const float logit = of.of(last.id);
        largest = j == 0 ? logit : largest;
        const float score = SCORES ? rule.of(logit) : expf(logit - largest);
        sum += score;
        // The lane that finishes this expert below.
        if (lane == j % 32) {
            ids[to + j] = last.id;
            weights[to + j] = score;
        }
    }
    if (SCORES) {
        sum = divisor(sum, p);
    } else if (!NORMALISE) {
        sum = of.exponentials(largest);
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
