// rms_norm: out = scale * (x * weight / sqrt(mean x^2 + eps)) of each row, f32, f16 or bf16 in and out.
//
// x, residual, sum and out are [rows, dim]; weight is [dim]. AFTER adds the residual to the normed row, before the
// scale; BEFORE adds it to x first, and writes the sum. A row belongs to one warp of several in a block, or, when it is
// long, to a whole block (WHOLE). A thread keeps its first HELD groups of four elements in registers; what is beyond is
// read twice, for its mean square, then for the result. Every element is read and written by one thread, nothing is
// written before the mean square is known, and then an element is read before it is written: so `out` and `sum` may be
// `x` or the residual. Rows whose squares leave the range of f32 are gone through once more, scaled by a power of two.
//
// Weights are read before the previous kernel has ended (device/dependent_launch.h).
#include "device/dependent_launch.h"
#include "device/reduce.h"
#include "device/vectors.h"

struct RmsNormParams {
    uint rows;
    uint dim;
    float eps;
    float scale;
};

constexpr uint HELD = 4;

extern "C" __global__ void __launch_bounds__(1024)
    KVANT_KERNEL(const uchar *x, const uchar *weight, const uchar *residual, uchar *sum, uchar *out, const RmsNormParams p) {
    __shared__ float room[3 * EXCHANGE];
    const Team team = whole_block();
    const uint row = WHOLE ? blockIdx.x : blockIdx.x * (team.size / 32) + team.warp;
    const uint first = (WHOLE ? team.index : team.lane) * 4;
    const uint step = (WHOLE ? team.size : 32) * 4;
    const ulong start = ulong(row) * p.dim;
    const auto weights_of = [&](uint i) { return HAS_WEIGHT ? load4(weight, i, p.dim - i, WEIGHT_DTYPE, ALIGNED) : all4(1); };
    const auto residual_of = [&](uint i) {
        return AFTER || BEFORE ? load4(residual, start + i, p.dim - i, RESIDUAL_DTYPE, ALIGNED) : all4(0);
    };

    float4 weights[HELD], values[HELD], residuals[HELD];
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = first + k * step;
        weights[k] = i < p.dim ? weights_of(i) : all4(0);
    }
    take_turn();
    if (row >= p.rows) {
        return;
    }
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = first + k * step;
        values[k] = i < p.dim ? load4(x, start + i, p.dim - i, X_DTYPE, ALIGNED) : all4(0);
        residuals[k] = i < p.dim ? residual_of(i) : all4(0);
    }
    const auto value_of = [&](uint i) {
        const float4 value = load4(x, start + i, p.dim - i, X_DTYPE, ALIGNED);
        return BEFORE ? value + residual_of(i) : value;
    };
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        values[k] = BEFORE ? values[k] + residuals[k] : values[k];
    }
    // All elements of the thread; zeros behind the row.
    const auto each = [&](auto visit) {
#pragma unroll
        for (uint k = 0; k < HELD; k++) {
            visit(values[k]);
        }
        for (ulong i = first + HELD * step; i < p.dim; i += step) {
            visit(value_of(uint(i)));
        }
    };
    float squares = 0;
    each([&](float4 value) { squares += dot(value, value); });
    squares = WHOLE ? over_team<Sum>(squares, room, team) : over_warp<Sum>(squares);
    // What the elements are multiplied with, in two steps, since squares and factors may be beyond float where the
    // result is not.
    float unit = 1;
    float r = 1 / sqrtf(squares / float(p.dim) + p.eps);
    if (is_nan_or_infinite(squares) || (squares < 1e-24f && p.eps < 1e-24f)) {
        float largest = sqrtf(p.eps);
        each([&](float4 value) {
            largest = fmaxf(largest, fmaxf(fmaxf(fabsf(value.x), fabsf(value.y)), fmaxf(fabsf(value.z), fabsf(value.w))));
        });
        unit = unit_of(WHOLE ? over_team<Max>(largest, room + EXCHANGE, team) : over_warp<Max>(largest));
        squares = 0;
        each([&](float4 value) { squares += dot(unit * value, unit * value); });
        squares = WHOLE ? over_team<Sum>(squares, room + 2 * EXCHANGE, team) : over_warp<Sum>(squares);
        r = 1 / sqrtf(squares / float(p.dim) + p.eps * unit * unit);
    }

    const auto finish = [&](uint i, float4 value, float4 other, float4 factors) {
        if (BEFORE) {
            store4(sum, start + i, p.dim - i, value, SUM_DTYPE, ALIGNED);
        }
        value = r * (unit * value);
        if (HAS_WEIGHT) {
            value = value * factors;
        }
        if (AFTER) {
            value = value + other;
        }
        store4(out, start + i, p.dim - i, p.scale * value, OUT_DTYPE, ALIGNED);
    };
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = first + k * step;
        if (i < p.dim) {
            finish(i, values[k], residuals[k], weights[k]);
        }
    }
    for (ulong i = first + HELD * step; i < p.dim; i += step) {
        finish(uint(i), value_of(uint(i)), residual_of(uint(i)), weights_of(uint(i)));
    }
}
