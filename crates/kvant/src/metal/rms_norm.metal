// rms_norm: out = scale * (x * weight / sqrt(mean x^2 + eps)) of each row, f32, f16 or bf16 in and out.
//
// x, residual, sum and out are [rows, dim]; weight is [dim]. AFTER adds the residual to the normed row, before the
// scale; BEFORE adds it to x first, and writes the sum. A row belongs to one SIMD-group of several in a threadgroup,
// or, when it is long, to a whole threadgroup (WHOLE). It is read twice: for its mean square, then, mostly from a
// cache, for the result. Every element is read and written by one thread, nothing is written in the first pass, and in
// the second an element is read before it is written: so `out` and `sum` may be `x` or the residual. Rows whose squares
// leave the range of f32 are read once more, scaled by a power of two.
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

// What a row is read from, and the elements of it that are a thread's: from `first` on, four in every `step`.
struct Row {
    device const uchar *x;
    device const uchar *residual;
    ulong start;
    uint dim;
    uint first;
    uint step;
};

// Four elements from i on, before the norm.
inline float4 four_of(Row row, uint i) {
    float4 value = load4(row.x, row.start + i, row.dim - i, X_DTYPE, ALIGNED);
    if (BEFORE) {
        value += load4(row.residual, row.start + i, row.dim - i, RESIDUAL_DTYPE, ALIGNED);
    }
    return value;
}

// The sum of the squares of the row, each element multiplied by `unit`.
inline float squares_of(Row row, float unit, threadgroup float *shared, Place place) {
    float squares = 0;
    for (uint i = row.first; i < row.dim; i += row.step) {
        const float4 value = four_of(row, i) * unit;
        squares += dot(value, value);
    }
    return reduce<Sum>(squares, shared, place);
}

// What the row's elements are multiplied with, in two steps, since squares and factors may be beyond float where the
// result is not.
inline float2 factors_of(Row row, float eps, threadgroup float *shared, Place place) {
    const float squares = squares_of(row, 1, shared, place);
    if (is_finite(squares) && (squares >= 1e-24f || eps >= 1e-24f)) {
        return float2(1, precise::rsqrt(squares / float(row.dim) + eps));
    }
    float largest = precise::sqrt(eps);
    for (uint i = row.first; i < row.dim; i += row.step) {
        const float4 value = abs(four_of(row, i));
        largest = max(largest, max(max(value.x, value.y), max(value.z, value.w)));
    }
    const float unit = unit_of(reduce<Max>(largest, shared, place));
    const float mean = squares_of(row, unit, shared, place) / float(row.dim);
    return float2(unit, precise::rsqrt(mean + eps * unit * unit));
}

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
    const uint index = WHOLE ? group : group * simdgroups + simdgroup;
    if (index >= p.rows) {
        return;
    }
    const ulong start = ulong(index) * p.dim;
    const Row row = {x, HAS_RESIDUAL ? residual : nullptr, start, p.dim, index_of(place) * 4, threads_of(place) * 4};
    const float2 factors = factors_of(row, p.eps, shared, place);

    for (uint i = row.first; i < p.dim; i += row.step) {
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
        value = value * factors.x * factors.y;
        if (HAS_WEIGHT) {
            value *= load4(weight, i, count, WEIGHT_DTYPE, ALIGNED);
        }
        if (AFTER) {
            value += other;
        }
        store4(out, start + i, count, value * p.scale, OUT_DTYPE, ALIGNED);
    }
}
