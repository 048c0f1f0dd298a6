// Keys or values of a codec as A operands of attend_generic.cu: the layout of their rows in shared memory, and loads
// from there.
//
// Keys: A = K, 16 keys x 16 coordinates. Values: A = V transposed, 16 coordinates x 16 keys. Both are read from one
// layout: rows as they are stored, padded by 16 bytes to avoid bank conflicts. A lane takes coordinates in memory
// order, whole words at a time. For keys this permutes k of the product, and the queries are permuted to match. For
// values it permutes the rows of the product, and the output is reordered at the end.
//
// PARTS: number of 16-bit numbers whose sum is a coordinate. Dense f16 and bf16 are one part. f32 is a sum of bf16
// parts. Centroids are f16: one part rounds them to 11 bits, two parts keep 22.
#ifndef KVANT_CUDA_ATTEND_GENERIC_OPERANDS_H
#define KVANT_CUDA_ATTEND_GENERIC_OPERANDS_H
#include "codec/planes.h"
#include "device/fragments.h"

template <uint CODEC, uint PARTS, uint DIM>
struct Operand {
    static constexpr bool QUANTISED = is_quantised(CODEC);
    static constexpr bool HALF = CODEC == F16 || QUANTISED;
    // Bits of a coordinate in the low plane, bytes of its rows.
    static constexpr uint BITS = CODEC == F32 ? 32 : !QUANTISED ? 16 : low_bits_of(CODEC);
    static constexpr uint ROW = DIM * BITS / 8;
    static constexpr uint PITCH = ROW + 16;
    static constexpr uint HIGH_BITS = QUANTISED ? high_bits_of(CODEC) : 0;
    static constexpr uint HIGH_ROW = DIM / 8 * HIGH_BITS;
    static constexpr uint HIGH_COPY = HIGH_ROW < 16 ? HIGH_ROW : 16;
    static constexpr uint HIGH_PITCH = HIGH_ROW + HIGH_COPY;
    static constexpr uint BLOCKS = QUANTISED ? (DIM + 255) / 256 : 0;

    // Centroids in shared memory, one copy for each lane so that lookups have no bank conflicts; fewer if memory is
    // short (LANE_COPIES). PAIRED: an entry is two f16 centroids, of both nibbles of a byte. Otherwise it is one
    // centroid in two parts: the rounded number in the low half, the rest in the high half.
    static constexpr bool PAIRED = CODEC == TQ4 && PARTS == 1;
    static constexpr uint ENTRIES = !QUANTISED ? 0 : PAIRED ? 256 : levels_of(CODEC);
    static constexpr uint TABLE_BYTES = ENTRIES * LANE_COPIES * 4;

    static float centroid(uint i) {
        return CODEC == TQ2   ? CENTROIDS_2[i]
               : CODEC == TQ3 ? CENTROIDS_3[i]
               : CODEC == TQ4 ? CENTROIDS_4[i]
               : CODEC == TQ5 ? CENTROIDS_5[i]
               : CODEC == TQ6 ? CENTROIDS_6[i]
                              : CENTROIDS_8[i];
    }

    static void fill_table(uint *table, uint thread, uint threads) {
        for (uint at = thread; at + 1 <= ENTRIES * LANE_COPIES; at += threads) {
            const uint i = at / LANE_COPIES;
            if constexpr (PAIRED) {
                table[at] = pack<true>(centroid(i & 15), centroid(i >> 4));
            } else {
                uint terms[2];
                split<true, 2>(centroid(i), 0, terms);
                table[at] = terms[0] & 0xFFFF | terms[1] << 16;
            }
        }
    }

    // The entry of byte `at` of a word of indices.
    static uint entry(const uint *lane_table, uint indices, uint at) {
        return lane_table[__byte_perm(indices, 0, 0x4440 | at) * LANE_COPIES];
    }

    // ------------------------------------------------------------------------------------------------------- keys

    // A lane's consecutive coordinates: a power of two that divides a quarter of the row, at most 32 bytes. Four lanes'
    // coordinates have one norm.
    static constexpr uint POWER_OF_QUARTER = DIM / 4 & (~(DIM / 4) + 1);
    static constexpr uint MAX_RUN = BITS == 2 ? 64 : 256 / BITS;
    static constexpr uint RUN = MAX_RUN < POWER_OF_QUARTER ? MAX_RUN : POWER_OF_QUARTER;
    static_assert(BLOCKS < 2 || 256 % (4 * RUN) == 0, "attend: products of keys do not cross blocks");
    // Bytes that a lane loads at a time, their coordinates, and their products (16 coordinates of a warp each).
    static constexpr uint MAX_LOAD = BITS == 2 ? 8 : 16;
    static constexpr uint LOAD = RUN * BITS / 8 < MAX_LOAD ? RUN * BITS / 8 : MAX_LOAD;
    static constexpr uint LOAD_COORDS = LOAD * 8 / BITS;
    static constexpr uint LOADS = DIM / 4 / LOAD_COORDS;
    static constexpr uint LOAD_STEPS = LOAD_COORDS / 4;
    static_assert(LOADS * LOAD_COORDS * 4 == DIM && LOAD_STEPS * 4 == LOAD_COORDS, "attend: lanes have whole products");

    // The first coordinate of load i of lane column t.
    static uint key_coord(uint i, uint t) {
        const uint at = i * LOAD_COORDS;
        return at / RUN * (4 * RUN) + t * RUN + at % RUN;
    }

    // The place of a coordinate in the queries' B operands: the product (16 coordinates), the lane column, the index
    // among the lane's four.
    static uint3 key_place(uint coord) {
        const uint at = coord / (4 * RUN) * RUN + coord % RUN;
        return make_uint3(at / 4, coord % (4 * RUN) / RUN, at % 4);
    }

    template <uint BYTES>
    static void load_words(const uchar *from, uint (&words)[BYTES < 4 ? 1 : BYTES / 4]) {
        if constexpr (BYTES == 16) {
            const uint4 x = *reinterpret_cast<const uint4 *>(from);
            words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
        } else if constexpr (BYTES == 8) {
            const uint2 x = *reinterpret_cast<const uint2 *>(from);
            words[0] = x.x, words[1] = x.y;
        } else if constexpr (BYTES == 4) {
            words[0] = *reinterpret_cast<const uint *>(from);
        } else if constexpr (BYTES == 2) {
            words[0] = *reinterpret_cast<const ushort *>(from);
        } else {
            words[0] = *from;
        }
    }

    // The indices of up to 8 coordinates. At 8 bits, x has the first four and y the last four. At fewer bits, x has the
    // even ones and y the odd ones.
    static uint2 indices8(uint low, uint next, uint high) {
        if constexpr (CODEC == TQ8) {
            return make_uint2(low, next);
        }
        uint even = low & 0x0F0F0F0F, odd = low >> 4 & 0x0F0F0F0F;
        if constexpr (BITS == 2) {
            // Coordinates 2i and 2i + 1 in byte i.
            uint bits = (low & 0x000000FF) | (low << 8 & 0x00FF0000);
            bits = (bits | bits << 4) & 0x0F0F0F0F;
            even = bits & 0x03030303;
            odd = bits >> 2 & 0x03030303;
        }
        if constexpr (HIGH_BITS == 1) {
            uint bits = (high | high << 12) & 0x000F000F;
            bits = (bits | bits << 6) & 0x03030303;
            constexpr uint ONE = 0x01010101 << BITS;
            even |= bits << BITS & ONE;
            odd |= bits << (BITS - 1) & ONE;
        } else if constexpr (CODEC == TQ6) {
            uint bits = (high | high << 8) & 0x00FF00FF;
            bits = (bits | bits << 4) & 0x0F0F0F0F;
            even |= bits << 4 & 0x30303030;
            odd |= bits << 2 & 0x30303030;
        }
        return make_uint2(even, odd);
    }

    // The low bits of eight coordinates from `at` on, a multiple of 8, counted from the beginning of the words. Higher
    // bits are arbitrary.
    template <uint N>
    static uint eight_of(const uint (&words)[N], uint at) {
        return BITS == 2 ? words[at / 16] >> at % 16 * 2 : words[at / 8];
    }

    static uint entry8(const uint *lane_table, uint2 indices, uint i) {
        if constexpr (CODEC == TQ8) {
            return entry(lane_table, i < 4 ? indices.x : indices.y, i % 4);
        } else {
            return entry(lane_table, i % 2 == 0 ? indices.x : indices.y, i / 2);
        }
    }

    // The bits of the high plane for the 8 coordinates from `coord` (even) on, or for fewer at the end of a byte.
    static uint high_bits(const uchar *high, uint coord) {
        if constexpr (HIGH_BITS == 1) {
            return uint(high[coord / 8]) >> coord % 8;
        } else if constexpr (CODEC == TQ6) {
            return coord % 8 == 0 ? *reinterpret_cast<const ushort *>(high + coord / 4)
                                  : uint(high[coord / 4]) >> coord % 4 * 2;
        } else {
            return 0;
        }
    }

    // A lane's data of one key during a load's products.
    struct KeyWords {
        uint words[LOAD < 4 ? 1 : LOAD / 4];
        // Indices by eight coordinates, unless PAIRED.
        uint2 indices[QUANTISED && !PAIRED ? (LOAD_COORDS + 7) / 8 : 1];
    };

    static void load_key(const uchar *low, const uchar *high, uint row, uint i, uint t, KeyWords &key) {
        const uint coord = key_coord(i, t);
        load_words<LOAD>(low + row * PITCH + coord * BITS / 8, key.words);
        if constexpr (QUANTISED && !PAIRED) {
            constexpr uint GROUPS = (LOAD_COORDS + 7) / 8;
#pragma unroll
            for (uint j = 0; j < GROUPS; j++) {
                const uint bits = high_bits(high + row * HIGH_PITCH, coord + 8 * j);
                if constexpr (CODEC == TQ8) {
                    key.indices[j] = indices8(key.words[2 * j], key.words[2 * j + 1], 0);
                } else {
                    key.indices[j] = indices8(eight_of(key.words, 8 * j), 0, bits);
                }
            }
        }
    }

    // The A operands of product `step` of a load: x holds key g, y key g + 8.
    static void key_operand(const KeyWords &x, const KeyWords &y, uint step, const uint *table, uint (&a)[PARTS][4]) {
        if constexpr (CODEC == F32) {
            uint p[PARTS], q[PARTS], r[PARTS], s[PARTS];
            auto f = [](uint word) { return __uint_as_float(word); };
            split<false, PARTS>(f(x.words[0]), f(x.words[1]), p);
            split<false, PARTS>(f(y.words[0]), f(y.words[1]), q);
            split<false, PARTS>(f(x.words[2]), f(x.words[3]), r);
            split<false, PARTS>(f(y.words[2]), f(y.words[3]), s);
#pragma unroll
            for (uint i = 0; i < PARTS; i++) {
                a[i][0] = p[i], a[i][1] = q[i], a[i][2] = r[i], a[i][3] = s[i];
            }
        } else if constexpr (!QUANTISED) {
            a[0][0] = x.words[2 * step], a[0][1] = y.words[2 * step];
            a[0][2] = x.words[2 * step + 1], a[0][3] = y.words[2 * step + 1];
        } else if constexpr (PAIRED) {
            const uint word = step / 2, at = step % 2 * 2;
            a[0][0] = entry(table, x.words[word], at), a[0][1] = entry(table, y.words[word], at);
            a[0][2] = entry(table, x.words[word], at + 1), a[0][3] = entry(table, y.words[word], at + 1);
        } else {
#pragma unroll
            for (uint i = 0; i < 2; i++) {
                const uint at = step % 2 * 4 + 2 * i;
                const uint2 of_x = x.indices[step / 2], of_y = y.indices[step / 2];
                join(entry8(table, of_x, at), entry8(table, of_x, at + 1), a, 2 * i);
                join(entry8(table, of_y, at), entry8(table, of_y, at + 1), a, 2 * i + 1);
            }
        }
    }

    // Two table entries as the pairs of every part.
    static void join(uint first, uint second, uint (&a)[PARTS][4], uint at) {
        a[0][at] = __byte_perm(first, second, 0x5410);
        if constexpr (PARTS == 2) {
            a[1][at] = __byte_perm(first, second, 0x7632);
        }
    }

    // ----------------------------------------------------------------------------------------------------- values

    // A warp has a slice of the coordinates. Each row g of lanes has an eighth of the slice.
    template <uint SLICE>
    struct Values {
        static constexpr uint LANE_COORDS = SLICE / 8;
        // At 2 bits, two lanes may share a byte.
        static constexpr uint LANE_BYTES = LANE_COORDS * BITS < 8 ? 1 : LANE_COORDS * BITS / 8;
        static constexpr uint LOAD = LANE_BYTES < 16 ? LANE_BYTES : 16;
        static constexpr uint COORDS = LOAD * 8 / BITS < LANE_COORDS ? LOAD * 8 / BITS : LANE_COORDS;
        static constexpr uint LOADS = LANE_BYTES / LOAD;
        static constexpr uint WORDS = LOAD < 4 ? 1 : LOAD / 4;
        static_assert((LOAD & LOAD - 1) == 0 && LOADS * LOAD == LANE_BYTES, "attend: lanes load whole words");

        // The coordinate, within the slice, of the lane's e-th.
        static uint coord(uint e, uint g) {
            return e / COORDS * (8 * COORDS) + g * COORDS + e % COORDS;
        }

        // Operands of f32 words, split into PARTS terms.
        template <typename Use> static void split_operands(const uint (&words)[4][WORDS], uint i, Use use) {
#pragma unroll
            for (uint e = 0; e < COORDS; e += 2) {
                uint a[PARTS][4];
#pragma unroll
                for (uint j = 0; j < 4; j++) {
                    uint terms[PARTS];
                    const uint k = j / 2 * 2, c = e + j % 2;
                    split<false, PARTS>(__uint_as_float(words[k][c]), __uint_as_float(words[k + 1][c]), terms);
#pragma unroll
                    for (uint p = 0; p < PARTS; p++) {
                        a[p][j] = terms[p];
                    }
                }
                use((i * COORDS + e) / 2, a);
            }
        }

        // Operands of 16-bit words.
        template <typename Use> static void dense_operands(const uint (&words)[4][WORDS], uint i, Use use) {
#pragma unroll
            for (uint e = 0; e < COORDS; e += 2) {
                uint a[PARTS][4];
#pragma unroll
                for (uint j = 0; j < 4; j += 2) {
                    a[0][j] = __byte_perm(words[j][e / 2], words[j + 1][e / 2], 0x5410);
                    a[0][j + 1] = __byte_perm(words[j][e / 2], words[j + 1][e / 2], 0x7632);
                }
                use((i * COORDS + e) / 2, a);
            }
        }

        // Operands of nibbles, each looked up with the nibble of another key.
        template <typename Use>
        static void paired_operands(const uint (&words)[4][WORDS], uint i, const uint *table, Use use) {
            // A byte of `even` holds an even coordinate of two keys, one of `odd` the coordinate after it.
            uint even[2][WORDS], odd[2][WORDS];
#pragma unroll
            for (uint w = 0; w < WORDS; w++) {
#pragma unroll
                for (uint j = 0; j < 2; j++) {
                    const uint x = words[2 * j][w], y = words[2 * j + 1][w];
                    even[j][w] = x & 0x0F0F0F0F | y << 4 & 0xF0F0F0F0;
                    odd[j][w] = x >> 4 & 0x0F0F0F0F | y & 0xF0F0F0F0;
                }
            }
#pragma unroll
            for (uint e = 0; e < COORDS; e += 2) {
                uint a[PARTS][4];
                const uint w = e / 8, at = e % 8 / 2;
#pragma unroll
                for (uint j = 0; j < 2; j++) {
                    a[0][2 * j] = entry(table, even[j][w], at);
                    a[0][2 * j + 1] = entry(table, odd[j][w], at);
                }
                use((i * COORDS + e) / 2, a);
            }
        }

        // Operands of other codes; the upper bits of `row` are in `high`, from coordinate `from` on.
        template <typename Use>
        static void code_operands(const uint (&words)[4][WORDS], const uchar *high, const uint (&row)[4], uint from,
                                  uint i, const uint *table, Use use) {
#pragma unroll
            for (uint e8 = 0; e8 < COORDS; e8 += 8) {
                uint2 indices[4];
#pragma unroll
                for (uint k = 0; k < 4; k++) {
                    if constexpr (CODEC == TQ8) {
                        indices[k] = make_uint2(words[k][e8 / 4], COORDS > 4 ? words[k][(e8 / 4 + 1) % WORDS] : 0);
                    } else {
                        indices[k] = indices8(eight_of(words[k], e8), 0, high_bits(high + row[k] * HIGH_PITCH, from + e8));
                    }
                }
#pragma unroll
                for (uint e = e8; e < e8 + 8 && e < COORDS; e += 2) {
                    uint a[PARTS][4];
#pragma unroll
                    for (uint j = 0; j < 4; j++) {
                        const uint k = j / 2 * 2, c = e - e8 + j % 2;
                        join(entry8(table, indices[k], c), entry8(table, indices[k + 1], c), a, j);
                    }
                    use((i * COORDS + e) / 2, a);
                }
            }
        }

        // The A operands of load i: rows g and g + 8 of product m are the lane's coordinates 2m and 2m + 1, k are the
        // keys `first` + 2t, 2t+1, 2t+8, 2t+9.
        template <typename Use>
        static void operands(const uchar *low, const uchar *high, uint first, uint slice, uint i, uint g, uint t,
                             const uint *table, Use use) {
            const uint from = slice + coord(i * COORDS, g);
            uint words[4][WORDS];
            uint row[4];
#pragma unroll
            for (uint k = 0; k < 4; k++) {
                row[k] = first + 2 * t + k % 2 + k / 2 * 8;
                load_words<LOAD>(low + row[k] * PITCH + from * BITS / 8, words[k]);
                if constexpr (COORDS * BITS < 8) {
                    words[k][0] >>= from * BITS % 8;
                }
            }
            if constexpr (CODEC == F32) {
                split_operands(words, i, use);
            } else if constexpr (!QUANTISED) {
                dense_operands(words, i, use);
            } else if constexpr (PAIRED) {
                paired_operands(words, i, table, use);
            } else {
                code_operands(words, high, row, from, i, table, use);
            }
        }
    };
};

#endif
