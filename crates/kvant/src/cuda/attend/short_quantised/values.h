// Products of weights and quantised values for attend_short_quantised.cu: a warp has 64 coordinates, and a lane eight
// of them, of four values at a time.
#ifndef KVANT_CUDA_ATTEND_SHORT_QUANTISED_VALUES_H
#define KVANT_CUDA_ATTEND_SHORT_QUANTISED_VALUES_H
#include "attend/codes.h"

constexpr uint SLICE = 64;

// Eight coordinates of four values.
template <uint CODEC>
struct SliceCodes {
    using C = Codes<CODEC, 4>;
    static constexpr uint WORDS = CODEC == TQ8 ? 2 : 1;
    // Bytes of a lane's coordinates.
    static constexpr uint LOW = C::LOW_BITS;
    static constexpr uint HIGH = C::HIGH_BITS;

    uint low[4][WORDS];
    uint high[4];

    // Reads value j; the pointers are at the lane's first coordinate.
    void read(uint j, const uchar *from_low, const uchar *from_high) {
        read_bytes<LOW>(from_low, low[j]);
        high[j] = 0;
        if constexpr (HIGH == 2) {
            high[j] = *reinterpret_cast<const ushort *>(from_high);
        } else if constexpr (HIGH == 1) {
            high[j] = *from_high;
        }
    }

    // The A operands of the products: rows are the coordinates 2i and 2i + 1 of the lane for product i, columns the
    // four values. Without pairs each product comes in two parts.
    template <uint AT, typename Use>
    void operands(const Lookup<CODEC, AT> &lookup, Use use) const {
        if constexpr (in_twos(CODEC)) {
            // The lower half has codes of the first two values, the upper half of the last two.
            uint even[8], odd[8];
            lookup.pairs_of_rows(low[0][0] | low[2][0] << 16, low[1][0] | low[3][0] << 16, high[0] | high[2] << 8,
                                 high[1] | high[3] << 8, 0, even, odd);
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                const uint a[4] = {even[i], odd[i], even[4 + i], odd[4 + i]};
                use(i, a);
            }
        } else if constexpr (C::PAIRED) {
            // A byte of `even` holds an even coordinate of two values; the byte of `odd` holds the next coordinate.
            uint even[2], odd[2];
#pragma unroll
            for (uint j = 0; j < 2; j++) {
                const uint x = low[2 * j][0], y = low[2 * j + 1][0];
                even[j] = choose(0x0F0F0F0F, x, y << 4);
                odd[j] = choose(0x0F0F0F0F, x >> 4, y);
            }
            const uint x = high[0] | high[2] << 8, y = high[1] | high[3] << 8;
            const uint high_even = choose(0x55555555, x, y << 1), high_odd = choose(0x55555555, x >> 1, y);
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                uint of_even = 0, of_odd = 0;
                if constexpr (CODEC == TQ5) {
                    of_even = lookup.upper(high_even, i);
                    of_odd = lookup.upper(high_odd, i);
                }
                const uint a[4] = {lookup.pair(even[0], of_even, 0, i), lookup.pair(odd[0], of_odd, 0, i),
                                   lookup.pair(even[1], of_even, 1, i), lookup.pair(odd[1], of_odd, 1, i)};
                use(i, a);
            }
        } else {
            // Codes of the first two values, and of the last two.
            uint of_first[4], of_second[4];
            if constexpr (CODEC == TQ5) {
                five_bits(low[0][0], low[2][0], high[0] | high[2] << 8, of_first);
                five_bits(low[1][0], low[3][0], high[1] | high[3] << 8, of_second);
            } else if constexpr (CODEC == TQ6) {
                six_bits(low[0][0], low[2][0], high[0] | high[2] << 16, of_first);
                six_bits(low[1][0], low[3][0], high[1] | high[3] << 16, of_second);
            } else {
#pragma unroll
                for (uint w = 0; w < 2; w++) {
                    of_first[w] = low[0][w];
                    of_first[2 + w] = low[2][w];
                    of_second[w] = low[1][w];
                    of_second[2 + w] = low[3][w];
                }
            }
            // Coordinate e of the first of two values, or of the second.
            const auto word = [](uint j, uint e) { return CODEC == TQ8 ? 2 * j + e / 4 : e % 4; };
            const auto byte = [](uint j, uint e) { return CODEC == TQ8 ? e % 4 : 2 * j + e / 4; };
            const auto first = [&](uint j, uint e) { return lookup.low(of_first[word(j, e)], byte(j, e)); };
            const auto second = [&](uint j, uint e) { return lookup.high(of_second[word(j, e)], byte(j, e)); };
#pragma unroll
            for (uint e = 0; e < 8; e += 2) {
                const uint a[4] = {first(0, e), first(0, e + 1), first(1, e), first(1, e + 1)};
                use(e / 2, a);
                const uint b[4] = {second(0, e), second(0, e + 1), second(1, e), second(1, e + 1)};
                use(e / 2, b);
            }
        }
    }
};

#endif
