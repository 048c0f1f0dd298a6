// A row of keys or values, divided among some lanes of a SIMD-group.
//
// L lanes share a row of D coordinates. Coordinates are divided into quads of four. Lane c has quads c, c + L, c + 2L,
// …; if it loads eight coordinates at once, it has quads 2c and 2c + 1 of every 2L. A load of a SIMD-group therefore
// reads whole sectors. Codes are converted to centroids by simd_shuffle or by a table in threadgroup memory. `constant`
// memory would serialise lanes with different indices.
#ifndef KVANT_ATTEND_LANES_H
#define KVANT_ATTEND_LANES_H
#include "attend/keys.h"

// Maximum quads of a lane; if L does not divide the quads, some lanes have one fewer.
constexpr uint quads_of_lane(uint dim, uint lanes) {
    return (dim / 4 + lanes - 1) / lanes;
}

// Whether a lane may have eight coordinates at once.
constexpr bool are_pairs(uint dim, uint lanes) {
    return dim / 4 % (2 * lanes) == 0;
}

// Quad n of lane c, as a quad of the row.
inline uint quad_of(uint n, uint c, uint lanes, bool pairs) {
    return pairs ? (n / 2 * lanes + c) * 2 + n % 2 : n * lanes + c;
}

// A codebook. Up to 32 centroids are in the lanes' registers: lane i has centroid i. Larger codebooks are tables.
struct Codebook {
    float mine;
    threadgroup const float *table;
};

constant constexpr uint TABLE = 256;

inline bool has_table(uint codec) {
    return is_quantised(codec) && plain(codec) > TQ5;
}

inline float centroid(uint index, uint codec) {
    switch (plain(codec)) {
    case TQ2: return CENTROIDS_2[index & 3];
    case TQ3: return CENTROIDS_3[index & 7];
    case TQ4: return CENTROIDS_4[index & 15];
    case TQ5: return CENTROIDS_5[index & 31];
    case TQ6: return CENTROIDS_6[index & 63];
    default: return CENTROIDS_8[index & 255];
    }
}

// All lanes of a SIMD-group call it.
inline float4 looked_up(Codebook book, uint4 index, uint codec) {
    if (has_table(codec)) {
        return float4(book.table[index.x], book.table[index.y], book.table[index.z], book.table[index.w]);
    }
    return float4(simd_shuffle(book.mine, ushort(index.x)), simd_shuffle(book.mine, ushort(index.y)),
                  simd_shuffle(book.mine, ushort(index.z)), simd_shuffle(book.mine, ushort(index.w)));
}

// The address of a row in the planes low and high.
struct RowAddress {
    device const uchar *low;
    device const uchar *high;
};

inline uint low_bytes(uint dim, uint codec) {
    switch (is_quantised(codec) ? plain(codec) : codec) {
    case F32: return dim * 4;
    case F16:
    case BF16: return dim * 2;
    case TQ2:
    case TQ3: return dim / 4;
    case TQ8: return dim;
    default: return dim / 2;
    }
}

inline uint high_bytes(uint dim, uint codec) {
    return plain(codec) == TQ6 ? dim / 4 : dim / 8;
}

inline RowAddress address_of(Planes planes, RowPlace at, uint dim, uint codec) {
    return RowAddress{planes.low + at.bytes + at.row * low_bytes(dim, codec),
                      has_high(codec) ? planes.high + at.bytes + at.row * high_bytes(dim, codec) : nullptr};
}

// The address of a row's norms; a row has `count` norms.
inline device const uchar *norms_of(Planes planes, RowPlace at, uint count, uint codec) {
    return is_quantised(codec) ? planes.norms + at.bytes + at.row * (count * (is_centred(codec) ? 2 : 4)) : nullptr;
}

// The address `rows` rows after `from`.
inline RowAddress further(RowAddress from, uint rows, uint dim, uint codec) {
    return RowAddress{from.low + rows * low_bytes(dim, codec),
                      has_high(codec) ? from.high + rows * high_bytes(dim, codec) : nullptr};
}

// The bits of eight coordinates, or of four: elements or codes.
struct Piece {
    uint4 low;
    uint high;
};

// Coordinates 8·i .. 8·i+7 with `pairs`, else 4·i .. 4·i+3. Rows begin at multiples of 4 bytes, except in unaligned
// dense planes, which are read element by element.
inline Piece load_piece(RowAddress row, uint i, bool pairs, uint codec, bool aligned) {
    Piece piece = {uint4(0), 0};
    switch (is_quantised(codec) ? plain(codec) : codec) {
    case TQ8:
        if (pairs) {
            piece.low.xy = uint2(reinterpret_cast<device const packed_uint2 *>(row.low)[i]);
        } else {
            piece.low.x = reinterpret_cast<device const uint *>(row.low)[i];
        }
        break;
    case TQ2:
    case TQ3:
        piece.low.x = pairs ? uint(reinterpret_cast<device const ushort *>(row.low)[i]) : uint(row.low[i]);
        break;
    case TQ4:
    case TQ5:
    case TQ6:
        piece.low.x = pairs ? reinterpret_cast<device const uint *>(row.low)[i]
                            : uint(reinterpret_cast<device const ushort *>(row.low)[i]);
        break;
    case F32: piece.low = as_type<uint4>(load4(row.low, i * 4, 4, F32, aligned)); break;
    default:
        if (!aligned) {
            device const ushort *elements = reinterpret_cast<device const ushort *>(row.low) + i * (pairs ? 8 : 4);
            for (uint n = 0; n < (pairs ? 4 : 2); n++) {
                piece.low[n] = uint(elements[2 * n]) | uint(elements[2 * n + 1]) << 16;
            }
        } else if (pairs) {
            piece.low = uint4(reinterpret_cast<device const packed_uint4 *>(row.low)[i]);
        } else {
            piece.low.xy = uint2(reinterpret_cast<device const packed_uint2 *>(row.low)[i]);
        }
    }
    if (has_high(codec)) {
        if (plain(codec) == TQ6) {
            piece.high = pairs ? uint(reinterpret_cast<device const ushort *>(row.high)[i]) : uint(row.high[i]);
        } else {
            piece.high = pairs ? uint(row.high[i]) : uint(row.high[i / 2]) >> (i % 2 * 4);
        }
    }
    return piece;
}

// Four neighbouring fields of `width` bits, from bit `at` on.
inline uint4 fields(uint bits, uint at, uint width) {
    return uint4(extract_bits(bits, at, width), extract_bits(bits, at + width, width),
                 extract_bits(bits, at + 2 * width, width), extract_bits(bits, at + 3 * width, width));
}

// The first or second four coordinates of a piece. All lanes of a SIMD-group call it.
inline float4 quad_from(Piece piece, uint half_of, uint codec, Codebook book) {
    if (!is_quantised(codec)) {
        if (codec == F32) {
            return as_type<float4>(piece.low);
        }
        const uint2 bits = half_of == 0 ? piece.low.xy : piece.low.zw;
        if (codec == F16) {
            return float4(float2(as_type<half2>(bits.x)), float2(as_type<half2>(bits.y)));
        }
        return as_type<float4>(uint4(bits.x << 16, bits.x & 0xFFFF0000, bits.y << 16, bits.y & 0xFFFF0000));
    }
    const uint bits = plain(codec);
    uint4 index;
    if (bits == TQ8) {
        index = fields(half_of == 0 ? piece.low.x : piece.low.y, 0, 8);
    } else if (bits == TQ2 || bits == TQ3) {
        index = fields(piece.low.x, 8 * half_of, 2);
    } else {
        index = fields(piece.low.x, 16 * half_of, 4);
    }
    if (bits == TQ3 || bits == TQ5) {
        index |= fields(piece.high, 4 * half_of, 1) << (bits == TQ3 ? 2 : 4);
    } else if (bits == TQ6) {
        index |= fields(piece.high, 8 * half_of, 2) << 4;
    }
    return looked_up(book, index, codec);
}

// The coordinates of lane c of a row: quads 0 .. QUADS-1 of it.
template <uint D, uint L> struct LaneOfRow {
    float4 quads[quads_of_lane(D, L)];
};

// `wanted`: whether the lane's row may be read; if not, quads are zero or any finite values. All lanes of a SIMD-group
// call it.
template <uint D, uint L>
LaneOfRow<D, L> load_row(RowAddress row, uint c, bool wanted, bool pairs, uint codec, bool aligned, Codebook book) {
    constexpr uint OWN = quads_of_lane(D, L);
    LaneOfRow<D, L> lane;
    for (uint n = 0; n < OWN; n += pairs ? 2 : 1) {
        Piece piece = {uint4(0), 0};
        if (wanted && (D / 4 % L == 0 || n * L + c < D / 4)) {
            piece = load_piece(row, pairs ? n / 2 * L + c : n * L + c, pairs, codec, aligned);
        }
        lane.quads[n] = quad_from(piece, 0, codec, book);
        if (pairs) {
            lane.quads[n + 1] = quad_from(piece, 1, codec, book);
        }
    }
    return lane;
}

#endif
