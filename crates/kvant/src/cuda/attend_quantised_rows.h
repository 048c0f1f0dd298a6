// How rows of the cache come into registers, for attend_quantised.cu.
#ifndef KVANT_ATTEND_QUANTISED_ROWS_H
#define KVANT_ATTEND_QUANTISED_ROWS_H
#include "attend_quantised_shared.h"

// The rows of a group of keys: key i of the group is at slot `slot` + i of a ring; past the last, the last.
struct Group {
    uint slot;
    uint last;

    uint slot_of(const AttendParams &p, uint i) const {
        uint at = slot + min(i, last);
        if (RING && at >= p.capacity) {
            at -= p.capacity;
            if (at >= p.capacity) {
                at %= p.capacity;
            }
        }
        return at;
    }
};

// What a lane reads from: its coordinates of the first row, norms of the first row, all of the warp's block.
struct Sources {
    const uchar *k_low;
    const uchar *k_high;
    const uchar *k_norms;
    const uchar *v_low;
    const uchar *v_high;
    const uchar *v_norms;
    // Rows between slots.
    uint row_slot;
};

template <uint BYTES>
inline const uchar *row_at(const uchar *first, uint row_slot, uint slot) {
    return first + ulong(slot) * (row_slot * BYTES);
}

using Keys = KeyCodes[2];
using Values = ValueCodes[4];

inline void load_keys(const AttendParams &p, const Sources &from, Group group, Keys &to, bool there) {
    const uint g = threadIdx.x % 32 / 4;
#pragma unroll
    for (uint i = 0; i < 2; i++) {
        const uint slot = group.slot_of(p, g + 8 * i);
        to[i].load(row_at<KeyCodes::LOW_ROW>(from.k_low, from.row_slot, slot),
                   row_at<KeyCodes::HIGH_ROW>(from.k_high, from.row_slot, slot), there);
    }
}

inline void load_values(const AttendParams &p, const Sources &from, Group group, Values &to, bool there) {
    const uint t = threadIdx.x % 4;
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        const uint slot = group.slot_of(p, 2 * t + i % 2 + i / 2 * 8);
        to[i].load(row_at<ValueCodes::LOW_ROW>(from.v_low, from.row_slot, slot),
                   row_at<ValueCodes::HIGH_ROW>(from.v_high, from.row_slot, slot), there);
    }
}

// Norms of the keys or values g and g + 8 of a group.
using Norms = uint[2];

inline void load_norms(const AttendParams &p, const Sources &from, const uchar *norms, Group group, Norms &to, bool there) {
    const uint g = threadIdx.x % 32 / 4;
#pragma unroll
    for (uint i = 0; i < 2; i++) {
        load_once<4>(row_at<4 * BLOCKS>(norms, from.row_slot, group.slot_of(p, g + 8 * i)), to + i, there);
    }
}

#endif
