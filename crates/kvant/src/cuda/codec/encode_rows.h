// Rows of a cache layer, encoded and stored. Dense rows are converted; codec/turboquant.rs defines TurboQuant.
//
// SHARERS neighbouring lanes of a warp share a row: lane i has the MINE coordinates from MINE * i on in registers.
// These coordinates fill whole bytes of every plane.
//
// Butterflies of the rotation over a distance below MINE stay within a lane; for larger distances lanes exchange
// registers. There is no barrier. Sums add neighbouring coordinates, then neighbouring pairs, and so on: their bits do
// not depend on MINE. All lanes of a warp call these functions, also lanes whose row is not `kept`.
#ifndef KVANT_CUDA_CODEC_ENCODE_ROWS_H
#define KVANT_CUDA_CODEC_ENCODE_ROWS_H
#include "codec/butterflies.h"
#include "codec/nearest_centroid.h"
#include "codec/planes.h"
#include "codec/rotate_block.h"
#include "device/cache_slots.h"
#include "device/reduce.h"
#include "device/vectors.h"

// The numbers of norms (gpu/planes.rs).
constexpr uint NORM_RMS = 0;
constexpr uint NORM_MIN_SQUARES = 1;
constexpr uint NORM_UNBIASED = 2;

struct WritablePlanes {
    uchar *low;
    uchar *high;
    // Floats, or halves if the codec is centred.
    float *norms;

    // The first row of the page.
    inline WritablePlanes of_page(uint page) const {
        const ulong bytes = page_bytes(page);
        return {low + bytes, high + bytes, norms + bytes / sizeof(float)};
    }
};

// Stores norm i. A half is rounded to nearest; norms above the largest half become infinite.
template <uint CODEC> inline void store_norm(const WritablePlanes &to, ulong i, float norm) {
    if constexpr (is_centred(CODEC)) {
        reinterpret_cast<ushort *>(to.norms)[i] = float_to_half(norm);
    } else {
        to.norms[i] = norm;
    }
}

// f(base) + .. + f(base + N - 1), as a tree, without contraction to fused operations.
template <uint N, typename F> inline float tree_sum(F f, uint base = 0) {
    if constexpr (N == 1) {
        return f(base);
    } else {
        return __fadd_rn(tree_sum<N / 2>(f, base), tree_sum<N / 2>(f, base + N / 2));
    }
}

// The sum over the COUNT lanes that hold this lane's block; x is already the sum over BEGUN lanes.
template <uint COUNT, uint BEGUN = 1> inline float lane_sum(float x) {
#pragma unroll
    for (uint distance = BEGUN; distance < COUNT; distance *= 2) {
        x = __fadd_rn(x, __shfl_xor_sync(ALL, x, distance));
    }
    return x;
}

// The signs of a lane's coordinates.
template <uint MINE> struct Signs {
    uint bits[(MINE + 31) / 32];

    // `lane` of SHARERS. The table is constant.
    inline Signs(uint sharers, uint lane) {
#pragma unroll
        for (uint i = 0; i < (MINE + 31) / 32; i++) {
            const uint bit = MINE * sharers + lane * MINE + 32 * i;
            bits[i] = SIGN_BITS[bit / 32] >> (bit % 32);
        }
    }

    inline float flip(float y, uint j) const {
        return __uint_as_float(__float_as_uint(y) ^ (bits[j / 32] << (31 - j % 32) & 0x80000000));
    }
};

// A lane's part of a row of the source, from element `from` on. `aligned` is a constant: see load4.
template <uint DTYPE, uint MINE> inline void load_part(float (&y)[MINE], const uchar *source, ulong from, bool aligned) {
#pragma unroll
    for (uint j = 0; j < MINE; j += 4) {
        const float4 four = load4(source, from + j, 4, DTYPE, aligned);
        y[j] = four.x;
        y[j + 1] = four.y;
        y[j + 2] = four.z;
        y[j + 3] = four.w;
    }
}

// The rotation of a row, `lane` of SHARERS.
template <uint MINE, uint SHARERS> inline void rotate_row(float (&y)[MINE], const Signs<MINE> &signs, uint lane) {
    constexpr uint DIM = MINE * SHARERS;
    const float scale = rotation_scale(DIM);
#pragma unroll
    for (uint j = 0; j < MINE; j++) {
        y[j] = signs.flip(y[j] * scale, j);
    }
    transform(y);
#pragma unroll
    for (uint distance = 1; distance < SHARERS; distance *= 2) {
        const float own = (lane & distance) != 0 ? -1.0f : 1.0f;
#pragma unroll
        for (uint j = 0; j < MINE; j++) {
            y[j] = fmaf(y[j], own, __shfl_xor_sync(ALL, y[j], distance));
        }
    }
}

// Stores WORDS words to an address that is a multiple of their size, or of 16 bytes.
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

// BITS bits of each index, from bit FROM on, consecutively: MINE / 8 * BITS bytes, a lane's part of a plane.
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

// Encodes the rotated row y, minus its mean if the codec is centred, as row `at` of the planes, if it is `kept`.
template <uint MINE, uint SHARERS, uint CODEC, uint NORM, uint COPIES>
inline void store_encoded(float (&y)[MINE], WritablePlanes to, ulong at, bool kept, float scale, uint lane,
                          const Nearest<CODEC, COPIES> &nearest_to) {
    constexpr uint DIM = MINE * SHARERS, BLOCK = DIM < 256 ? DIM : 256, BLOCK_LANES = BLOCK / MINE;
    const auto square = [&](uint j) { return __fmul_rn(y[j], y[j]); };
    float energy = lane_sum<BLOCK_LANES>(tree_sum<MINE>(square));
    const float total = lane_sum<SHARERS, BLOCK_LANES>(energy);
    const bool storable = !is_nan_or_infinite(total);
    float unit = 1;
    if (__any_sync(ALL, total < 1e-24f)) {
        // Squares this small have lost digits: computes them again, with the coordinates scaled to about 1.
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
    const float n = sqrtf(energy / float(BLOCK)) / scale;
    const float inverse = n > 0 ? 1 / n : 0;
    uint index[MINE];
    float c[MINE];
#pragma unroll
    for (uint j = 0; j < MINE; j++) {
        index[j] = nearest_to(y[j] * inverse, c[j]);
        index[j] = storable ? index[j] : 0;
    }
    float norm = n;
    if (NORM != NORM_RMS) {
        const float yc = lane_sum<BLOCK_LANES>(tree_sum<MINE>([&](uint j) { return __fmul_rn(y[j], c[j]); }));
        if (NORM == NORM_MIN_SQUARES) {
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
        store_norm<CODEC>(to, at * (DIM / BLOCK) + lane / BLOCK_LANES, norm);
    }
    constexpr uint LOW = low_bits_of(CODEC), HIGH = high_bits_of(CODEC);
    store_bits<LOW, 0>(to.low + at * (DIM / 8 * LOW) + lane * (MINE / 8 * LOW), index);
    if constexpr (HIGH > 0) {
        store_bits<HIGH, LOW>(to.high + at * (DIM / 8 * HIGH) + lane * (MINE / 8 * HIGH), index);
    }
}

// Stores the row y, dense or encoded, as row `at` of the planes, whose codec is not centred. `aligned` is a constant:
// see store4.
template <uint MINE, uint SHARERS, uint CODEC, uint NORM, uint COPIES>
inline void store_row(float (&y)[MINE], WritablePlanes to, ulong at, bool kept, float scale, uint lane, const uint *tables,
                      bool aligned) {
    if constexpr (is_quantised(CODEC)) {
        rotate_row<MINE, SHARERS>(y, Signs<MINE>(SHARERS, lane), lane);
        const Nearest<CODEC, COPIES> nearest_to(tables);
        store_encoded<MINE, SHARERS, CODEC, NORM, COPIES>(y, to, at, kept, scale, lane, nearest_to);
    } else if (kept) {
#pragma unroll
        for (uint j = 0; j < MINE; j += 4) {
            const float4 four = make_float4(y[j], y[j + 1], y[j + 2], y[j + 3]);
            store4(to.low, at * (MINE * SHARERS) + lane * MINE + j, 4, four, CODEC, aligned);
        }
    }
}

#endif
