// The slots of a step's tokens in a cache layer: ops/kv_write.rs, layer.rs.
//
// A layer of a pool (PAGE_SHIFT > 0) has pages: device/pages.h.
#ifndef KVANT_CUDA_DEVICE_CACHE_SLOTS_H
#define KVANT_CUDA_DEVICE_CACHE_SLOTS_H
#include "device/convert.h"
#include "device/pages.h"

// A layer's shape. ring and token_major are 0 or 1.
struct LayerParams {
    uint sequences;
    uint kv_heads;
    uint capacity;
    uint ring;
    uint token_major;
    // Entries of a sequence in the page table; an entry of at least page_entries is not a page.
    uint page_width;
    uint page_entries;
};

// The place of a vector: the row of each plane, counted from the beginning of its page if the layer has pages.
struct RowPlace {
    ulong row;
    // The page's entry; 0 without pages.
    uint page;
};

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

// Whether the layer holds the token after the step is written. Sequences, positions and lengths are untrusted: returns
// false if one is out of range.
inline bool is_kept(const LayerParams &layer, uint sequence, uint position, const uint *lens) {
    if (sequence >= layer.sequences) {
        return false;
    }
    const uint len = lens[sequence];
    const bool held = position < len && ulong(position) + layer.capacity >= len;
    return held && (layer.ring != 0 || position < layer.capacity);
}

// Finds the vector of a position, over pages. Returns false if no page holds it.
inline bool find_in_pages(const LayerParams &layer, const uint *table, uint sequence, uint head, ulong position,
                          RowPlace &place) {
    const ulong index = page_index(position);
    if (index >= layer.page_width) {
        return false;
    }
    place.page = entries_of(table, layer.page_width, sequence)[index];
    place.row = (ulong(head) << PAGE_SHIFT) + slot_in_page(position);
    return is_page(place.page, layer.page_entries);
}

#endif
