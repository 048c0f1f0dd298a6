// The rows of one side (keys or values) of a cache layer, as kernels read them, whatever the codec.
//
// Dense: low holds [rows, D] elements. TurboQuant: low holds [rows, D/2] nibbles (even coordinate in the low half) or,
// at 8 bits, [rows, D] bytes; high holds bit 4 (5 bits: [rows, D/8]) or bits 4 and 5 (6 bits: [rows, D/4]) of each
// index; norms holds [rows, D/B] floats, B = min(D, 256). A coordinate is norm * centroid, in the rotated domain.
#ifndef KVANT_CUDA_CODEC_PLANES_H
#define KVANT_CUDA_CODEC_PLANES_H
#include "codec/codebooks.h"
#include "device/elements.h"

// The numbers of codecs: those of the dtypes when dense, else the bits (gpu/planes.rs).
constexpr uint TQ4 = 4;
constexpr uint TQ5 = 5;
constexpr uint TQ6 = 6;
constexpr uint TQ8 = 8;

inline constexpr bool is_quantised(uint codec) {
    return codec >= TQ4;
}

struct Planes {
    const uchar *low;
    const uchar *high;
    const float *norms;
};

// The four indices of coordinates j .. j+3 of a row, j a multiple of 4.
inline uint4 load_indices(Planes planes, ulong row, uint j, uint head_dim, uint codec) {
    if (codec == TQ8) {
        const uchar *at = planes.low + row * head_dim + j;
        return make_uint4(at[0], at[1], at[2], at[3]);
    }
    const uchar *at = planes.low + row * (head_dim / 2) + j / 2;
    const uint a = at[0], b = at[1];
    uint4 index = make_uint4(a & 15, a >> 4, b & 15, b >> 4);
    if (codec == TQ5) {
        const uint bits = uint(planes.high[row * (head_dim / 8) + j / 8]) >> (j % 8);
        index.x |= (bits & 1) << 4;
        index.y |= (bits >> 1 & 1) << 4;
        index.z |= (bits >> 2 & 1) << 4;
        index.w |= (bits >> 3 & 1) << 4;
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
    switch (codec) {
    case TQ4: return make_float4(CENTROIDS_4[index.x], CENTROIDS_4[index.y], CENTROIDS_4[index.z], CENTROIDS_4[index.w]);
    case TQ5: return make_float4(CENTROIDS_5[index.x], CENTROIDS_5[index.y], CENTROIDS_5[index.z], CENTROIDS_5[index.w]);
    case TQ6: return make_float4(CENTROIDS_6[index.x], CENTROIDS_6[index.y], CENTROIDS_6[index.z], CENTROIDS_6[index.w]);
    default: return make_float4(CENTROIDS_8[index.x], CENTROIDS_8[index.y], CENTROIDS_8[index.z], CENTROIDS_8[index.w]);
    }
}

// Coordinates j .. j+3 of a row, j a multiple of 4; in the rotated domain when quantised.
inline float4 load_row4(Planes planes, ulong row, uint j, uint head_dim, uint codec) {
    if (is_quantised(codec)) {
        const uint blocks = (head_dim + 255) / 256;
        const float norm = planes.norms[row * blocks + j / 256];
        const float4 c = centroids(load_indices(planes, row, j, head_dim, codec), codec);
        return make_float4(norm * c.x, norm * c.y, norm * c.z, norm * c.w);
    }
    const ulong i = row * head_dim + j;
    return make_float4(load(planes.low, i, codec), load(planes.low, i + 1, codec), load(planes.low, i + 2, codec),
                       load(planes.low, i + 3, codec));
}

#endif
