// RMS norm and rotary embedding of one head, in threadgroup memory, shared by all threads of a threadgroup.
//
// Angles are positions times frequencies, in turns, as 64-bit fractions. Whole turns are discarded by the overflow of
// the product, so that far positions lose no precision, and no compiler can reorder the computation.
#ifndef KVANT_NORM_ROPE_H
#define KVANT_NORM_ROPE_H
#include "reduce.h"
#include "rows.h"
#include "upper_half.h"

// The numbers of norms, of sources of angles, and of layouts (metal/norm_rope.rs).
constant constexpr uint NO_NORM = 0;
constant constexpr uint PLAIN_NORM = 1;
constant constexpr uint WEIGHTED_NORM = 2;
constant constexpr uint NO_ROPE = 0;
constant constexpr uint THETA = 1;
constant constexpr uint THETA_FACTORS = 2;
constant constexpr uint TABLES = 3;
constant constexpr uint HALVES = 0;
constant constexpr uint LEADING_HALVES = 1;
constant constexpr uint INTERLEAVED = 2;

// Pair i makes coarse[i / 64] · fine[i % 64] turns per position. Both are the bits of doubles, because Metal has no
// doubles.
struct RopeParams {
    ulong coarse[64];
    ulong fine[64];
    uint pairs;
    uint table_rows;
};

struct Norm {
    uint kind;
    device const uchar *weight;
    uint dtype;
    float eps;
};

struct Rope {
    uint angles;
    uint layout;
    device const float *cos;
    device const float *sin;
    device const float *factors;
};

// Floats of threadgroup memory that norm_rope_head needs in addition to the row.
constant constexpr uint NORM_ROOM = 32;

// x · 2^by, modulo 2^64.
inline ulong shifted(ulong x, int by) {
    if (by >= 64 || by <= -64) {
        return 0;
    }
    return by >= 0 ? x << by : x >> -by;
}

// The turns of pair i from one position to the next, as a fraction in units of 2^-64.
inline ulong frequency(constant RopeParams &rope, uint i) {
    const ulong a = rope.coarse[i / 64], b = rope.fine[i % 64];
    // Mantissas with their leading one in the top bit: 1.f · 2^63.
    const ulong top = 1ul << 63;
    const ulong product = upper_half(a << 11 | top, b << 11 | top);
    const int exponent = int(a >> 52 & 2047) + int(b >> 52 & 2047) - 2 * 1023;
    return shifted(product, exponent + 2);
}

// `turns` divided by a factor that is not zero; whole turns are discarded.
inline ulong divided(ulong turns, float factor) {
    const uint bits = as_type<uint>(factor);
    const uint exponent = bits >> 23 & 255, fraction = bits & 0x7FFFFF;
    // |factor| = mantissa · 2^(max(exponent, 1) - 150).
    const ulong mantissa = exponent == 0 ? fraction : fraction | 0x800000;
    const ulong quotient = (turns / mantissa << 23) + (turns % mantissa << 23) / mantissa;
    const ulong result = shifted(quotient, 127 - int(max(exponent, 1u)));
    return bits >> 31 != 0 ? 0 - result : result;
}

// (cosine, sine) of a fraction of a turn, to about 2e-7.
inline float2 cos_sin(ulong turns) {
    // The nearest quarter turn, and the remainder, at most an eighth of a turn in either direction.
    const uint quarter = uint((turns + (1ul << 61)) >> 62);
    const int rest = int(uint((turns - (ulong(quarter) << 62)) >> 32));
    const float x = float(rest) * (2 * M_PI_F / 4294967296.0f);
    const float xx = x * x;
    // Taylor: for |x| up to an eighth of a turn the next terms are below 2e-9 and 3e-10.
    const float s = fma(fma(fma(fma(1.0f / 362880, xx, -1.0f / 5040), xx, 1.0f / 120), xx, -1.0f / 6) * xx, x, x);
    const float c =
        fma(fma(fma(fma(fma(-1.0f / 3628800, xx, 1.0f / 40320), xx, -1.0f / 720), xx, 1.0f / 24), xx, -0.5f), xx, 1.0f);
    float2 turned = float2(c, s);
    if (quarter % 2 != 0) {
        turned = float2(-s, c);
    }
    return quarter < 2 ? turned : -turned;
}

// (cosine, sine) of pair i; position is within the tables.
inline float2 turn_of(Rope rope, constant RopeParams &params, uint position, uint i) {
    if (rope.angles == TABLES) {
        const ulong at = ulong(position) * params.pairs + i;
        return float2(rope.cos[at], rope.sin[at]);
    }
    ulong turns = frequency(params, i);
    if (rope.angles == THETA_FACTORS) {
        const float factor = rope.factors[i];
        const uint magnitude = as_type<uint>(factor) & 0x7FFFFFFF;
        if (magnitude == 0 || magnitude > 0x7F800000) {
            // The factor is zero or NaN.
            return float2(as_type<float>(NAN_BITS));
        }
        turns = divided(turns, factor);
    }
    return cos_sin(position * turns);
}

// The factors that normalise a row. They are applied in two steps, because squares and factors may overflow float
// although the result does not.
inline float2 norm_factors(threadgroup const float *row, threadgroup float *room, float squares, uint dim, float eps,
                           Place place) {
    const float total = reduce<Sum>(squares, room, place);
    if (is_finite(total) && (total >= 1e-24f || eps >= 1e-24f)) {
        return float2(1, precise::rsqrt(total / float(dim) + eps));
    }
    // Sum once more, with all numbers scaled to about 1.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint index = index_of(place), threads = threads_of(place);
    float largest = precise::sqrt(eps);
    for (uint j = index; j < dim; j += threads) {
        largest = max(largest, abs(row[j]));
    }
    const float unit = unit_of(reduce<Max>(largest, room, place));
    squares = 0;
    for (uint j = index; j < dim; j += threads) {
        squares += row[j] * unit * (row[j] * unit);
    }
    const float mean = reduce<Sum>(squares, room, place) / float(dim);
    return float2(unit, precise::rsqrt(mean + eps * unit * unit));
}

inline float normed(threadgroup const float *row, uint j, float2 factors, Norm norm) {
    if (norm.kind == NO_NORM) {
        return row[j];
    }
    const float x = row[j] * factors.x * factors.y;
    return norm.kind == WEIGHTED_NORM ? x * load(norm.weight, j, norm.dtype) : x;
}

// row ← the head that begins at element `start` of x, normalised and turned. `room` has NORM_ROOM unused floats. The
// position is within the tables. A barrier must follow before the row is read.
inline void norm_rope_head(threadgroup float *row, threadgroup float *room, device const uchar *x, ulong start,
                           uint dtype, bool aligned, uint dim, Norm norm, Rope rope,
                           constant RopeParams &params, uint position, Place place) {
    const uint index = index_of(place), threads = threads_of(place);
    float squares = 0;
    for (uint j = 4 * index; j < dim; j += 4 * threads) {
        const float4 values = load4(x, start + j, dim - j, dtype, aligned);
        put4(row, j, dim - j, values, aligned);
        squares += dot(values, values);
    }
    const float2 factors = norm.kind != NO_NORM ? norm_factors(row, room, squares, dim, norm.eps, place) : float2(1);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint pairs = rope.angles == NO_ROPE ? 0 : params.pairs;
    const uint apart = rope.layout == HALVES ? dim / 2 : rope.layout == LEADING_HALVES ? pairs : 1;
    for (uint i = index; i < pairs; i += threads) {
        const uint j = rope.layout == INTERLEAVED ? 2 * i : i;
        const float a = normed(row, j, factors, norm), b = normed(row, j + apart, factors, norm);
        const float2 turn = turn_of(rope, params, position, i);
        row[j] = a * turn.x - b * turn.y;
        row[j + apart] = a * turn.y + b * turn.x;
    }
    // The coordinates outside of pairs: after the pairs, and with halves also between the two halves.
    for (uint j = index; j < dim; j += threads) {
        const bool turned = rope.layout == HALVES ? j < pairs || (j >= apart && j < apart + pairs) : j < 2 * pairs;
        if (!turned) {
            row[j] = normed(row, j, factors, norm);
        }
    }
}

#endif
