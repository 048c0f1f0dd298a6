// MLX's affine quantisation: w = scale * code + bias, one scale and bias per group of 32, 64 or 128 inputs.
//
// The codes of a row are one little-endian bit stream of 4, 6 or 8 bits each. They are taken 16 at a time: 2, 3 or 4 words,
// all of one group.
#ifndef KVANT_AFFINE_H
#define KVANT_AFFINE_H
#include "vectors.h"

// Words that hold 16 codes.
inline constexpr uint words_of(uint bits) {
    return bits / 2;
}

// The words of codes 16 c .. 16 c + 15 of the row whose first word is `row`. `aligned`, a constant, says that rows begin
// at multiples of 16 bytes.
inline uint4 load_words(const uint *row, uint c, uint bits, bool aligned) {
    const uint *at = row + c * words_of(bits);
    if (bits == 4) {
        const uint2 two = aligned ? *reinterpret_cast<const uint2 *>(at) : make_uint2(at[0], at[1]);
        return make_uint4(two.x, two.y, 0, 0);
    }
    if (bits == 6) {
        return make_uint4(at[0], at[1], at[2], 0);
    }
    return aligned ? *reinterpret_cast<const uint4 *>(at) : make_uint4(at[0], at[1], at[2], at[3]);
}

// Codes 4 i .. 4 i + 3 of those 16; i is known when the loop around it is unrolled.
inline float4 codes_of(uint4 words, uint i, uint bits) {
    if (bits == 4) {
        const uint w = (i < 2 ? words.x : words.y) >> (i % 2 * 16);
        return make_float4(w & 15, w >> 4 & 15, w >> 8 & 15, w >> 12 & 15);
    }
    if (bits == 6) {
        // 24 bits, from bit 24 i on.
        const uint w = i == 0 ? words.x : i == 1 ? words.x >> 24 | words.y << 8 : i == 2 ? words.y >> 16 | words.z << 16
                                                                                         : words.z >> 8;
        return make_float4(w & 63, w >> 6 & 63, w >> 12 & 63, w >> 18 & 63);
    }
    const uint w = i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
    return make_float4(w & 255, w >> 8 & 255, w >> 16 & 255, w >> 24);
}

#endif
