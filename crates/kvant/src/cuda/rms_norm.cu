// rms_norm: out = scale * (x * weight / sqrt(mean x^2 + eps)) of each row, f32, f16 or bf16 in and out, and up to three
// norms of out.
//
// x, residual, sum, out and the outputs next_out are [rows, dim]; weights are [dim]. COMBINE: x is [rows * terms, dim],
// and a row is the sum of `terms` of these times combine, [rows, terms]. AFTER adds the residual to the
// normed row, before the scale, NORMED after a norm of its own; BEFORE adds it to x first, and writes the sum. A row
// belongs to one warp of several in a block, or, when it is long, to a whole block (WHOLE). A thread keeps its first
// HELD groups of four elements in registers, for all norms; what is beyond (BEYOND) is read twice, for its mean square,
// then for the result. Every element is read and written by one thread, nothing is written before the mean square is
// known, and then an element is read before it is written: so `out` and `sum` may be `x` or the residual. Rows whose
// squares leave the range of f32 are gone through once more, scaled by a power of two.
//
// Weights are read before the previous kernel has ended (device/dependent_launch.h).
#include "device/dependent_launch.h"
#include "device/reduce.h"
#include "device/vectors.h"

struct RmsNormParams {
    uint rows;
    uint dim;
    uint terms;
    float eps;
    float next_eps;
    float scale;
    float next_scales[3];
};

// A block has at most 16 warps if it shares a row, or else 4: see the launch.
constexpr uint THREADS = WHOLE ? 512 : 128;

// The dtypes of the next norms have four bits each.
constexpr uint NO_WEIGHT = 15;

inline constexpr uint weight_dtype(uint n) {
    return NEXT_WEIGHT_DTYPES >> (4 * n) & 15;
}

inline constexpr uint out_dtype(uint n) {
    return NEXT_OUT_DTYPES >> (4 * n) & 15;
}

// The factors of a row's elements, in two steps, since squares and factors may overflow float where the result does
// not.
struct Factors {
    float unit;
    float r;

    float4 of(float4 value) const { return r * (unit * value); }
};

template <typename Op> inline float over_row(float x, float *room, Team team) {
    return WHOLE ? over_team<Op>(x, room, team) : over_warp<Op>(x);
}

// The thread's sum of the squares of the elements that `each` visits, times `unit`.
template <typename Each> inline float squares_of(const Each &each, float unit) {
    float squares = 0;
    each([&](float4 value) { squares += dot(unit * value, unit * value); });
    return squares;
}

// Factors of a row with this sum of squares, for the inverse of its length.
template <typename Each>
inline Factors factors_of(const Each &each, float squares, float inverse, float eps, float *room, Team team) {
    if (!is_nan_or_infinite(squares) && (squares >= 1e-24f || eps >= 1e-24f)) {
        return Factors{1, rsqrtf(squares * inverse + eps)};
    }
    float largest = sqrtf(eps);
    each([&](float4 value) {
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(value.x), fabsf(value.y)), fmaxf(fabsf(value.z), fabsf(value.w))));
    });
    const float unit = unit_of(over_row<Max>(largest, room, team));
    squares = over_row<Sum>(squares_of(each, unit), room + EXCHANGE, team);
    return Factors{unit, rsqrtf(squares * inverse + eps * unit * unit)};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KVANT_KERNEL(const uchar *x, const uchar *weight, const uchar *residual, uchar *sum, uchar *out,
                 const uchar *residual_weight, const uchar *next_weight_0, const uchar *next_weight_1,
                 const uchar *next_weight_2, uchar *next_out_0, uchar *next_out_1, uchar *next_out_2,
                 const float *combine, const RmsNormParams p) {
    // Two exchanges of the first sums, and two of each norm whose squares leave the range.
    __shared__ float room[9 * EXCHANGE];
    const Team team = whole_block();
    const uint row = WHOLE ? blockIdx.x : blockIdx.x * (team.size / 32) + team.warp;
    const uint first = (WHOLE ? team.index : team.lane) * 4;
    const uint step = (WHOLE ? team.size : 32) * 4;
    const ulong start = ulong(row) * p.dim;
    const float inverse = __fdividef(1, float(p.dim));
    const uchar *const next_weights[3] = {next_weight_0, next_weight_1, next_weight_2};
    uchar *const next_outs[3] = {next_out_0, next_out_1, next_out_2};
    const auto weights_of = [&](uint i) { return HAS_WEIGHT ? load4(weight, i, p.dim - i, WEIGHT_DTYPE, ALIGNED) : all4(1); };
    const auto residual_weights_of = [&](uint i) {
        return HAS_RESIDUAL_WEIGHT ? load4(residual_weight, i, p.dim - i, RESIDUAL_WEIGHT_DTYPE, ALIGNED) : all4(1);
    };
    const auto next_weights_of = [&](uint n, uint i) {
        return weight_dtype(n) == NO_WEIGHT ? all4(1) : load4(next_weights[n], i, p.dim - i, weight_dtype(n), ALIGNED);
    };
    const auto residual_of = [&](uint i) {
        return AFTER || BEFORE ? load4(residual, start + i, p.dim - i, RESIDUAL_DTYPE, ALIGNED) : all4(0);
    };

    const auto x_of = [&](uint i) {
        if (!COMBINE) {
            return load4(x, start + i, p.dim - i, X_DTYPE, ALIGNED);
        }
        float4 value = all4(0);
        // Loads of several terms are in flight.
#pragma unroll 4
        for (uint j = 0; j < p.terms; j++) {
            const ulong term = ulong(row) * p.terms + j;
            value = value + combine[term] * load4(x, term * p.dim + i, p.dim - i, X_DTYPE, ALIGNED);
        }
        return value;
    };

    float4 weights[HELD], residual_weights[HELD], held_next_weights[NEXTS + 1][HELD], values[HELD], residuals[HELD];
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = first + k * step;
        weights[k] = i < p.dim ? weights_of(i) : all4(0);
        residual_weights[k] = i < p.dim ? residual_weights_of(i) : all4(0);
#pragma unroll
        for (uint n = 0; n < NEXTS; n++) {
            held_next_weights[n][k] = i < p.dim ? next_weights_of(n, i) : all4(0);
        }
    }
    take_turn_early();
    if (row >= p.rows) {
        return;
    }
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = first + k * step;
        values[k] = i < p.dim ? x_of(i) : all4(0);
        residuals[k] = i < p.dim ? residual_of(i) : all4(0);
    }
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        values[k] = BEFORE ? values[k] + residuals[k] : values[k];
    }
    const auto value_of = [&](uint i) {
        const float4 value = x_of(i);
        return BEFORE ? value + residual_of(i) : value;
    };
    // All elements of the thread; zeros behind the row.
    const auto each_of = [&](const float4 *held, const auto &rest, const auto &visit) {
#pragma unroll
        for (uint k = 0; k < HELD; k++) {
            visit(held[k]);
        }
        for (ulong i = first + HELD * step; BEYOND && i < p.dim; i += step) {
            visit(rest(uint(i)));
        }
    };
    const auto each = [&](const auto &visit) { each_of(values, value_of, visit); };
    const auto each_residual = [&](const auto &visit) { each_of(residuals, residual_of, visit); };

    float2 squares = make_float2(squares_of(each, 1), NORMED ? squares_of(each_residual, 1) : 0);
    if (NORMED && WHOLE) {
        squares = over_team2<Sum>(squares, room, team);
    } else {
        squares.x = over_row<Sum>(squares.x, room, team);
        squares.y = NORMED ? over_warp<Sum>(squares.y) : 0;
    }
    const Factors factors = factors_of(each, squares.x, inverse, p.eps, room + 2 * EXCHANGE, team);
    const Factors other_factors =
        NORMED ? factors_of(each_residual, squares.y, inverse, p.eps, room + 4 * EXCHANGE, team) : Factors{1, 1};

    const auto finish = [&](uint i, float4 value, float4 other, float4 weight, float4 other_weight) {
        if (BEFORE) {
            store4(sum, start + i, p.dim - i, value, SUM_DTYPE, ALIGNED);
        }
        value = factors.of(value);
        if (HAS_WEIGHT) {
            value = value * weight;
        }
        if (NORMED) {
            other = other_factors.of(other);
        }
        if (HAS_RESIDUAL_WEIGHT) {
            other = other * other_weight;
        }
        if (AFTER) {
            value = value + other;
        }
        value = p.scale * value;
        store4(out, start + i, p.dim - i, value, OUT_DTYPE, ALIGNED);
        return value;
    };
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = first + k * step;
        if (i < p.dim) {
            values[k] = rounded4(finish(i, values[k], residuals[k], weights[k], residual_weights[k]), OUT_DTYPE);
        }
    }
    for (ulong i = first + HELD * step; BEYOND && i < p.dim; i += step) {
        finish(uint(i), value_of(uint(i)), residual_of(uint(i)), weights_of(uint(i)), residual_weights_of(uint(i)));
    }
    if (NEXTS == 0) {
        return;
    }

    // A thread reads what it has written itself.
    const auto stored_of = [&](uint i) { return load4(out, start + i, p.dim - i, OUT_DTYPE, ALIGNED); };
    const auto each_stored = [&](const auto &visit) { each_of(values, stored_of, visit); };
    const float stored_squares = over_row<Sum>(squares_of(each_stored, 1), room + 6 * EXCHANGE, team);
    const Factors next_factors = factors_of(each_stored, stored_squares, inverse, p.next_eps, room + 7 * EXCHANGE, team);
    const auto finish_next = [&](uint n, uint i, float4 value, float4 weight) {
        value = next_factors.of(value);
        if (weight_dtype(n) != NO_WEIGHT) {
            value = value * weight;
        }
        store4(next_outs[n], start + i, p.dim - i, p.next_scales[n] * value, out_dtype(n), ALIGNED);
    };
#pragma unroll
    for (uint n = 0; n < NEXTS; n++) {
#pragma unroll
        for (uint k = 0; k < HELD; k++) {
            const uint i = first + k * step;
            if (i < p.dim) {
                finish_next(n, i, values[k], held_next_weights[n][k]);
            }
        }
        for (ulong i = first + HELD * step; BEYOND && i < p.dim; i += step) {
            finish_next(n, uint(i), stored_of(uint(i)), next_weights_of(n, uint(i)));
        }
    }
}
