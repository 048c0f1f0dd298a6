// rms_norm: out = scale * (x * weight / sqrt(mean x^2 + eps)) of each row, f32, f16 or bf16 in and out.
//
// x, residual, sum and out are [rows, dim]; weight is [dim]. AFTER adds the residual to the normed row, before the scale;
// BEFORE adds it to x first, and writes the sum. A row belongs to one warp of several in a block, or, when it is long, to
// a whole block (WHOLE). It is read twice: for its mean square, then, from a cache, for the result. Every element is read
// and written by one thread, nothing is written in the first pass, and in the second an element is read before it is
// written: so `out` and `sum` may be `x` or the residual.
#include "vectors.h"
#include "team.h"
#include "ahead.h"

struct RmsNormParams {
    uint rows;
    uint dim;
    float eps;
    float scale;
};

extern "C" __global__ void rms_norm(const uchar *x, const uchar *weight, const uchar *residual, uchar *sum, uchar *out,
                                    const RmsNormParams p) {
    take_turn();
    __shared__ float room[EXCHANGE];
    const Team team = whole_block();
    const uint row = WHOLE ? blockIdx.x : blockIdx.x * (team.size / 32) + team.warp;
    if (row >= p.rows) {
        return;
    }
    const uint first = (WHOLE ? team.index : team.lane) * 4;
    const uint step = (WHOLE ? team.size : 32) * 4;
    const ulong start = ulong(row) * p.dim;

    float squares = 0;
    for (ulong at = first; at < p.dim; at += step) {
        const uint i = uint(at);
        float4 value = load4(x, start + i, p.dim - i, X_DTYPE, ALIGNED);
        if (BEFORE) {
            value = value + load4(residual, start + i, p.dim - i, RESIDUAL_DTYPE, ALIGNED);
        }
        squares += dot(value, value);
    }
    squares = WHOLE ? over_team<Sum>(squares, room, team) : over_warp<Sum>(squares);
    const float r = 1 / sqrtf(squares / float(p.dim) + p.eps);

    for (ulong at = first; at < p.dim; at += step) {
        const uint i = uint(at);
        const uint count = p.dim - i;
        float4 value = load4(x, start + i, count, X_DTYPE, ALIGNED);
        float4 other = all4(0);
        if (AFTER || BEFORE) {
            other = load4(residual, start + i, count, RESIDUAL_DTYPE, ALIGNED);
        }
        if (BEFORE) {
            value = value + other;
            store4(sum, start + i, count, value, SUM_DTYPE, ALIGNED);
        }
        value = r * value;
        if (HAS_WEIGHT) {
            value = value * load4(weight, i, count, WEIGHT_DTYPE, ALIGNED);
        }
        if (AFTER) {
            value = value + other;
        }
        store4(out, start + i, count, p.scale * value, OUT_DTYPE, ALIGNED);
    }
}
