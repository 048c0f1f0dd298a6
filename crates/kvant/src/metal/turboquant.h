// TurboQuant's encoding of a row, as codec/turboquant.rs defines it, and storing of rows for any codec.
//
// All threads of a threadgroup share a row in threadgroup memory. A thread takes four coordinates at a time, from
// 4·lane on, so that a SIMD-group has 128 consecutive coordinates. A thread's coordinates fill whole bytes of every
// plane, except planes of single bits, in which two threads share a byte.
#ifndef KVANT_TURBOQUANT_H
#define KVANT_TURBOQUANT_H
#include "planes.h"
#include "rotate.h"
#include "reduce.h"
#include "rows.h"

// The numbers of norms (metal/planes.rs).
constant constexpr uint NORM_RMS = 0;
constant constexpr uint NORM_MIN_SQUARES = 1;
constant constexpr uint NORM_UNBIASED = 2;

// Floats of threadgroup memory that write_row needs in addition to the row: three for each 128 coordinates.
constant constexpr uint WRITE_ROOM = 3 * 32;

struct WritablePlanes {
    device uchar *low;
    device uchar *high;
    device uchar *norms;
    device uchar *means;
};

struct Encoding {
    uint codec;
    uint norm;
    float scale;
};

// The number of the 2^bits − 1 ascending thresholds that z exceeds.
inline uint nearest(float z, const constant float *thresholds, uint bits) {
    uint index = 0;
    for (uint step = 1u << (bits - 1); step > 0; step /= 2) {
        index += z > thresholds[index + step - 1] ? step : 0;
    }
    return index;
}

inline uint nearest(float z, uint codec) {
    switch (plain(codec)) {
    case TQ2: return nearest(z, THRESHOLDS_2, 2);
    case TQ3: return nearest(z, THRESHOLDS_3, 3);
    case TQ4: return nearest(z, THRESHOLDS_4, 4);
    case TQ5: return nearest(z, THRESHOLDS_5, 5);
    case TQ6: return nearest(z, THRESHOLDS_6, 6);
    default: return nearest(z, THRESHOLDS_8, 8);
    }
}

// Stores the indices of coordinates j .. j+3; all lanes of a SIMD-group call it; lanes with `mine` have coordinates.
inline void store_indices(WritablePlanes to, ulong row, uint j, bool mine, uint4 index, uint dim, uint codec) {
    codec = plain(codec);
    // Two lanes have the bits of a byte: the even one stores both halves.
    const bool has_singles = codec == TQ3 || codec == TQ5;
    const uint4 single = index >> (codec == TQ3 ? 2 : 4);
    const uint half = single.x | single.y << 1 | single.z << 2 | single.w << 3;
    const uint next = has_singles ? simd_shuffle_xor(half, ushort(1)) : 0;
    if (!mine) {
        return;
    }
    if (codec == TQ8) {
        const uint bytes = index.x | index.y << 8 | index.z << 16 | index.w << 24;
        *reinterpret_cast<device uint *>(to.low + row * dim + j) = bytes;
        return;
    }
    if (codec == TQ2 || codec == TQ3) {
        const uint4 low = index & 3;
        to.low[row * (dim / 4) + j / 4] = uchar(low.x | low.y << 2 | low.z << 4 | low.w << 6);
    } else {
        const uint4 low = index & 15;
        *reinterpret_cast<device ushort *>(to.low + row * (dim / 2) + j / 2) =
            ushort(low.x | low.y << 4 | low.z << 8 | low.w << 12);
    }
    if (has_singles && j % 8 == 0) {
        to.high[row * (dim / 8) + j / 8] = uchar(half | next << 4);
    } else if (codec == TQ6) {
        const uint4 high = index >> 4;
        to.high[row * (dim / 4) + j / 4] = uchar(high.x | high.y << 2 | high.z << 4 | high.w << 6);
    }
}

// The sum for the block of coordinate j, from the sums of its parts of 128 coordinates.
inline float block_sum(threadgroup const float *parts, uint j, uint dim) {
    return dim <= 128 ? parts[0] : parts[j / 256 * 2] + parts[j / 256 * 2 + 1];
}

inline float4 coordinates(threadgroup const float *row, uint j, bool mine) {
    return mine ? get4(row, j, 4, true) : float4(0);
}

// parts ← the squared lengths, times unit², of each 128 coordinates. Ends with a barrier.
inline void sum_squares(threadgroup const float *row, threadgroup float *parts, float unit, uint dim, Place place) {
    for (uint start = 128 * place.simdgroup; start < dim; start += 128 * place.simdgroups) {
        const uint j = start + 4 * place.lane;
        const float4 y = coordinates(row, j, j < dim) * unit;
        const float squares = simd_sum(dot(y, y));
        if (place.lane == 0) {
            parts[start / 128] = squares;
        }
    }
    wait_for(place);
}

// Stores norm i. A half is rounded to nearest; norms above the largest half become infinite.
inline void store_norm(WritablePlanes to, ulong i, float norm, uint codec) {
    if (is_centred(codec)) {
        store(to.norms, i, norm, F16);
    } else {
        reinterpret_cast<device float *>(to.norms)[i] = norm;
    }
}

// Encodes a rotated row. If the codec is centred, the caller has subtracted the mean; each thread has done so for the
// coordinates that it reads here: four from 4·index on in every 4·threads. `room` has WRITE_ROOM unused floats.
inline void encode(threadgroup const float *row, threadgroup float *room, WritablePlanes to, ulong at, uint dim,
                   Encoding encoding, Place place) {
    threadgroup float *squares = room, *products = room + 32, *lengths = room + 64;
    const uint index = index_of(place), threads = threads_of(place);
    sum_squares(row, squares, 1, dim, place);
    float total = 0;
    for (uint part = 0; part < (dim + 127) / 128; part++) {
        total += squares[part];
    }
    const bool storable = is_finite(total);
    float unit = 1;
    if (total < 1e-24f) {
        // Squares this small have lost precision: sum once more, with the coordinates scaled to about 1.
        float largest = 0;
        for (uint j = index; j < dim; j += threads) {
            largest = max(largest, abs(row[j]));
        }
        unit = unit_of(reduce<Max>(largest, products, place));
        // Other threads may still sum the squares: within a SIMD-group, a reduction has no barrier.
        wait_for(place);
        sum_squares(row, squares, unit, dim, place);
    }
    const uint block = min(dim, 256u);
    for (uint start = 128 * place.simdgroup; start < dim; start += 128 * place.simdgroups) {
        const uint j = start + 4 * place.lane;
        const bool mine = j < dim;
        const float n = precise::sqrt(block_sum(squares, start, dim) / float(block)) / encoding.scale;
        const float4 y = coordinates(row, j, mine) * unit;
        const float4 z = n > 0 ? y / n : float4(0);
        uint4 indices = uint4(nearest(z.x, encoding.codec), nearest(z.y, encoding.codec), nearest(z.z, encoding.codec),
                              nearest(z.w, encoding.codec));
        indices = storable ? indices : uint4(0);
        store_indices(to, at, j, mine, indices, dim, encoding.codec);
        if (encoding.norm != NORM_RMS) {
            const float4 c = mine ? centroids(indices, encoding.codec) : float4(0);
            const float yc = simd_sum(dot(y, c)), cc = simd_sum(dot(c, c));
            if (place.lane == 0) {
                products[start / 128] = yc;
                lengths[start / 128] = cc;
            }
        }
    }
    wait_for(place);
    const uint blocks = dim / block;
    for (uint b = index; b < blocks; b += threads) {
        const float energy = block_sum(squares, b * block, dim);
        float norm = 0;
        if (!storable) {
            norm = as_type<float>(NAN_BITS);
        } else if (energy > 0) {
            switch (encoding.norm) {
            case NORM_RMS: norm = precise::sqrt(energy / float(block)) / encoding.scale; break;
            case NORM_MIN_SQUARES:
                norm = block_sum(products, b * block, dim) / block_sum(lengths, b * block, dim);
                break;
            default: norm = energy / block_sum(products, b * block, dim); break;
            }
        }
        store_norm(to, at * blocks + b, norm / unit, encoding.codec);
    }
}

// Stores a row of threadgroup memory, which may be changed, as row `at` of the planes, whose codec is not centred.
// Begins with a barrier.
inline void write_row(threadgroup float *row, threadgroup float *room, WritablePlanes to, ulong at, uint dim,
                      Encoding encoding, bool aligned, Place place) {
    if (is_quantised(encoding.codec)) {
        rotate(row, 1, dim, false, index_of(place), threads_of(place));
        encode(row, room, to, at, dim, encoding, place);
        return;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_row(to.low, at * dim, row, dim, encoding.codec, aligned, index_of(place), threads_of(place));
}

#endif
