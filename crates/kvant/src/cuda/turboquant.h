// Rows of a cache layer, encoded and stored: dense ones converted, TurboQuant as codec/turboquant.rs defines it.
//
// SHARERS neighbouring lanes of a warp hold a row in registers, MINE coordinates each, from MINE * i on in the i-th: whole bytes of
// every plane. Distances of the rotation below MINE are within a lane, the others are exchanges of lanes; there is no
// barrier. Sums are trees over neighbouring coordinates, then pairs of these, and so on: the same bits whatever MINE is.
// All lanes of a warp call these functions; those whose row is not `kept` only keep the others company.
#ifndef KVANT_TURBOQUANT_H
#define KVANT_TURBOQUANT_H
#include "planes.h"
#include "rotate.h"
#include "team.h"

// The numbers of norms (gpu/planes.rs).
constexpr uint NORM_RMS = 0;
constexpr uint NORM_LEAST_SQUARES = 1;
constexpr uint NORM_UNBIASED = 2;

struct WritablePlanes {
    uchar *low;
    uchar *high;
    float *norms;
};

struct Encoding {
    uint codec;
    uint norm;
    float scale;
};

// f(base) + .. + f(base + N - 1), as a tree. Nothing is contracted.
template <uint N, typename F> inline float tree_sum(F f, uint base = 0) {
    if constexpr (N == 1) {
        return f(base);
    } else {
        return __fadd_rn(tree_sum<N / 2>(f, base), tree_sum<N / 2>(f, base + N / 2));
    }
}

// The sum over the COUNT lanes that hold the block of this lane, from those of BEGUN lanes.
template <uint COUNT, uint BEGUN = 1> inline float lane_sum(float x) {
#pragma unroll
    for (uint distance = BEGUN; distance < COUNT; distance *= 2) {
        x = __fadd_rn(x, __shfl_xor_sync(ALL, x, distance));
    }
    return x;
}

// The rotation of a row, `lane` of SHARERS.
template <uint MINE, uint SHARERS> inline void rotate_row(float (&y)[MINE], uint lane) {
    constexpr uint DIM = MINE * SHARERS;
    const float scale = rotation_scale(DIM);
#pragma unroll
    for (uint j = 0; j < MINE; j++) {
        y[j] = y[j] * (scale * sign_of(DIM, lane * MINE + j));
    }
#pragma unroll
    for (uint distance = 1; distance < MINE; distance *= 2) {
#pragma unroll
        for (uint j = 0; j < MINE; j++) {
            if ((j & distance) == 0) {
                const float a = y[j], b = y[j + distance];
                y[j] = a + b;
                y[j + distance] = a - b;
            }
        }
    }
#pragma unroll
    for (uint distance = 1; distance < SHARERS; distance *= 2) {
        const float own = (lane & distance) != 0 ? -1.0f : 1.0f;
#pragma unroll
        for (uint j = 0; j < MINE; j++) {
            y[j] = fmaf(y[j], own, __shfl_xor_sync(ALL, y[j], distance));
        }
    }
}

// How many of the 2^bits - 1 ascending thresholds z exceeds.
inline uint nearest(float z, const float *thresholds, uint bits) {
    uint index = 0;
#pragma unroll
    for (uint step = 1u << (bits - 1); step > 0; step /= 2) {
        index += z > thresholds[index + step - 1] ? step : 0;
    }
    return index;
}

// The same for 4 bits, from registers: the thresholds lie symmetrically about 0, and positive floats compare as their bits.
inline uint nearest_of_16(float z) {
    const auto at = [](uint i) { return __float_as_int(THRESHOLDS_4[8 + i]); };
    // Below 0 a threshold that z lies on counts as passed.
    const bool above = z > 0;
    const int size = int(__float_as_uint(z) & 0x7FFFFFFF) + (above ? 0 : 1);
    const bool a = size > at(3);
    const bool b = size > (a ? at(5) : at(1));
    const int upper = b ? at(6) : at(4), lower = b ? at(2) : at(0);
    const bool c = size > (a ? upper : lower);
    return ((a ? 4 : 0) | (b ? 2 : 0) | (c ? 1 : 0)) ^ (above ? 8 : 7);
}

inline uint nearest(float z, uint codec, const float *thresholds) {
    return codec == TQ4 ? nearest_of_16(z) : nearest(z, thresholds, codec);
}

inline float centroid(uint index, uint codec) {
    switch (codec) {
    case TQ4: return CENTROIDS_4[index];
    case TQ5: return CENTROIDS_5[index];
    case TQ6: return CENTROIDS_6[index];
    default: return CENTROIDS_8[index];
    }
}

// Shared memory for `thresholds`: those that are not read from registers.
constexpr uint THRESHOLD_ROOM = 256;

// Fills it; all threads of the block call it. Ends with a barrier.
inline void load_thresholds(float *thresholds, uint codec) {
    const float *from = codec == TQ5 ? THRESHOLDS_5 : codec == TQ6 ? THRESHOLDS_6 : THRESHOLDS_8;
    if (codec > TQ4) {
        for (uint i = threadIdx.x; i < (1u << codec) - 1; i += blockDim.x) {
            thresholds[i] = from[i];
        }
        __syncthreads();
    }
}

// WORDS words to a place that is a multiple of their size, or of 16 bytes.
template <uint WORDS> inline void store_words(uchar *to, const uint (&words)[WORDS]) {
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
        for (uint i = 0; i < WORDS; i += 4) {
            reinterpret_cast<uint4 *>(to)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
        }
    } else {
#pragma unroll
        for (uint i = 0; i < WORDS; i++) {
            reinterpret_cast<uint *>(to)[i] = words[i];
        }
    }
}

// BITS bits, from bit FROM on, of each index, one behind the other: MINE / 8 * BITS bytes, a lane's part of a plane.
template <uint BITS, uint FROM, uint MINE> inline void store_bits(uchar *to, const uint (&index)[MINE]) {
    constexpr uint EACH = 32 / BITS, WORDS = (MINE + EACH - 1) / EACH;
    uint words[WORDS] = {};
#pragma unroll
    for (uint j = 0; j < MINE; j++) {
        words[j / EACH] |= (index[j] >> FROM & ((1u << BITS) - 1)) << (j % EACH * BITS);
    }
    if constexpr (MINE >= EACH) {
        store_words<WORDS>(to, words);
    } else if constexpr (MINE * BITS == 16) {
        *reinterpret_cast<ushort *>(to) = ushort(words[0]);
    } else {
        *to = uchar(words[0]);
    }
}

// Encodes the rotated row y as row `at` of the planes, if it is `kept`.
template <uint MINE, uint SHARERS>
inline void store_encoded(float (&y)[MINE], WritablePlanes to, ulong at, bool kept, Encoding encoding, uint lane,
                          const float *thresholds) {
    constexpr uint DIM = MINE * SHARERS, BLOCK = DIM < 256 ? DIM : 256, BLOCK_LANES = BLOCK / MINE;
    const auto square = [&](uint j) { return __fmul_rn(y[j], y[j]); };
    float energy = lane_sum<BLOCK_LANES>(tree_sum<MINE>(square));
    const float total = lane_sum<SHARERS, BLOCK_LANES>(energy);
    const bool storable = !is_nan_or_infinite(total);
    float unit = 1;
    if (__any_sync(ALL, total < 1e-24f)) {
        // Squares this small have lost digits: once more, with the coordinates near 1.
        float largest = 0;
#pragma unroll
        for (uint j = 0; j < MINE; j++) {
            largest = fmaxf(largest, fabsf(y[j]));
        }
#pragma unroll
        for (uint distance = 1; distance < SHARERS; distance *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, distance));
        }
        unit = total < 1e-24f ? unit_of(largest) : 1;
#pragma unroll
        for (uint j = 0; j < MINE; j++) {
            y[j] *= unit;
        }
        energy = lane_sum<BLOCK_LANES>(tree_sum<MINE>(square));
    }
    const float n = sqrtf(energy / float(BLOCK)) / encoding.scale;
    const float inverse = n > 0 ? 1 / n : 0;
    uint index[MINE];
#pragma unroll
    for (uint j = 0; j < MINE; j++) {
        index[j] = storable ? nearest(y[j] * inverse, encoding.codec, thresholds) : 0;
    }
    float norm = n;
    if (encoding.norm != NORM_RMS) {
        float c[MINE];
#pragma unroll
        for (uint j = 0; j < MINE; j++) {
            c[j] = centroid(index[j], encoding.codec);
        }
        const float yc = lane_sum<BLOCK_LANES>(tree_sum<MINE>([&](uint j) { return __fmul_rn(y[j], c[j]); }));
        if (encoding.norm == NORM_LEAST_SQUARES) {
            const float cc = lane_sum<BLOCK_LANES>(tree_sum<MINE>([&](uint j) { return __fmul_rn(c[j], c[j]); }));
            norm = yc / cc;
        } else {
            norm = energy / yc;
        }
    }
    if (!kept) {
        return;
    }
    norm = !storable ? __uint_as_float(0x7FC00000) : energy > 0 ? norm / unit : 0;
    if (lane % BLOCK_LANES == 0) {
        to.norms[at * (DIM / BLOCK) + lane / BLOCK_LANES] = norm;
    }
    if (encoding.codec == TQ8) {
        store_bits<8, 0>(to.low + at * DIM + lane * MINE, index);
        return;
    }
    store_bits<4, 0>(to.low + at * (DIM / 2) + lane * (MINE / 2), index);
    if (encoding.codec == TQ5) {
        store_bits<1, 4>(to.high + at * (DIM / 8) + lane * (MINE / 8), index);
    } else if (encoding.codec == TQ6) {
        store_bits<2, 4>(to.high + at * (DIM / 4) + lane * (MINE / 4), index);
    }
}

// Stores the row y, dense or encoded, as row `at` of the planes. `aligned`, a constant, is that of store4.
template <uint MINE, uint SHARERS>
inline void store_row(float (&y)[MINE], WritablePlanes to, ulong at, bool kept, Encoding encoding, uint lane,
                      const float *thresholds, bool aligned) {
    if (is_quantised(encoding.codec)) {
        rotate_row<MINE, SHARERS>(y, lane);
        store_encoded<MINE, SHARERS>(y, to, at, kept, encoding, lane, thresholds);
        return;
    }
    if (kept) {
#pragma unroll
        for (uint j = 0; j < MINE; j += 4) {
            const float4 four = make_float4(y[j], y[j + 1], y[j + 2], y[j + 3]);
            store4(to.low, at * (MINE * SHARERS) + lane * MINE + j, 4, four, encoding.codec, aligned);
        }
    }
}

#endif
