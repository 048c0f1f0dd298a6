// rms_norm: out = scale * (x * weight / sqrt(mean x^2 + eps)) of each row, f32, f16 or bf16 in and out, and up to three
// norms of out.
//
// x, residual, sum, out and the outputs next_out are [rows, dim]; weights are [dim]. COMBINE: x is [rows * terms, dim],
// and a row is the sum of `terms` rows of x, each times its element of combine, [rows, terms]. AFTER: the residual is
// added to the normed row, before the scale; with NORMED, the residual is normed first. BEFORE: the residual is added
// to x before the norm, and the sum is written. GATED: the result is multiplied by gate / (1 + e^-gate), [rows, dim].
//
// A row belongs to one of several SIMD-groups in a threadgroup or, if it is long, to a whole threadgroup (WHOLE). It is
// read twice: for its mean square, then, mostly from a cache, for the result. For the next norms, `out` is read in the
// same way. Every element is read and written by one thread. The first pass writes nothing, and the second reads an
// element before it writes it, so that `out` and `sum` may be `x` or the residual, and `out` the gate. Rows whose
// squares overflow or underflow f32 are read once more, scaled by a power of two.
#include "vectors.h"
#include "reduce.h"

struct RmsNormParams {
    uint rows;
    uint dim;
    uint terms;
    float eps;
    float next_eps;
    float scale;
    float next_scales[3];
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
constant bool NORMED [[function_constant(10)]];
constant uint RESIDUAL_WEIGHT_DTYPE [[function_constant(11)]];
constant bool HAS_RESIDUAL_WEIGHT [[function_constant(12)]];
constant uint NEXTS [[function_constant(13)]];
// Four bits for each next norm: its dtype; 15 for a weight that is absent.
constant uint NEXT_WEIGHT_DTYPES [[function_constant(14)]];
constant uint NEXT_OUT_DTYPES [[function_constant(15)]];
constant bool COMBINE [[function_constant(16)]];
constant bool GATED [[function_constant(17)]];
constant uint GATE_DTYPE [[function_constant(18)]];
constant bool HAS_RESIDUAL = AFTER || BEFORE;
constant bool HAS_NEXT_0 = NEXTS > 0;
constant bool HAS_NEXT_1 = NEXTS > 1;
constant bool HAS_NEXT_2 = NEXTS > 2;
constant bool HAS_NEXT_WEIGHT_0 = HAS_NEXT_0 && (NEXT_WEIGHT_DTYPES & 15) != 15;
constant bool HAS_NEXT_WEIGHT_1 = HAS_NEXT_1 && (NEXT_WEIGHT_DTYPES >> 4 & 15) != 15;
constant bool HAS_NEXT_WEIGHT_2 = HAS_NEXT_2 && (NEXT_WEIGHT_DTYPES >> 8 & 15) != 15;

// The source of a row, and the elements that belong to a thread: from `first` on, four in every `step`.
struct Row {
    device const uchar *x;
    uint dtype;
    // If `is_sum`, the row is a sum of `terms` rows.
    bool is_sum;
    device const float *combine;
    uint terms;
    // Added if `before`.
    device const uchar *residual;
    bool before;
    ulong start;
    uint dim;
    uint first;
    uint step;
};

// Four elements from i on, before the norm.
inline float4 four_of(Row row, uint i) {
    float4 value = 0;
    if (row.is_sum) {
        for (uint j = 0; j < row.terms; j++) {
            const ulong start = row.start * row.terms + ulong(j) * row.dim;
            value += row.combine[j] * load4(row.x, start + i, row.dim - i, row.dtype, ALIGNED);
        }
    } else {
        value = load4(row.x, row.start + i, row.dim - i, row.dtype, ALIGNED);
    }
    if (row.before) {
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

// The factors that normalise the row. They are applied in two steps, because squares and factors may overflow float
// although the result does not.
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
                     device const uchar *residual_weight [[buffer(5), function_constant(HAS_RESIDUAL_WEIGHT)]],
                     device const uchar *next_weight_0 [[buffer(6), function_constant(HAS_NEXT_WEIGHT_0)]],
                     device const uchar *next_weight_1 [[buffer(7), function_constant(HAS_NEXT_WEIGHT_1)]],
                     device const uchar *next_weight_2 [[buffer(8), function_constant(HAS_NEXT_WEIGHT_2)]],
                     device uchar *next_out_0 [[buffer(9), function_constant(HAS_NEXT_0)]],
                     device uchar *next_out_1 [[buffer(10), function_constant(HAS_NEXT_1)]],
                     device uchar *next_out_2 [[buffer(11), function_constant(HAS_NEXT_2)]],
                     device const float *combine [[buffer(12), function_constant(COMBINE)]],
                     device const uchar *gate [[buffer(13), function_constant(GATED)]],
                     constant RmsNormParams &p [[buffer(14)]],
                     uint group [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float shared[32];
    // The threads of a row; together they process `step` elements at a time.
    const Place place = WHOLE ? Place{lane, simdgroup, simdgroups} : Place{lane, 0, 1};
    const uint index = WHOLE ? group : group * simdgroups + simdgroup;
    if (index >= p.rows) {
        return;
    }
    const ulong start = ulong(index) * p.dim;
    Row row = {x,       X_DTYPE, false, nullptr, 0, nullptr, false, start, p.dim, index_of(place) * 4,
               threads_of(place) * 4};
    if (COMBINE) {
        row.is_sum = true;
        row.combine = combine + ulong(index) * p.terms;
        row.terms = p.terms;
    }
    if (BEFORE) {
        row.residual = residual;
        row.before = true;
    }
    const float2 factors = factors_of(row, p.eps, shared, place);
    float2 other_factors = 1;
    if (NORMED) {
        const Row other = {residual, RESIDUAL_DTYPE, false, nullptr, 0, nullptr, false, start, p.dim, row.first, row.step};
        other_factors = factors_of(other, p.eps, shared, place);
    }

    for (uint i = row.first; i < row.dim; i += row.step) {
        const uint count = p.dim - i;
        float4 value = four_of(row, i);
        float4 other = 0;
        if (AFTER) {
            other = load4(residual, start + i, count, RESIDUAL_DTYPE, ALIGNED);
        }
        if (BEFORE) {
            store4(sum, start + i, count, value, SUM_DTYPE, ALIGNED);
        }
        value = value * factors.x * factors.y;
        if (HAS_WEIGHT) {
            value *= load4(weight, i, count, WEIGHT_DTYPE, ALIGNED);
        }
        if (NORMED) {
            other = other * other_factors.x * other_factors.y;
        }
        if (HAS_RESIDUAL_WEIGHT) {
            other *= load4(residual_weight, i, count, RESIDUAL_WEIGHT_DTYPE, ALIGNED);
        }
        if (AFTER) {
            value += other;
        }
        value *= p.scale;
        if (GATED) {
            const float4 x = load4(gate, start + i, count, GATE_DTYPE, ALIGNED);
            value *= x / (1.0f + precise::exp(-x));
        }
        store4(out, start + i, count, value, OUT_DTYPE, ALIGNED);
    }
    if (!HAS_NEXT_0) {
        return;
    }

    // A thread reads back only elements that it has written.
    const Row stored = {out, OUT_DTYPE, false, nullptr, 0, nullptr, false, start, p.dim, row.first, row.step};
    const float2 next_factors = factors_of(stored, p.next_eps, shared, place);
    for (uint i = row.first; i < row.dim; i += row.step) {
        const uint count = p.dim - i;
        const float4 value = four_of(stored, i) * next_factors.x * next_factors.y;
        float4 weights = 1;
        if (HAS_NEXT_WEIGHT_0) {
            weights = load4(next_weight_0, i, count, NEXT_WEIGHT_DTYPES & 15, ALIGNED);
        }
        store4(next_out_0, start + i, count, value * weights * p.next_scales[0], NEXT_OUT_DTYPES & 15, ALIGNED);
        if (HAS_NEXT_1) {
            weights = 1;
            if (HAS_NEXT_WEIGHT_1) {
                weights = load4(next_weight_1, i, count, NEXT_WEIGHT_DTYPES >> 4 & 15, ALIGNED);
            }
            store4(next_out_1, start + i, count, value * weights * p.next_scales[1], NEXT_OUT_DTYPES >> 4 & 15, ALIGNED);
        }
        if (HAS_NEXT_2) {
            weights = 1;
            if (HAS_NEXT_WEIGHT_2) {
                weights = load4(next_weight_2, i, count, NEXT_WEIGHT_DTYPES >> 8 & 15, ALIGNED);
            }
            store4(next_out_2, start + i, count, value * weights * p.next_scales[2], NEXT_OUT_DTYPES >> 8 & 15, ALIGNED);
        }
    }
}
