// rms_norm: out = scale * (x * weight / sqrt(mean x^2 + eps)) of each row, f32, f16 or bf16 in and out.
//
// x, residual, sum and out are [rows, dim]; weight is [dim]. AFTER adds the residual to the normed row, before the scale;
// BEFORE adds it to x first, and writes the sum. A row belongs to one SIMD-group of several in a threadgroup, or, when it is
// long, to a whole threadgroup (WHOLE). It is read twice: for its mean square, then, mostly from a cache, for the result.
// Every element is read and written by one thread, nothing is written in the first pass, and in the second an element
// is read before it is written: so `out` and `sum` may be `x` or the residual.
#include "vectors.h"
#include "reduce.h"

struct RmsNormParams {
    uint rows;
    uint dim;
    float eps;
    float scale;
};

constant uint X_DTYPE [[function_constant(0)]];
constant uint OUT_DTYPE [[function_constant(1)]];
constant uint WEIGHT_DTYPE [[function_constant(2)]];
constant uint RESIDUAL_DTYPE [[function_constant(3)]];
constant uint SUM_DTYPE [[function_constant(4)]];
constant bool HAS_WEIGHT [[function_constant(5)]];
constant bool AFTER [[function_constant(6)]];
constant bool BEFORE [[function_constant(7)]];
constant bool WHOLE [[function_constant(8)]];
constant bool ALIGNED [[function_constant(9)]];
constant bool HAS_RESIDUAL = AFTER || BEFORE;

kernel void rms_norm(device const uchar *x [[buffer(0)]],
                     device const uchar *weight [[buffer(1), function_constant(HAS_WEIGHT)]],
                     device const uchar *residual [[buffer(2), function_constant(HAS_RESIDUAL)]],
                     device uchar *sum [[buffer(3), function_constant(BEFORE)]],
                     device uchar *out [[buffer(4)]],
                     constant RmsNormParams &p [[buffer(5)]],
                     uint group [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float shared[32];
    // The threads of a row; `step` elements are theirs at a time.
    const Place place = WHOLE ? Place{lane, simdgroup, simdgroups} : Place{lane, 0, 1};
    const uint row = WHOLE ? group : group * simdgroups + simdgroup;
    if (row >= p.rows) {
        return;
    }
    const uint first = (place.simdgroup * 32 + lane) * 4;
    const uint step = place.simdgroups * 32 * 4;
    const ulong start = ulong(row) * p.dim;

    float squares = 0;
    for (uint i = first; i < p.dim; i += step) {
        float4 value = load4(x, start + i, p.dim - i, X_DTYPE, ALIGNED);
        if (BEFORE) {
            value += load4(residual, start + i, p.dim - i, RESIDUAL_DTYPE, ALIGNED);
        }
        squares += dot(value, value);
    }
    squares = reduce<Sum>(squares, shared, place);
    const float r = precise::rsqrt(squares / float(p.dim) + p.eps);

    for (uint i = first; i < p.dim; i += step) {
        const uint count = p.dim - i;
        float4 value = load4(x, start + i, count, X_DTYPE, ALIGNED);
        float4 other = 0;
        if (HAS_RESIDUAL) {
            other = load4(residual, start + i, count, RESIDUAL_DTYPE, ALIGNED);
        }
        if (BEFORE) {
            value += other;
            store4(sum, start + i, count, value, SUM_DTYPE, ALIGNED);
        }
        value *= r;
        if (HAS_WEIGHT) {
            value *= load4(weight, i, count, WEIGHT_DTYPE, ALIGNED);
        }
        if (AFTER) {
            value += other;
        }
        store4(out, start + i, count, value * p.scale, OUT_DTYPE, ALIGNED);
    }
}
