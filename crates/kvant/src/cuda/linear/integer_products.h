// Exact products of affine codes and numbers, both as bytes, on integer tensor cores.
//
// W is the left side of a product: 16 outputs by 32 inputs, one code per byte. Codes of 8 bits are unchanged; others
// are unpacked to words of four codes, UNIT codes at a time. A number of x becomes an integer of 23 bits, relative to
// the largest number of its span: three signed bytes, each in its own column of the right side.
#ifndef KVANT_CUDA_LINEAR_INTEGER_PRODUCTS_H
#define KVANT_CUDA_LINEAR_INTEGER_PRODUCTS_H
#include "device/affine.h"
#include "device/elements.h"
#include "device/reduce.h"

// Codes of a lane in a span, and units that are unpacked together.
constexpr uint LANE = 32;
constexpr uint SPAN = 4 * LANE;
constexpr uint UNIT = 16;
constexpr uint UNITS = LANE / UNIT;
constexpr uint UNIT_WORDS = words_of(BITS);
// Words from one byte of a span's numbers to the next, with a gap against bank conflicts.
constexpr uint DIGIT = 36;

// 1.5 * 2^23: a float whose lowest bits are an integer of up to 23 bits and a sign.
constexpr float MAGIC = 12582912.0f;
constexpr int MAGIC_BITS = 0x4B400000;

// a * b + c of bytes.
inline int4 mma_bytes(uint4 a, uint2 b, int4 c) {
    int4 d;
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y), "r"(c.x), "r"(c.y), "r"(c.z), "r"(c.w));
    return d;
}

// The 16 codes of a unit as bytes; in_order() has the same order for x.
inline void unpack_unit(uint (&bytes)[4], const uint (&w)[UNIT_WORDS]) {
    if constexpr (BITS == 4) {
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            bytes[2 * i] = w[i] & 0x0F0F0F0F;
            bytes[2 * i + 1] = w[i] >> 4 & 0x0F0F0F0F;
        }
    } else if constexpr (BITS == 6) {
        // Four codes are three bytes: bytes 0, 3, 6 and 9 of the twelve, and the bytes after them.
        const uint a = __byte_perm(__byte_perm(w[0], w[1], 0x0630), w[2], 0x5210);
        const uint b = __byte_perm(__byte_perm(w[0], w[1], 0x0741), w[2], 0x6210);
        const uint c = __byte_perm(__byte_perm(w[0], w[1], 0x0052), w[2], 0x7410);
        bytes[0] = a & 0x3F3F3F3F;
        bytes[1] = a >> 6 & 0x03030303 | b << 2 & 0x3C3C3C3C;
        bytes[2] = b >> 4 & 0x0F0F0F0F | c << 4 & 0x30303030;
        bytes[3] = c >> 2 & 0x3F3F3F3F;
    } else {
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            bytes[i] = w[i];
        }
    }
}

// The bytes of 16 neighbours in the order in which the codes of a unit are unpacked.
inline uint4 in_order(uint4 x) {
    if constexpr (BITS == 4) {
        return make_uint4(__byte_perm(x.x, x.y, 0x6420), __byte_perm(x.x, x.y, 0x7531), __byte_perm(x.z, x.w, 0x6420),
                          __byte_perm(x.z, x.w, 0x7531));
    } else if constexpr (BITS == 6) {
        const uint a = __byte_perm(x.x, x.y, 0x5140), b = __byte_perm(x.z, x.w, 0x5140);
        const uint c = __byte_perm(x.x, x.y, 0x7362), d = __byte_perm(x.z, x.w, 0x7362);
        return make_uint4(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                          __byte_perm(c, d, 0x7632));
    }
    return x;
}

inline float larger(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// A span of x as integers of 23 bits, relative to its largest number. The lane has four neighbours.
struct Numbers {
    uint bits;
    uint exponent;

    Numbers(float4 v) {
        const float most = larger(larger(fabsf(v.x), fabsf(v.y)), larger(fabsf(v.z), fabsf(v.w)));
        bits = __reduce_max_sync(ALL, __float_as_uint(most));
        // For numbers this small, digits below the smallest float are lost.
        exponent = max(bits & 0x7F800000, 24u << 23);
    }
    int of(float x) const {
        return __float_as_int(fmaf(x, __uint_as_float((275u << 23) - exponent), MAGIC)) - MAGIC_BITS;
    }
    // The unit of the integers: NaN if an element of x is not finite.
    float unit() const {
        return __uint_as_float(bits < 0x7F800000 ? exponent - (21u << 23) : 0x7FC00000);
    }
};

// The bytes of a span of x: the lane's four neighbours become word `at`. Returns their unit: NaN if an element of x is
// not finite.
inline float make_digits(uint *digits, float4 v, uint at) {
    const Numbers numbers(v);
    uint bytes[4];
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        // Adding 0x808080 makes the signed bytes unsigned: each is larger by 0x80.
        bytes[j] = uint(numbers.of(part(v, j))) + 0x808080;
    }
    const uint low = __byte_perm(bytes[0], bytes[1], 0x5140), high = __byte_perm(bytes[2], bytes[3], 0x5140);
    const uint third = __byte_perm(bytes[0], bytes[1], 0x0062), fourth = __byte_perm(bytes[2], bytes[3], 0x0062);
    digits[at] = __byte_perm(low, high, 0x5410) ^ 0x80808080;
    digits[DIGIT + at] = __byte_perm(low, high, 0x7632) ^ 0x80808080;
    digits[2 * DIGIT + at] = __byte_perm(third, fourth, 0x5410) ^ 0x80808080;
    return numbers.unit();
}

// Pairs of codes of 4 bits as bytes: e + 16 o. With x for e and y for o, 16 (e x + o y) = e (16 x - y) + (e + 16 o) y.
// Unpacking then takes one instruction instead of three. Bytes of a span's pairs: [4][64] of 16 x - y, [3][64] of y,
// then zeros.
constexpr uint PAIR_DIGIT = SPAN / 2 / 4;
constexpr uint PAIR_ZEROS = 7 * PAIR_DIGIT;
constexpr uint PAIR_DIGITS = 8 * PAIR_DIGIT;

// As make_digits, for pairs; products are 16 times as large. The span's four runs of 16 pairs are stored in the order
// 0, 2, 1, 3, so that a lane's words of the right side are adjacent.
inline float make_pair_digits(uint *digits, float4 v, uint lane) {
    const Numbers numbers(v);
    int n[4];
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        n[j] = numbers.of(part(v, j));
    }
    const uint stretch = lane / 8;
    ushort *to = reinterpret_cast<ushort *>(digits) + lane % 8 / 2 * 8 + (stretch % 2 * 2 + stretch / 2) * 2 + lane % 2;
    const uint x[2] = {(16 * n[0] - n[1] + 0x80808080) ^ 0x80808080, (16 * n[2] - n[3] + 0x80808080) ^ 0x80808080};
    const uint y[2] = {(n[1] + 0x80808080) ^ 0x80808080, (n[3] + 0x80808080) ^ 0x80808080};
#pragma unroll
    for (uint i = 0; i < 7; i++) {
        const uint bytes = i % 4 * 0x11 + 0x40;
        to[i * 2 * PAIR_DIGIT] = ushort(i < 4 ? __byte_perm(x[0], x[1], bytes) : __byte_perm(y[0], y[1], bytes));
    }
    return numbers.unit();
}

#endif
