// Rows of a cache layer, encoded eight at a time by a warp from sources of 16 bits. kv_write and seal use it for many
// rows.
//
// The D coordinates of a row are 16 strips of STRIP neighbours, D = 16 * STRIP. The rotation over strips is followed by
// the rotation within strips. The rotation over strips is a product with Sylvester's 16 x 16 matrix on tensor cores,
// with exact operands: A is the matrix, B is coordinate c of each strip (k) of eight rows (n). Lane 4g + t reads strips
// t, t + 4, t + 8 and t + 12 of row g, so that four lanes read neighbours: k = 2t + i + 8j is strip t + 4i + 8j. As
// results the lane gets all coordinates of strips g and g + 8 of rows 2t and 2t + 1, so the rotation within strips
// stays within the lane.
#ifndef KVANT_CUDA_CODEC_ENCODE_TILES_H
#define KVANT_CUDA_CODEC_ENCODE_TILES_H
#include "codec/encode_rows.h"
#include "codec/nearest_centroid.h"
#include "device/fragments.h"
#include "device/vectors.h"

// The signs of pairs of coordinates, as the highest bits of 16.
template <uint DIM> inline void fill_signs(uint *signs) {
    for (uint i = threadIdx.x; i < DIM / 2; i += blockDim.x) {
        const uint bit = DIM + 2 * i, two = SIGN_BITS[bit / 32] >> (bit % 32);
        signs[i] = (two & 1) << 15 | (two & 2) << 30;
    }
}

// The lane's part of A: Sylvester's matrix of 16, scaled.
template <bool HALF> inline void strip_matrix(uint (&a)[4], uint lane, float scale) {
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        const uint row = lane / 4 + i % 2 * 8, strip = lane % 4 + i / 2 * 8;
        const auto entry = [&](uint strip) { return __popc(row & strip) % 2 != 0 ? -scale : scale; };
        a[i] = pack<HALF>(entry(strip), entry(strip + 4));
    }
}

// The sum over the eight lanes with the same t.
inline float strips_sum(float x) {
#pragma unroll
    for (uint distance = 4; distance < 32; distance *= 2) {
        x += __shfl_xor_sync(ALL, x, distance);
    }
    return x;
}

// BITS bits of each index, from bit FROM on, consecutively.
template <uint BITS, uint FROM, uint N, bool WHOLE> inline void store_fields(uchar *to, const uint (&index)[N]) {
    constexpr uint EACH = 32 / BITS, WORDS = (N + EACH - 1) / EACH;
    uint words[WORDS] = {};
#pragma unroll
    for (uint j = 0; j < N; j++) {
        const uint field = WHOLE ? index[j] : index[j] >> FROM & ((1u << BITS) - 1);
        words[j / EACH] += field << (j % EACH * BITS);
    }
    if constexpr (N >= EACH) {
        if constexpr (WORDS == 2) {
            *reinterpret_cast<uint2 *>(to) = make_uint2(words[0], words[1]);
        } else {
            store_words<WORDS>(to, words);
        }
    } else if constexpr (N * BITS == 16) {
        *reinterpret_cast<ushort *>(to) = ushort(words[0]);
    } else {
        *to = uchar(words[0]);
    }
}

// A lane's four strips of eight rows of 16-bit numbers.
template <uint DIM> struct Strips {
    static constexpr uint STRIP = DIM / 16, PIECES = STRIP / 8;
    uint4 words[4][PIECES];

    static inline uint first_of(uint strip) {
        return (threadIdx.x % 4 + strip * 4) * PIECES;
    }

    // Whether the lane's numbers are finite, and small enough that no row's squared length overflows.
    template <bool HALF> inline bool are_usual() const {
        uint sum = 0;
#pragma unroll
        for (uint s = 0; s < 4; s++) {
#pragma unroll
            for (uint i = 0; i < PIECES; i++) {
                const uint4 x = words[s][i];
                sum = add_finite<HALF>(add_finite<HALF>(add_finite<HALF>(add_finite<HALF>(sum, x.x), x.y), x.z), x.w);
            }
        }
        const float2 both = unpack<HALF>(sum);
        return both.x < 1e35f && both.y < 1e35f;
    }

    // `source` is row lane / 4.
    inline void load(const uchar *source) {
#pragma unroll
        for (uint s = 0; s < 4; s++) {
#pragma unroll
            for (uint i = 0; i < PIECES; i++) {
                words[s][i] = reinterpret_cast<const uint4 *>(source)[first_of(s) + i];
            }
        }
    }

    // Word i of a strip, with the signs of its coordinates.
    inline uint flipped(uint s, uint i, const uint4 *signs) const {
        const uint4 x = words[s][i / 4], flip = signs[first_of(s) + i / 4];
        return i % 4 == 0 ? x.x ^ flip.x : i % 4 == 1 ? x.y ^ flip.y : i % 4 == 2 ? x.z ^ flip.z : x.w ^ flip.w;
    }

    // y[r][s][c]: coordinate c of strip g + 8 s of row 2t + r, rotated.
    template <bool HALF> inline void rotate(float (&y)[2][2][STRIP], const uint (&a)[4], const uint *signs) const {
        const uint4 *flips = reinterpret_cast<const uint4 *>(signs);
#pragma unroll
        for (uint i = 0; i < STRIP / 2; i++) {
            const uint w[4] = {flipped(0, i, flips), flipped(1, i, flips), flipped(2, i, flips), flipped(3, i, flips)};
#pragma unroll
            for (uint half = 0; half < 2; half++) {
                const uint halves = half == 0 ? 0x5410 : 0x7632, c = 2 * i + half;
                float sum[4] = {};
                mma<HALF>(sum, a, make_uint2(__byte_perm(w[0], w[1], halves), __byte_perm(w[2], w[3], halves)));
                y[0][0][c] = sum[0];
                y[1][0][c] = sum[1];
                y[0][1][c] = sum[2];
                y[1][1][c] = sum[3];
            }
        }
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            transform<STRIP>(y[i / 2][i % 2]);
        }
        if (DIM != 256) {
#pragma unroll
            for (uint i = 0; i < 4 * STRIP; i++) {
                // The remaining factor of 1 / sqrt(DIM).
                y[i / STRIP / 2][i / STRIP % 2][i % STRIP] *= 0.70710678118654752f;
            }
        }
    }
};

// Subtracts a mean from eight rotated rows.
template <uint DIM> inline void subtract_from_eight(float (&y)[2][2][DIM / 16], const float *mean, uint lane) {
    constexpr uint STRIP = DIM / 16;
#pragma unroll
    for (uint s = 0; s < 2; s++) {
#pragma unroll
        for (uint c = 0; c < STRIP; c += 4) {
            const float4 m = *reinterpret_cast<const float4 *>(mean + (lane / 4 + 8 * s) * STRIP + c);
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                y[0][s][c + i] -= part(m, i);
                y[1][s][c + i] -= part(m, i);
            }
        }
    }
}

// The destination of one of eight rows: row `at` of the planes, if it is kept.
struct StoredRow {
    WritablePlanes to;
    ulong at;
    bool kept;
};

// Squared lengths of a lane's two rows and of their blocks; the factors by which the rows were scaled.
template <uint BLOCKS> struct Energies {
    float blocks[2][BLOCKS];
    float total[2], unit[2];
};

// Squares of tiny rows lose digits: scales the coordinates of such rows to about 1, and adds the squares again.
template <uint STRIP, uint BLOCKS>
inline void rescale_tiny_rows(float (&y)[2][2][STRIP], Energies<BLOCKS> &energy) {
#pragma unroll
    for (uint r = 0; r < 2; r++) {
        float largest = 0;
#pragma unroll
        for (uint i = 0; i < 2 * STRIP; i++) {
            largest = fmaxf(largest, fabsf(y[r][i / STRIP][i % STRIP]));
        }
#pragma unroll
        for (uint distance = 4; distance < 32; distance *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, distance));
        }
        energy.unit[r] = energy.total[r] < 1e-24f ? unit_of(largest) : 1;
        float again[BLOCKS] = {};
#pragma unroll
        for (uint i = 0; i < 2 * STRIP; i++) {
            float &x = y[r][i / STRIP][i % STRIP];
            x *= energy.unit[r];
            again[i / STRIP % BLOCKS] = fmaf(x, x, again[i / STRIP % BLOCKS]);
        }
#pragma unroll
        for (uint b = 0; b < BLOCKS; b++) {
            energy.blocks[r][b] = strips_sum(again[b]);
        }
    }
}

// Computes the squared lengths; scales tiny rows.
template <uint STRIP, uint BLOCKS> inline void add_squares(float (&y)[2][2][STRIP], Energies<BLOCKS> &energy) {
    // The square of row r and block b. A single block has both strips.
#pragma unroll
    for (uint r = 0; r < 2; r++) {
#pragma unroll
        for (uint b = 0; b < BLOCKS; b++) {
            energy.blocks[r][b] = 0;
        }
#pragma unroll
        for (uint s = 0; s < 2; s++) {
            float sum = 0;
#pragma unroll
            for (uint c = 0; c < STRIP; c++) {
                sum = fmaf(y[r][s][c], y[r][s][c], sum);
            }
            energy.blocks[r][s % BLOCKS] += sum;
        }
    }
#pragma unroll
    for (uint r = 0; r < 2; r++) {
        energy.unit[r] = 1;
        energy.total[r] = 0;
#pragma unroll
        for (uint b = 0; b < BLOCKS; b++) {
            energy.blocks[r][b] = strips_sum(energy.blocks[r][b]);
            energy.total[r] += energy.blocks[r][b];
        }
    }
    if (__any_sync(ALL, fminf(energy.total[0], energy.total[1]) < 1e-24f)) {
        rescale_tiny_rows(y, energy);
    }
}

// Finds the indices of a strip, whose coordinates are multiplied by `inverse`. Adds the products of coordinates and
// centroids to yc, and the squares of centroids to cc.
template <uint CODEC, uint COPIES, uint STRIP>
inline void encode_strip(const float (&y)[STRIP], float inverse, const Nearest<CODEC, COPIES> &nearest_to,
                         uint (&index)[STRIP], float &yc, float &cc) {
    float products[2] = {}, squares[2] = {};
#pragma unroll
    for (uint c = 0; c < STRIP; c++) {
        float value;
        index[c] = nearest_to(y[c] * inverse, value);
        products[c % 2] = fmaf(y[c], value, products[c % 2]);
        squares[c % 2] = fmaf(value, value, squares[c % 2]);
    }
    yc += products[0] + products[1];
    cc += squares[0] + squares[1];
}

// Stores the indices of a strip.
template <uint DIM, uint CODEC> inline void store_strip(const StoredRow &row, uint strip, const uint (&index)[DIM / 16]) {
    constexpr uint STRIP = DIM / 16, LOW = low_bits_of(CODEC), HIGH = high_bits_of(CODEC);
    store_fields<LOW, 0, STRIP, HIGH == 0>(row.to.low + row.at * (DIM / 8 * LOW) + strip * (STRIP / 8 * LOW), index);
    if constexpr (HIGH > 0) {
        store_fields<HIGH, LOW, STRIP, false>(row.to.high + row.at * (DIM / 8 * HIGH) + strip * (STRIP / 8 * HIGH), index);
    }
}

// Encodes eight rotated rows; `place` returns the place of the i-th. All lanes call it together.
template <uint DIM, uint CODEC, uint NORM, uint COPIES, typename Place>
inline void store_eight(float (&y)[2][2][DIM / 16], Place place, float scale, const Nearest<CODEC, COPIES> &nearest_to,
                        uint lane) {
    constexpr uint STRIP = DIM / 16, BLOCK = DIM < 256 ? DIM : 256, BLOCKS = DIM / BLOCK;
    const uint g = lane / 4, t = lane % 4;
    Energies<BLOCKS> energy;
    add_squares(y, energy);
    // Each lane computes the norm of one block of one row.
    const uint my_row = g % 2, my_block = g / 2 % BLOCKS;
    const auto mine = [&](const float(&of)[2][BLOCKS]) {
        const float first = my_row == 0 ? of[0][0] : of[1][0], last = my_row == 0 ? of[0][BLOCKS - 1] : of[1][BLOCKS - 1];
        return my_block == 0 ? first : last;
    };
    const float my_energy = mine(energy.blocks);
    const float n = sqrtf(my_energy / float(BLOCK)) / scale;
    const float my_inverse = n > 0 ? 1 / n : 0;
    float yc[2][BLOCKS] = {}, cc[2][BLOCKS] = {};
#pragma unroll
    for (uint r = 0; r < 2; r++) {
        const StoredRow row = place(2 * t + r);
        const bool storable = !is_nan_or_infinite(energy.total[r]);
#pragma unroll
        for (uint s = 0; s < 2; s++) {
            const uint b = s % BLOCKS;
            const float inverse = __shfl_sync(ALL, my_inverse, b * 8 + r * 4 + t);
            uint index[STRIP];
            encode_strip(y[r][s], inverse, nearest_to, index, yc[r][b], cc[r][b]);
            if (!storable) {
#pragma unroll
                for (uint c = 0; c < STRIP; c++) {
                    index[c] = 0;
                }
            }
            if (row.kept) {
                store_strip<DIM, CODEC>(row, g + s * 8, index);
            }
        }
    }
    if (NORM != NORM_RMS) {
#pragma unroll
        for (uint i = 0; i < 2 * BLOCKS; i++) {
            yc[i / BLOCKS][i % BLOCKS] = strips_sum(yc[i / BLOCKS][i % BLOCKS]);
            if (NORM == NORM_MIN_SQUARES) {
                cc[i / BLOCKS][i % BLOCKS] = strips_sum(cc[i / BLOCKS][i % BLOCKS]);
            }
        }
    }
    const StoredRow row = place(2 * t + my_row);
    if (row.kept && g < 2 * BLOCKS) {
        const float norm = NORM == NORM_RMS ? n : NORM == NORM_MIN_SQUARES ? mine(yc) / mine(cc) : my_energy / mine(yc);
        const bool storable = !is_nan_or_infinite(my_row == 0 ? energy.total[0] : energy.total[1]);
        const float stored_norm = my_energy > 0 ? norm / (my_row == 0 ? energy.unit[0] : energy.unit[1]) : 0;
        store_norm<CODEC>(row.to, row.at * BLOCKS + my_block, storable ? stored_norm : __uint_as_float(0x7FC00000));
    }
}

#endif
