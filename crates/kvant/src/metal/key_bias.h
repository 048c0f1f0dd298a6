// The key bias, rotated to positions; sealed pages store keys without it (key_bias.rs).
//
// A row of pairs has two halves: the first coordinates of all pairs, then the second ones. The angle of a position is
// the sum of the angles of its page's first position and of its slot. Two neighbouring pairs are processed at once, as
// the first and the second two of four floats.
#ifndef KVANT_KEY_BIAS_H
#define KVANT_KEY_BIAS_H
#include <metal_stdlib>
using namespace metal;

// The bias of one KV head; a page has 2^shift positions.
struct KeyBias {
    device const float *pairs;  // [2, D/2]
    device const uint *places;  // [D]: the index of each coordinate among the pairs
    device const float *starts; // [pages, 2, D/2]: cosines, then sines, of a page's first position
    device const float *steps;  // [2^shift, 2, D/2]: cosines, then sines, of a slot
    uint dim;
    uint shift;

    uint slot_of(uint position) const {
        return position & ((1u << shift) - 1);
    }
    // Coordinate j of the bias at a position.
    float at(uint position, uint j) const {
        const uint pairs_of_row = dim / 2, place = places[j], pair = place % pairs_of_row;
        device const float *start = starts + ulong(position >> shift) * dim + pair;
        device const float *step = steps + slot_of(position) * dim + pair;
        const float2 a = float2(start[0], start[pairs_of_row]), b = float2(step[0], step[pairs_of_row]);
        const float cosine = a.x * b.x - a.y * b.y, sine = a.y * b.x + a.x * b.y;
        const float x = pairs[pair], y = pairs[pairs_of_row + pair];
        return place < pairs_of_row ? x * cosine - y * sine : x * sine + y * cosine;
    }
    // Coordinates j .. j+3.
    float4 quad_at(uint position, uint j) const {
        return float4(at(position, j), at(position, j + 1), at(position, j + 2), at(position, j + 3));
    }
    // Pairs 2i and 2i+1 of a row.
    float4 two_pairs(device const float *row, uint i) const {
        const float2 first = *reinterpret_cast<device const float2 *>(row + 2 * i);
        return float4(first, *reinterpret_cast<device const float2 *>(row + dim / 2 + 2 * i));
    }
    // The factors by which a query's product with the bias multiplies cosines and sines. `query` has the query's
    // coordinates, ordered by pairs.
    float4 factors(threadgroup const float *query, uint i) const {
        const float2 a = *reinterpret_cast<threadgroup const float2 *>(query + 2 * i);
        const float2 b = *reinterpret_cast<threadgroup const float2 *>(query + dim / 2 + 2 * i);
        const float4 own = two_pairs(pairs, i);
        return float4(a * own.xy + b * own.zw, b * own.xy - a * own.zw);
    }
    // As factors, for angles relative to the first position of a page.
    float4 factors_on_page(float4 factors, uint page, uint i) const {
        const float4 turn = two_pairs(starts + ulong(page) * dim, i);
        return float4(factors.xy * turn.xy + factors.zw * turn.zw, factors.zw * turn.xy - factors.xy * turn.zw);
    }
    // The cosines and sines of a slot.
    float4 turns(uint slot, uint i) const {
        return two_pairs(steps + slot * dim, i);
    }
};

inline KeyBias key_bias_of(device const float *pairs, device const uint *places, device const float *starts,
                           device const float *steps, uint head, uint dim, uint shift) {
    return KeyBias{pairs + head * dim, places, starts, steps, dim, shift};
}

#endif
