// The slots of a step's tokens in a cache layer: ops/kv_write.rs, layer.rs.
#ifndef KVANT_SLOTS_H
#define KVANT_SLOTS_H
#include "pages.h"

// The shape of a layer and of its page table. ring and token_major are 0 or 1.
struct LayerParams {
    uint sequences;
    uint kv_heads;
    uint capacity;
    uint ring;
    uint token_major;
    uint page_width;
    uint page_entries;
};

// The row of a vector within each plane.
inline ulong layer_row(constant LayerParams &layer, uint sequence, uint head, uint slot) {
    if (layer.token_major != 0) {
        return (ulong(sequence) * layer.capacity + slot) * layer.kv_heads + head;
    }
    return (ulong(sequence) * layer.kv_heads + head) * layer.capacity + slot;
}

// A position may be beyond 32 bits when a ring is read.
template <typename P> inline uint layer_slot(constant LayerParams &layer, P position) {
    return uint(layer.ring != 0 ? position % layer.capacity : position);
}

// The location of a position's vector. `page_shift`, a function constant, is 0 without pages; the table is then absent.
template <typename P>
inline RowPlace layer_place(constant LayerParams &layer, device const uint *table, uint page_shift, uint sequence,
                            uint head, P position) {
    if (page_shift != 0) {
        const PageTable pages = {table, layer.page_width, layer.page_entries};
        return place_in_page(pages, sequence, head, uint(position), page_shift);
    }
    return RowPlace{0, layer_row(layer, sequence, head, layer_slot(layer, position)), true};
}

// Whether the layer holds the token after the step is written. Sequences, positions and lengths are untrusted input:
// returns false for values that are out of range.
inline bool is_kept(constant LayerParams &layer, uint sequence, uint position, device const uint *lens) {
    if (sequence >= layer.sequences) {
        return false;
    }
    const uint len = lens[sequence];
    const bool held = position < len && ulong(position) + layer.capacity >= len;
    return held && (layer.ring != 0 || position < layer.capacity);
}

#endif
