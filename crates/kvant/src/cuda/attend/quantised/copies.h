// Copies of rows of the cache to shared memory, and from there to registers, for attend_quantised.cu.
#ifndef KVANT_CUDA_ATTEND_QUANTISED_COPIES_H
#define KVANT_CUDA_ATTEND_QUANTISED_COPIES_H
#include "attend/quantised/layout.h"

// The rows of a group of keys: key i is at slot `slot` + i of a ring; keys after `last` repeat key `last`. Over pages,
// slots are slots of `page`, which is NONE if no page holds the group; keys before `skip` do not belong to the part.
struct Group {
    uint slot;
    uint last;
    uint page;
    uint skip;

    // Whether any key is masked, and whether key i is masked.
    bool lacks_any() const {
        return last + 1 < KEYS || (PAGE_SHIFT > 0 && (skip > 0 || page == NONE));
    }
    bool lacks(uint i) const {
        return i > last || (PAGE_SHIFT > 0 && (i < skip || page == NONE));
    }
    // Whether the group has rows to copy, and the offset of its page's planes.
    bool is_held() const {
        return PAGE_SHIFT == 0 || page != NONE;
    }
    ulong moved() const {
        return PAGE_SHIFT == 0 ? 0 : page_bytes_or_zero(page);
    }

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

// The addresses from which a lane copies: its bytes of the first row, and the first row's norms, both of the warp's
// block.
struct Sources {
    const uchar *k_low;
    const uchar *k_high;
    const uchar *v_low;
    const uchar *v_high;
    // Norms of keys for the lower half of the lanes, of values for the upper half. If norms are halves: the norms of
    // all blocks.
    const uchar *norms;
    // Rows between slots.
    uint row_slot;
};

// The address of a row, in one instruction; the compiler would emit three.
template <uint BYTES>
inline const uchar *row_at(const uchar *first, uint row_slot, uint slot) {
    const uchar *row;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(row) : "r"(slot), "r"(row_slot * BYTES), "l"(first));
    return row;
}

// Copies a plane's rows of a group, PITCH bytes apart: BYTES of each; zeros if no page holds them.
template <uint BYTES, uint PITCH, uint ROW>
inline void copy_rows(const AttendParams &p, const uchar *first, uint row_slot, Group group, uint to) {
    constexpr uint LANES = BYTES / 16, AT_ONCE = 32 / LANES;
    const uint lane = threadIdx.x % 32;
#pragma unroll
    for (uint i = 0; i < KEYS; i += AT_ONCE) {
        const uint row = i + lane / LANES;
        if (AT_ONCE <= KEYS || row < KEYS) {
            copy_async<16>(to + row * PITCH + lane % LANES * 16, row_at<ROW>(first + group.moved(), row_slot, group.slot_of(p, row)),
                           group.is_held());
        }
    }
}

template <typename C>
inline void copy_codes(const AttendParams &p, const uchar *low, const uchar *high, uint row_slot, Group group, uint to) {
    copy_rows<C::LOW_BYTES, C::LOW_PITCH, C::LOW_ROW>(p, low, row_slot, group, to);
    if constexpr (C::HIGH_BITS > 0) {
        copy_rows<C::HIGH_BYTES, C::HIGH_PITCH, C::HIGH_ROW>(p, high, row_slot, group, to + KEYS * C::LOW_PITCH);
    }
}

using Keys = KeyCodes[2];
using Values = ValueCodes[4];
// Norms of the keys or values g and g + 8 of a group.
using Norms = uint[2];

// A warp's shared memory of a group.
struct Box {
    uchar *at;

    Box() : at(box_of(threadIdx.x / 32)) {}

    void copy_keys(const AttendParams &p, const Sources &from, Group group) const {
        const uint lane = threadIdx.x % 32;
        copy_codes<KeyCodes>(p, from.k_low, from.k_high, from.row_slot, group, shared_address(at));
        const uint to = shared_address(at + AT_BOX_NORMS);
        if (!HAS_MEANS || !(lane < KEYS ? K_CENTRED : V_CENTRED)) {
            copy_async<4>(to + lane * 4, row_at<4 * BLOCKS>(from.norms + group.moved(), from.row_slot, group.slot_of(p, lane % KEYS)),
                          group.is_held());
        } else if (lane % KEYS < 2 * BLOCKS) {
            // Norms are halves and are copied 8 at a time; the 8 are consecutive in a page.
            copy_async<16>(to + lane / KEYS * (KEYS * 4) + lane % KEYS * 16,
                           from.norms + group.moved() + group.slot * (2 * BLOCKS) + lane % KEYS * 16, group.is_held());
        }
    }
    void copy_values(const AttendParams &p, const Sources &from, Group group) const {
        copy_codes<ValueCodes>(p, from.v_low, from.v_high, from.row_slot, group, shared_address(at + AT_BOX_VALUES));
    }
    void read_keys(Keys &to, Norms &k_norms, Norms &v_norms) const {
        const uint g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const uchar *low = at + t * KeyCodes::LOW_RUN, *high = at + KEYS * KeyCodes::LOW_PITCH + t * KeyCodes::HIGH_RUN;
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            const uint row = g + 8 * i;
            to[i].read(low + row * KeyCodes::LOW_PITCH, high + row * KeyCodes::HIGH_PITCH);
            k_norms[i] = norm<K_CENTRED>(at + AT_BOX_NORMS, row);
            v_norms[i] = norm<V_CENTRED>(at + AT_BOX_NORMS + KEYS * 4, row);
        }
    }
    template <bool HALVES>
    static uint norm(const uchar *norms, uint row) {
        if (HALVES) {
            const uint at = row * BLOCKS + threadIdx.x / 32 % TEAM;
            return __float_as_uint(half_to_float(reinterpret_cast<const ushort *>(norms)[at]));
        }
        return reinterpret_cast<const uint *>(norms)[row];
    }
    void read_values(Values &to) const {
        const uint g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const uchar *low = at + AT_BOX_VALUES + g * ValueCodes::LOW_RUN;
        const uchar *high = at + AT_BOX_VALUES + KEYS * ValueCodes::LOW_PITCH + g * ValueCodes::HIGH_RUN;
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            const uint row = 2 * t + i % 2 + i / 2 * 8;
            to[i].read(low + row * ValueCodes::LOW_PITCH, high + row * ValueCodes::HIGH_PITCH);
        }
    }
};

#endif
