// MLX's affine quantisation: w = scale * code + bias, one scale and bias per group of 32, 64 or 128 inputs.
//
// The codes of a row are one little-endian bit stream of 2, 3, 4, 5, 6 or 8 bits each. Kernels take 16 codes of one
// group at a time; these fill one half word for each bit of a code.
#ifndef KVANT_CUDA_DEVICE_AFFINE_H
#define KVANT_CUDA_DEVICE_AFFINE_H
#include "device/vectors.h"

// Words that hold 16 codes of 4, 6 or 8 bits.
inline constexpr uint words_of(uint bits) {
    return bits / 2;
}

// The words of codes 16 c .. 16 c + 15 of the row whose first word is `row`. `aligned`, a constant, says that rows
// begin at multiples of 16 bytes.
inline uint4 load_words(const uint *row, uint c, uint bits, bool aligned) {
    if (bits == 2 || bits == 3 || bits == 5) {
        const ushort *halves = reinterpret_cast<const ushort *>(row) + c * bits;
        const uint low = halves[0] | uint(halves[1]) << 16;
        const uint middle = bits > 2 ? halves[2] | (bits > 3 ? uint(halves[3]) << 16 : 0) : 0;
        return make_uint4(low, middle, bits > 3 ? halves[4] : 0, 0);
    }
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

// A code of few bits as a float. Conversions are slow, so the code becomes the low bits of the float 2^23, and 2^23 is
// subtracted.
inline float from_bits(uint bits) {
    return __uint_as_float(bits | 0x4B000000) - 8388608.0f;
}

// The bytes of a word.
inline float4 bytes_of(uint w) {
    return make_float4(from_bits(w & 255), from_bits(w >> 8 & 255), from_bits(w >> 16 & 255), from_bits(w >> 24));
}

// Codes 4 i .. 4 i + 3 of the 16. The j-th is in units of 1 / part(field_units(bits), j). i is known when the loop
// around the call is unrolled. Codes of 4 bits are not shifted within their 16 bits.
inline float4 fields_of(uint4 words, uint i, uint bits) {
    if (bits == 4) {
        const uint w = (i < 2 ? words.x : words.y) >> (i % 2 * 16);
        return make_float4(from_bits(w & 0xF), from_bits(w & 0xF0), from_bits(w & 0xF00), from_bits(w & 0xF000));
    }
    if (bits == 2 || bits == 3 || bits == 5) {
        // At most 20 bits, from bit 4 bits i on.
        const uint bit = i * 4 * bits;
        const uint first = bit < 32 ? words.x : words.y, second = bit < 32 ? words.y : words.z;
        const uint w = bit % 32 == 0 ? first : first >> bit % 32 | second << (32 - bit % 32);
        const uint mask = (1u << bits) - 1;
        return make_float4(from_bits(w & mask), from_bits(w >> bits & mask), from_bits(w >> 2 * bits & mask),
                           from_bits(w >> 3 * bits & mask));
    }
    if (bits == 6) {
        // 24 bits, from bit 24 i on.
        const uint w = i == 0 ? words.x : i == 1 ? words.x >> 24 | words.y << 8 : i == 2 ? words.y >> 16 | words.z << 16
                                                                                         : words.z >> 8;
        return make_float4(from_bits(w & 63), from_bits(w >> 6 & 63), from_bits(w >> 12 & 63), from_bits(w >> 18 & 63));
    }
    return bytes_of(i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w);
}

inline float4 field_units(uint bits) {
    return bits == 4 ? make_float4(1, 1 / 16.0f, 1 / 256.0f, 1 / 4096.0f) : all4(1);
}

// As fields_of, with all results in units of 1: the codes.
inline float4 codes_of(uint4 words, uint i, uint bits) {
    return field_units(bits) * fields_of(words, i, bits);
}

#endif
