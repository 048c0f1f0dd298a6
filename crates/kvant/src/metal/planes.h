// The rows of one side (keys or values) of a cache layer, as kernels read them, whatever the codec.
//
// Dense: low holds [rows, D] elements. TurboQuant: low holds the lowest bits of each index: [rows, D/4] bytes of four
// times 2 bits (2 and 3 bits), [rows, D/2] bytes of two nibbles (4, 5, 6 bits; even coordinate in the low half), or
// [rows, D] bytes (8 bits). high holds the bits above: [rows, D/8] bytes of eight single bits (3 and 5 bits), or [rows,
// D/4] bytes of four times 2 bits (6 bits). norms holds [rows, D/B] floats, B = min(D, 256). A coordinate is norm *
// centroid, in the rotated domain.
//
// Centred: norms are halves, and norm * centroid is relative to the mean of the page and KV head. means holds, for each
// KV head of a page, D codes (signed bytes) and the float that multiplies them.
#ifndef KVANT_PLANES_H
#define KVANT_PLANES_H
#include "elements.h"
#include "codebooks.h"

// The numbers of codecs: the dtype's if dense, else 16 plus the bits (gpu/planes.rs).
constant constexpr uint TQ2 = 16 + 2;
constant constexpr uint TQ3 = 16 + 3;
constant constexpr uint TQ4 = 16 + 4;
constant constexpr uint TQ5 = 16 + 5;
constant constexpr uint TQ6 = 16 + 6;
constant constexpr uint TQ8 = 16 + 8;
// Centred codecs add 32.
constant constexpr uint CENTRED = 32;
// Bit n: whether codec n, without CENTRED, has a high plane.
constant constexpr uint WITH_HIGH = 1u << TQ3 | 1u << TQ5 | 1u << TQ6;

inline bool is_quantised(uint codec) {
    return codec >= TQ2;
}

inline bool is_centred(uint codec) {
    return (codec & CENTRED) != 0;
}

inline bool has_high(uint codec) {
    return (WITH_HIGH >> codec % CENTRED & 1) != 0;
}

// The codec of the vectors that a centred codec stores in addition to the mean.
inline uint plain(uint codec) {
    return codec % CENTRED;
}

struct Planes {
    device const uchar *low;
    device const uchar *high;
    device const uchar *norms;
    device const uchar *means;
};

// The planes, to read or to write, `bytes` bytes later. Only planes of the codec exist.
template <typename P> inline P shifted(P planes, ulong bytes, uint codec) {
    return P{planes.low + bytes, has_high(codec) ? planes.high + bytes : nullptr,
             is_quantised(codec) ? planes.norms + bytes : nullptr, is_centred(codec) ? planes.means + bytes : nullptr};
}

// Bytes of the mean of a KV head.
inline ulong mean_bytes(uint head_dim) {
    return head_dim + sizeof(float);
}

// Coordinates j .. j+3 of a mean, j a multiple of 4.
inline float4 load_mean4(device const uchar *mean, uint j, uint head_dim) {
    const uint codes = *reinterpret_cast<device const uint *>(mean + j);
    const int4 signed_codes = int4(uint4(codes << 24, codes << 16, codes << 8, codes)) >> 24;
    return *reinterpret_cast<device const float *>(mean + head_dim) * float4(signed_codes);
}

// The bits of coordinates j .. j+3 of a row in a high plane of single bits.
inline uint4 single_bits(Planes planes, ulong row, uint j, uint head_dim) {
    const uint bits = uint(planes.high[row * (head_dim / 8) + j / 8]) >> (j % 8);
    return uint4(bits, bits >> 1, bits >> 2, bits >> 3) & 1;
}

// The four indices of coordinates j .. j+3 of a row, j a multiple of 4. Quantised planes begin at multiples of 4 bytes,
// both as separate allocations and within a page.
inline uint4 load_indices(Planes planes, ulong row, uint j, uint head_dim, uint codec) {
    codec = plain(codec);
    if (codec == TQ8) {
        const uint four = *reinterpret_cast<device const uint *>(planes.low + row * head_dim + j);
        return uint4(four, four >> 8, four >> 16, four >> 24) & 255;
    }
    if (codec == TQ2 || codec == TQ3) {
        const uint low = planes.low[row * (head_dim / 4) + j / 4];
        const uint4 index = uint4(low, low >> 2, low >> 4, low >> 6) & 3;
        return codec == TQ3 ? index | single_bits(planes, row, j, head_dim) << 2 : index;
    }
    const uint low = *reinterpret_cast<device const ushort *>(planes.low + row * (head_dim / 2) + j / 2);
    uint4 index = uint4(low, low >> 4, low >> 8, low >> 12) & 15;
    if (codec == TQ5) {
        index |= single_bits(planes, row, j, head_dim) << 4;
    } else if (codec == TQ6) {
        const uint bits = planes.high[row * (head_dim / 4) + j / 4];
        index |= (uint4(bits, bits >> 2, bits >> 4, bits >> 6) & 3) << 4;
    }
    return index;
}

inline float4 centroids(uint4 index, uint codec) {
    switch (plain(codec)) {
    case TQ2: return float4(CENTROIDS_2[index.x], CENTROIDS_2[index.y], CENTROIDS_2[index.z], CENTROIDS_2[index.w]);
    case TQ3: return float4(CENTROIDS_3[index.x], CENTROIDS_3[index.y], CENTROIDS_3[index.z], CENTROIDS_3[index.w]);
    case TQ4: return float4(CENTROIDS_4[index.x], CENTROIDS_4[index.y], CENTROIDS_4[index.z], CENTROIDS_4[index.w]);
    case TQ5: return float4(CENTROIDS_5[index.x], CENTROIDS_5[index.y], CENTROIDS_5[index.z], CENTROIDS_5[index.w]);
    case TQ6: return float4(CENTROIDS_6[index.x], CENTROIDS_6[index.y], CENTROIDS_6[index.z], CENTROIDS_6[index.w]);
    default: return float4(CENTROIDS_8[index.x], CENTROIDS_8[index.y], CENTROIDS_8[index.z], CENTROIDS_8[index.w]);
    }
}

// Norm i, counted from `norms`.
template <typename I> inline float load_norm(device const uchar *norms, I i, uint codec) {
    return is_centred(codec) ? float(reinterpret_cast<device const half *>(norms)[i])
                             : reinterpret_cast<device const float *>(norms)[i];
}

// Norm i, counted from the start of the plane.
inline float load_norm(Planes planes, ulong i, uint codec) {
    return load_norm(planes.norms, i, codec);
}

// Coordinates j .. j+3 of a quantised row, j a multiple of 4, in the rotated domain; without the mean, if the codec is
// centred.
inline float4 load_row4(Planes planes, ulong row, uint j, uint head_dim, uint codec) {
    const uint blocks = (head_dim + 255) / 256;
    const float norm = load_norm(planes, row * blocks + j / 256, codec);
    return norm * centroids(load_indices(planes, row, j, head_dim, codec), codec);
}

#endif
