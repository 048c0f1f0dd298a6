// MLX's affine quantisation: w = scale * code + bias, one scale and bias per group of 32, 64 or 128 inputs.
//
// The codes of a row are one little-endian bit stream of 2, 3, 4, 5, 6 or 8 bits each. They are loaded 16 at a time,
// all of one group. 16 codes fill one half word for each bit of a code.
#ifndef KVANT_AFFINE_H
#define KVANT_AFFINE_H
#include "elements.h"

// Loads codes 16 c .. 16 c + 15, of 4 bits, of the row whose first word is `row`. Codes are masked, not shifted: code i
// of a half word is returned as 16^i * code.
inline void load_placed_codes(device const uint *row, uint c, bool aligned, thread float4 *q) {
    device const ushort *at = reinterpret_cast<device const ushort *>(row) + c * 4;
    ushort4 words = {at[0], at[1], at[2], at[3]};
    if (aligned) {
        words = *reinterpret_cast<device const ushort4 *>(at);
    }
    for (uint i = 0; i < 4; i++) {
        q[i] = float4(uint4(words[i]) & uint4(0xF, 0xF0, 0xF00, 0xF000));
    }
}

// Loads codes 16 c .. 16 c + 15 of the row whose first word is `row`. `aligned` is a function constant: rows begin at
// multiples of 16 bytes.
inline void load_codes(device const uint *row, uint c, uint bits, bool aligned, thread float4 *q) {
    if (bits == 4) {
        device const uint *at = row + c * 2;
        uint2 words = {at[0], at[1]};
        if (aligned) {
            words = *reinterpret_cast<device const uint2 *>(at);
        }
        for (uint i = 0; i < 4; i++) {
            const uint w = words[i / 2] >> (i % 2 * 16);
            q[i] = float4(uint4(w, w >> 4, w >> 8, w >> 12) & 15);
        }
    } else if (bits == 6) {
        device const uint *at = row + c * 3;
        const uint words[4] = {at[0], at[1], at[2], 0};
        for (uint i = 0; i < 4; i++) {
            // Four codes are 24 bits, from bit 24 i on.
            const uint bit = i * 24;
            const ulong two = ulong(words[bit / 32]) | ulong(words[bit / 32 + 1]) << 32;
            const uint w = uint(two >> (bit % 32));
            q[i] = float4(uint4(w, w >> 6, w >> 12, w >> 18) & 63);
        }
    } else if (bits == 8) {
        device const uint *at = row + c * 4;
        uint4 words = {at[0], at[1], at[2], at[3]};
        if (aligned) {
            words = *reinterpret_cast<device const uint4 *>(at);
        }
        for (uint i = 0; i < 4; i++) {
            const uint w = words[i];
            q[i] = float4(uint4(w, w >> 8, w >> 16, w >> 24) & 255);
        }
    } else {
        // 2, 3 or 5 bits.
        device const ushort *at = reinterpret_cast<device const ushort *>(row) + c * bits;
        for (uint i = 0; i < 4; i++) {
            // Four codes: at most 20 bits, from bit 4 * bits * i on.
            const uint bit = i * 4 * bits, half_word = bit / 16;
            const uint next = half_word + 1 < bits ? at[half_word + 1] : 0u;
            const uint w = (at[half_word] | next << 16) >> (bit % 16);
            q[i] = float4(uint4(w, w >> bits, w >> (2 * bits), w >> (3 * bits)) & ((1u << bits) - 1));
        }
    }
}

#endif
