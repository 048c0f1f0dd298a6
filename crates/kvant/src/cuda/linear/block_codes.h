// Weights as linear_skinny_blocks_mma reads them: the codes of a lane as pairs of bf16 or (HALF) f16 numbers, and their
// scales.
//
// A row is read in spans of 256 inputs, a span in units of 32. Lane t of four has inputs 4 t .. 4 t + 3 of either half
// of a unit. FORMAT is defined in device/blocks.h; affine codes have BITS (2, 3 or 5) bits and a scale for each GROUP
// inputs.
#ifndef KVANT_CUDA_LINEAR_BLOCK_CODES_H
#define KVANT_CUDA_LINEAR_BLOCK_CODES_H
#include "device/blocks.h"
#include "device/fragments.h"

constexpr bool AFFINE = BITS != 0;
constexpr uint SPAN = 256;
constexpr uint UNIT = 32;
constexpr uint UNITS = SPAN / UNIT;
// Bytes of a span's codes, which may include scales, and of its separate scales. Biases take as many bytes as scales.
constexpr uint CODE_BYTES = AFFINE ? UNIT * BITS : SPAN / block_inputs(FORMAT) * block_bytes(FORMAT);
constexpr uint SCALE_BYTES = AFFINE            ? SPAN / GROUP * size_of(W_DTYPE)
                             : FORMAT == NVFP4 ? SPAN / 16
                                               : SPAN / 32;
constexpr bool SEPARATE = AFFINE || has_separate_scales(FORMAT);
constexpr bool BIASED = AFFINE || FORMAT == Q5_1 || FORMAT == Q2_K || FORMAT == Q4_K || FORMAT == Q5_K;
// Whether each half of a unit has a scale.
constexpr bool HALVES = FORMAT == Q2_K || FORMAT == Q3_K || FORMAT == Q6_K || FORMAT == NVFP4;

// The bytes of a span in shared memory: pieces of 16 bytes, in which the first byte may be at any multiple of
// ALIGNMENT.
template <uint ALIGNMENT> struct Run {
    const uchar *slot;
    uint shift;

    uint byte(uint at) const { return slot[shift + at]; }

    // Alignment of `at`.
    template <uint OF> uint half(uint at) const {
        if constexpr (ALIGNMENT % 2 == 0 && OF % 2 == 0) {
            return *reinterpret_cast<const ushort *>(slot + shift + at);
        }
        return byte(at) | byte(at + 1) << 8;
    }
    template <uint OF> uint word(uint at) const {
        if constexpr (ALIGNMENT % 4 == 0 && OF % 4 == 0) {
            return *reinterpret_cast<const uint *>(slot + shift + at);
        }
        const uint *words = reinterpret_cast<const uint *>(slot) + (shift + at) / 4;
        return __funnelshift_r(words[0], words[1], (shift + at) % 4 * 8);
    }
    template <uint OF> float number(uint at) const { return half_to_float(ushort(half<OF>(at))); }
};

typedef Run<W_ALIGNMENT> Codes;
typedef Run<FACTOR_ALIGNMENT> Factors;

// scale * (byte i of a word - zero), rounded once. The byte becomes the low bits of the float 2^23, which adds its
// value. Products of 2^23 and f16 scales are exact.
inline float scaled_byte(float scale, uint word, uint i, float zero) {
    constexpr float OFF = 8388608;
    const float number = __uint_as_float(__byte_perm(word, 0x4B000000, 0x7540 | i));
    return zero == 0 ? fmaf(scale, number, scale * -OFF) : scale * (number - (OFF + zero));
}

// Numbers that the scales of a span share, and their bytes.
struct Header {
    float scale;
    float bias;
    uint scales[4];
    uint biases[4];
};

inline Header header_of(const Codes &codes) {
    constexpr uint LOW = 0x0F0F0F0F, SIX = 0x3F3F3F3F, TOP = 0x30303030;
    Header h = {};
    if (FORMAT == Q4_K || FORMAT == Q5_K) {
        h.scale = codes.number<4>(0), h.bias = -codes.number<2>(2);
        const uint a = codes.word<4>(4), b = codes.word<4>(8), c = codes.word<4>(12);
        h.scales[0] = a & SIX, h.scales[1] = (c & LOW) | (a >> 2 & TOP);
        h.biases[0] = b & SIX, h.biases[1] = (c >> 4 & LOW) | (b >> 2 & TOP);
    } else if (FORMAT == Q2_K) {
        h.scale = codes.number<4>(80), h.bias = -codes.number<2>(82);
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            const uint word = codes.word<4>(4 * i);
            h.scales[i] = word & LOW, h.biases[i] = word >> 4 & LOW;
        }
    } else if (FORMAT == Q3_K) {
        h.scale = codes.number<4>(108);
        const uint a = codes.word<4>(96), b = codes.word<4>(100), c = codes.word<4>(104);
        h.scales[0] = (a & LOW) | (c << 4 & TOP), h.scales[1] = (b & LOW) | (c << 2 & TOP);
        h.scales[2] = (a >> 4 & LOW) | (c & TOP), h.scales[3] = (b >> 4 & LOW) | (c >> 2 & TOP);
    } else if (FORMAT == Q6_K) {
        h.scale = codes.number<4>(208);
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            h.scales[i] = codes.word<4>(192 + 4 * i) ^ 0x80808080;
        }
    } else if (FORMAT == IQ4_XS) {
        h.scale = codes.number<4>(0);
        h.scales[0] = codes.word<4>(4), h.scales[1] = codes.half<2>(2);
    }
    return h;
}

// The scale and bias of unit u, or of its half.
inline float2 factors_of(const Header &h, const Codes &codes, const Factors &scales, const Factors &biases, uint u,
                         uint half) {
    if (AFFINE) {
        const uint at = u * UNIT / GROUP * size_of(W_DTYPE);
        if (W_DTYPE == F32) {
            return make_float2(__uint_as_float(scales.word<4>(at)), __uint_as_float(biases.word<4>(at)));
        }
        const ushort scale = scales.half<2>(at), bias = biases.half<2>(at);
        return W_DTYPE == F16 ? make_float2(half_to_float(scale), half_to_float(bias))
                              : make_float2(bf16_to_float(scale), bf16_to_float(bias));
    }
    const uint g = 2 * u + half;
    switch (FORMAT) {
    case Q5_0: return make_float2(codes.number<2>(22 * u), 0);
    case Q5_1: return make_float2(codes.number<4>(24 * u), codes.number<2>(24 * u + 2));
    case IQ4_NL: return make_float2(codes.number<2>(18 * u), 0);
    case MXFP4: return make_float2(half_power(codes.byte(17 * u)), 0);
    case Q4_K:
    case Q5_K:
        return make_float2(scaled_byte(h.scale, h.scales[u / 4], u % 4, 0),
                           scaled_byte(h.bias, h.biases[u / 4], u % 4, 0));
    case Q2_K:
        return make_float2(scaled_byte(h.scale, h.scales[g / 4], g % 4, 0),
                           scaled_byte(h.bias, h.biases[g / 4], g % 4, 0));
    case Q3_K: return make_float2(scaled_byte(h.scale, h.scales[g / 4], g % 4, 32), 0);
    case Q6_K: return make_float2(scaled_byte(h.scale, h.scales[g / 4], g % 4, 128), 0);
    case IQ4_XS:
        return make_float2(scaled_byte(h.scale, (h.scales[0] >> 4 * u & 15) | (h.scales[1] >> 2 * u & 3) << 4, 0, 32), 0);
    case MXFP8: return make_float2(power(scales.byte(u)), 0);
    case NVFP4: return make_float2(0.5f * e4m3(scales.byte(g)), 0);
    default: return make_float2(half_power(scales.byte(u)), 0);
    }
}

// Whether a code keeps its offset (MAGIC below) until its bias is applied. Only for formats with a bias, and only if
// the error is at most the rounding error of the result.
constexpr bool FOLD = BIASED && OUT_DTYPE != F32 && X_DTYPE != F16;

// Bytes as numbers: in the low bits of 128 (bf16, which has room for 7 bits) or of 1024 (f16), a byte adds its value.
template <bool HALF> constexpr uint MAGIC = HALF ? 0x64 : 0x43;

template <bool HALF> inline uint pair_of_bytes(uint bytes, uint selector, uint zero) {
    const uint pair = __byte_perm(bytes, MAGIC<HALF>, selector);
    return FOLD ? pair : minus<HALF>(pair, (MAGIC<HALF> << 8 | zero) * 0x10001);
}

constexpr bool IQ4 = FORMAT == IQ4_NL || FORMAT == IQ4_XS;

// Bytes of numbers that replace codes of 4 bits. WIDE: bytes of bf16 numbers, the higher bytes first, because IQ4 needs
// 8 bits.
template <bool HALF> struct Tables {
    static constexpr bool WIDE = IQ4 && !HALF;
    uint words[WIDE ? 8 : 4];
};

// `zero` is 0 at run time. If the compiler knew this, it would load the words again for every use.
template <bool HALF> inline Tables<HALF> tables(uint zero) {
    constexpr uint E2M1[4] = {0x0F0E0D0C, 0x18141210, 0x090A0B0C, 0x00040608};
    constexpr uint BYTES[4] = {0x3F2D1801, 0x766A5D4F, 0xA6998D81, 0xF1D9C5B5};
    constexpr uint HIGH[4] = {0xC2C2C2C2, 0xC1C1C2C2, 0x4241413F, 0x42424242};
    constexpr uint LOW[4] = {0x82A6D0FE, 0x20B00C44, 0x18C85080, 0xE2B28A54};
    Tables<HALF> t;
#pragma unroll
    for (uint i = 0; i < sizeof(t.words) / 4; i++) {
        t.words[i] = (Tables<HALF>::WIDE ? (i < 4 ? HIGH[i] : LOW[i - 4]) : IQ4 ? BYTES[i] : E2M1[i]) ^ zero;
    }
    return t;
}

// The bytes of a table of 16 entries at four codes of 4 bits. `low` has their three low bits; `high` has the highest
// bit, as 4 added to the byte's number 0, 1, 2 or 3.
inline uint look_up(uint low, uint high, const uint *words) {
    return __byte_perm(__byte_perm(words[0], words[1], low), __byte_perm(words[2], words[3], low), high);
}

// Eight codes of 4 bits, in the order of their bits, as four words of two numbers. INTERLEAVED: codes 0 and 2, 1 and 3
// of the low half, then of the high half; otherwise codes 0 and 1, 2 and 3.
template <bool HALF, bool INTERLEAVED>
inline void pairs_of_nibbles(uint nibbles, const Tables<HALF> &tables, uint (&pairs)[4]) {
    const uint low = nibbles & 0x77777777, high = (nibbles >> 1 & 0x44444444) | 0x32103210;
#pragma unroll
    for (uint i = 0; i < 2; i++) {
        const uint l = i == 0 ? low : low >> 16, h = i == 0 ? high : high >> 16;
        const uint bytes = look_up(l, h, tables.words);
        uint two[2];
        if constexpr (Tables<HALF>::WIDE) {
            const uint lower = look_up(l, h, tables.words + 4);
            two[0] = __byte_perm(lower, bytes, INTERLEAVED ? 0x6240 : 0x5140);
            two[1] = __byte_perm(lower, bytes, INTERLEAVED ? 0x7351 : 0x7362);
        } else {
            const uint zero = IQ4 ? 128 : 12;
            two[0] = pair_of_bytes<HALF>(bytes, INTERLEAVED ? 0x4240 : 0x4140, zero);
            two[1] = pair_of_bytes<HALF>(bytes, INTERLEAVED ? 0x4341 : 0x4342, zero);
        }
        pairs[INTERLEAVED ? i : 2 * i] = two[0];
        pairs[INTERLEAVED ? 2 + i : 2 * i + 1] = two[1];
    }
}

// Two E4M3 numbers, neighbours in a word; the first is byte `first`.
template <bool HALF> inline uint pair_of_floats(uint word, uint first) {
    // The bits, moved into a longer exponent field, are too small by one factor, also for subnormal numbers.
    const uint upper = __byte_perm(word, 0, first == 0 ? 0x1404 : 0x3424);
    const uint magnitude = HALF ? upper >> 1 & 0x3F803F80 : upper >> 4 & 0x07F007F0;
    return times<HALF>(magnitude | (upper & 0x80008000), HALF ? 0x5C005C00 : 0x7B807B80);
}

// Codes of BITS from bit `bit` of the unit on, as bytes.
inline uint stream_bytes(const Codes &codes, uint u, uint bit) {
    const uint at = u * 4 * BITS + bit / 32 * 4;
    const uint first = codes.word<4>(at);
    // The last word of a unit has no successor; it needs none.
    const uint second = bit % 32 + 4 * BITS > 32 ? codes.word<4>(at + 4) : 0;
    const uint four = __funnelshift_r(first, second, bit % 32);
    // First two codes in each half of a word, then one code in every byte.
    constexpr uint TWO = (1u << 2 * BITS) - 1, ONE = ((1u << BITS) - 1) * 0x10001;
    const uint twos = (four & TWO) | (four << (16 - 2 * BITS) & TWO << 16);
    return (twos & ONE) | (twos << (8 - BITS) & ONE << 8);
}

// The numbers of a lane in unit u: inputs 0, 1 and 2, 3 of the first half, and of the second.
template <bool HALF>
inline void pairs_of(const Codes &codes, const Tables<HALF> &tables, uint u, uint t, uint (&pairs)[4]) {
    if constexpr (FORMAT == IQ4_NL) {
        pairs_of_nibbles<HALF, true>(codes.word<2>(18 * u + 2 + 4 * t), tables, pairs);
    } else if constexpr (FORMAT == IQ4_XS) {
        pairs_of_nibbles<HALF, true>(codes.word<4>(16 * u + 8 + 4 * t), tables, pairs);
    } else if constexpr (FORMAT == MXFP4) {
        pairs_of_nibbles<HALF, true>(codes.word<1>(17 * u + 1 + 4 * t), tables, pairs);
    } else if constexpr (FORMAT == MXFP4_SEPARATE || FORMAT == NVFP4) {
        const uint nibbles = codes.half<2>(16 * u + 2 * t) | codes.half<2>(16 * u + 8 + 2 * t) << 16;
        pairs_of_nibbles<HALF, false>(nibbles, tables, pairs);
    } else if constexpr (FORMAT == MXFP8) {
#pragma unroll
        for (uint half = 0; half < 2; half++) {
            const uint word = codes.word<4>(32 * u + 16 * half + 4 * t);
            const bool has_nan = ((word & 0x7F7F7F7F) + 0x01010101 & 0x80808080) != 0;
            pairs[2 * half] = has_nan ? 0x7FFF7FFF : pair_of_floats<HALF>(word, 0);
            pairs[2 * half + 1] = has_nan ? 0x7FFF7FFF : pair_of_floats<HALF>(word, 2);
        }
    } else {
        uint bytes[2];
#pragma unroll
        for (uint half = 0; half < 2; half++) {
            const uint part = 16 * half + 4 * t;
            if constexpr (AFFINE) {
                bytes[half] = stream_bytes(codes, u, part * BITS);
            } else if constexpr (FORMAT == Q2_K) {
                bytes[half] = codes.word<4>(16 + u / 4 * 32 + part) >> u % 4 * 2 & 0x03030303;
            } else if constexpr (FORMAT == Q3_K) {
                const uint high = codes.word<4>(part);
                bytes[half] = (codes.word<4>(32 + u / 4 * 32 + part) >> u % 4 * 2 & 0x03030303) |
                              ((u < 2 ? high << (2 - u) : high >> (u - 2)) & 0x04040404);
            } else if constexpr (FORMAT == Q4_K) {
                bytes[half] = codes.word<4>(16 + u / 2 * 32 + part) >> u % 2 * 4 & 0x0F0F0F0F;
            } else if constexpr (FORMAT == Q5_K) {
                const uint high = codes.word<4>(16 + part);
                bytes[half] = (codes.word<4>(48 + u / 2 * 32 + part) >> u % 2 * 4 & 0x0F0F0F0F) |
                              ((u < 4 ? high << (4 - u) : high >> (u - 4)) & 0x10101010);
            } else if constexpr (FORMAT == Q6_K) {
                const uint low = codes.word<4>(u / 4 * 64 + u % 2 * 32 + part) >> u % 4 / 2 * 4;
                const uint high = codes.word<4>(128 + u / 4 * 32 + part);
                bytes[half] = (low & 0x0F0F0F0F) | ((u % 4 < 2 ? high << (4 - u % 4 * 2) : high >> (u % 4 * 2 - 4)) & 0x30303030);
            } else {
                // Q5_0 and Q5_1: a block has the highest bits, then 16 bytes of nibbles.
                constexpr uint SIZE = block_bytes(FORMAT), OF = SIZE % 4 == 0 ? 4 : 2;
                const uint low = codes.word<OF>(SIZE * u + SIZE - 16 + 4 * t) >> 4 * half;
                const uint high = codes.word<OF>(SIZE * u + SIZE - 20) >> (16 * half + 4 * t);
                bytes[half] = (low & 0x0F0F0F0F) | spread(high) << 4;
            }
        }
        constexpr uint ZERO = AFFINE ? 0 : uint(code_of_zero(FORMAT));
#pragma unroll
        for (uint half = 0; half < 2; half++) {
            pairs[2 * half] = pair_of_bytes<HALF>(bytes[half], 0x4140, ZERO);
            pairs[2 * half + 1] = pair_of_bytes<HALF>(bytes[half], 0x4342, ZERO);
        }
    }
}

#endif
