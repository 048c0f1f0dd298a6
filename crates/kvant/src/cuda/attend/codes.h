// The codes of quantised rows in a lane's registers, and their lookup.
//
// LANES lanes share a block of a row: up to 256 coordinates (CHUNK). Each lane has runs of consecutive coordinates; a
// run has 16 or 32 bytes if the lane has enough coordinates. A run consists of units of 16 coordinates.
//
// A table in shared memory maps codes to f16 centroids. Every entry has 32 copies side by side, one for each lane, so
// that lookups of a warp have no bank conflicts. Entries are 256 bytes apart and tables begin at multiples of 64 KiB.
// One permutation of bytes then composes an address from 4 * lane (first byte), the code (second byte), and the table's
// address.
//
//   2 bits: a byte has four codes. An entry is the pair of the lower two and, 128 bytes on, the four upper bytes of
//   centroids that `expand` converts to both pairs. 3 bits: a byte has the lower bits of a pair in its lower nibble,
//   and the upper bits of two pairs in the upper one. An entry is the pair with the first upper bits and, 128 bytes on,
//   the pair with the second. 4 bits: an entry is a pair of centroids, for both nibbles of a byte. 5 bits: as 4 bits;
//   the fifth bits of both codes are bits 7 and 16 of the offset, so the table has no gaps and twice the length.
//   Without FIVES_IN_PAIRS: as 6 bits. 6 bits: an entry is (centroid, 0) and, 128 bytes on, (0, centroid). A pair is
//   never composed: each of two products takes one half. The bits of the byte above the code are arbitrary, so every
//   entry is stored four times (5 bits: eight times). 8 bits: as 6 bits, with every entry stored once.
//
// Compact tables (COMPACT_COPIES is 8, 16 or 32, otherwise 0) are for GPUs with little shared memory and for two blocks
// on a multiprocessor. Each entry is stored once, with COMPACT_COPIES copies. Entries follow one another, and a table
// begins at a multiple of its size. An address takes two instructions: a shift, and a choice of bits. With 16 copies
// two lanes may share a bank, with 8 copies four.
#ifndef KVANT_CUDA_ATTEND_CODES_H
#define KVANT_CUDA_ATTEND_CODES_H
#include "codec/planes.h"
#include "device/fragments.h"

constexpr uint CHUNK = HEAD_DIM < 256 ? HEAD_DIM : 256;
// Blocks of a row. Each block has one norm.
constexpr uint BLOCKS = HEAD_DIM / CHUNK;
// At 2 bits: the number of a word's four bytes that are looked up once instead of twice, which costs two more
// operations.
constexpr uint EXPANDED_BYTES = 2;

// Whether the low plane has two bits of each code.
inline constexpr bool in_twos(uint codec) {
    return low_bits_of(codec) == 2;
}

// Whether an entry of a codec's table is a pair.
inline constexpr bool in_pairs(uint codec) {
    return in_twos(codec) || codec == TQ4 || (codec == TQ5 && FIVES_IN_PAIRS);
}

extern __shared__ __align__(128) uchar memory[];

// The bytes of `a` (0 to 3) and of `b` (4 to 7) that the nibbles of `which` select. A nibble plus 8 selects the byte's
// sign bit, repeated eight times.
inline uint permute(uint a, uint b, uint which) {
    uint out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(which));
    return out;
}

// Bits of a where the mask is set, otherwise bits of b, in one instruction. The compiler would use two.
inline uint choose(uint mask, uint a, uint b) {
    uint out;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(out) : "r"(mask), "r"(a), "r"(b));
    return out;
}

// ------------------------------------------------------------------------------------------------------------- tables

constexpr bool COMPACT = COMPACT_COPIES > 0;
static_assert(!COMPACT || COMPACT_COPIES == 8 || COMPACT_COPIES == 16 || COMPACT_COPIES == 32, "attend: copies");
static_assert(!COMPACT || !FIVES_IN_PAIRS, "attend: compact tables of 5 bits have single codes");

template <uint CODEC>
struct Table {
    // Bytes of a word's copies.
    static constexpr uint WORD = COMPACT ? COMPACT_COPIES * 4 : 128;
    // Compact: words of an entry, and the bits of a byte that select the entry.
    static constexpr uint WORDS = CODEC == TQ4 ? 1 : 2;
    static constexpr uint FIELD = CODEC == TQ5 ? 5 : CODEC == TQ6 ? 6 : 8;
    static constexpr uint BYTES = COMPACT                          ? (WORDS * WORD) << FIELD
                                  : CODEC == TQ5 && FIVES_IN_PAIRS ? 128 << 10
                                                                   : 64 << 10;
    // The factor of centroids: of thousands of numbers from 1 to 2, the one with the least error of rounding to f16.
    // The error relative to a vector's square is 5.3e-11, 1.5e-9, 6.7e-9, 1.4e-8, 2.9e-8 for 3, 4, 5, 6, 8 bits; with
    // factor 1 it is 2.5e-8 to 4.7e-8. At 2 bits it is 2.9e-11, the least error among factors for which all centroids
    // have the same lower byte.
    static constexpr float SCALE = CODEC == TQ2   ? 1.66292596f
                                   : CODEC == TQ3 ? 1.85879123f
                                   : CODEC == TQ4 ? 1.26016724f
                                   : CODEC == TQ5 ? 1.95522618f
                                   : CODEC == TQ6 ? 1.90302241f
                                                  : 1.86773717f;

    // Distance between entries. At 4 bits, no lookup has bit 7 set.
    static constexpr uint PITCH = CODEC == TQ4 ? 256 : 128;

    static uint entry(uint at) {
        const uint byte = at >> 8 & 255, seventh = at >> 7 & 1;
        if (CODEC == TQ2) {
            const auto pair = [&](uint codes) {
                return pack<true>(CENTROIDS_2[codes & 3] * SCALE, CENTROIDS_2[codes >> 2 & 3] * SCALE);
            };
            return seventh == 0 ? pair(byte) : permute(pair(byte), pair(byte >> 4), 0x7351);
        }
        if (CODEC == TQ3) {
            const uint upper = byte >> (seventh == 0 ? 4 : 6);
            return pack<true>(CENTROIDS_3[(byte & 3) + (upper & 1) * 4] * SCALE,
                              CENTROIDS_3[(byte >> 2 & 3) + (upper >> 1 & 1) * 4] * SCALE);
        }
        if (CODEC == TQ4) {
            return pack<true>(CENTROIDS_4[byte & 15] * SCALE, CENTROIDS_4[byte >> 4] * SCALE);
        }
        if (CODEC == TQ5 && FIVES_IN_PAIRS) {
            return pack<true>(CENTROIDS_5[(byte & 15) + 16 * seventh] * SCALE,
                              CENTROIDS_5[(byte >> 4) + (at >> 16) * 16] * SCALE);
        }
        const float centroid = CODEC == TQ5 ? CENTROIDS_5[byte & 31] : CODEC == TQ6 ? CENTROIDS_6[byte & 63] : CENTROIDS_8[byte];
        const float c = centroid * SCALE;
        return pack<true>(seventh != 0 ? 0 : c, seventh != 0 ? c : 0);
    }

    // A thread fills every `threads`-th entry. Threads begin at different words of it, to avoid bank conflicts.
    static void fill(uchar *table, uint thread, uint threads) {
        if constexpr (COMPACT) {
#pragma unroll 1
            for (uint i = thread; i < WORDS << FIELD; i += threads) {
                fill_copies(table + i * WORD, entry(i / WORDS << 8 | i % WORDS << 7), thread);
            }
        } else {
#pragma unroll 2
            for (uint at = thread * PITCH; at < BYTES; at += threads * PITCH) {
                fill_copies(table + at, entry(at), thread);
            }
        }
    }
    static void fill_copies(uchar *to, uint word, uint thread) {
#pragma unroll
        for (uint i = 0; i < WORD / 16; i++) {
            *reinterpret_cast<uint4 *>(to + (thread + i) % (WORD / 16) * 16) = make_uint4(word, word, word, word);
        }
    }
};

// Lookups of a lane in a table. The table begins AT bytes after a multiple of 64 KiB; a compact table begins AT bytes
// after a multiple of its size.
template <uint CODEC, uint AT = 0>
struct Lookup {
    // The address of the lane's column of the table, less AT.
    uint column;
    // The highest byte of a block's addresses: its number in the cluster.
    uint window;

    Lookup(const uchar *table)
        : column(shared_address(table) - AT + threadIdx.x % (COMPACT ? COMPACT_COPIES : 32) * 4),
          window(shared_address(memory) & 0xFF000000) {}

    template <uint OFFSET = 0>
    static uint word(uint address) {
        uint x;
        asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(x) : "r"(address), "n"(AT + OFFSET));
        return x;
    }
    // The entry of byte `i` of a word: its first word, or its second.
    template <bool SECOND = false>
    uint entry(uint codes, uint i) const {
        using Entries = Table<CODEC>;
        constexpr uint OFFSET = SECOND ? Entries::WORD : 0;
        if constexpr (COMPACT) {
            constexpr uint SHIFT = (COMPACT_COPIES == 32 ? 7 : COMPACT_COPIES == 16 ? 6 : 5) + Entries::WORDS - 1;
            constexpr uint MASK = ((1 << Entries::FIELD) - 1) << SHIFT;
            return word<OFFSET>(choose(MASK, 8 * i < SHIFT ? codes << (SHIFT - 8 * i) : codes >> (8 * i - SHIFT), column));
        }
        return word<OFFSET>(permute(codes, column, 0x7604 | i << 4));
    }
    // Without pairs: the code in byte `i`, as the first or the second number of a pair whose other number is 0.
    uint low(uint codes, uint i) const {
        return entry(codes, i);
    }
    uint high(uint codes, uint i) const {
        return entry<true>(codes, i);
    }
    // 5 bits: the upper bits of the nibbles of bytes `i` of two words, moved to where `pair` needs them. The lower half
    // of `high` has the 16 upper bits of both words.
    uint upper(uint high, uint i) const {
        // Two bits go to bits 7 and 8 of each half. Bit 8 selects the table; it becomes byte 2 of the address.
        const uint spread = permute(high, 0, 0x4140), columns = permute(column, 0, 0x2020);
        return (spread & 0x00030003 << 2 * i) * (1u << (7 - 2 * i)) + columns;
    }
    // With pairs: the pair of byte `i` of a word; with upper bits, of the first or second of two words.
    uint pair(uint codes, uint upper, uint which, uint i) const {
        if constexpr (CODEC == TQ4) {
            return entry(codes, i);
        }
        const uint place = permute(codes, upper, (which == 0 ? 0xD504 : 0xD706) | i << 4);
        return word(CLUSTER > 1 ? place + window : place);
    }
    // 2 bits: both pairs of a byte, from the upper bytes of four centroids, in the order 0, 2, 1, 3.
    static void expand(uint upper, uint (&pairs)[8], uint i) {
        // The lower byte of every centroid.
        constexpr uint LOWER = 0x06060606;
        pairs[2 * i] = permute(upper, LOWER, 0x2404);
        pairs[2 * i + 1] = choose(0xFF00FF00, upper, LOWER);
    }
    // 2 and 3 bits: the pairs of the eight nibbles of a word. The half `half` of `high` has their upper bits, two for
    // each pair.
    void pairs(uint codes, uint high, uint half, uint (&pairs)[8]) const {
        if constexpr (CODEC == TQ2) {
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                if (i < EXPANDED_BYTES) {
                    expand(entry<true>(codes, i), pairs, i);
                } else {
                    pairs[2 * i] = entry(codes, i);
                    pairs[2 * i + 1] = entry(codes >> 4, i);
                }
            }
        } else {
            // The upper half of byte i has the upper bits of nibbles 2i and 2i + 1.
            const uint upper = permute(high << 4, high, half == 0 ? 0x5140 : 0x7362);
            const uint even = choose(0x0F0F0F0F, codes, upper), odd = choose(0x0F0F0F0F, codes >> 4, upper);
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                pairs[2 * i] = entry(even, i);
                pairs[2 * i + 1] = entry<true>(odd, i);
            }
        }
    }
    // As `pairs`, for 16 codes of each of two rows: a pair has a code of both rows. Even codes and odd codes are
    // separate.
    void pairs_of_rows(uint x, uint y, uint high_x, uint high_y, uint half, uint (&even)[8], uint (&odd)[8]) const {
        pairs(choose(0x33333333, x, y << 2), choose(0x55555555, high_x, high_y << 1), half, even);
        pairs(choose(0x33333333, x >> 2, y), choose(0x55555555, high_x >> 1, high_y), half, odd);
    }
};

// -------------------------------------------------------------------------------------------------------------- codes

// Reads N bytes of shared memory.
template <uint N>
inline void read_bytes(const uchar *from, uint *to) {
    if constexpr (N >= 16) {
#pragma unroll
        for (uint i = 0; i < N / 16; i++) {
            const uint4 x = reinterpret_cast<const uint4 *>(from)[i];
            to[4 * i] = x.x;
            to[4 * i + 1] = x.y;
            to[4 * i + 2] = x.z;
            to[4 * i + 3] = x.w;
        }
    } else if constexpr (N == 8) {
        const uint2 x = *reinterpret_cast<const uint2 *>(from);
        to[0] = x.x;
        to[1] = x.y;
    } else if constexpr (N == 4) {
        to[0] = *reinterpret_cast<const uint *>(from);
    } else {
        static_assert(N == 2, "attend: bytes of a read");
        to[0] = *reinterpret_cast<const ushort *>(from);
    }
}

// 16 codes, one per byte: code i is byte i / 4 of word i % 4. x and y have the lower four bits of all codes, upper(j)
// has the upper bits of the codes of word j.
template <typename Upper>
inline void join_bits(uint x, uint y, Upper upper, uint (&out)[4]) {
    // Byte i of `even` has coordinates 4i and 4i+1, byte i of `odd` has 4i+2 and 4i+3.
    const uint even = permute(x, y, 0x6420), odd = permute(x, y, 0x7531);
    out[0] = choose(0x0F0F0F0F, even, upper(0));
    out[1] = choose(0x0F0F0F0F, even >> 4, upper(1));
    out[2] = choose(0x0F0F0F0F, odd, upper(2));
    out[3] = choose(0x0F0F0F0F, odd >> 4, upper(3));
}

// The 16 codes of 6 bits whose upper two bits are in `bits`.
inline void six_bits(uint x, uint y, uint bits, uint (&out)[4]) {
    join_bits(x, y, [&](uint j) { return j == 0 ? bits << 4 : j == 1 ? bits << 2 : j == 2 ? bits : bits >> 2; }, out);
}

// The 16 codes of 5 bits whose upper bits are in `bits`.
inline void five_bits(uint x, uint y, uint bits, uint (&out)[4]) {
    // The lowest bits of byte i are those of coordinates 4i to 4i+3.
    const uint spread = permute(bits, bits >> 4, 0x5140);
    join_bits(x, y, [&](uint j) { return spread << (4 - j); }, out);
}

// A lane's coordinates of a row's block.
template <uint CODEC, uint LANES>
struct Codes {
    static constexpr bool PAIRED = in_pairs(CODEC);
    static constexpr uint LOW_BITS = low_bits_of(CODEC);
    static constexpr uint HIGH_BITS = high_bits_of(CODEC);
    // If four lanes share a row, two adjacent rows in shared memory have no bank conflicts if a lane has 32 bytes.
    static constexpr uint MAX_RUN = (LANES == 4 ? 256 : 128) / LOW_BITS;
    static constexpr uint RUN = CHUNK / LANES < MAX_RUN ? CHUNK / LANES : MAX_RUN;
    static constexpr uint LOADS = CHUNK / LANES / RUN;
    static constexpr uint UNITS = RUN / 16;
    static_assert(RUN % 16 == 0, "attend: units of 16 coordinates");
    // Bytes of a row and of a run.
    static constexpr uint LOW_ROW = HEAD_DIM * LOW_BITS / 8;
    static constexpr uint HIGH_ROW = HEAD_DIM * HIGH_BITS / 8;
    static constexpr uint LOW_RUN = RUN * LOW_BITS / 8;
    static constexpr uint HIGH_RUN = RUN * HIGH_BITS / 8;
    static constexpr uint HIGH_WORDS = HIGH_RUN < 4 ? 1 : HIGH_RUN / 4;
    // The block's share of a row, and the distance of shares in shared memory, chosen against bank conflicts.
    static constexpr uint LOW_BYTES = CHUNK * LOW_BITS / 8;
    static constexpr uint HIGH_BYTES = CHUNK * HIGH_BITS / 8;
    static constexpr uint LOW_PITCH = LOW_BYTES + (LANES == 4 && LOW_RUN <= 16 ? 0 : 16);
    static constexpr uint HIGH_PITCH = HIGH_BYTES + (LANES == 8 && HIGH_BYTES > 16 ? 16 : 0);

    uint low[LOADS][LOW_RUN / 4];
    uint high[LOADS][HIGH_WORDS];

    // The index within the block of the lane's e-th coordinate.
    static constexpr uint coord(uint lane, uint e) {
        return e / RUN * (RUN * LANES) + lane * RUN + e % RUN;
    }

    // Reads the lane's coordinates. Both pointers are at its first coordinate in shared memory.
    void read(const uchar *low_row, const uchar *high_row) {
#pragma unroll
        for (uint i = 0; i < LOADS; i++) {
            read_bytes<LOW_RUN>(low_row + i * (LOW_RUN * LANES), low[i]);
            if constexpr (HIGH_BITS > 0) {
                read_bytes<HIGH_RUN>(high_row + i * (HIGH_RUN * LANES), high[i]);
            }
        }
    }

    // If a code has one upper bit: the word with the upper bits of a unit, in its half `unit` % 2.
    uint upper_word(uint load, uint unit) const {
        return HIGH_BITS == 0 ? 0 : high[load][unit / 2];
    }
    // As `upper_word`, with the bits in the lower half.
    uint upper(uint load, uint unit) const {
        return upper_word(load, unit) >> 16 * (unit % 2);
    }

    // The 16 codes of a unit of 5, 6 or 8 bits, one per byte.
    void singles(uint load, uint unit, uint (&out)[4]) const {
        if constexpr (CODEC == TQ8) {
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                out[i] = low[load][4 * unit + i];
            }
        } else if constexpr (CODEC == TQ6) {
            six_bits(low[load][2 * unit], low[load][2 * unit + 1], high[load][unit % HIGH_WORDS], out);
        } else {
            five_bits(low[load][2 * unit], low[load][2 * unit + 1], upper(load, unit), out);
        }
    }
    // The word of `singles` that has coordinate e.
    static constexpr uint word_of(uint e) {
        return CODEC == TQ8 ? e / 4 : e % 4;
    }
    static constexpr uint byte_of(uint e) {
        return CODEC == TQ8 ? e % 4 : e / 4;
    }
};

// The index of a query's coordinate among B operands in the order of these codes. For each lane, the operands of two
// products are adjacent.
template <typename C>
inline uint query_place(uint row, uint coord) {
    constexpr uint LANES = 4, RUN = C::RUN;
    const uint c = coord % CHUNK;
    const uint t = c % (RUN * LANES) / RUN;
    // The index among the lane's coordinates.
    const uint at = coord / CHUNK * (CHUNK / LANES) + c / (RUN * LANES) * RUN + c % RUN;
    return (at / 8 * 32 + row * 4 + t) * 8 + at % 8;
}

// Four codes of a page's mean as two pairs of f16, exact: 1024 + 128 + code, less 1152.
inline uint2 halves_of_mean(uint codes) {
    const uint shifted = codes ^ 0x80808080;
    return make_uint2(minus<true>(permute(shifted, 0x64646464, 0x4140), 0x64806480),
                      minus<true>(permute(shifted, 0x64646464, 0x4342), 0x64806480));
}

// The A operands of products whose rows are two coordinates and whose columns are two means. Each mean has two columns,
// one for each of the two terms of a weight. `x` and `y` have four coordinates of each mean; `upper` selects the last
// two.
inline uint4 operands_of_means(uint x, uint y, bool upper) {
    const uint2 halves = halves_of_mean(permute(x, y, upper ? 0x7362 : 0x5140));
    return make_uint4(halves.x, halves.y, halves.x, halves.y);
}

// The A operands of a unit's products; without pairs, each product comes in two parts. For keys, rows are the keys x
// and y. `use` gets (product, operands).
template <uint CODEC, uint LANES, uint AT, typename Use>
inline void key_operands(const Codes<CODEC, LANES> &x, const Codes<CODEC, LANES> &y, uint load, uint unit,
                         const Lookup<CODEC, AT> &lookup, Use use) {
    using C = Codes<CODEC, LANES>;
    if constexpr (in_twos(CODEC)) {
        uint of_x[8], of_y[8];
        lookup.pairs(x.low[load][unit], x.upper_word(load, unit), unit % 2, of_x);
        lookup.pairs(y.low[load][unit], y.upper_word(load, unit), unit % 2, of_y);
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            const uint a[4] = {of_x[2 * i], of_y[2 * i], of_x[2 * i + 1], of_y[2 * i + 1]};
            use(i, a);
        }
    } else if constexpr (C::PAIRED) {
#pragma unroll
        for (uint i = 0; i < 4; i += 2) {
            uint of_x[2] = {}, of_y[2] = {};
            if constexpr (CODEC == TQ5) {
#pragma unroll
                for (uint j = 0; j < 2; j++) {
                    of_x[j] = lookup.upper(x.upper(load, unit), i + j);
                    of_y[j] = lookup.upper(y.upper(load, unit), i + j);
                }
            }
#pragma unroll
            for (uint w = 0; w < 2; w++) {
                const uint codes_x = x.low[load][2 * unit + w], codes_y = y.low[load][2 * unit + w];
                const uint a[4] = {lookup.pair(codes_x, of_x[0], w, i), lookup.pair(codes_y, of_y[0], w, i),
                                   lookup.pair(codes_x, of_x[1], w, i + 1), lookup.pair(codes_y, of_y[1], w, i + 1)};
                use(2 * w + i / 2, a);
            }
        }
    } else {
        uint of_x[4], of_y[4];
        x.singles(load, unit, of_x);
        y.singles(load, unit, of_y);
        const auto low = [&](const uint(&codes)[4], uint e) { return lookup.low(codes[C::word_of(e)], C::byte_of(e)); };
        const auto high = [&](const uint(&codes)[4], uint e) { return lookup.high(codes[C::word_of(e)], C::byte_of(e)); };
#pragma unroll
        for (uint e = 0; e < 16; e += 4) {
            const uint a[4] = {low(of_x, e), low(of_y, e), low(of_x, e + 2), low(of_y, e + 2)};
            use(e / 4, a);
            const uint b[4] = {high(of_x, e + 1), high(of_y, e + 1), high(of_x, e + 3), high(of_y, e + 3)};
            use(e / 4, b);
        }
    }
}

// Values: rows are two coordinates of the lane, columns the four values.
template <uint CODEC, uint LANES, typename Use>
inline void value_operands(const Codes<CODEC, LANES> (&v)[4], uint load, uint unit, const Lookup<CODEC> &lookup, Use use) {
    using C = Codes<CODEC, LANES>;
    if constexpr (in_twos(CODEC)) {
        uint even[2][8], odd[2][8];
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            const C &x = v[2 * j], &y = v[2 * j + 1];
            lookup.pairs_of_rows(x.low[load][unit], y.low[load][unit], x.upper_word(load, unit), y.upper_word(load, unit),
                                 unit % 2, even[j], odd[j]);
        }
#pragma unroll
        for (uint i = 0; i < 8; i++) {
            const uint a[4] = {even[0][i], odd[0][i], even[1][i], odd[1][i]};
            use(i, a);
        }
    } else if constexpr (C::PAIRED) {
        // A byte of `even` holds an even coordinate of two values; the byte of `odd` holds the next coordinate.
        uint even[2][2], odd[2][2], high_even[2] = {}, high_odd[2] = {};
#pragma unroll
        for (uint j = 0; j < 2; j++) {
            const C &first = v[2 * j], &second = v[2 * j + 1];
#pragma unroll
            for (uint w = 0; w < 2; w++) {
                const uint x = first.low[load][2 * unit + w], y = second.low[load][2 * unit + w];
                even[j][w] = choose(0x0F0F0F0F, x, y << 4);
                odd[j][w] = choose(0x0F0F0F0F, x >> 4, y);
            }
            if constexpr (CODEC == TQ5) {
                const uint x = first.upper(load, unit), y = second.upper(load, unit);
                high_even[j] = choose(0x55555555, x, y << 1);
                high_odd[j] = choose(0x55555555, x >> 1, y);
            }
        }
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            uint of_even[2] = {}, of_odd[2] = {};
            if constexpr (CODEC == TQ5) {
#pragma unroll
                for (uint j = 0; j < 2; j++) {
                    of_even[j] = lookup.upper(high_even[j], i);
                    of_odd[j] = lookup.upper(high_odd[j], i);
                }
            }
#pragma unroll
            for (uint w = 0; w < 2; w++) {
                const uint a[4] = {lookup.pair(even[0][w], of_even[0], w, i), lookup.pair(odd[0][w], of_odd[0], w, i),
                                   lookup.pair(even[1][w], of_even[1], w, i), lookup.pair(odd[1][w], of_odd[1], w, i)};
                use(4 * w + i, a);
            }
        }
    } else {
        uint codes[4][4];
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            v[j].singles(load, unit, codes[j]);
        }
        const auto low = [&](uint j, uint e) { return lookup.low(codes[j][C::word_of(e)], C::byte_of(e)); };
        const auto high = [&](uint j, uint e) { return lookup.high(codes[j][C::word_of(e)], C::byte_of(e)); };
#pragma unroll
        for (uint e = 0; e < 16; e += 2) {
            const uint a[4] = {low(0, e), low(0, e + 1), low(2, e), low(2, e + 1)};
            use(e / 2, a);
            const uint b[4] = {high(1, e), high(1, e + 1), high(3, e), high(3, e + 1)};
            use(e / 2, b);
        }
    }
}

#endif
