// Rows of a cache layer, encoded and stored: dense ones converted, TurboQuant as codec/turboquant.rs defines it.
//
// All threads of a block share a row in shared memory. A thread takes four coordinates at a time, 4·lane on,
// so that a warp has 128 in a row: whole bytes of every plane but the high one at 5 bits, of which two threads
// have a half each.
#ifndef KVANT_TURBOQUANT_H
#define KVANT_TURBOQUANT_H
#include "planes.h"
#include "rotate.h"
#include "team.h"

// The numbers of norms (cuda/planes.rs).
constexpr uint NORM_RMS = 0;
constexpr uint NORM_LEAST_SQUARES = 1;
constexpr uint NORM_UNBIASED = 2;

// Shared memory of store_row, beyond the row.
constexpr uint STORE_ROOM = 3 * EXCHANGE;

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

// How many of the 2^bits − 1 ascending thresholds z exceeds.
inline uint nearest(float z, const float *thresholds, uint bits) {
    uint index = 0;
    for (uint step = 1u << (bits - 1); step > 0; step /= 2) {
        index += z > thresholds[index + step - 1] ? step : 0;
    }
    return index;
}

inline uint nearest(float z, uint codec) {
    switch (codec) {
    case TQ4: return nearest(z, THRESHOLDS_4, 4);
    case TQ5: return nearest(z, THRESHOLDS_5, 5);
    case TQ6: return nearest(z, THRESHOLDS_6, 6);
    default: return nearest(z, THRESHOLDS_8, 8);
    }
}

// Stores the indices of coordinates j .. j+3; all lanes of a warp call it, those with `mine` have coordinates.
inline void store_indices(WritablePlanes to, ulong row, uint j, bool mine, uint4 index, uint dim, uint codec) {
    // Two lanes have the bits of a byte: the even one takes both halves.
    const uint fifth = index.x >> 4 | index.y >> 4 << 1 | index.z >> 4 << 2 | index.w >> 4 << 3;
    const uint next = codec == TQ5 ? __shfl_xor_sync(ALL, fifth, 1) : 0;
    if (!mine) {
        return;
    }
    if (codec == TQ8) {
        const uint bytes = index.x | index.y << 8 | index.z << 16 | index.w << 24;
        *reinterpret_cast<uint *>(to.low + row * dim + j) = bytes;
        return;
    }
    const uint4 low = make_uint4(index.x & 15, index.y & 15, index.z & 15, index.w & 15);
    *reinterpret_cast<ushort *>(to.low + row * (dim / 2) + j / 2) =
        ushort(low.x | low.y << 4 | low.z << 8 | low.w << 12);
    if (codec == TQ5 && j % 8 == 0) {
        to.high[row * (dim / 8) + j / 8] = uchar(fifth | next << 4);
    } else if (codec == TQ6) {
        const uint4 high = make_uint4(index.x >> 4, index.y >> 4, index.z >> 4, index.w >> 4);
        to.high[row * (dim / 4) + j / 4] = uchar(high.x | high.y << 2 | high.z << 4 | high.w << 6);
    }
}

// What the parts of 128 coordinates, in `parts`, make for the block of coordinate j.
inline float block_sum(const float *parts, uint j, uint dim) {
    return dim <= 128 ? parts[0] : parts[j / 256 * 2] + parts[j / 256 * 2 + 1];
}

inline float4 coordinates(const float *row, uint j, bool mine) {
    return mine ? make_float4(row[j], row[j + 1], row[j + 2], row[j + 3]) : all4(0);
}

// parts ← the squared lengths, times unit², of each 128 coordinates. Ends with a barrier.
inline void sum_squares(const float *row, float *parts, float unit, uint dim, Team team) {
    for (uint start = 128 * team.warp; start < dim; start += 4 * team.size) {
        const uint j = start + 4 * team.lane;
        const float4 y = unit * coordinates(row, j, j < dim);
        const float squares = over_warp<Sum>(dot(y, y));
        if (team.lane == 0) {
            parts[start / 128] = squares;
        }
    }
    __syncthreads();
}

// Encodes a row, which is left rotated. `room` holds STORE_ROOM floats that nobody uses.
inline void encode(float *row, float *room, WritablePlanes to, ulong at, uint dim,
                   Encoding encoding, Team team) {
    float *squares = room, *products = room + EXCHANGE, *lengths = room + 2 * EXCHANGE;
    rotate(row, 1, dim, false, team.index, team.size);
    sum_squares(row, squares, 1, dim, team);
    float total = 0;
    for (uint part = 0; part < (dim + 127) / 128; part++) {
        total += squares[part];
    }
    const bool storable = !is_nan_or_infinite(total);
    float unit = 1;
    if (total < 1e-24f) {
        // Squares this small have lost digits: once more, with the coordinates near 1.
        float largest = 0;
        for (uint j = team.index; j < dim; j += team.size) {
            largest = fmaxf(largest, fabsf(row[j]));
        }
        unit = unit_of(over_team<Max>(largest, products, team));
        sum_squares(row, squares, unit, dim, team);
    }
    const uint block = min(dim, 256u);
    for (uint start = 128 * team.warp; start < dim; start += 4 * team.size) {
        const uint j = start + 4 * team.lane;
        const bool mine = j < dim;
        const float n = sqrtf(block_sum(squares, start, dim) / float(block)) / encoding.scale;
        const float4 y = unit * coordinates(row, j, mine);
        const float4 z = n > 0 ? make_float4(y.x / n, y.y / n, y.z / n, y.w / n) : all4(0);
        uint4 index = make_uint4(nearest(z.x, encoding.codec), nearest(z.y, encoding.codec), nearest(z.z, encoding.codec),
                            nearest(z.w, encoding.codec));
        index = storable ? index : make_uint4(0, 0, 0, 0);
        store_indices(to, at, j, mine, index, dim, encoding.codec);
        if (encoding.norm != NORM_RMS) {
            const float4 c = mine ? centroids(index, encoding.codec) : all4(0);
            const float yc = over_warp<Sum>(dot(y, c)), cc = over_warp<Sum>(dot(c, c));
            if (team.lane == 0) {
                products[start / 128] = yc;
                lengths[start / 128] = cc;
            }
        }
    }
    __syncthreads();
    const uint blocks = dim / block;
    for (uint b = team.index; b < blocks; b += team.size) {
        const float energy = block_sum(squares, b * block, dim);
        float norm = 0;
        if (!storable) {
            norm = __uint_as_float(0x7FC00000);
        } else if (energy > 0) {
            switch (encoding.norm) {
            case NORM_RMS: norm = sqrtf(energy / float(block)) / encoding.scale; break;
            case NORM_LEAST_SQUARES:
                norm = block_sum(products, b * block, dim) / block_sum(lengths, b * block, dim);
                break;
            default: norm = energy / block_sum(products, b * block, dim); break;
            }
        }
        to.norms[at * blocks + b] = norm / unit;
    }
}

// Stores a row of shared memory, which may be changed, as row `at` of the planes. It begins with a barrier.
inline void store_row(float *row, float *room, WritablePlanes to, ulong at, uint dim,
                      Encoding encoding, Team team) {
    if (is_quantised(encoding.codec)) {
        encode(row, room, to, at, dim, encoding, team);
        return;
    }
    __syncthreads();
    for (uint j = team.index; j < dim; j += team.size) {
        store(to.low, at * dim + j, row[j], encoding.codec);
    }
}

#endif
