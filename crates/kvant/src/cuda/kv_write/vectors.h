// The keys and values that kv_write.cu and page_means.cu read, [T, Hk, D] or [Hk, T, D], and the tokens of their step.
#ifndef KVANT_CUDA_KV_WRITE_VECTORS_H
#define KVANT_CUDA_KV_WRITE_VECTORS_H
#include "device/cache_slots.h"

struct KvWriteParams {
    ulong first_token;
    ulong source_tokens;
    uint tokens;
    // Tokens from this position on are skipped; with passes alone.
    uint position_limit;
    LayerParams layer;
    float k_scale;
    float v_scale;
    uint head_dim;
};

// The passes (gpu/kv_write.rs). ALONE is the only one, if no sequence has two tokens in the step or no side is centred.
constexpr uint ALONE = 0;
constexpr uint FIRST_PASS = 1;
constexpr uint SECOND_PASS = 2;

// The row of the source.
inline ulong source_row(const KvWriteParams &p, uint token, uint head) {
    const ulong at = p.first_token + token;
    return HEAD_MAJOR ? head * p.source_tokens + at : at * p.layer.kv_heads + head;
}

// The tokens of the step, and the page table of the layer's group. `second` marks those of the second pass.
struct Tokens {
    const uint *positions;
    const uint *sequence;
    const uint *lens;
    const uint *table;
    const uint *second;
};

#endif
