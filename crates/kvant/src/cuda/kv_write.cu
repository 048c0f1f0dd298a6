// kv_write: new keys and values, [T, Hk, D] or [Hk, T, D], into the slots of a cache layer, both in one launch.
//
// A block takes one vector: blockIdx.x is its token, y its head, z 0 for the key and 1 for the value. A dense layer of the source's dtype gets its bits. A token that the layer does not hold when the step is written, or
// whose sequence or position is out of range, is skipped, so that no slot is written twice.
#include "elements.h"
#include "slots.h"
#include "turboquant.h"

struct KvWriteParams {
    ulong first_token;
    ulong source_tokens;
    LayerParams layer;
    float k_scale;
    float v_scale;
    uint head_dim;
};

// Moves one vector. With `row`, D + STORE_ROOM floats, if the layer is quantised.
inline void write(const uchar *source, ulong from, uint dtype, WritablePlanes to, ulong at, uint dim,
                  Encoding encoding, float *row, Team team) {
    if (is_quantised(encoding.codec)) {
        for (uint j = team.index; j < dim; j += team.size) {
            row[j] = load(source, from * dim + j, dtype);
        }
        store_row(row, row + dim, to, at, dim, encoding, team);
        return;
    }
    for (uint j = team.index; j < dim; j += team.size) {
        if (encoding.codec == dtype) {
            copy_element(source, from * dim + j, to.low, at * dim + j, dtype);
        } else {
            store(to.low, at * dim + j, load(source, from * dim + j, dtype), encoding.codec);
        }
    }
}

extern "C" __global__ void kv_write(const uchar *k, const uchar *v, const uint *positions, const uint *sequence,
                                    const uint *lens, uchar *k_low, uchar *k_high, float *k_norms, uchar *v_low,
                                    uchar *v_high, float *v_norms, const __grid_constant__ KvWriteParams p) {
    extern __shared__ float row[];
    const uint token = blockIdx.x, head = blockIdx.y;
    const uint position = positions[token], seq = sequence[token];
    if (!is_kept(p.layer, seq, position, lens)) {
        return;
    }
    const Team team = whole_block();
    const ulong source = p.first_token + token;
    const ulong from = HEAD_MAJOR ? head * p.source_tokens + source : source * p.layer.kv_heads + head;
    const ulong at = layer_row(p.layer, seq, head, layer_slot(p.layer, position));
    if (blockIdx.z == 0) {
        const WritablePlanes to = {k_low, k_high, k_norms};
        write(k, from, K_DTYPE, to, at, p.head_dim, Encoding{K_CODEC, K_NORM, p.k_scale}, row, team);
    } else {
        const WritablePlanes to = {v_low, v_high, v_norms};
        write(v, from, V_DTYPE, to, at, p.head_dim, Encoding{V_CODEC, V_NORM, p.v_scale}, row, team);
    }
}
