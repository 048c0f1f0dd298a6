// attend, for many query rows per KV head: prompts.
//
// attend_tiles: q [T, H, D] over a cache layer, out [T, H, D]. A threadgroup takes (tile of ROWS query rows, KV head,
// split) and processes KEYS keys at a time. A SIMD-group owns 8 rows and WIDTH coordinates, all of them up to D = 128:
// its queries, scores and results are 8x8 matrices in registers (fragments.h).
//   keys      all threads load them into threadgroup memory, then the values, while keys are multiplied;
//   scores    one matrix for every 8 keys. If PARTS SIMD-groups divide the coordinates, they add up their products;
//   softmax   in registers: four lanes share a row;
//   values    weights are used directly as the left operand.
// If keys and values are both f16, they stay halves in threadgroup memory; otherwise they become floats. Threadgroup
// memory holds the keys and the values of one step, and a step has two barriers; for floats with D > 128, keys and
// values share one buffer.
//
// Over quantised keys, the queries are rotated first; over quantised values, o is rotated back at the end. Page means
// are added where keys and values are decoded, once for all rows of a tile. The key bias, which stored keys do not
// include, is one more product: of the queries' factors and the cosines and sines of keys (key_bias.h).
#include "attend/fragments.h"
#include "attend/lanes.h"
#include "attend/softmax.h"
#include "key_bias.h"
#include "rotate.h"

// metal/attend/route.rs computes the bytes of threadgroup memory from these constants.
constant bool HALVES = K_CODEC == F16 && V_CODEC == F16;
// Codebooks of more than 32 centroids are tables (lanes.h).
constant bool K_TABLE = K_QUANTISED && K_CODEC % CENTRED > TQ5;
constant bool V_TABLE = V_QUANTISED && V_CODEC % CENTRED > TQ5;

template <uint D, uint ROWS, uint SIMDS, uint KEYS> struct Division {
    static constant constexpr uint THREADS = 32 * SIMDS;
    static constant constexpr uint PARTS = 8 * SIMDS / ROWS;
    static constant constexpr uint WIDTH = D / PARTS;
    static constant constexpr uint PAIRS = WIDTH / 16;
    static constant constexpr uint BLOCKS = KEYS / 8;
    static_assert(WIDTH % 16 == 0 && KEYS % 8 == 0 && ROWS <= 32, "whole pairs of matrices; a lane knows a row");
};

// Elements of type T between keys, padded so that 8 keys begin in different banks.
template <typename T> constexpr uint stride_of(uint dim) {
    return dim + 16 / sizeof(T);
}

// Threadgroup memory.
template <typename T> struct Room {
    threadgroup T *keys;
    threadgroup T *values;
    threadgroup float2 *products; // [SIMDS, BLOCKS, 32], with several PARTS
    threadgroup uint *finite;     // [SIMDS]: whether all values that a SIMD-group loaded are finite
};

// The registers of a lane.
template <uint D, uint ROWS, uint SIMDS, uint KEYS> struct Accumulators {
    typedef Division<D, ROWS, SIMDS, KEYS> Of;
    simdgroup_float8x8 q[2 * Of::PAIRS];
    simdgroup_float8x8 o[2 * Of::PAIRS];
    State state; // of its row: m over all keys, l over the lane's keys
    uint row;    // its row of the tile
    uint part;   // its part of the coordinates
    uint2 seen;  // the first and the last key of a pass that the row sees
    uint2 any;   // the keys that any of the 8 rows sees
    uint2 all;   // the keys that all existing ones of them see
    uint2 tile;  // the keys that all rows of the tile see
    uint index;
    uint lane;
    uint simd;
    KeyBias bias;
    float4 factors[Of::PAIRS]; // of the bias
    Codebook keys;
    Codebook values;
};

// The octets (eight coordinates) of a step that a thread loads, by their index among all octets.
template <uint D, uint KEYS, uint THREADS> struct Share {
    static constant constexpr uint OCTETS = D / 8;
    static constant constexpr uint COUNT = (KEYS * OCTETS + THREADS - 1) / THREADS;
    static_assert(KEYS * OCTETS % 32 == 0, "all lanes of a SIMD-group load one, or none does");
    static bool has(uint index, uint n) {
        return KEYS * OCTETS % THREADS == 0 || index + n * THREADS < KEYS * OCTETS;
    }
    static uint key(uint index, uint n) {
        return THREADS % OCTETS == 0 ? index / OCTETS + n * (THREADS / OCTETS) : (index + n * THREADS) / OCTETS;
    }
    static uint octet(uint index, uint n) {
        return (THREADS % OCTETS == 0 ? index : index + n * THREADS) % OCTETS;
    }
};

inline bool are_finite_halves(uint4 bits) {
    return are_finite_halves(bits.x) && are_finite_halves(bits.y) && are_finite_halves(bits.z) && are_finite_halves(bits.w);
}

// Moves halves that are contiguous from `low` on without conversion.
template <uint D, uint KEYS, uint THREADS>
bool bring_halves(device const uchar *low, uint stride, threadgroup half *stage, uint index, bool check) {
    typedef Share<D, KEYS, THREADS> Own;
    bool finite = true;
#pragma unroll
    for (uint n = 0; n < Own::COUNT; n++) {
        if (!Own::has(index, n)) {
            break;
        }
        const uint key = Own::key(index, n), octet = Own::octet(index, n);
        const uint4 bits = uint4(*reinterpret_cast<device const packed_uint4 *>(low + (key * stride * D + 8 * octet) * 2));
        *reinterpret_cast<threadgroup uint4 *>(stage + key * stride_of<half>(D) + 8 * octet) = bits;
        if (check) {
            finite = finite && are_finite_halves(bits);
        }
    }
    return finite;
}

// Loads keys (or values) base .. base + KEYS into `stage`. Keys from `end` on, and keys without a page, become zeros.
// With `check`, returns whether all numbers that this thread loaded are finite. All threads call it.
template <bool VALUES, uint D, uint KEYS, uint THREADS, typename T>
bool bring(CachedKeys keys, uint base, uint end, threadgroup T *stage, Codebook book, uint index, bool check) {
    typedef Share<D, KEYS, THREADS> Own;
    constexpr uint NORMS = (D + 255) / 256;
    const Planes planes = VALUES ? keys.v : keys.k;
    const uint codec = VALUES ? V_CODEC : K_CODEC;
    const bool aligned = VALUES ? V_ALIGNED : K_ALIGNED, together = keys.are_together(base, KEYS);
    RowPlace start = {0, 0, false};
    RowAddress first = {planes.low, planes.high};
    device const uchar *first_norms = planes.norms;
    if (together) {
        start = keys.place_of(base);
        first = address_of(planes, start, D, codec);
        first_norms = norms_of(planes, start, NORMS, codec);
    }
    if (sizeof(T) == 2 && aligned && start.held && end - base >= KEYS) {
        return bring_halves<D, KEYS, THREADS>(first.low, keys.stride, reinterpret_cast<threadgroup half *>(stage), index, check);
    }
    bool finite = true;
#pragma unroll
    for (uint n = 0; n < Own::COUNT; n++) {
        if (!Own::has(index, n)) {
            break;
        }
        const uint key = Own::key(index, n), octet = Own::octet(index, n);
        RowPlace at = start;
        RowAddress row = first;
        device const uchar *norms = first_norms;
        uint norm = octet / 32;
        bool held = base + key < end;
        if (together) {
            held = held && start.held;
            norm += key * keys.stride * NORMS;
            row = further(first, key * keys.stride, D, codec);
        } else if (held) {
            at = keys.place_of(base + key);
            row = address_of(planes, at, D, codec);
            norms = norms_of(planes, at, NORMS, codec);
            held = at.held;
        }
        Piece pieces[2] = {{uint4(0), 0}, {uint4(0), 0}};
        if (held && codec == F32) {
            pieces[0] = load_piece(row, 2 * octet, false, codec, aligned);
            pieces[1] = load_piece(row, 2 * octet + 1, false, codec, aligned);
        } else if (held) {
            pieces[0] = load_piece(row, octet, true, codec, aligned);
        }
        threadgroup T *to = stage + key * stride_of<T>(D) + 8 * octet;
        if (sizeof(T) == 2) {
            *reinterpret_cast<threadgroup uint4 *>(to) = pieces[0].low;
            if (check) {
                finite = finite && are_finite_halves(pieces[0].low);
            }
            continue;
        }
        // Missing keys have factor 0, because code 0 does not represent the number 0.
        const float factor = is_quantised(codec) && held ? load_norm(norms, norm, codec) : 0;
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            // Four lanes store the first half of their octet while the next four store the second half, which is in
            // different banks.
            const uint quad = i ^ (octet >> 2 & 1);
            float4 x = codec == F32 ? as_type<float4>(pieces[0].low) : quad_from(pieces[0], quad, codec, book);
            if (codec == F32 && quad == 1) {
                x = as_type<float4>(pieces[1].low);
            }
            if (is_quantised(codec)) {
                x *= factor;
            }
            if (is_centred(codec) && held) {
                const uint j = 8 * octet + 4 * quad;
                x += VALUES ? keys.value_mean4(at, j, D) : keys.key_mean4(at, j, D);
            }
            if (check) {
                finite = finite && is_finite(x.x) && is_finite(x.y) && is_finite(x.z) && is_finite(x.w);
            }
            *reinterpret_cast<threadgroup float4 *>(to + 4 * quad) = x;
        }
    }
    return finite;
}

// Multiplies the queries by the keys in `stage`: one matrix of products for every 8 keys that a row sees. FULL: all
// existing rows see all keys.
template <bool FULL, typename T, uint D, uint ROWS, uint SIMDS, uint KEYS>
void multiply_keys(thread const Accumulators<D, ROWS, SIMDS, KEYS> &acc, threadgroup const T *stage, uint base,
                   thread simdgroup_float8x8 *scores) {
    typedef Division<D, ROWS, SIMDS, KEYS> Of;
    const uint row = fragment_row(acc.lane), column = fragment_column(acc.lane);
#pragma unroll
    for (uint b = 0; b < Of::BLOCKS; b++) {
        scores[b] = make_filled_simdgroup_matrix<float, 8, 8>(0);
        if (!FULL && base + 8 * b > acc.any.y) {
            continue;
        }
        threadgroup const T *at = stage + (8 * b + column) * stride_of<T>(D) + acc.part * Of::WIDTH + 2 * row;
#pragma unroll
        for (uint n = 0; n < Of::PAIRS; n++) {
            simdgroup_matrix<T, 8, 8> even, odd;
            load_columns(at + 16 * n, at + 16 * n + stride_of<T>(D), even, odd);
            simdgroup_multiply_accumulate(scores[b], acc.q[2 * n], even, scores[b]);
            simdgroup_multiply_accumulate(scores[b], acc.q[2 * n + 1], odd, scores[b]);
        }
    }
}

// Computes the factors of the bias from the queries, KEYS rows of the tile at a time; all threads call it. A row has D
// factors, stored like coordinates: quad i has those of pairs 2i and 2i + 1.
template <uint D, uint ROWS, uint SIMDS, uint KEYS>
void make_factors(thread Accumulators<D, ROWS, SIMDS, KEYS> &acc, threadgroup float *stage) {
    typedef Division<D, ROWS, SIMDS, KEYS> Of;
    const uint start = acc.part * Of::WIDTH + 2 * fragment_column(acc.lane);
    for (uint first = 0; first < ROWS; first += KEYS) {
        const bool mine = acc.row - first < KEYS;
        threadgroup float *query = stage + (mine ? acc.row - first : 0) * D;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (mine) {
#pragma unroll
            for (uint n = 0; n < Of::PAIRS; n++) {
                const float4 quad = quad_of_pair(acc.q[2 * n], acc.q[2 * n + 1]);
                for (uint e = 0; e < 4; e++) {
                    query[acc.bias.places[start + 16 * n + e]] = quad[e];
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (mine) {
#pragma unroll
            for (uint n = 0; n < Of::PAIRS; n++) {
                acc.factors[n] = acc.bias.factors(query, (start + 16 * n) / 4);
            }
        }
    }
}

// Adds the products of the queries and the bias to those of keys base .. base + KEYS.
template <bool FULL, uint D, uint ROWS, uint SIMDS, uint KEYS>
void add_bias(thread const Accumulators<D, ROWS, SIMDS, KEYS> &acc, CachedKeys keys, uint base,
              thread simdgroup_float8x8 *scores) {
    typedef Division<D, ROWS, SIMDS, KEYS> Of;
    const uint row = fragment_row(acc.lane), column = fragment_column(acc.lane);
    const uint start = acc.part * Of::WIDTH, first_quad = start / 4 + column / 2;
#pragma unroll
    for (uint b = 0; b < Of::BLOCKS; b++) {
        // The tables cover only positions that pages hold. Eight keys are in one page.
        if (!FULL && (base + 8 * b > acc.any.y || !keys.place_of(base + 8 * b).held)) {
            continue;
        }
        const uint position = keys.first + base + 8 * b;
        // The lane's two turns of 16: cosines or sines.
        device const float *turns = acc.bias.steps + (acc.bias.slot_of(position) + column) * D + row % 2 * (D / 2);
#pragma unroll
        for (uint n = 0; n < Of::PAIRS; n++) {
            simdgroup_float8x8 even, odd, even_turns, odd_turns;
            set_pair(even, odd, acc.bias.factors_on_page(acc.factors[n], position >> PAGE_SHIFT, first_quad + 4 * n));
            device const float *two = turns + (start + 16 * n) / 2 + row / 2 * 2;
            set_columns(even_turns, odd_turns, *reinterpret_cast<device const float2 *>(two),
                        *reinterpret_cast<device const float2 *>(two + D));
            simdgroup_multiply_accumulate(scores[b], even, even_turns, scores[b]);
            simdgroup_multiply_accumulate(scores[b], odd, odd_turns, scores[b]);
        }
    }
}

// Turns the products of a step into weights, and adds them to the states.
template <bool FULL, uint D, uint ROWS, uint SIMDS, uint KEYS>
void weigh(thread Accumulators<D, ROWS, SIMDS, KEYS> &acc, uint base, uint held, thread simdgroup_float8x8 *scores,
           constant MetalAttendParams &p) {
    typedef Division<D, ROWS, SIMDS, KEYS> Of;
    const uint column = fragment_column(acc.lane);
    const float before = acc.state.m, scale = p.scale * M_LOG2E_F;
    float m = FULL ? max(before, -FLT_MAX) : before;
    uint seen = 0;
#pragma unroll
    for (uint b = 0; b < Of::BLOCKS; b++) {
#pragma unroll
        for (uint e = 0; e < 2; e++) {
            const uint key = 8 * b + column + e;
            const float product = scores[b].thread_elements()[e];
            const float score = SOFTCAP ? score_of(product, p) : product * scale;
            scores[b].thread_elements()[e] = score;
            if (FULL) {
                // `fmax` ignores a NaN, which shows in its weight.
                m = fmax(m, score);
            } else if (base + key - acc.seen.x <= acc.seen.y - acc.seen.x && (held >> key & 1) != 0) {
                seen |= 1u << (2 * b + e);
                m = raised(m, score);
            }
        }
    }
    m = fmax(m, simd_shuffle_xor(m, ushort(1)));
    m = fmax(m, simd_shuffle_xor(m, ushort(8)));
    // Equal maxima, infinite ones included, need no factor.
    const float factor = before == m ? 1 : precise::exp2(before - m);
    float sum = 0;
#pragma unroll
    for (uint b = 0; b < Of::BLOCKS; b++) {
#pragma unroll
        for (uint e = 0; e < 2; e++) {
            float weight = precise::exp2(scores[b].thread_elements()[e] - m);
            weight = FULL || (seen >> (2 * b + e) & 1) != 0 ? weight : 0;
            scores[b].thread_elements()[e] = weight;
            sum += weight;
        }
    }
    acc.state = State{m, acc.state.l * factor + sum};
    if (simd_any(factor != 1)) {
#pragma unroll
        for (uint n = 0; n < 2 * Of::PAIRS; n++) {
            acc.o[n].thread_elements()[0] *= factor;
            acc.o[n].thread_elements()[1] *= factor;
        }
    }
}

// Adds weights times values to o.
template <bool FULL, typename T, uint D, uint ROWS, uint SIMDS, uint KEYS>
void add_values(thread Accumulators<D, ROWS, SIMDS, KEYS> &acc, threadgroup const T *stage, uint base,
                thread const simdgroup_float8x8 *weights) {
    typedef Division<D, ROWS, SIMDS, KEYS> Of;
    const uint row = fragment_row(acc.lane), column = fragment_column(acc.lane);
#pragma unroll
    for (uint b = 0; b < Of::BLOCKS; b++) {
        if (!FULL && base + 8 * b > acc.any.y) {
            continue;
        }
        threadgroup const T *at = stage + (8 * b + row) * stride_of<T>(D) + acc.part * Of::WIDTH + 2 * column;
#pragma unroll
        for (uint n = 0; n < Of::PAIRS; n++) {
            simdgroup_matrix<T, 8, 8> even, odd;
            load_quad(at + 16 * n, even, odd);
            simdgroup_multiply_accumulate(acc.o[2 * n], weights[b], even, acc.o[2 * n]);
            simdgroup_multiply_accumulate(acc.o[2 * n + 1], weights[b], odd, acc.o[2 * n + 1]);
        }
    }
}

// As [add_values], for values that are not finite: a value is added only to rows that see it.
template <typename T, uint D, uint ROWS, uint SIMDS, uint KEYS>
void add_values_one_by_one(thread Accumulators<D, ROWS, SIMDS, KEYS> &acc, threadgroup const T *stage, uint base, uint held,
                           thread simdgroup_float8x8 *weights) {
    typedef Division<D, ROWS, SIMDS, KEYS> Of;
    const uint row = fragment_row(acc.lane), column = fragment_column(acc.lane);
#pragma unroll
    for (uint b = 0; b < Of::BLOCKS; b++) {
#pragma unroll
        for (uint i = 0; i < 8; i++) {
            const uint key = 8 * b + i;
            const float weight = simd_shuffle(weights[b].thread_elements()[i % 2], ushort(lane_of_fragment(row, i)));
            if (base + key - acc.seen.x > acc.seen.y - acc.seen.x || (held >> key & 1) == 0) {
                continue;
            }
            threadgroup const T *at = stage + key * stride_of<T>(D) + acc.part * Of::WIDTH + 2 * column;
#pragma unroll
            for (uint n = 0; n < Of::PAIRS; n++) {
                add_to_pair(acc.o[2 * n], acc.o[2 * n + 1], weight * quad_at(at + 16 * n));
            }
        }
    }
}

// Processes keys begin .. end of a pass; all threads call it.
template <typename T, uint D, uint ROWS, uint SIMDS, uint KEYS>
void absorb(CachedKeys keys, uint begin, uint end, Room<T> room, thread Accumulators<D, ROWS, SIMDS, KEYS> &acc,
            constant MetalAttendParams &p) {
    typedef Division<D, ROWS, SIMDS, KEYS> Of;
    constexpr bool SHARED = sizeof(T) == 4 && D > 128;
    // Other SIMD-groups may still use the threadgroup memory for earlier data.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    bring<false, D, KEYS, Of::THREADS>(keys, begin, end, room.keys, acc.keys, acc.index, false);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint base = begin; base < end; base += KEYS) {
        const uint next = base + KEYS;
        // The keys of a step, as bits.
        constexpr uint EVERY = 0xFFFFFFFF >> (32 - KEYS);
        uint held = end - base < KEYS ? (1u << (end - base)) - 1 : EVERY;
        if (PAGED && keys.are_together(base, KEYS)) {
            held = keys.place_of(base).held ? held : 0;
        } else if (PAGED) {
            held = simd_or((held >> acc.lane & 1) != 0 && keys.place_of(base + acc.lane).held ? 1u << acc.lane : 0);
        }
        const bool whole = held == EVERY;
        const bool active = acc.any.x < next && acc.any.y >= base && held != 0;
        const bool full = whole && acc.all.x <= base && acc.all.y >= next - 1;
        simdgroup_float8x8 scores[Of::BLOCKS];
        if (active) {
            if (full) {
                multiply_keys<true>(acc, room.keys, base, scores);
            } else {
                multiply_keys<false>(acc, room.keys, base, scores);
            }
            if (KEY_BIAS && full) {
                add_bias<true>(acc, keys, base, scores);
            } else if (KEY_BIAS) {
                add_bias<false>(acc, keys, base, scores);
            }
            if (Of::PARTS > 1) {
#pragma unroll
                for (uint b = 0; b < Of::BLOCKS; b++) {
                    room.products[(acc.simd * Of::BLOCKS + b) * 32 + acc.lane] =
                        float2(scores[b].thread_elements()[0], scores[b].thread_elements()[1]);
                }
            }
        }
        if (SHARED) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        // Infinite values that all rows see may be added to all results.
        const bool careful = !(whole && acc.tile.x <= base && acc.tile.y >= next - 1);
        const bool finite =
            bring<true, D, KEYS, Of::THREADS>(keys, base, end, room.values, acc.values, acc.index, careful);
        if (careful) {
            const bool all_finite = simd_all(finite);
            if (acc.lane == 0) {
                room.finite[acc.simd] = all_finite ? 1 : 0;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (!SHARED && next < end) {
            bring<false, D, KEYS, Of::THREADS>(keys, next, end, room.keys, acc.keys, acc.index, false);
        }
        if (active) {
            if (Of::PARTS > 1) {
#pragma unroll
                for (uint b = 0; b < Of::BLOCKS; b++) {
                    float2 sum = 0;
#pragma unroll
                    for (uint part = 0; part < Of::PARTS; part++) {
                        const uint simd = acc.simd - acc.part + part;
                        sum += room.products[(simd * Of::BLOCKS + b) * 32 + acc.lane];
                    }
                    scores[b].thread_elements()[0] = sum.x;
                    scores[b].thread_elements()[1] = sum.y;
                }
            }
            if (full) {
                weigh<true>(acc, base, held, scores, p);
                add_values<true>(acc, room.values, base, scores);
            } else {
                weigh<false>(acc, base, held, scores, p);
                bool all_finite = true;
                for (uint simd = 0; simd < SIMDS; simd++) {
                    all_finite = all_finite && room.finite[simd] != 0;
                }
                if (all_finite) {
                    add_values<false>(acc, room.values, base, scores);
                } else {
                    add_values_one_by_one(acc, room.values, base, held, scores);
                }
            }
        }
        if (SHARED) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (next < end) {
                bring<false, D, KEYS, Of::THREADS>(keys, next, end, room.keys, acc.keys, acc.index, false);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// Rotates all rows of the tile, KEYS rows at a time; all threads call it.
template <uint D, uint ROWS, uint SIMDS, uint KEYS>
void rotate_rows(thread simdgroup_float8x8 *matrices, bool inverse, threadgroup float *stage,
                 thread const Accumulators<D, ROWS, SIMDS, KEYS> &acc) {
    typedef Division<D, ROWS, SIMDS, KEYS> Of;
    static_assert(ROWS % KEYS == 0, "the room is that of KEYS rows");
    for (uint first = 0; first < ROWS; first += KEYS) {
        const bool mine = acc.row - first < KEYS;
        threadgroup float4 *quads = reinterpret_cast<threadgroup float4 *>(
            stage + (acc.row - (mine ? first : acc.row)) * D + acc.part * Of::WIDTH + 2 * fragment_column(acc.lane));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (mine) {
#pragma unroll
            for (uint n = 0; n < Of::PAIRS; n++) {
                quads[4 * n] = quad_of_pair(matrices[2 * n], matrices[2 * n + 1]);
            }
        }
        rotate(stage, KEYS, D, inverse, acc.index, Of::THREADS);
        if (mine) {
#pragma unroll
            for (uint n = 0; n < Of::PAIRS; n++) {
                set_pair(matrices[2 * n], matrices[2 * n + 1], quads[4 * n]);
            }
        }
    }
}

template <uint D, uint ROWS, uint SIMDS, uint KEYS>
kernel void attend_tiles(device const uchar *q [[buffer(0)]],
                         device uchar *out [[buffer(1), function_constant(WHOLE)]],
                         device const uint *positions [[buffer(2)]],
                         device const uint *sequences [[buffer(3)]],
                         device const uint *lens [[buffer(4)]],
                         device const uchar *k_low [[buffer(5)]],
                         device const uchar *k_high [[buffer(6), function_constant(K_HIGH)]],
                         device const uchar *k_norms [[buffer(7), function_constant(K_QUANTISED)]],
                         device const uchar *v_low [[buffer(8)]],
                         device const uchar *v_high [[buffer(9), function_constant(V_HIGH)]],
                         device const uchar *v_norms [[buffer(10), function_constant(V_QUANTISED)]],
                         device const float *sinks [[buffer(11), function_constant(SINKS_HERE)]],
                         device const float *earlier_out [[buffer(12), function_constant(EARLIER_HERE)]],
                         device float *partial_o [[buffer(13), function_constant(PARTIAL)]],
                         device float2 *partial_states [[buffer(14), function_constant(PARTIAL)]],
                         constant MetalAttendParams &p [[buffer(15)]],
                         device const uint *table [[buffer(16), function_constant(PAGED)]],
                         device const uchar *k_means [[buffer(17), function_constant(K_CENTRED)]],
                         device const uchar *v_means [[buffer(18), function_constant(V_CENTRED)]],
                         device const float *earlier_ends [[buffer(19), function_constant(EARLIER_HERE)]],
                         device float *ends [[buffer(20), function_constant(ENDS_HERE)]],
                         device const float *bias_pairs [[buffer(21), function_constant(KEY_BIAS)]],
                         device const uint *bias_places [[buffer(22), function_constant(KEY_BIAS)]],
                         device const float *bias_starts [[buffer(23), function_constant(KEY_BIAS)]],
                         device const float *bias_steps [[buffer(24), function_constant(KEY_BIAS)]],
                         threadgroup float4 *memory [[threadgroup(0)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint index [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    typedef Division<D, ROWS, SIMDS, KEYS> Of;
    threadgroup float2 products[Of::PARTS > 1 ? SIMDS * Of::BLOCKS * 32 : 1];
    threadgroup uint finite[SIMDS];
    threadgroup float *stage = reinterpret_cast<threadgroup float *>(memory);
    const uint kv_head = group.y, split = group.z;
    const Planes keys = {k_low, K_HIGH ? k_high : nullptr, K_QUANTISED ? k_norms : nullptr,
                         K_CENTRED ? k_means : nullptr};
    const Planes values = {v_low, V_HIGH ? v_high : nullptr, V_QUANTISED ? v_norms : nullptr,
                           V_CENTRED ? v_means : nullptr};
    Accumulators<D, ROWS, SIMDS, KEYS> acc;
    acc.index = index;
    acc.lane = lane;
    acc.simd = simd;
    acc.part = simd % Of::PARTS;
    acc.row = simd / Of::PARTS * 8 + fragment_row(lane);
    acc.state = no_keys();
    // After the keys and the values of a step.
    threadgroup float *tables = stage + KEYS * (D + 4) * (D > 128 ? 1 : 2);
    acc.keys = Codebook{K_QUANTISED ? centroid(lane, K_CODEC) : 0, tables};
    acc.values = Codebook{V_QUANTISED ? centroid(lane, V_CODEC) : 0, tables + (K_TABLE ? TABLE : 0)};
    for (uint i = index; (K_TABLE || V_TABLE) && i < TABLE; i += Of::THREADS) {
        if (K_TABLE) {
            tables[i] = centroid(i, K_CODEC);
        }
        if (V_TABLE) {
            tables[(K_TABLE ? TABLE : 0) + i] = centroid(i, V_CODEC);
        }
    }

    // Lane i of every SIMD-group has row i.
    uint position;
    Row row = row_of(group.x, lane, kv_head, positions, sequences, p, position);
    const uint vector = simd_shuffle(row.x, ushort(acc.row));
    const ulong start = ulong(vector) * D + acc.part * Of::WIDTH + 2 * fragment_column(lane);
#pragma unroll
    for (uint n = 0; n < Of::PAIRS; n++) {
        acc.o[2 * n] = acc.o[2 * n + 1] = make_filled_simdgroup_matrix<float, 8, 8>(0);
        const float4 quad = vector != NONE ? load4(q, start + 16 * n, 4, Q_DTYPE, Q_ALIGNED) : float4(0);
        set_pair(acc.q[2 * n], acc.q[2 * n + 1], quad);
    }
    acc.bias = KeyBias{nullptr, nullptr, nullptr, nullptr, D, PAGE_SHIFT};
    if (KEY_BIAS) {
        acc.bias = key_bias_of(bias_pairs, bias_places, bias_starts, bias_steps, kv_head, D, PAGE_SHIFT);
        make_factors(acc, stage);
    }
    if (K_QUANTISED && !Q_ROTATED) {
        rotate_rows(acc.q, false, stage, acc);
    }

    for (uint sequence = simd_min(row.y); sequence != NONE;) {
        row = seeing(row, position, sequence, lens[sequence], p);
        const uint seen_first = simd_min(row.z), last = simd_max(row.w);
        const uint first = begin_of_pass(seen_first, KEYS);
        const uint2 part = seen_first <= last ? part_of(last - first + 1, split, KEYS, p) : uint2(0);
        if (part.x < part.y) {
            // Keys are counted from the first key of the pass.
            const bool sees = row.z <= row.w, there = is_there(row), mine = lane / 8 == simd / Of::PARTS;
            const uint from = sees ? row.z - first : NONE, to = sees ? row.w - first : 0;
            acc.seen = uint2(simd_shuffle(from, ushort(acc.row)), simd_shuffle(to, ushort(acc.row)));
            // If the row sees no key: an empty range, since no key has index NONE - 1.
            acc.seen = acc.seen.x <= acc.seen.y ? acc.seen : uint2(NONE - 1);
            acc.any = uint2(simd_min(mine ? from : NONE), simd_max(mine ? to : 0));
            acc.all = uint2(simd_max(mine && there ? from : 0), simd_min(mine && there ? to : NONE));
            acc.tile = uint2(simd_max(there ? from : 0), simd_min(there ? to : NONE));
            const CachedKeys seen = keys_of(keys, values, PAGED ? table : nullptr, sequence, kv_head, first, p);
            if (HALVES) {
                threadgroup half *at = reinterpret_cast<threadgroup half *>(stage);
                const Room<half> room = {at, at + KEYS * (D + 8), products, finite};
                absorb(seen, part.x, part.y, room, acc, p);
            } else {
                const Room<float> room = {stage, stage + (D > 128 ? 0 : KEYS * (D + 4)), products, finite};
                absorb(seen, part.x, part.y, room, acc, p);
            }
        }
        sequence = simd_min(row.y > sequence ? row.y : NONE);
    }

    acc.state.l += simd_shuffle_xor(acc.state.l, ushort(1));
    acc.state.l += simd_shuffle_xor(acc.state.l, ushort(8));
    if (V_QUANTISED) {
        rotate_rows(acc.o, true, stage, acc);
    }
    float end = -INFINITY;
    if (EARLIER_HERE) {
        end = vector != NONE ? earlier_ends[vector] : end;
        // `ends` may be the memory of the earlier ends: all threads must have read them.
        threadgroup_barrier(mem_flags::mem_device);
    }
    if (vector == NONE) {
        return;
    }
    if (PARTIAL) {
        const ulong at = split * (ulong(p.tokens) * p.heads) * D + start;
        if (acc.state.m != -INFINITY) {
#pragma unroll
            for (uint n = 0; n < Of::PAIRS; n++) {
                store4(reinterpret_cast<device uchar *>(partial_o), at + 16 * n, 4,
                       quad_of_pair(acc.o[2 * n], acc.o[2 * n + 1]), F32, true);
            }
        }
        if (acc.part == 0 && fragment_column(lane) == 0) {
            partial_states[at / D] = packed(acc.state);
        }
    } else {
        const float2 factors = with_earlier(acc.state, end);
        const float factor = finish(with_sink(acc.state, SINKS_HERE ? sinks : nullptr, vector, p));
#pragma unroll
        for (uint n = 0; n < Of::PAIRS; n++) {
            float4 o = quad_of_pair(acc.o[2 * n], acc.o[2 * n + 1]);
            if (EARLIER_HERE) {
                o = o * factors.x + *reinterpret_cast<device const float4 *>(earlier_out + start + 16 * n) * factors.y;
            }
            store4(out, start + 16 * n, 4, factor * o, OUT_DTYPE, false);
        }
        if (ENDS_HERE && acc.part == 0 && fragment_column(lane) == 0) {
            ends[vector] = end_of(acc.state);
        }
    }
}

// D, rows of a tile, SIMD-groups, keys of a step.
template [[host_name("attend_tiles_64")]] [[kernel]] decltype(attend_tiles<64, 32, 4, 32>) attend_tiles<64, 32, 4, 32>;
template [[host_name("attend_tiles_80")]] [[kernel]] decltype(attend_tiles<80, 32, 4, 16>) attend_tiles<80, 32, 4, 16>;
template [[host_name("attend_tiles_96")]] [[kernel]] decltype(attend_tiles<96, 32, 4, 16>) attend_tiles<96, 32, 4, 16>;
template [[host_name("attend_tiles_112")]] [[kernel]] decltype(attend_tiles<112, 32, 4, 16>) attend_tiles<112, 32, 4, 16>;
template [[host_name("attend_tiles_128")]] [[kernel]] decltype(attend_tiles<128, 32, 4, 16>) attend_tiles<128, 32, 4, 16>;
template [[host_name("attend_tiles_192")]] [[kernel]] decltype(attend_tiles<192, 32, 8, 16>) attend_tiles<192, 32, 8, 16>;
template [[host_name("attend_tiles_256")]] [[kernel]] decltype(attend_tiles<256, 32, 8, 16>) attend_tiles<256, 32, 8, 16>;
template [[host_name("attend_tiles_512")]] [[kernel]] decltype(attend_tiles<512, 16, 8, 8>) attend_tiles<512, 16, 8, 8>;
