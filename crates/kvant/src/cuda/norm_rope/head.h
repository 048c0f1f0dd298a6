// RMS norm and rotary embedding of one head, in shared memory, by all threads of a block.
//
// Angles are positions times frequencies, in turns, as doubles. Whole turns are subtracted before the sine.
#ifndef KVANT_CUDA_NORM_ROPE_HEAD_H
#define KVANT_CUDA_NORM_ROPE_HEAD_H
#include "device/elements.h"
#include "device/reduce.h"

// The numbers of norms, of sources of angles, and of layouts (gpu/norm_rope.rs).
constexpr uint NO_NORM = 0;
constexpr uint PLAIN_NORM = 1;
constexpr uint WEIGHTED_NORM = 2;
constexpr uint NO_ROPE = 0;
constexpr uint THETA = 1;
constexpr uint THETA_FACTORS = 2;
constexpr uint TABLES = 3;
constexpr uint HALVES = 0;
constexpr uint LEADING_HALVES = 1;
constexpr uint INTERLEAVED = 2;

// Pair i makes coarse[i / 64] · fine[i % 64] turns per position.
struct RopeParams {
    double coarse[64];
    double fine[64];
    uint pairs;
    uint table_rows;
};

struct Norm {
    uint kind;
    const uchar *weight;
    uint dtype;
    float eps;
};

struct Rope {
    uint angles;
    uint layout;
    const float *cos;
    const float *sin;
    const float *factors;
};

// Floats of shared memory of norm_rope, in addition to the row.
constexpr uint NORM_ROPE_SCRATCH = 3 * EXCHANGE;

// The fraction of a turn of pair i at a position, or NaN. Doubles suffice for large positions: the relative error of
// the product is below 2^-53, which is 5e-7 turns at the last position of 32 bits.
inline double turns_of(const RopeParams &rope, float factor, uint position, uint i) {
    const double turns = rope.coarse[i / 64] * rope.fine[i % 64] / double(factor) * double(position);
    return turns - rint(turns);
}

// (cosine, sine) of pair i. The position must be within the tables.
inline float2 turn_of(Rope rope, const RopeParams &params, uint position, uint i) {
    if (rope.angles == TABLES) {
        const ulong at = ulong(position) * params.pairs + i;
        return make_float2(rope.cos[at], rope.sin[at]);
    }
    const float factor = rope.angles == THETA_FACTORS ? rope.factors[i] : 1.0f;
    float2 turn;
    sincospif(2 * float(turns_of(params, factor, position, i)), &turn.y, &turn.x);
    return turn;
}

// The factors of the row's elements for a norm, in two steps, because squares and factors may overflow float if the
// result does not. Ends with a barrier.
inline float2 norm_factors(const float *row, float *room, float squares, uint dim, float eps, Team team) {
    const float total = over_team<Sum>(squares, room, team);
    if (!is_nan_or_infinite(total) && (total >= 1e-24f || eps >= 1e-24f)) {
        return make_float2(1, 1 / sqrtf(total / float(dim) + eps));
    }
    float largest = 0;
    for (uint j = team.index; j < dim; j += team.size) {
        largest = fmaxf(largest, fabsf(row[j]));
    }
    const float unit = unit_of(fmaxf(over_team<Max>(largest, room + EXCHANGE, team), sqrtf(eps)));
    squares = 0;
    for (uint j = team.index; j < dim; j += team.size) {
        squares += row[j] * unit * (row[j] * unit);
    }
    const float mean = over_team<Sum>(squares, room + 2 * EXCHANGE, team) / float(dim);
    return make_float2(unit, 1 / sqrtf(mean + eps * unit * unit));
}

// The weight of element j; 1 without a weighted norm.
inline float weight_of(Norm norm, uint j) {
    return norm.kind == WEIGHTED_NORM ? load(norm.weight, j, norm.dtype) : 1;
}

inline float normed(float x, float weight, float2 factors, Norm norm) {
    if (norm.kind == NO_NORM) {
        return x;
    }
    const float y = x * factors.x * factors.y;
    return norm.kind == WEIGHTED_NORM ? y * weight : y;
}

// Loads the head that begins at element `start` of x into the row. Returns the sum of squares of the thread's elements.
inline float load_head(float *row, const uchar *x, ulong start, uint dtype, uint dim, Team team) {
    float squares = 0;
    for (uint j = team.index; j < dim; j += team.size) {
        const float value = load(x, start + j, dtype);
        row[j] = value;
        squares += value * value;
    }
    return squares;
}

// Operands of a thread other than the row: for its first pairs, or for its first elements if no element is rotated.
constexpr uint FIRST = 2;
struct Needed {
    float2 turns[FIRST];
    float weights[2 * FIRST];
};

// The distance between the two elements of a pair; the first element of pair i.
inline uint apart_of(Rope rope, uint pairs, uint dim) {
    return rope.layout == HALVES ? dim / 2 : rope.layout == LEADING_HALVES ? pairs : 1;
}
inline uint first_of(Rope rope, uint i) {
    return rope.layout == INTERLEAVED ? 2 * i : i;
}

// The position must be within the tables.
inline Needed needed(uint dim, Norm norm, Rope rope, const RopeParams &params, uint position, Team team) {
    Needed n;
#pragma unroll
    for (uint k = 0; k < FIRST; k++) {
        const uint i = team.index + k * team.size, j = first_of(rope, i);
        n.turns[k] = make_float2(1, 0);
        if (rope.angles != NO_ROPE && i < params.pairs) {
            n.weights[2 * k] = weight_of(norm, j);
            n.weights[2 * k + 1] = weight_of(norm, j + apart_of(rope, params.pairs, dim));
            n.turns[k] = turn_of(rope, params, position, i);
        }
    }
    if (rope.angles == NO_ROPE) {
#pragma unroll
        for (uint k = 0; k < 2 * FIRST; k++) {
            const uint j = team.index + k * team.size;
            n.weights[k] = j < dim ? weight_of(norm, j) : 0;
        }
    }
    return n;
}

// Normalises and rotates the row that load_head has loaded. `room` holds NORM_ROPE_SCRATCH unused floats. The position
// must be within the tables; `n` is needed() for it. Ends with a barrier.
inline void norm_rope_head(float *row, float *room, float squares, uint dim, Norm norm, Rope rope, const RopeParams &params,
                           uint position, const Needed &n, Team team) {
    const uint pairs = rope.angles == NO_ROPE ? 0 : params.pairs, apart = apart_of(rope, pairs, dim);
    float2 factors = make_float2(1, 1);
    if (norm.kind != NO_NORM) {
        factors = norm_factors(row, room, squares, dim, norm.eps, team);
    } else {
        __syncthreads();
    }
    const auto turn_pair = [&](uint j, float weight, float other_weight, float2 turn) {
        const float a = normed(row[j], weight, factors, norm), b = normed(row[j + apart], other_weight, factors, norm);
        row[j] = a * turn.x - b * turn.y;
        row[j + apart] = a * turn.y + b * turn.x;
    };
    if (rope.angles == NO_ROPE) {
#pragma unroll
        for (uint k = 0; k < 2 * FIRST; k++) {
            const uint j = team.index + k * team.size;
            if (j < dim) {
                row[j] = normed(row[j], n.weights[k], factors, norm);
            }
        }
        for (uint j = team.index + 2 * FIRST * team.size; j < dim; j += team.size) {
            row[j] = normed(row[j], weight_of(norm, j), factors, norm);
        }
        __syncthreads();
        return;
    }
#pragma unroll
    for (uint k = 0; k < FIRST; k++) {
        const uint i = team.index + k * team.size;
        if (i < pairs) {
            turn_pair(first_of(rope, i), n.weights[2 * k], n.weights[2 * k + 1], n.turns[k]);
        }
    }
    for (uint i = team.index + FIRST * team.size; i < pairs; i += team.size) {
        const uint j = first_of(rope, i);
        turn_pair(j, weight_of(norm, j), weight_of(norm, j + apart), turn_of(rope, params, position, i));
    }
    // Elements that are not rotated: those after the pairs, and with halves also those between the two halves.
    for (uint j = team.index; j < dim; j += team.size) {
        const bool turned = rope.layout == HALVES ? j < pairs || (j >= apart && j < apart + pairs) : j < 2 * pairs;
        if (!turned) {
            row[j] = normed(row[j], weight_of(norm, j), factors, norm);
        }
    }
    __syncthreads();
}

#endif
