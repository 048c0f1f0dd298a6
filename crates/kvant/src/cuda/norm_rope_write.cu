// norm_rope_write: norm and rotary embedding of queries, keys and values, [T, H, D] and twice [T, Hk, D], in one launch;
// the queries go to q_out, optionally rotated, the keys and values into the slots of a cache layer.
//
// A block takes one head of one token, blockIdx.x: with blockIdx.y below H a query, then Hk keys, then Hk values. All
// of a head is read before anything is written, so that `q_out` may be `q`. Keys and values of tokens that the layer does
// not hold when the step is written are skipped, as are tokens whose sequence or position is out of range.
#include "elements.h"
#include "norm_rope.h"
#include "slots.h"
#include "turboquant.h"
#include "ahead.h"

struct NormRopeWriteParams {
    RopeParams rope;
    LayerParams layer;
    uint heads;
    uint head_dim;
    float q_eps;
    float k_eps;
    float v_eps;
    float k_scale;
    float v_scale;
};

constexpr bool HAS_TABLES = ANGLES == TABLES;

extern "C" __global__ void norm_rope_write(const uchar *q, const uchar *k, const uchar *v, const uchar *q_weight,
                                           const uchar *k_weight, const uchar *v_weight, const float *cos,
                                           const float *sin, const float *factors, const uint *positions,
                                           const uint *sequence, const uint *lens, uchar *q_out, uchar *k_low,
                                           uchar *k_high, float *k_norms, uchar *v_low, uchar *v_high,
                                           float *v_norms, const __grid_constant__ NormRopeWriteParams p) {
    take_turn();
    extern __shared__ float row[];
    const uint token = blockIdx.x, dim = p.head_dim, kv_heads = p.layer.kv_heads;
    const Team team = whole_block();
    float *room = row + dim;
    const Rope rope = {ANGLES, LAYOUT, cos, sin, factors};
    const uint position = positions[token];
    if (HAS_TABLES && position >= p.rope.table_rows) {
        return;
    }
    if (blockIdx.y < p.heads) {
        const Norm norm = {Q_NORM, q_weight, Q_WEIGHT_DTYPE, p.q_eps};
        const ulong at = (ulong(token) * p.heads + blockIdx.y) * dim;
        norm_rope_head(row, room, q, at, Q_DTYPE, dim, norm, rope, p.rope, position, team);
        if (ROTATE_Q) {
            rotate(row, 1, dim, false, threadIdx.x, blockDim.x);
        }
        for (uint j = threadIdx.x; j < dim; j += blockDim.x) {
            store(q_out, at + j, row[j], OUT_DTYPE);
        }
        return;
    }
    const uint seq = sequence[token];
    if (!is_kept(p.layer, seq, position, lens)) {
        return;
    }
    const bool is_key = blockIdx.y < p.heads + kv_heads;
    const uint head = blockIdx.y - p.heads - (is_key ? 0 : kv_heads);
    const ulong from = (ulong(token) * kv_heads + head) * dim;
    const ulong at = layer_row(p.layer, seq, head, layer_slot(p.layer, position));
    if (is_key) {
        const Norm norm = {K_NORM, k_weight, K_WEIGHT_DTYPE, p.k_eps};
        const WritablePlanes to = {k_low, k_high, k_norms};
        norm_rope_head(row, room, k, from, K_DTYPE, dim, norm, rope, p.rope, position, team);
        store_row(row, room, to, at, dim, Encoding{K_CODEC, K_STORED_NORM, p.k_scale}, team);
    } else {
        const Norm norm = {V_NORM, v_weight, V_WEIGHT_DTYPE, p.v_eps};
        const Rope none = {NO_ROPE, HALVES, nullptr, nullptr, nullptr};
        const WritablePlanes to = {v_low, v_high, v_norms};
        norm_rope_head(row, room, v, from, V_DTYPE, dim, norm, none, p.rope, position, team);
        store_row(row, room, to, at, dim, Encoding{V_CODEC, V_STORED_NORM, p.v_scale}, team);
    }
}
