// The rows of one side (keys or values) of a cache layer, as kernels read them, whatever the codec.
//
// Dense: low holds [rows, D] elements. TurboQuant: low holds [rows, D/2] nibbles (even coordinate in the low half) or,
// at 8 bits, [rows, D] bytes; high holds bit 4 (5 bits: [rows, D/8]) or bits 4 and 5 (6 bits: [rows, D/4]) of each
// index; norms holds [rows, D/B] floats, B = min(D, 256). A coordinate is norm * centroid, in the rotated domain.
#ifndef KVANT_PLANES_H
#define KVANT_PLANES_H
#include "elements.h"
#include "codebooks.h"

// The numbers of codecs: those of the dtypes when dense, else the bits (metal/planes.rs).
constant constexpr uint TQ4 = 4;
constant constexpr uint TQ5 = 5;
constant constexpr uint TQ6 = 6;
constant constexpr uint TQ8 = 8;

inline bool is_quantised(uint codec) {
    return codec >= TQ4;
}

struct Planes {
    device const uchar *low;
    device const uchar *high;
    device const float *norms;
};

// The planes, to read or to write, from `bytes` bytes on. Only those that the codec has are there.
template <typename P> inline P shifted(P planes, ulong bytes, uint codec) {
    const bool has_high = codec == TQ5 || codec == TQ6;
    return P{planes.low + bytes, has_high ? planes.high + bytes : nullptr,
             is_quantised(codec) ? planes.norms + bytes / sizeof(float) : nullptr};
}

// The four indices of coordinates j .. j+3 of a row, j a multiple of 4. Quantised planes begin at multiples of 4 bytes,
// as allocations of their own or within a page.
inline uint4 load_indices(Planes planes, ulong row, uint j, uint head_dim, uint codec) {
    if (codec == TQ8) {
        const uint four = *reinterpret_cast<device const uint *>(planes.low + row * head_dim + j);
        return uint4(four, four >> 8, four >> 16, four >> 24) & 255;
    }
    const uint low = *reinterpret_cast<device const ushort *>(planes.low + row * (head_dim / 2) + j / 2);
    uint4 index = uint4(low, low >> 4, low >> 8, low >> 12) & 15;
    if (codec == TQ5) {
        const uint bits = uint(planes.high[row * (head_dim / 8) + j / 8]) >> (j % 8);
        index |= (uint4(bits, bits >> 1, bits >> 2, bits >> 3) & 1) << 4;
    } else if (codec == TQ6) {
        const uint bits = planes.high[row * (head_dim / 4) + j / 4];
        index |= (uint4(bits, bits >> 2, bits >> 4, bits >> 6) & 3) << 4;
    }
    return index;
}

inline float4 centroids(uint4 index, uint codec) {
    switch (codec) {
    case TQ4: return float4(CENTROIDS_4[index.x], CENTROIDS_4[index.y], CENTROIDS_4[index.z], CENTROIDS_4[index.w]);
    case TQ5: return float4(CENTROIDS_5[index.x], CENTROIDS_5[index.y], CENTROIDS_5[index.z], CENTROIDS_5[index.w]);
    case TQ6: return float4(CENTROIDS_6[index.x], CENTROIDS_6[index.y], CENTROIDS_6[index.z], CENTROIDS_6[index.w]);
    default: return float4(CENTROIDS_8[index.x], CENTROIDS_8[index.y], CENTROIDS_8[index.z], CENTROIDS_8[index.w]);
    }
}

// Coordinates j .. j+3 of a quantised row, j a multiple of 4, in the rotated domain.
inline float4 load_row4(Planes planes, ulong row, uint j, uint head_dim, uint codec) {
    const uint blocks = (head_dim + 255) / 256;
    return planes.norms[row * blocks + j / 256] * centroids(load_indices(planes, row, j, head_dim, codec), codec);
}

#endif
