// The slots of a step's tokens in a cache layer: ops/kv_write.rs, layer.rs.
#ifndef KVANT_SLOTS_H
#define KVANT_SLOTS_H
#include <metal_stdlib>
using namespace metal;

// A layer's shape. ring and token_major are 0 or 1.
struct LayerParams {
    uint sequences;
    uint kv_heads;
    uint capacity;
    uint ring;
    uint token_major;
};

// The row of a vector within each plane.
inline ulong layer_row(constant LayerParams &layer, uint sequence, uint head, uint slot) {
    if (layer.token_major != 0) {
        return (ulong(sequence) * layer.capacity + slot) * layer.kv_heads + head;
    }
    return (ulong(sequence) * layer.kv_heads + head) * layer.capacity + slot;
}

inline uint layer_slot(constant LayerParams &layer, uint position) {
    return layer.ring != 0 ? position % layer.capacity : position;
}

// Whether the layer holds the token once the step is written. Sequences, positions and lengths are what somebody put
// in a buffer: false for those that are out of range.
inline bool is_kept(constant LayerParams &layer, uint sequence, uint position, device const uint *lens) {
    if (sequence >= layer.sequences) {
        return false;
    }
    const uint len = lens[sequence];
    const bool held = position < len && ulong(position) + layer.capacity >= len;
    return held && (layer.ring != 0 || position < layer.capacity);
}

#endif
