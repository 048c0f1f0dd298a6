// Weights in the block formats of GGUF files and in floats with separate scales: reference/blocks.rs defines them.
//
// Every format is affine in groups of 16 or 32 inputs. Codes are taken 16 of one group at a time, as unsigned bytes.
// Codes of IQ4, MXFP4 and NVFP4 are replaced by their values minus the lowest value. Codes of MXFP8 are floats of 8
// bits; numbers_of_codes widens them.
#ifndef KVANT_CUDA_DEVICE_BLOCKS_H
#define KVANT_CUDA_DEVICE_BLOCKS_H
#include "device/affine.h"
#include "device/vectors.h"

// Numbers of formats: gpu/affine.rs has the same.
constexpr uint Q5_0 = 1;
constexpr uint Q5_1 = 2;
constexpr uint IQ4_NL = 3;
constexpr uint MXFP4 = 4;
constexpr uint Q2_K = 5;
constexpr uint Q3_K = 6;
constexpr uint Q4_K = 7;
constexpr uint Q5_K = 8;
constexpr uint Q6_K = 9;
constexpr uint IQ4_XS = 10;
constexpr uint MXFP4_SEPARATE = 11;
constexpr uint MXFP8 = 12;
constexpr uint NVFP4 = 13;

// Whether scales are in a buffer of their own.
inline constexpr bool has_separate_scales(uint format) {
    return format >= MXFP4_SEPARATE && format <= NVFP4;
}

// Inputs and bytes of a block.
inline constexpr uint block_inputs(uint format) {
    return format >= Q2_K && format <= IQ4_XS ? 256 : 32;
}

inline constexpr uint block_bytes(uint format) {
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
inline constexpr float code_of_zero(uint format) {
    return format == Q5_0                                                      ? 16
           : format == Q3_K                                                    ? 4
           : format == Q6_K                                                    ? 32
           : format == IQ4_NL || format == IQ4_XS                              ? 128
           : format == MXFP4 || format == MXFP4_SEPARATE || format == NVFP4 ? 12
                                                                               : 0;
}

// The word at any address. `alignment`, a constant, is that of blocks in bytes. The distance of words from it is even,
// or a multiple of four.
inline uint word_at(const uchar *at, uint alignment) {
    if (alignment == 4) {
        return *reinterpret_cast<const uint *>(at);
    }
    if (alignment == 2) {
        const ushort *halves = reinterpret_cast<const ushort *>(at);
        return halves[0] | uint(halves[1]) << 16;
    }
    return at[0] | uint(at[1]) << 8 | uint(at[2]) << 16 | uint(at[3]) << 24;
}

inline float half_at(const uchar *at) {
    return half_to_float(ushort(at[0] | uint(at[1]) << 8));
}

// Twice the numbers of four E2M1 codes, plus 12, without a table: 0, 1, 2, 3, 4, 6, 8, 12 and a sign.
inline uint numbers_of(uint codes) {
    uint numbers = 0;
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        const uint code = codes >> (i * 8) & 15, m = code & 7;
        const uint doubled = m < 4 ? m : (2 + (m & 1)) << (m / 2 - 1);
        numbers |= (code < 8 ? 12 + doubled : 12 - doubled) << (i * 8);
    }
    return numbers;
}

// The values of four codes of IQ4_NL, plus 128.
inline uint values_of(uint codes) {
    constexpr uint VALUES[4] = {0x3F2D1801, 0x766A5D4F, 0xA6998D81, 0xF1D9C5B5};
    uint values = 0;
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        const uint code = codes >> (i * 8) & 15;
        values |= (VALUES[code / 4] >> (code % 4 * 8) & 255) << (i * 8);
    }
    return values;
}

// 2^(e - 128), the scale of numbers that are doubled; 0 if it is subnormal.
inline float half_power(uint e) {
    return __uint_as_float((max(e, 1u) - 1) << 23);
}

// 2^(e - 127); 0 if it is subnormal.
inline float power(uint e) {
    return __uint_as_float(e << 23);
}

// An E4M3 number: a sign, 4 bits of exponent with bias 7, 3 of mantissa. 0x7F and 0xFF are NaN.
inline float e4m3(uint code) {
    const uint m = code & 0x7F;
    // With its exponent in the longer field of f32, it is too small by 2^120, subnormal numbers included.
    const float magnitude = __uint_as_float(m << 20) * 1.329227995784916e36f;
    return __uint_as_float((m == 0x7F ? 0x7FC00000 : __float_as_uint(magnitude)) | (code & 0x80) << 24);
}

// Bits 0 .. 3 as the lowest bits of four bytes.
inline uint spread(uint bits) {
    return (bits & 15) * 0x00204081u & 0x01010101u;
}

// The numbers of four codes, in the bytes of a word.
inline float4 numbers_of_codes(uint codes, uint format) {
    if (format == MXFP8) {
        return make_float4(e4m3(codes & 255), e4m3(codes >> 8 & 255), e4m3(codes >> 16 & 255), e4m3(codes >> 24));
    }
    return bytes_of(codes) + all4(-code_of_zero(format));
}

// Inputs 16 c .. 16 c + 15 of row `row` of a matrix of rows of `inputs`: w = scale * numbers_of_codes(code) + bias.
// Four codes a word, the first in its lowest byte. `scales` is read if they are separate.
inline void load_block_codes(const uchar *data, const uchar *scales, uint format, uint alignment, ulong row, uint c,
                             uint inputs, uint (&words)[4], float &scale, float &bias) {
    const uint chunks = block_inputs(format) / 16;
    const uint g = c % chunks;
    const uchar *block =
        data + (row * (inputs / block_inputs(format)) + c / chunks) * block_bytes(format);
    // Of K-quants: the bytes of this group in a plane of 32, and the shift of its two bits among those of four planes.
    const uint half_plane = g % 2 * 16, two_bits = g % 8 / 2 * 2;
    bias = 0;
    if (format == Q2_K) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            words[j] = word_at(block + 16 + g / 8 * 32 + half_plane + j * 4, alignment) >> two_bits & 0x03030303;
        }
        scale = half_at(block + 80) * float(block[g] & 15);
        bias = -half_at(block + 82) * float(block[g] >> 4);
    } else if (format == Q3_K) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const uint high = word_at(block + half_plane + j * 4, alignment) >> (g / 2) & 0x01010101;
            words[j] = (word_at(block + 32 + g / 8 * 32 + half_plane + j * 4, alignment) >> two_bits & 0x03030303) | high << 2;
        }
        const uint low = block[96 + g % 8] >> (g / 8 * 4) & 15, top = block[104 + g % 4] >> (g / 4 * 2) & 3;
        scale = half_at(block + 108) * (float(low | top << 4) - 32.0f);
    } else if (format == Q4_K || format == Q5_K) {
        const uint u = g / 2, codes = format == Q4_K ? 16 : 48;
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            words[j] = word_at(block + codes + u / 2 * 32 + half_plane + j * 4, alignment) >> (u % 2 * 4) & 0x0F0F0F0F;
            if (format == Q5_K) {
                words[j] |= (word_at(block + 16 + half_plane + j * 4, alignment) >> u & 0x01010101) << 4;
            }
        }
        const uchar *packed = block + 4;
        const uint s = u < 4 ? packed[u] & 63 : (packed[u + 4] & 15) | packed[u - 4] >> 6 << 4;
        const uint m = u < 4 ? packed[u + 4] & 63 : packed[u + 4] >> 4 | packed[u] >> 6 << 4;
        scale = half_at(block) * float(s);
        bias = -half_at(block + 2) * float(m);
    } else if (format == Q6_K) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const uint low = word_at(block + g / 8 * 64 + g % 4 * 16 + j * 4, alignment) >> (g % 8 / 4 * 4);
            const uint high = word_at(block + 128 + g / 8 * 32 + half_plane + j * 4, alignment) >> two_bits;
            words[j] = (low & 0x0F0F0F0F) | (high & 0x03030303) << 4;
        }
        scale = half_at(block + 208) * float((signed char)(block[192 + g]));
    } else if (format == IQ4_XS) {
        const uint u = g / 2;
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            words[j] = values_of(word_at(block + 8 + u * 16 + j * 4, alignment) >> (g % 2 * 4) & 0x0F0F0F0F);
        }
        const uint high = (block[2] | uint(block[3]) << 8) >> (u * 2) & 3;
        scale = half_at(block) * (float((block[4 + u / 2] >> (u % 2 * 4) & 15) | high << 4) - 32.0f);
    } else if (format == MXFP8) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            words[j] = word_at(block + g * 16 + j * 4, alignment);
        }
        scale = power(scales[row * (inputs / 32) + c / 2]);
    } else if (format == MXFP4_SEPARATE || format == NVFP4) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const uchar *two = block + g * 8 + j * 2;
            const uint codes = two[0] | uint(two[1]) << 8;
            words[j] = numbers_of((codes & 0xF) | (codes & 0xF0) << 4 | (codes & 0xF00) << 8 | (codes & 0xF000) << 12);
        }
        scale = format == NVFP4 ? 0.5f * e4m3(scales[row * (inputs / 16) + c])
                                : half_power(scales[row * (inputs / 32) + c / 2]);
    } else {
        // Blocks of 32: the chunk is the low or the high halves of 16 bytes, at the end of the block.
        const uint start = block_bytes(format) - 16;
        uint high = 0;
        if (format == Q5_0 || format == Q5_1) {
            high = word_at(block + start - 4, alignment) >> (g * 16);
        }
#pragma unroll
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
