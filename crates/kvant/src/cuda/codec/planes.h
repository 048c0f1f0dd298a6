// The rows of one side (keys or values) of a cache layer, as kernels read them, whatever the codec.
//
// Dense: low holds [rows, D] elements. TurboQuant: low holds the lowest bits of each index: [rows, D/4] bytes of four
// times 2 bits (2 and 3 bits), [rows, D/2] bytes of two nibbles (4, 5, 6 bits; even coordinate in the low half), or
// [rows, D] bytes (8 bits). high holds the bits above: [rows, D/8] bytes of eight single bits (3 and 5 bits), or [rows,
// D/4] bytes of four times 2 bits (6 bits). norms holds [rows, D/B] floats, B = min(D, 256). A coordinate of the
// rotated vector is norm * centroid.
//
// Centred: norms are halves, and a coordinate is stored as the difference from the mean of its page and KV head. means
// holds D codes (signed bytes) and the float that multiplies them, for each KV head of a page.
#ifndef KVANT_CUDA_CODEC_PLANES_H
#define KVANT_CUDA_CODEC_PLANES_H
#include "codec/codebooks.h"
#include "device/elements.h"

// The numbers of codecs (gpu/planes.rs). Dense codecs have the numbers of dtypes; others have 16 plus their bits.
constexpr uint TQ2 = 16 + 2;
constexpr uint TQ3 = 16 + 3;
constexpr uint TQ4 = 16 + 4;
constexpr uint TQ5 = 16 + 5;
constexpr uint TQ6 = 16 + 6;
constexpr uint TQ8 = 16 + 8;

// Centred codecs have 32 added.
constexpr uint CENTRED = 32;

inline constexpr bool is_quantised(uint codec) {
    return codec >= TQ2;
}

inline constexpr bool is_centred(uint codec) {
    return codec >= CENTRED;
}

// The codec of the differences that a centred codec stores.
inline constexpr uint plain(uint codec) {
    return codec % CENTRED;
}

// Centroids of a quantised codec.
inline constexpr uint levels_of(uint codec) {
    return 1u << (plain(codec) - 16);
}

// Bits of an index in the low plane of a quantised codec, and in the high one.
inline constexpr uint low_bits_of(uint codec) {
    return plain(codec) == TQ8 ? 8 : plain(codec) >= TQ4 ? 4 : 2;
}

inline constexpr uint high_bits_of(uint codec) {
    return plain(codec) - 16 - low_bits_of(codec);
}

struct Planes {
    const uchar *low;
    const uchar *high;
    // Floats, or halves if the codec is centred.
    const float *norms;
    const uchar *means;
};

// Norm i.
inline float load_norm(const Planes &planes, ulong i, uint codec) {
    return is_centred(codec) ? half_to_float(reinterpret_cast<const ushort *>(planes.norms)[i]) : planes.norms[i];
}

// Bytes of the mean of a KV head.
inline constexpr uint mean_bytes(uint head_dim) {
    return head_dim + 4;
}

// Coordinate i of four codes of a mean.
inline float code_of_four(uint codes, uint i) {
    return float(int(codes << (24 - 8 * i)) >> 24);
}

// Coordinates j .. j+3 of a mean, j a multiple of 4.
inline float4 load_mean4(const uchar *mean, uint j, uint head_dim) {
    const uint codes = *reinterpret_cast<const uint *>(mean + j);
    const float scale = *reinterpret_cast<const float *>(mean + head_dim);
    return make_float4(scale * code_of_four(codes, 0), scale * code_of_four(codes, 1), scale * code_of_four(codes, 2),
                       scale * code_of_four(codes, 3));
}

// The four indices of coordinates j .. j+3 of a row, j a multiple of 4.
inline uint4 load_indices(Planes planes, ulong row, uint j, uint head_dim, uint codec) {
    codec = plain(codec);
    if (codec == TQ8) {
        const uchar *at = planes.low + row * head_dim + j;
        return make_uint4(at[0], at[1], at[2], at[3]);
    }
    uint4 index;
    if (codec == TQ2 || codec == TQ3) {
        const uint a = planes.low[row * (head_dim / 4) + j / 4];
        index = make_uint4(a & 3, a >> 2 & 3, a >> 4 & 3, a >> 6);
    } else {
        const uchar *at = planes.low + row * (head_dim / 2) + j / 2;
        const uint a = at[0], b = at[1];
        index = make_uint4(a & 15, a >> 4, b & 15, b >> 4);
    }
    if (codec == TQ3 || codec == TQ5) {
        const uint bits = uint(planes.high[row * (head_dim / 8) + j / 8]) >> (j % 8), to = codec == TQ3 ? 2 : 4;
        index.x |= (bits & 1) << to;
        index.y |= (bits >> 1 & 1) << to;
        index.z |= (bits >> 2 & 1) << to;
        index.w |= (bits >> 3 & 1) << to;
    } else if (codec == TQ6) {
        const uint bits = planes.high[row * (head_dim / 4) + j / 4];
        index.x |= (bits & 3) << 4;
        index.y |= (bits >> 2 & 3) << 4;
        index.z |= (bits >> 4 & 3) << 4;
        index.w |= (bits >> 6 & 3) << 4;
    }
    return index;
}

inline float4 centroids(uint4 index, uint codec) {
    switch (plain(codec)) {
    case TQ2: return make_float4(CENTROIDS_2[index.x], CENTROIDS_2[index.y], CENTROIDS_2[index.z], CENTROIDS_2[index.w]);
    case TQ3: return make_float4(CENTROIDS_3[index.x], CENTROIDS_3[index.y], CENTROIDS_3[index.z], CENTROIDS_3[index.w]);
    case TQ4: return make_float4(CENTROIDS_4[index.x], CENTROIDS_4[index.y], CENTROIDS_4[index.z], CENTROIDS_4[index.w]);
    case TQ5: return make_float4(CENTROIDS_5[index.x], CENTROIDS_5[index.y], CENTROIDS_5[index.z], CENTROIDS_5[index.w]);
    case TQ6: return make_float4(CENTROIDS_6[index.x], CENTROIDS_6[index.y], CENTROIDS_6[index.z], CENTROIDS_6[index.w]);
    default: return make_float4(CENTROIDS_8[index.x], CENTROIDS_8[index.y], CENTROIDS_8[index.z], CENTROIDS_8[index.w]);
    }
}

// Coordinates j .. j+3 of a row, j a multiple of 4. Quantised rows are in the rotated domain; centred ones are without
// the mean.
inline float4 load_row4(Planes planes, ulong row, uint j, uint head_dim, uint codec) {
    if (is_quantised(codec)) {
        const uint blocks = (head_dim + 255) / 256;
        const float norm = load_norm(planes, row * blocks + j / 256, codec);
        const float4 c = centroids(load_indices(planes, row, j, head_dim, codec), codec);
        return make_float4(norm * c.x, norm * c.y, norm * c.z, norm * c.w);
    }
    const ulong i = row * head_dim + j;
    return make_float4(load(planes.low, i, codec), load(planes.low, i + 1, codec), load(planes.low, i + 2, codec),
                       load(planes.low, i + 3, codec));
}

#endif
