// kv_write: new keys and values, [T, Hk, D] or [Hk, T, D], into the slots of a cache layer, both in one launch.
//
// A threadgroup takes one vector: group.x is its head, group.y the token, group.z 0 for the key and 1 for the value. A
// dense layer of the source's dtype gets its bits. A token that the layer does not hold when the step is written, or
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

constant uint K_DTYPE [[function_constant(0)]];
constant uint V_DTYPE [[function_constant(1)]];
constant uint K_CODEC [[function_constant(2)]];
constant uint V_CODEC [[function_constant(3)]];
constant uint K_NORM [[function_constant(4)]];
constant uint V_NORM [[function_constant(5)]];
constant bool HEAD_MAJOR [[function_constant(6)]];
constant bool K_HAS_HIGH = K_CODEC == TQ5 || K_CODEC == TQ6;
constant bool V_HAS_HIGH = V_CODEC == TQ5 || V_CODEC == TQ6;
constant bool K_HAS_NORMS = K_CODEC >= TQ4;
constant bool V_HAS_NORMS = V_CODEC >= TQ4;

// Moves one vector. With `row`, D + STORE_ROOM floats, if the layer is quantised.
inline void write(device const uchar *source, ulong from, uint dtype, WritablePlanes to, ulong at, uint dim,
                  Encoding encoding, threadgroup float *row, Team team) {
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

kernel void kv_write(device const uchar *k [[buffer(0)]],
                     device const uchar *v [[buffer(1)]],
                     device const uint *positions [[buffer(2)]],
                     device const uint *sequence [[buffer(3)]],
                     device const uint *lens [[buffer(4)]],
                     device uchar *k_low [[buffer(5)]],
                     device uchar *k_high [[buffer(6), function_constant(K_HAS_HIGH)]],
                     device float *k_norms [[buffer(7), function_constant(K_HAS_NORMS)]],
                     device uchar *v_low [[buffer(8)]],
                     device uchar *v_high [[buffer(9), function_constant(V_HAS_HIGH)]],
                     device float *v_norms [[buffer(10), function_constant(V_HAS_NORMS)]],
                     constant KvWriteParams &p [[buffer(11)]],
                     threadgroup float *row [[threadgroup(0)]],
                     uint3 group [[threadgroup_position_in_grid]],
                     uint index [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]],
                     uint3 threads [[threads_per_threadgroup]]) {
    const uint head = group.x, token = group.y;
    const uint position = positions[token], seq = sequence[token];
    if (!is_kept(p.layer, seq, position, lens)) {
        return;
    }
    const Team team = {index, threads.x, lane, simd};
    const ulong source = p.first_token + token;
    const ulong from = HEAD_MAJOR ? head * p.source_tokens + source : source * p.layer.kv_heads + head;
    const ulong at = layer_row(p.layer, seq, head, layer_slot(p.layer, position));
    if (group.z == 0) {
        const WritablePlanes to = {k_low, K_HAS_HIGH ? k_high : nullptr, K_HAS_NORMS ? k_norms : nullptr};
        write(k, from, K_DTYPE, to, at, p.head_dim, Encoding{K_CODEC, K_NORM, p.k_scale}, row, team);
    } else {
        const WritablePlanes to = {v_low, V_HAS_HIGH ? v_high : nullptr, V_HAS_NORMS ? v_norms : nullptr};
        write(v, from, V_DTYPE, to, at, p.head_dim, Encoding{V_CODEC, V_NORM, p.v_scale}, row, team);
    }
}
