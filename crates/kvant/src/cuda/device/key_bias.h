// The key bias, rotated to positions; sealed pages store keys without it (key_bias.rs).
#ifndef KVANT_CUDA_DEVICE_KEY_BIAS_H
#define KVANT_CUDA_DEVICE_KEY_BIAS_H
#include "device/convert.h"

// Pairs of coordinates are two halves of a row: the first coordinates of all pairs, then the second ones.
struct KeyBias {
    // [Hk, 2, dim / 2].
    const float *pairs;
    // [dim]: the index of a coordinate among the pairs.
    const uint *places;
    // [pages, 2, dim / 2]: cosines, then sines, of the angles of each page's first position.
    const float *starts;
    // [positions of a page, 2, dim / 2]: cosines, then sines, for the distance from the page's first position.
    const float *steps;

    // Coordinate j of the bias of a KV head, for the key in slot `slot` of page `page` of its sequence.
    inline float at(uint head, uint page, uint slot, uint j, uint dim) const {
        const uint half = dim / 2, place = places[j], i = place % half;
        const float *start = starts + ulong(page) * dim + i, *step = steps + ulong(slot) * dim + i;
        const float cosine = start[0] * step[0] - start[half] * step[half];
        const float sine = start[half] * step[0] + start[0] * step[half];
        const float x = pairs[ulong(head) * dim + i], y = pairs[ulong(head) * dim + half + i];
        return place < half ? x * cosine - y * sine : x * sine + y * cosine;
    }
};

#endif
