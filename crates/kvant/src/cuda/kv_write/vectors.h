// The keys and values that kv_write.cu, write_pages.cu and open_pages.cu read, [T, Hk, D] or [Hk, T, D], and the
// tokens of their step.
#ifndef KVANT_CUDA_KV_WRITE_VECTORS_H
#define KVANT_CUDA_KV_WRITE_VECTORS_H
#include "device/cache_slots.h"

struct KvWriteParams {
    ulong first_token;
    ulong source_tokens;
    uint tokens;
    // Tokens from this position on are skipped; around page means, in steps of several tokens of a sequence, alone.
    uint position_limit;
    LayerParams layer;
    float k_scale;
    float v_scale;
    uint head_dim;
};

// The row of the source.
inline ulong source_row(const KvWriteParams &p, uint token, uint head) {
    const ulong at = p.first_token + token;
    return HEAD_MAJOR ? head * p.source_tokens + at : at * p.layer.kv_heads + head;
}

// The tokens of the step, and the page table of the layer's group.
struct Tokens {
    const uint *positions;
    const uint *sequence;
    const uint *lens;
    const uint *table;
};

#endif
