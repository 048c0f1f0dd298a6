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

// The word at any address. `alignment` is a constant, the alignment of blocks in bytes. If it is 2 or 4, it also
// divides the word's offset in a block.
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

// Twice the numbers of four E2M1 codes, plus 12, computed without a table. Twice the numbers is 0, 1, 2, 3, 4, 6, 8, 12
// with a sign.
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
    // The bits, moved into the longer exponent field of f32, are too small by a factor of 2^120, also for subnormal
    // numbers.
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

// A chunk of 16 inputs of a block: chunk g of the block. `alignment` is that of the blocks. The functions below write
// the 16 codes, four a word, the first in its lowest byte, and the scale and the bias of the chunk.
struct BlockChunk {
    const uchar *block;
    uint alignment, g;
    // For K-quants: the half of a plane of 32 bytes that has the chunk, and the shift of its two bits among the bits of
    // four planes.
    uint half_plane, two_bits;

    uint word(uint at) const {
        return word_at(block + at, alignment);
    }
};

inline void load_q2_k(const BlockChunk &c, uint (&words)[4], float &scale, float &bias) {
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        words[j] = c.word(16 + c.g / 8 * 32 + c.half_plane + j * 4) >> c.two_bits & 0x03030303;
    }
    scale = half_at(c.block + 80) * float(c.block[c.g] & 15);
    bias = -half_at(c.block + 82) * float(c.block[c.g] >> 4);
}

inline void load_q3_k(const BlockChunk &c, uint (&words)[4], float &scale) {
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        const uint high = c.word(c.half_plane + j * 4) >> (c.g / 2) & 0x01010101;
        words[j] = (c.word(32 + c.g / 8 * 32 + c.half_plane + j * 4) >> c.two_bits & 0x03030303) | high << 2;
    }
    const uint low = c.block[96 + c.g % 8] >> (c.g / 8 * 4) & 15, top = c.block[104 + c.g % 4] >> (c.g / 4 * 2) & 3;
    scale = half_at(c.block + 108) * (float(low | top << 4) - 32.0f);
}

// Q4_K and Q5_K.
inline void load_q45_k(const BlockChunk &c, uint format, uint (&words)[4], float &scale, float &bias) {
    const uint u = c.g / 2, codes = format == Q4_K ? 16 : 48;
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        words[j] = c.word(codes + u / 2 * 32 + c.half_plane + j * 4) >> (u % 2 * 4) & 0x0F0F0F0F;
        if (format == Q5_K) {
            words[j] |= (c.word(16 + c.half_plane + j * 4) >> u & 0x01010101) << 4;
        }
    }
    const uchar *packed = c.block + 4;
    const uint s = u < 4 ? packed[u] & 63 : (packed[u + 4] & 15) | packed[u - 4] >> 6 << 4;
    const uint m = u < 4 ? packed[u + 4] & 63 : packed[u + 4] >> 4 | packed[u] >> 6 << 4;
    scale = half_at(c.block) * float(s);
    bias = -half_at(c.block + 2) * float(m);
}

inline void load_q6_k(const BlockChunk &c, uint (&words)[4], float &scale) {
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        const uint low = c.word(c.g / 8 * 64 + c.g % 4 * 16 + j * 4) >> (c.g % 8 / 4 * 4);
        const uint high = c.word(128 + c.g / 8 * 32 + c.half_plane + j * 4) >> c.two_bits;
        words[j] = (low & 0x0F0F0F0F) | (high & 0x03030303) << 4;
    }
    scale = half_at(c.block + 208) * float((signed char)(c.block[192 + c.g]));
}

inline void load_iq4_xs(const BlockChunk &c, uint (&words)[4], float &scale) {
    const uint u = c.g / 2;
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        words[j] = values_of(c.word(8 + u * 16 + j * 4) >> (c.g % 2 * 4) & 0x0F0F0F0F);
    }
    const uint high = (c.block[2] | uint(c.block[3]) << 8) >> (u * 2) & 3;
    scale = half_at(c.block) * (float((c.block[4 + u / 2] >> (u % 2 * 4) & 15) | high << 4) - 32.0f);
}

// Codes of MXFP4 or NVFP4 whose scales are separate.
inline void load_fp4(const BlockChunk &c, uint (&words)[4]) {
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        const uchar *two = c.block + c.g * 8 + j * 2;
        const uint codes = two[0] | uint(two[1]) << 8;
        words[j] = numbers_of((codes & 0xF) | (codes & 0xF0) << 4 | (codes & 0xF00) << 8 | (codes & 0xF000) << 12);
    }
}

// Blocks of 32 inputs: the chunk is the low or the high nibbles of the last 16 bytes of the block.
inline void load_block_of_32(const BlockChunk &c, uint format, uint (&words)[4], float &scale, float &bias) {
    const uint start = block_bytes(format) - 16;
    uint high = 0;
    if (format == Q5_0 || format == Q5_1) {
        high = c.word(start - 4) >> (c.g * 16);
    }
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        const uint codes = c.word(start + j * 4) >> (c.g * 4) & 0x0F0F0F0F;
        words[j] = format == IQ4_NL  ? values_of(codes)
                   : format == MXFP4 ? numbers_of(codes)
                                     : codes | spread(high >> (j * 4)) << 4;
    }
    scale = format == MXFP4 ? half_power(c.block[0]) : half_at(c.block);
    if (format == Q5_1) {
        bias = half_at(c.block + 2);
    }
}

// Inputs 16 c .. 16 c + 15 of row `row` of a matrix of rows of `inputs`: w = scale * numbers_of_codes(code) + bias.
// Four codes a word, the first in its lowest byte. `scales` is read if they are separate.
inline void load_block_codes(const uchar *data, const uchar *scales, uint format, uint alignment, ulong row, uint c,
                             uint inputs, uint (&words)[4], float &scale, float &bias) {
    const uint chunks = block_inputs(format) / 16;
    const uint g = c % chunks;
    const uchar *block = data + (row * (inputs / block_inputs(format)) + c / chunks) * block_bytes(format);
    const BlockChunk chunk = {block, alignment, g, g % 2 * 16, g % 8 / 2 * 2};
    bias = 0;
    if (format == Q2_K) {
        load_q2_k(chunk, words, scale, bias);
    } else if (format == Q3_K) {
        load_q3_k(chunk, words, scale);
    } else if (format == Q4_K || format == Q5_K) {
        load_q45_k(chunk, format, words, scale, bias);
    } else if (format == Q6_K) {
        load_q6_k(chunk, words, scale);
    } else if (format == IQ4_XS) {
        load_iq4_xs(chunk, words, scale);
    } else if (format == MXFP8) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            words[j] = chunk.word(chunk.g * 16 + j * 4);
        }
        scale = power(scales[row * (inputs / 32) + c / 2]);
    } else if (format == MXFP4_SEPARATE || format == NVFP4) {
        load_fp4(chunk, words);
        scale = format == NVFP4 ? 0.5f * e4m3(scales[row * (inputs / 16) + c])
                                : half_power(scales[row * (inputs / 32) + c / 2]);
    } else {
        load_block_of_32(chunk, format, words, scale, bias);
    }
}

#endif
