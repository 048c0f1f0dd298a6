// Codes of linear_gemm_affine_wgmma.cu as left sides of products, and their scales and biases.
#ifndef KVANT_CUDA_LINEAR_BATCH_CODES_H
#define KVANT_CUDA_LINEAR_BATCH_CODES_H
#include "linear/gemm_affine_wgmma/layout.h"

// Offset of codes: a code becomes the low seven bits of the bf16 number 128, and so adds its value to it. Codes of 8
// bits are counted from their middle.
constexpr bool EXACT = OUT_DTYPE == F32 && BITS != 8;
constexpr float OFFSET = BITS == 8 ? -128 : EXACT ? 0 : 128;
constexpr uint MINUS_OFFSET = BITS == 8 ? 0x43004300 : 0xC300C300;

// (word & mask) | 128 in both halves, in one instruction.
inline uint masked(uint word, uint mask) {
    uint out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(mask), "r"(0x43004300));
    return out;
}

// Pair i of a lane's 16 codes.
inline uint pair_of(const uint (&w)[4], uint i) {
    if (BITS == 4) {
        return masked(w[i / 4] >> i % 4 * 4, 0x000F000F);
    }
    if (BITS == 6) {
        // 24 bits, from bit 24 (i / 2) on. The pair has bits 0 and 12, or 6 and 18.
        const uint quad = i / 2;
        const uint four = quad == 0 ? w[0] : quad == 1 ? __funnelshift_r(w[0], w[1], 24) : quad == 2 ? __funnelshift_r(w[1], w[2], 16)
                                                                                                  : w[2] >> 8;
        const uint two = four >> i % 2 * 6;
        return masked(two << 4, 0x3F0000) | two & 0x3F;
    }
    const uint two = w[i / 2] >> i % 2 * 16;
    // The float 2^23 plus the code, less 2^23 and the middle of the codes: 8 bits, which fit into the upper half of the
    // float.
    constexpr float OFF = 8388608 + 128;
    const float low = __uint_as_float(two & 255 | 0x4B000000) - OFF, high = __uint_as_float(two >> 8 & 255 | 0x4B000000) - OFF;
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

// The place of unit `unit` of 16 bytes of a row of codes.
inline uint swizzled(uint row, uint unit) {
    return BITS == 4 ? unit ^ (DEPTH % 4 == 0 ? row & 3 : row >> 1 & 1) << 1 : unit;
}

// A lane's 16 codes of each of its two outputs.
inline void load_codes(uint (&w)[2][4], const uchar *codes) {
#pragma unroll
    for (uint r = 0; r < 2; r++) {
        const uchar *from = codes + r * 8 * PITCH;
        if (BITS == 4) {
            const uint2 two = *reinterpret_cast<const uint2 *>(from);
            w[r][0] = two.x;
            w[r][1] = two.y;
        } else if (BITS == 6) {
#pragma unroll
            for (uint i = 0; i < 3; i++) {
                w[r][i] = reinterpret_cast<const uint *>(from)[i];
            }
        } else {
            const uint4 four = *reinterpret_cast<const uint4 *>(from);
            w[r][0] = four.x;
            w[r][1] = four.y;
            w[r][2] = four.z;
            w[r][3] = four.w;
        }
    }
}

// Scales and biases of a lane's two outputs for one group. FOLDED: as bf16, twice each.
struct Factors {
    uint scale[2];
    uint bias[2];
};

// Codes as bf16, exactly.
inline uint codes_of(uint pair) {
    uint codes;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(codes) : "r"(pair), "r"(0x3F803F80), "r"(MINUS_OFFSET));
    return codes;
}

// scale * code + bias, rounded once.
inline uint weights_of(uint pair, uint scale, uint bias) {
    uint out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(codes_of(pair)), "r"(scale), "r"(bias));
    return out;
}

// The left sides of N products of a block, from product `first` on: rows g and g + 8 of the warp's outputs.
template <uint N>
inline void operands(uint (&a)[N][4], const uint (&w)[2][4], uint first, const Factors &factors) {
#pragma unroll
    for (uint i = 0; i < N; i++) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const uint pair = pair_of(w[j % 2], 2 * (first + i) + j / 2);
            a[i][j] = FOLDED ? weights_of(pair, factors.scale[j % 2], factors.bias[j % 2]) : EXACT ? codes_of(pair) : pair;
        }
    }
}

// The scales (or biases) of an output for a chunk. `odd`: they begin in the middle of a word.
inline void load_factors(uint (&to)[FACTORS], const uchar *from, bool odd) {
    ushort halves[FACTORS];
    if constexpr (FACTORS_ALIGNED && FACTORS % 2 == 0) {
#pragma unroll
        for (uint i = 0; i < FACTORS; i += 2) {
            // The compiler joins neighbouring words.
            const uint two = reinterpret_cast<const uint *>(from)[i / 2];
            halves[i] = ushort(two);
            halves[i + 1] = ushort(two >> 16);
        }
    } else {
#pragma unroll
        for (uint i = 0; i < FACTORS; i++) {
            halves[i] = reinterpret_cast<const ushort *>(from)[i + odd];
        }
    }
#pragma unroll
    for (uint i = 0; i < FACTORS; i++) {
        to[i] = FOLDED ? halves[i] * 0x10001u : W_DTYPE == F16 ? __float_as_uint(half_to_float(halves[i])) : uint(halves[i]) << 16;
    }
}

#endif
