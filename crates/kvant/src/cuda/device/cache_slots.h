// The slots of a step's tokens in a cache layer: ops/kv_write.rs, layer.rs.
//
// A layer of a pool (PAGE_SHIFT > 0) has pages of 2^PAGE_SHIFT positions. Within a page each plane is
// [Hk, 2^PAGE_SHIFT] rows, and all planes are as many bytes further on as the page's entry in the table says.
#ifndef KVANT_CUDA_DEVICE_CACHE_SLOTS_H
#define KVANT_CUDA_DEVICE_CACHE_SLOTS_H
#include "device/convert.h"

// A layer's shape. ring and token_major are 0 or 1.
struct LayerParams {
    uint sequences;
    uint kv_heads;
    uint capacity;
    uint ring;
    uint token_major;
    // Entries of a sequence in the page table; those from page_entries on are no pages.
    uint page_width;
    uint page_entries;
};

// What entries of a page table count in: layer.rs.
constexpr uint PAGE_UNIT = 256;

// Where a vector is: the row of each plane, counted from the beginning of its page if the layer has pages.
struct RowPlace {
    ulong row;
    // The page's entry; 0 without pages.
    uint page;
};

// How far the planes are moved for the rows of a page.
inline ulong page_bytes(uint page) {
    return PAGE_SHIFT == 0 ? 0 : ulong(page) * PAGE_UNIT;
}

// The row of a vector within each plane.
inline ulong layer_row(const LayerParams &layer, uint sequence, uint head, uint slot) {
    if (layer.token_major != 0) {
        return (ulong(sequence) * layer.capacity + slot) * layer.kv_heads + head;
    }
    return (ulong(sequence) * layer.kv_heads + head) * layer.capacity + slot;
}

inline uint layer_slot(const LayerParams &layer, uint position) {
    return layer.ring != 0 ? position % layer.capacity : position;
}

// Whether the layer holds the token once the step is written. Sequences, positions and lengths are what somebody put
// in a buffer: false for those that are out of range.
inline bool is_kept(const LayerParams &layer, uint sequence, uint position, const uint *lens) {
    if (sequence >= layer.sequences) {
        return false;
    }
    const uint len = lens[sequence];
    const bool held = position < len && ulong(position) + layer.capacity >= len;
    return held && (layer.ring != 0 || position < layer.capacity);
}

// Where the vector of a position is, over pages; false if no page holds it. Entries are what somebody put in a buffer.
inline bool find_in_pages(const LayerParams &layer, const uint *table, uint sequence, uint head, ulong position,
                          RowPlace &place) {
    const ulong index = position >> PAGE_SHIFT;
    if (index >= layer.page_width) {
        return false;
    }
    place.page = table[ulong(sequence) * layer.page_width + index];
    place.row = (ulong(head) << PAGE_SHIFT) + (uint(position) & ((1u << PAGE_SHIFT) - 1));
    return place.page < layer.page_entries;
}

#endif
