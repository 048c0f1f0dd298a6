// Weights in the block formats of GGUF files and in floats with separate scales: reference/blocks.rs defines them.
//
// Every format is affine in groups of 16 or 32 inputs. Codes are loaded 16 at a time, all of one group, as unsigned
// bytes. The codes of IQ4, MXFP4 and NVFP4 are replaced by the values that they represent, relative to the smallest
// one. Codes of MXFP8 are 8-bit floats; numbers_of_codes widens them.
#ifndef KVANT_BLOCKS_H
#define KVANT_BLOCKS_H
#include "elements.h"

// The numbers of formats, as in gpu/affine.rs.
constant constexpr uint Q5_0 = 1;
constant constexpr uint Q5_1 = 2;
constant constexpr uint IQ4_NL = 3;
constant constexpr uint MXFP4 = 4;
constant constexpr uint Q2_K = 5;
constant constexpr uint Q3_K = 6;
constant constexpr uint Q4_K = 7;
constant constexpr uint Q5_K = 8;
constant constexpr uint Q6_K = 9;
constant constexpr uint IQ4_XS = 10;
constant constexpr uint MXFP4_SEPARATE = 11;
constant constexpr uint MXFP8 = 12;
constant constexpr uint NVFP4 = 13;

// Whether scales are in a separate buffer.
inline bool has_separate_scales(uint format) {
    return format >= MXFP4_SEPARATE && format <= NVFP4;
}

// Inputs and bytes of a block.
inline uint block_inputs(uint format) {
    return format >= Q2_K && format <= IQ4_XS ? 256 : 32;
}

inline uint block_bytes(uint format) {
    return format == Q5_0     ? 22
           : format == Q5_1   ? 24
           : format == IQ4_NL ? 18
           : format == MXFP4  ? 17
           : format == Q2_K   ? 84
           : format == Q3_K   ? 110
           : format == Q4_K   ? 144
           : format == Q5_K   ? 176
           : format == Q6_K   ? 210
           : format == IQ4_XS ? 136
           : format == MXFP8  ? 32
                              : 16;
}

// The offset that is subtracted from a code.
inline float code_of_zero(uint format) {
    return format == Q5_0                                                      ? 16
           : format == Q3_K                                                    ? 4
           : format == Q6_K                                                    ? 32
           : format == IQ4_NL || format == IQ4_XS                              ? 128
           : format == MXFP4 || format == MXFP4_SEPARATE || format == NVFP4 ? 12
                                                                               : 0;
}

// The word at any address. `alignment`, a constant, is the alignment of blocks in bytes. Words are at even distances
// from a block's start, or at multiples of four.
inline uint word_at(device const uchar *at, uint alignment) {
    if (alignment == 4) {
        return *reinterpret_cast<device const uint *>(at);
    }
    if (alignment == 2) {
        device const ushort *halves = reinterpret_cast<device const ushort *>(at);
        return halves[0] | uint(halves[1]) << 16;
    }
    return at[0] | uint(at[1]) << 8 | uint(at[2]) << 16 | uint(at[3]) << 24;
}

inline float half_at(device const uchar *at) {
    return float(as_type<half>(ushort(at[0] | uint(at[1]) << 8)));
}

// Twice the values of four E2M1 codes, plus 12, computed without a table. Twice the values is 0, 1, 2, 3, 4, 6, 8, 12
// with a sign.
inline uint numbers_of(uint codes) {
    uint numbers = 0;
    for (uint i = 0; i < 4; i++) {
        const uint code = codes >> (i * 8) & 15, m = code & 7;
        const uint doubled = m < 4 ? m : (2 + (m & 1)) << (m / 2 - 1);
        numbers |= (code < 8 ? 12 + doubled : 12 - doubled) << (i * 8);
    }
    return numbers;
}

// The values of four codes of IQ4_NL, plus 128.
inline uint values_of(uint codes) {
    const uint VALUES[4] = {0x3F2D1801, 0x766A5D4F, 0xA6998D81, 0xF1D9C5B5};
    uint values = 0;
    for (uint i = 0; i < 4; i++) {
        const uint code = codes >> (i * 8) & 15;
        values |= (VALUES[code / 4] >> (code % 4 * 8) & 255) << (i * 8);
    }
    return values;
}

// 2^(e - 128), the scale of E2M1 values, which are doubled.
inline float half_power(uint e) {
    return as_type<float>(e < 2 ? 0x200000u << e : (e - 1) << 23);
}

// 2^(e - 127).
inline float power(uint e) {
    return as_type<float>(e == 0 ? 0x400000u : e << 23);
}

// An E4M3 number: a sign, 4 bits of exponent with bias 7, 3 of mantissa. 0x7F and 0xFF are NaN.
inline float e4m3(uint code) {
    const uint m = code & 0x7F;
    // The exponent is rebiased for f32. The first bit of a subnormal number's mantissa is not implied.
    const float magnitude = m < 8     ? float(m) * 0.001953125f
                            : m == 0x7F ? as_type<float>(0x7FC00000u)
                                        : as_type<float>((m << 20) + (120u << 23));
    return code & 0x80 ? -magnitude : magnitude;
}

// Spreads bits 0 .. 3 to the lowest bits of four bytes.
inline uint spread(uint bits) {
    return (bits & 15) * 0x00204081u & 0x01010101u;
}

// The numbers of four codes, in the bytes of a word.
inline float4 numbers_of_codes(uint codes, uint format) {
    if (format == MXFP8) {
        return float4(e4m3(codes & 255), e4m3(codes >> 8 & 255), e4m3(codes >> 16 & 255), e4m3(codes >> 24));
    }
    return float4(uint4(codes, codes >> 8, codes >> 16, codes >> 24) & 255) - code_of_zero(format);
}

// Inputs 16 c .. 16 c + 15 of row `row` of a matrix of rows of `inputs`: w = scale * numbers_of_codes(code) + bias. A
// word has four codes, the first in its lowest byte. `scales` is read if scales are separate.
inline void load_block_codes(device const uchar *data, device const uchar *scales, uint format, uint alignment, ulong row, uint c,
                             uint inputs, thread uint (&words)[4], thread float &scale, thread float &bias) {
    const uint chunks = block_inputs(format) / 16;
    const uint g = c % chunks;
    device const uchar *block =
        data + (row * (inputs / block_inputs(format)) + c / chunks) * block_bytes(format);
    // For K-quants: the half of a plane of 32 bytes that has this group, and the shift of its two bits among the bits
    // of four planes.
    const uint half_plane = g % 2 * 16, two_bits = g % 8 / 2 * 2;
    bias = 0;
    if (format == Q2_K) {
        for (uint j = 0; j < 4; j++) {
            words[j] = word_at(block + 16 + g / 8 * 32 + half_plane + j * 4, alignment) >> two_bits & 0x03030303;
        }
        scale = half_at(block + 80) * float(block[g] & 15);
        bias = -half_at(block + 82) * float(block[g] >> 4);
    } else if (format == Q3_K) {
        for (uint j = 0; j < 4; j++) {
            const uint high = word_at(block + half_plane + j * 4, alignment) >> (g / 2) & 0x01010101;
            words[j] = (word_at(block + 32 + g / 8 * 32 + half_plane + j * 4, alignment) >> two_bits & 0x03030303) | high << 2;
        }
        const uint low = block[96 + g % 8] >> (g / 8 * 4) & 15, top = block[104 + g % 4] >> (g / 4 * 2) & 3;
        scale = half_at(block + 108) * (float(low | top << 4) - 32.0f);
    } else if (format == Q4_K || format == Q5_K) {
        const uint u = g / 2, codes = format == Q4_K ? 16 : 48;
        for (uint j = 0; j < 4; j++) {
            words[j] = word_at(block + codes + u / 2 * 32 + half_plane + j * 4, alignment) >> (u % 2 * 4) & 0x0F0F0F0F;
            if (format == Q5_K) {
                words[j] |= (word_at(block + 16 + half_plane + j * 4, alignment) >> u & 0x01010101) << 4;
            }
        }
        device const uchar *packed = block + 4;
        const uint s = u < 4 ? packed[u] & 63 : (packed[u + 4] & 15) | packed[u - 4] >> 6 << 4;
        const uint m = u < 4 ? packed[u + 4] & 63 : packed[u + 4] >> 4 | packed[u] >> 6 << 4;
        scale = half_at(block) * float(s);
        bias = -half_at(block + 2) * float(m);
    } else if (format == Q6_K) {
        for (uint j = 0; j < 4; j++) {
            const uint low = word_at(block + g / 8 * 64 + g % 4 * 16 + j * 4, alignment) >> (g % 8 / 4 * 4);
            const uint high = word_at(block + 128 + g / 8 * 32 + half_plane + j * 4, alignment) >> two_bits;
            words[j] = (low & 0x0F0F0F0F) | (high & 0x03030303) << 4;
        }
        scale = half_at(block + 208) * float(char(block[192 + g]));
    } else if (format == IQ4_XS) {
        const uint u = g / 2;
        for (uint j = 0; j < 4; j++) {
            words[j] = values_of(word_at(block + 8 + u * 16 + j * 4, alignment) >> (g % 2 * 4) & 0x0F0F0F0F);
        }
        const uint high = (block[2] | uint(block[3]) << 8) >> (u * 2) & 3;
        scale = half_at(block) * (float((block[4 + u / 2] >> (u % 2 * 4) & 15) | high << 4) - 32.0f);
    } else if (format == MXFP8) {
        for (uint j = 0; j < 4; j++) {
            words[j] = word_at(block + g * 16 + j * 4, alignment);
        }
        scale = power(scales[row * (inputs / 32) + c / 2]);
    } else if (format == MXFP4_SEPARATE || format == NVFP4) {
        for (uint j = 0; j < 4; j++) {
            device const uchar *two = block + g * 8 + j * 2;
            const uint codes = two[0] | uint(two[1]) << 8;
            words[j] = numbers_of((codes & 0xF) | (codes & 0xF0) << 4 | (codes & 0xF00) << 8 | (codes & 0xF000) << 12);
        }
        scale = format == NVFP4 ? 0.5f * e4m3(scales[row * (inputs / 16) + c])
                                : half_power(scales[row * (inputs / 32) + c / 2]);
    } else {
        // Blocks of 32 inputs: the chunk is the low or the high nibbles of the last 16 bytes of the block.
        const uint start = block_bytes(format) - 16;
        uint high = 0;
        if (format == Q5_0 || format == Q5_1) {
            high = word_at(block + start - 4, alignment) >> (g * 16);
        }
        for (uint j = 0; j < 4; j++) {
            const uint codes = word_at(block + start + j * 4, alignment) >> (g * 4) & 0x0F0F0F0F;
            words[j] = format == IQ4_NL  ? values_of(codes)
                       : format == MXFP4 ? numbers_of(codes)
                                         : codes | spread(high >> (j * 4)) << 4;
        }
        scale = format == MXFP4 ? half_power(block[0]) : half_at(block);
        if (format == Q5_1) {
            bias = half_at(block + 2);
        }
    }
}

#endif
