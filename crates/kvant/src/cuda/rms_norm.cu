// rms_norm: out = scale * (x * weight / sqrt(mean x^2 + eps)) of each row, f32, f16 or bf16 in and out, and up to three
// norms of out.
//
// x, residual, sum, out and the outputs next_out are [rows, dim]; weights are [dim]. COMBINE: x is [rows * terms, dim],
// and a row is the sum of `terms` rows of x times combine, [rows, terms]. AFTER: the residual is added to the normed
// row, before the scale; with NORMED, the residual is normed first. BEFORE: the residual is added to x before the norm,
// and the sum is written. GATED: the result is multiplied by gate / (1 + e^-gate), [rows, dim].
//
// A block has several warps with a row each; a long row has a whole block (WHOLE). A thread keeps its first HELD groups
// of four elements in registers, for all norms. The remaining groups (BEYOND) are read twice, for the mean square and
// for the result. Every element is read and written by one thread; nothing is written before the mean square is known,
// and every element is read before it is written. Therefore `out` and `sum` may be `x` or the residual, and `out` the
// gate. Rows whose squares leave the range of f32 are processed again, scaled by a power of two.
//
// RANKS > 1: x is first added over ranks, as all_reduce_small does: four elements are a message of 8 bytes, which a
// thread sends to all other ranks; it holds all of its elements.
//
// Weights are read before the previous kernel has ended (device/dependent_launch.h).
#include "device/activation.h"
#include "device/dependent_launch.h"
#include "device/peers.h"
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

// A block has at most 16 warps if they share a row, otherwise 4: see the launch.
constexpr uint THREADS = WHOLE ? 512 : 128;

// The dtypes of the next norms have four bits each.
constexpr uint NO_WEIGHT = 15;

inline constexpr uint weight_dtype(uint n) {
    return NEXT_WEIGHT_DTYPES >> (4 * n) & 15;
}

inline constexpr uint out_dtype(uint n) {
    return NEXT_OUT_DTYPES >> (4 * n) & 15;
}

// The factors of a row's elements, in two steps, because squares and factors may overflow float if the result does not.
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

// The factors of a row; `squares` is the sum of its squares, `inverse` is 1 / its length.
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

struct Tensors {
    const uchar *x;
    const uchar *weight;
    const uchar *residual;
    uchar *sum;
    uchar *out;
    const uchar *residual_weight;
    const uchar *next_weights[3];
    uchar *next_outs[3];
    const float *combine;
    const uchar *gate;
};

// A row, and the thread's groups of four elements in it: the first group is at `first`, the next ones are `step`
// elements apart.
struct Row {
    const Tensors &t;
    const RmsNormParams &p;
    uint row;
    uint first;
    uint step;
    ulong start;

    inline float4 weights_of(uint i) const {
        return HAS_WEIGHT ? load4(t.weight, i, p.dim - i, WEIGHT_DTYPE, ALIGNED) : all4(1);
    }
    inline float4 residual_weights_of(uint i) const {
        return HAS_RESIDUAL_WEIGHT ? load4(t.residual_weight, i, p.dim - i, RESIDUAL_WEIGHT_DTYPE, ALIGNED) : all4(1);
    }
    inline float4 next_weights_of(uint n, uint i) const {
        return weight_dtype(n) == NO_WEIGHT ? all4(1) : load4(t.next_weights[n], i, p.dim - i, weight_dtype(n), ALIGNED);
    }
    inline float4 residual_of(uint i) const {
        return AFTER || BEFORE ? load4(t.residual, start + i, p.dim - i, RESIDUAL_DTYPE, ALIGNED) : all4(0);
    }
    inline float4 x_of(uint i) const {
        if (!COMBINE) {
            return load4(t.x, start + i, p.dim - i, X_DTYPE, ALIGNED);
        }
        float4 value = all4(0);
        // Loads of several terms are in flight.
#pragma unroll 4
        for (uint j = 0; j < p.terms; j++) {
            const ulong term = ulong(row) * p.terms + j;
            value = value + t.combine[term] * load4(t.x, term * p.dim + i, p.dim - i, X_DTYPE, ALIGNED);
        }
        return value;
    }
    inline float4 gate_of(uint i) const {
        if (!GATED) {
            return all4(1);
        }
        const float4 x = load4(t.gate, start + i, p.dim - i, GATE_DTYPE, ALIGNED);
        return make_float4(activate(x.x, SILU), activate(x.y, SILU), activate(x.z, SILU), activate(x.w, SILU));
    }
    inline float4 value_of(uint i) const {
        const float4 value = x_of(i);
        return BEFORE ? value + residual_of(i) : value;
    }
    // A thread reads what it has written itself.
    inline float4 stored_of(uint i) const {
        return load4(t.out, start + i, p.dim - i, OUT_DTYPE, ALIGNED);
    }
    // Visits all elements of the thread: the `held` ones, then the rest. Elements after the end of the row are zeros.
    template <typename Rest, typename Visit>
    inline void each_of(const float4 *held, const Rest &rest, const Visit &visit) const {
#pragma unroll
        for (uint k = 0; k < HELD; k++) {
            visit(held[k]);
        }
        for (ulong i = first + HELD * step; BEYOND && i < p.dim; i += step) {
            visit(rest(uint(i)));
        }
    }
};

// A thread's first groups in registers.
struct Held {
    float4 weights[HELD];
    float4 residual_weights[HELD];
    float4 next_weights[NEXTS + 1][HELD];
    float4 values[HELD];
    float4 residuals[HELD];
    float4 gates[HELD];
};

inline void load_weights(Held &held, const Row &row) {
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = row.first + k * row.step;
        held.weights[k] = i < row.p.dim ? row.weights_of(i) : all4(0);
        held.residual_weights[k] = i < row.p.dim ? row.residual_weights_of(i) : all4(0);
#pragma unroll
        for (uint n = 0; n < NEXTS; n++) {
            held.next_weights[n][k] = i < row.p.dim ? row.next_weights_of(n, i) : all4(0);
        }
    }
}

inline void load_values(Held &held, const Row &row) {
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = row.first + k * row.step;
        held.values[k] = i < row.p.dim ? row.x_of(i) : all4(0);
        held.residuals[k] = i < row.p.dim ? row.residual_of(i) : all4(0);
        held.gates[k] = i < row.p.dim ? row.gate_of(i) : all4(0);
    }
}

inline void add_residuals_before(Held &held) {
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        held.values[k] = BEFORE ? held.values[k] + held.residuals[k] : held.values[k];
    }
}

// The exchanges of the ranks, and the number of the collective.
struct Collective {
    Exchange *own;
    Exchange *const (&all)[MAX_RANKS];
    uint *failed;
    uint number;

    uint own_rank() const {
        uint rank = 0;
#pragma unroll
        for (uint r = 1; r < RANKS; r++) {
            rank = all[r] == own ? r : rank;
        }
        return rank;
    }
    // The packet of four elements from a rank to the owner of an exchange.
    Packet *packet(Exchange *exchange, uint from, const Row &row, uint i) const {
        return packets_from(exchange, from, number, RANKS, CAPACITY) + (row.start + i) / 4;
    }
};

inline uint2 message_of(const Row &row, uint i) {
    return *reinterpret_cast<const uint2 *>(row.t.x + (row.start + i) * 2);
}

inline float4 widened(uint2 m) {
    const auto widen = [](uint bits) { return X_DTYPE == F16 ? half_to_float(ushort(bits)) : bf16_to_float(ushort(bits)); };
    return make_float4(widen(m.x), widen(m.x >> 16), widen(m.y), widen(m.y >> 16));
}

inline void send_values(const Collective &c, const Row &row) {
    const uint own_rank = c.own_rank();
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = row.first + k * row.step;
        if (i < row.p.dim) {
            const uint2 message = message_of(row, i);
#pragma unroll
            for (uint r = 0; r < RANKS; r++) {
                if (r != own_rank) {
                    send(c.packet(c.all[r], own_rank, row, i), message, c.number);
                }
            }
        }
    }
}

// Replaces the held elements by their sums over ranks, in the order of ranks, rounded to the dtype of x. After a rank
// has failed, results are undefined.
inline void receive_values(Held &held, const Collective &c, const Row &row) {
    const uint own_rank = c.own_rank();
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = row.first + k * row.step;
        if (i < row.p.dim) {
            const uint2 message = message_of(row, i);
            float4 sum = all4(0);
#pragma unroll
            for (uint r = 0; r < RANKS; r++) {
                uint2 of_rank = message;
                if (r != own_rank) {
                    receive(c.packet(c.own, r, row, i), c.number, c.failed, of_rank);
                }
                const float4 term = widened(of_rank);
                sum = r == 0 ? term : sum + term;
            }
            held.values[k] = rounded4(sum, X_DTYPE);
        }
    }
}

// Factors of the row, and of its residual if that has a norm.
struct BothFactors {
    Factors own;
    Factors residual;
};

inline BothFactors both_factors_of(const Held &held, const Row &row, float inverse, float *room, Team team) {
    const auto value_of = [&](uint i) { return row.value_of(i); };
    const auto residual_of = [&](uint i) { return row.residual_of(i); };
    const auto each = [&](const auto &visit) { row.each_of(held.values, value_of, visit); };
    const auto each_residual = [&](const auto &visit) { row.each_of(held.residuals, residual_of, visit); };
    float2 squares = make_float2(squares_of(each, 1), NORMED ? squares_of(each_residual, 1) : 0);
    if (NORMED && WHOLE) {
        squares = over_team2<Sum>(squares, room, team);
    } else {
        squares.x = over_row<Sum>(squares.x, room, team);
        squares.y = NORMED ? over_warp<Sum>(squares.y) : 0;
    }
    const float eps = row.p.eps;
    const Factors own = factors_of(each, squares.x, inverse, eps, room + 2 * EXCHANGE, team);
    return {own, NORMED ? factors_of(each_residual, squares.y, inverse, eps, room + 4 * EXCHANGE, team) : Factors{1, 1}};
}

// Stores a result, and returns it. `other` is the residual.
inline float4 finish(const Row &row, const BothFactors &factors, uint i, float4 value, float4 other, float4 weight,
                     float4 other_weight, float4 gate) {
    const uint dim = row.p.dim;
    if (BEFORE) {
        store4(row.t.sum, row.start + i, dim - i, value, SUM_DTYPE, ALIGNED);
    }
    value = factors.own.of(value);
    if (HAS_WEIGHT) {
        value = value * weight;
    }
    if (NORMED) {
        other = factors.residual.of(other);
    }
    if (HAS_RESIDUAL_WEIGHT) {
        other = other * other_weight;
    }
    if (AFTER) {
        value = value + other;
    }
    value = row.p.scale * value;
    if (GATED) {
        value = value * gate;
    }
    store4(row.t.out, row.start + i, dim - i, value, OUT_DTYPE, ALIGNED);
    return value;
}

// Stores the results; the held ones take the place of the row's elements.
inline void store_results(Held &held, const Row &row, const BothFactors &factors) {
#pragma unroll
    for (uint k = 0; k < HELD; k++) {
        const uint i = row.first + k * row.step;
        if (i < row.p.dim) {
            const float4 result =
                finish(row, factors, i, held.values[k], held.residuals[k], held.weights[k], held.residual_weights[k],
                       held.gates[k]);
            held.values[k] = rounded4(result, OUT_DTYPE);
        }
    }
    for (ulong i = row.first + HELD * row.step; BEYOND && i < row.p.dim; i += row.step) {
        const uint at = uint(i);
        finish(row, factors, at, row.value_of(at), row.residual_of(at), row.weights_of(at), row.residual_weights_of(at),
               row.gate_of(at));
    }
}

inline void finish_next(const Row &row, Factors factors, uint n, uint i, float4 value, float4 weight) {
    value = factors.of(value);
    if (weight_dtype(n) != NO_WEIGHT) {
        value = value * weight;
    }
    store4(row.t.next_outs[n], row.start + i, row.p.dim - i, row.p.next_scales[n] * value, out_dtype(n), ALIGNED);
}

// Stores the norms of the results.
inline void store_nexts(const Held &held, const Row &row, float inverse, float *room, Team team) {
    const auto stored_of = [&](uint i) { return row.stored_of(i); };
    const auto each_stored = [&](const auto &visit) { row.each_of(held.values, stored_of, visit); };
    const float squares = over_row<Sum>(squares_of(each_stored, 1), room, team);
    const Factors factors = factors_of(each_stored, squares, inverse, row.p.next_eps, room + EXCHANGE, team);
#pragma unroll
    for (uint n = 0; n < NEXTS; n++) {
#pragma unroll
        for (uint k = 0; k < HELD; k++) {
            const uint i = row.first + k * row.step;
            if (i < row.p.dim) {
                finish_next(row, factors, n, i, held.values[k], held.next_weights[n][k]);
            }
        }
        for (ulong i = row.first + HELD * row.step; BEYOND && i < row.p.dim; i += row.step) {
            finish_next(row, factors, n, uint(i), row.stored_of(uint(i)), row.next_weights_of(n, uint(i)));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    KVANT_KERNEL(const uchar *x, const uchar *weight, const uchar *residual, uchar *sum, uchar *out,
                 const uchar *residual_weight, const uchar *next_weight_0, const uchar *next_weight_1,
                 const uchar *next_weight_2, uchar *next_out_0, uchar *next_out_1, uchar *next_out_2,
                 const float *combine, const uchar *gate, const RmsNormParams p
#if RANKS > 1
                 , uint *failed, Exchange *own, Exchange *e0, Exchange *e1, Exchange *e2, Exchange *e3, Exchange *e4,
                 Exchange *e5, Exchange *e6, Exchange *e7
#endif
    ) {
    // Two exchanges of the first sums, and two of each norm whose squares leave the range of f32.
    __shared__ float room[9 * EXCHANGE];
    const Team team = whole_block();
    const Tensors tensors = {x, weight, residual, sum, out, residual_weight, {next_weight_0, next_weight_1, next_weight_2},
                             {next_out_0, next_out_1, next_out_2}, combine, gate};
    const uint index = WHOLE ? blockIdx.x : blockIdx.x * (team.size / 32) + team.warp;
    const uint first = (WHOLE ? team.index : team.lane) * 4, step = (WHOLE ? team.size : 32) * 4;
    const Row row = {tensors, p, index, first, step, ulong(index) * p.dim};
    const float inverse = __fdividef(1, float(p.dim));
    Held held;
    load_weights(held, row);
    take_turn_early();
#if RANKS > 1
    Exchange *const all[MAX_RANKS] = {e0, e1, e2, e3, e4, e5, e6, e7};
    const Collective collective = {own, all, failed, number_of_collective(own)};
    if (index < p.rows) {
        send_values(collective, row);
    }
    __syncthreads();
    // While packets are on their way.
    if (threadIdx.x == 0) {
        count_collective(own, collective.number);
    }
#endif
    if (index >= p.rows) {
        return;
    }
    load_values(held, row);
#if RANKS > 1
    receive_values(held, collective, row);
#endif
    add_residuals_before(held);
    store_results(held, row, both_factors_of(held, row, inverse, room, team));
    if (NEXTS > 0) {
        store_nexts(held, row, inverse, room + 6 * EXCHANGE, team);
    }
}
