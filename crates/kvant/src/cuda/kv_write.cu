// kv_write: new keys and values, [T, Hk, D] or [Hk, T, D], into the slots of a cache layer, both in one launch.
//
// blockIdx.x is a token, z 0 for its keys and 1 for its values. A quantised row is encoded by a block, y is its head; dense
// rows are moved by blockDim.x threads each, blockDim.y heads at a time. A dense layer of the source's dtype gets its bits.
// A token that the layer does not hold when the step is written, or whose sequence or position is out of range, is
// skipped, so that no slot is written twice.
#include "elements.h"
#include "slots.h"
#include "turboquant.h"
#include "ahead.h"

struct KvWriteParams {
    ulong first_token;
    ulong source_tokens;
    LayerParams layer;
    float k_scale;
    float v_scale;
    uint head_dim;
};

// Stores dense rows: those of the token's heads that are this block's.
inline void move_heads(const uchar *source, uint dtype, uchar *to, uint codec, const KvWriteParams &p, ulong token,
                       uint sequence, uint slot) {
    for (uint head = blockIdx.y * blockDim.y + threadIdx.y; head < p.layer.kv_heads; head += gridDim.y * blockDim.y) {
        const ulong from = HEAD_MAJOR ? head * p.source_tokens + token : token * p.layer.kv_heads + head;
        const ulong at = layer_row(p.layer, sequence, head, slot);
        move_row(source, from * p.head_dim, dtype, to, at * p.head_dim, codec, p.head_dim, ALIGNED, threadIdx.x, blockDim.x);
    }
}

// Encodes one vector. `row` holds D + STORE_ROOM floats.
inline void encode_head(const uchar *source, ulong from, uint dtype, WritablePlanes to, ulong at, uint dim,
                        Encoding encoding, float *row) {
    const Team team = whole_block();
    for (uint j = team.index; j < dim; j += team.size) {
        row[j] = load(source, from * dim + j, dtype);
    }
    store_row(row, row + dim, to, at, dim, encoding, team);
}

extern "C" __global__ void kv_write(const uchar *k, const uchar *v, const uint *positions, const uint *sequence,
                                    const uint *lens, uchar *k_low, uchar *k_high, float *k_norms, uchar *v_low,
                                    uchar *v_high, float *v_norms, const __grid_constant__ KvWriteParams p) {
    take_turn();
    extern __shared__ float row[];
    const uint token = blockIdx.x, head = blockIdx.y;
    const uint position = positions[token], seq = sequence[token];
    if (!is_kept(p.layer, seq, position, lens)) {
        return;
    }
    const ulong source = p.first_token + token;
    const uint slot = layer_slot(p.layer, position);
    const bool is_key = blockIdx.z == 0;
    if (is_key ? !is_quantised(K_CODEC) : !is_quantised(V_CODEC)) {
        if (is_key) {
            move_heads(k, K_DTYPE, k_low, K_CODEC, p, source, seq, slot);
        } else {
            move_heads(v, V_DTYPE, v_low, V_CODEC, p, source, seq, slot);
        }
        return;
    }
    const ulong from = HEAD_MAJOR ? head * p.source_tokens + source : source * p.layer.kv_heads + head;
    const ulong at = layer_row(p.layer, seq, head, slot);
    if (is_key) {
        encode_head(k, from, K_DTYPE, {k_low, k_high, k_norms}, at, p.head_dim, {K_CODEC, K_NORM, p.k_scale}, row);
    } else {
        encode_head(v, from, V_DTYPE, {v_low, v_high, v_norms}, at, p.head_dim, {V_CODEC, V_NORM, p.v_scale}, row);
    }
}
