// norm_rope_write: norm and rotary embedding of queries, keys and values, [T, H, D] and twice [T, Hk, D], in one
// launch; the queries go to q_out, optionally rotated, the keys and values into the slots of a cache layer.
//
// A threadgroup takes one head of one token, group.y: a query if group.x is below H, then Hk keys, then Hk values. It
// reads the whole head before it writes, so that `q_out` may be `q`. Keys and values are skipped if the layer does not
// hold their token after the step, if its sequence or position is out of range, or if it has no page.
#include "norm_rope.h"
#include "slots.h"
#include "turboquant.h"

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

constant uint Q_DTYPE [[function_constant(0)]];
constant uint K_DTYPE [[function_constant(1)]];
constant uint V_DTYPE [[function_constant(2)]];
constant uint OUT_DTYPE [[function_constant(3)]];
constant uint Q_NORM [[function_constant(4)]];
constant uint K_NORM [[function_constant(5)]];
constant uint V_NORM [[function_constant(6)]];
constant uint Q_WEIGHT_DTYPE [[function_constant(7)]];
constant uint K_WEIGHT_DTYPE [[function_constant(8)]];
constant uint V_WEIGHT_DTYPE [[function_constant(9)]];
constant uint ANGLES [[function_constant(10)]];
constant uint LAYOUT [[function_constant(11)]];
constant bool ROTATE_Q [[function_constant(12)]];
constant uint K_CODEC [[function_constant(13)]];
constant uint V_CODEC [[function_constant(14)]];
constant uint K_STORED_NORM [[function_constant(15)]];
constant uint V_STORED_NORM [[function_constant(16)]];
constant bool ALIGNED [[function_constant(17)]];
constant uint PAGE_SHIFT [[function_constant(18)]];
constant bool PAGED = PAGE_SHIFT != 0;
constant bool Q_HAS_WEIGHT = Q_NORM == WEIGHTED_NORM;
constant bool K_HAS_WEIGHT = K_NORM == WEIGHTED_NORM;
constant bool V_HAS_WEIGHT = V_NORM == WEIGHTED_NORM;
constant bool HAS_FACTORS = ANGLES == THETA_FACTORS;
constant bool HAS_TABLES = ANGLES == TABLES;
constant bool K_HAS_HIGH = (WITH_HIGH >> K_CODEC & 1) != 0;
constant bool V_HAS_HIGH = (WITH_HIGH >> V_CODEC & 1) != 0;
constant bool K_HAS_NORMS = K_CODEC >= TQ2;
constant bool V_HAS_NORMS = V_CODEC >= TQ2;

static_assert(WRITE_ROOM >= NORM_ROOM, "norm_rope_write: the norm and the store share their room");

kernel void norm_rope_write(device const uchar *q [[buffer(0)]],
                            device const uchar *k [[buffer(1)]],
                            device const uchar *v [[buffer(2)]],
                            device const uchar *q_weight [[buffer(3), function_constant(Q_HAS_WEIGHT)]],
                            device const uchar *k_weight [[buffer(4), function_constant(K_HAS_WEIGHT)]],
                            device const uchar *v_weight [[buffer(5), function_constant(V_HAS_WEIGHT)]],
                            device const float *cos [[buffer(6), function_constant(HAS_TABLES)]],
                            device const float *sin [[buffer(7), function_constant(HAS_TABLES)]],
                            device const float *factors [[buffer(8), function_constant(HAS_FACTORS)]],
                            device const uint *positions [[buffer(9)]],
                            device const uint *sequence [[buffer(10)]],
                            device const uint *lens [[buffer(11)]],
                            device uchar *q_out [[buffer(12)]],
                            device uchar *k_low [[buffer(13)]],
                            device uchar *k_high [[buffer(14), function_constant(K_HAS_HIGH)]],
                            device uchar *k_norms [[buffer(15), function_constant(K_HAS_NORMS)]],
                            device uchar *v_low [[buffer(16)]],
                            device uchar *v_high [[buffer(17), function_constant(V_HAS_HIGH)]],
                            device uchar *v_norms [[buffer(18), function_constant(V_HAS_NORMS)]],
                            constant NormRopeWriteParams &p [[buffer(19)]],
                            device const uint *table [[buffer(20), function_constant(PAGED)]],
                            threadgroup float *row [[threadgroup(0)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint simdgroups [[simdgroups_per_threadgroup]]) {
    const uint token = group.y, dim = p.head_dim, kv_heads = p.layer.kv_heads;
    const Place place = {lane, simdgroup, simdgroups};
    const uint index = index_of(place), threads = threads_of(place);
    threadgroup float room[WRITE_ROOM];
    const Rope rope = {ANGLES, LAYOUT, HAS_TABLES ? cos : nullptr, HAS_TABLES ? sin : nullptr,
                       HAS_FACTORS ? factors : nullptr};
    const uint position = positions[token];
    if (HAS_TABLES && position >= p.rope.table_rows) {
        return;
    }
    if (group.x < p.heads) {
        const Norm norm = {Q_NORM, Q_HAS_WEIGHT ? q_weight : nullptr, Q_WEIGHT_DTYPE, p.q_eps};
        const ulong at = (ulong(token) * p.heads + group.x) * dim;
        norm_rope_head(row, room, q, at, Q_DTYPE, ALIGNED, dim, norm, rope, p.rope, position, place);
        if (ROTATE_Q) {
            rotate(row, 1, dim, false, index, threads);
        } else {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        store_row(q_out, at, row, dim, OUT_DTYPE, ALIGNED, index, threads);
        return;
    }
    const bool is_key = group.x < p.heads + kv_heads;
    const uint head = group.x - p.heads - (is_key ? 0 : kv_heads), seq = sequence[token];
    const ulong vector = ulong(token) * kv_heads + head;
    if (!is_kept(p.layer, seq, position, lens)) {
        return;
    }
    const RowPlace at = layer_place(p.layer, PAGED ? table : nullptr, PAGE_SHIFT, seq, head, position);
    if (!at.held) {
        return;
    }
    if (is_key) {
        const Norm norm = {K_NORM, K_HAS_WEIGHT ? k_weight : nullptr, K_WEIGHT_DTYPE, p.k_eps};
        const WritablePlanes to = {k_low, K_HAS_HIGH ? k_high : nullptr, K_HAS_NORMS ? k_norms : nullptr, nullptr};
        norm_rope_head(row, room, k, vector * dim, K_DTYPE, ALIGNED, dim, norm, rope, p.rope, position, place);
        write_row(row, room, shifted(to, at.bytes, K_CODEC), at.row, dim,
                  Encoding{K_CODEC, K_STORED_NORM, p.k_scale}, ALIGNED, place);
    } else {
        const Norm norm = {V_NORM, V_HAS_WEIGHT ? v_weight : nullptr, V_WEIGHT_DTYPE, p.v_eps};
        const Rope none = {NO_ROPE, HALVES, nullptr, nullptr, nullptr};
        const WritablePlanes to = {v_low, V_HAS_HIGH ? v_high : nullptr, V_HAS_NORMS ? v_norms : nullptr, nullptr};
        norm_rope_head(row, room, v, vector * dim, V_DTYPE, ALIGNED, dim, norm, none, p.rope, position, place);
        write_row(row, room, shifted(to, at.bytes, V_CODEC), at.row, dim,
                  Encoding{V_CODEC, V_STORED_NORM, p.v_scale}, ALIGNED, place);
    }
}
