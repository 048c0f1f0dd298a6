// moe_route: the top_k largest logits of each token in falling order, the lower expert first among equals, NaN last;
// the softmax over just those (or over all), times a factor per expert. moe_combine: out[t] = sum over j of weights[t,
// j] * x[t * top_k + j].
//
// logits is [tokens, experts], x is [tokens * top_k, dim], out is [tokens, dim], each f32, f16 or bf16; expert_scale is
// [experts], ids and weights are [tokens, top_k].
#include "device/dependent_launch.h"
#include "device/float_order.h"
#include "device/reduce.h"
#include "device/vectors.h"

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

#if KERNEL_moe_route && PER_LANE

// A warp per token, for at most 32 choices among 32 * PER_LANE experts: expert e belongs to lane e % 32, which holds
// its logit and its factor in registers. Factors are read before the previous kernel has ended.
extern "C" __global__ void __launch_bounds__(128)
    KVANT_KERNEL(const uchar *logits, const float *expert_scale, uint *ids, float *weights, const MoeRouteParams p) {
    const uint lane = threadIdx.x % 32;
    const uint token = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    float scales[PER_LANE];
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        const uint e = k * 32 + lane;
        scales[k] = HAS_SCALE && e < p.experts ? expert_scale[e] : 1;
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
    // 0 for experts that are absent or chosen; `ordered` is below 2^32 - 1.
    uint keys[PER_LANE];
#pragma unroll
    for (uint k = 0; k < PER_LANE; k++) {
        keys[k] = k * 32 + lane < p.experts ? ordered(values[k]) + 1 : 0;
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
    if (!NORMALISE) {
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
    if (lane < p.top_k) {
        ids[to + lane] = own_id;
        weights[to + lane] = HAS_SCALE ? own_weight / sum * scale : own_weight / sum;
    }
}

#elif KERNEL_moe_route

// Any number of experts and choices, a warp per token. Each round finds the largest logit behind the one of the round
// before.
extern "C" __global__ void KVANT_KERNEL(const uchar *logits, const float *expert_scale, uint *ids, float *weights,
                                     const MoeRouteParams p) {
    take_turn_early();
    const uint lane = threadIdx.x % 32;
    const uint token = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
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
        last_key = over_warp<Max>(id == 0xFFFFFFFF ? 0 : key);
        last_id = over_warp<Min>(key == last_key ? id : 0xFFFFFFFF);
        const float logit = load(logits, row + last_id, X_DTYPE);
        largest = j == 0 ? logit : largest;
        const float exponential = expf(logit - largest);
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
            sum += expf(load(logits, row + e, X_DTYPE) - largest);
        }
        sum = over_warp<Sum>(sum);
    }
    for (uint j = lane; j < p.top_k; j += 32) {
        float weight = weights[to + j] / sum;
        if (HAS_SCALE) {
            weight *= expert_scale[ids[to + j]];
        }
        weights[to + j] = weight;
    }
}

#else

// One thread per four elements of a row.
extern "C" __global__ void KVANT_KERNEL(const uchar *x, const float *weights, uchar *out, const MoeCombineParams p) {
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
    store4(out, ulong(at.x) * p.dim + i, count, sum, OUT_DTYPE, ALIGNED);
}

#endif
