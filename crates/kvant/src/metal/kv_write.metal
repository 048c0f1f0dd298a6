// kv_write: new keys and values, [T, Hk, D] or [Hk, T, D], into the slots of a cache layer, both in one launch.
//
// A threadgroup takes one vector: group.x is its head, group.y the token, group.z 0 for the key and 1 for the value. A
// dense layer of the source's dtype gets its bits. A token is skipped if the layer does not hold it when the step is
// written, if it has no page, or if its sequence or position is out of range. Therefore no slot is written twice.
#include "slots.h"
#include "turboquant.h"

struct KvWriteParams {
    ulong first_token;
    ulong source_tokens;
    ulong tokens;
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
constant bool ALIGNED [[function_constant(7)]];
constant uint PAGE_SHIFT [[function_constant(8)]];
constant bool PAGED = PAGE_SHIFT != 0;
constant bool K_HAS_HIGH = (WITH_HIGH >> K_CODEC & 1) != 0;
constant bool V_HAS_HIGH = (WITH_HIGH >> V_CODEC & 1) != 0;
constant bool K_HAS_NORMS = K_CODEC >= TQ2;
constant bool V_HAS_NORMS = V_CODEC >= TQ2;

// The source of a side.
struct Source {
    device const uchar *rows;
    uint dtype;

    ulong row(constant KvWriteParams &p, uint token, uint head) const {
        const ulong at = p.first_token + token;
        return HEAD_MAJOR ? ulong(head) * p.source_tokens + at : at * p.layer.kv_heads + head;
    }
};

// The tokens of a step.
struct StepTokens {
    device const uint *positions;
    device const uint *sequence;
    device const uint *lens;
    device const uint *table;
};

// Stores the vector of a token. `row` holds D floats if a side of the layer is quantised, `room` WRITE_ROOM floats.
inline void write(constant KvWriteParams &p, StepTokens step, Source source, WritablePlanes planes, Encoding encoding,
                  uint token, uint head, threadgroup float *row, threadgroup float *room, Place place) {
    const uint position = step.positions[token], seq = step.sequence[token], dim = p.head_dim;
    if (!is_kept(p.layer, seq, position, step.lens)) {
        return;
    }
    const RowPlace at = layer_place(p.layer, step.table, PAGE_SHIFT, seq, head, position);
    if (!at.held) {
        return;
    }
    const uint index = index_of(place), threads = threads_of(place);
    const ulong from = source.row(p, token, head) * dim;
    if (!is_quantised(encoding.codec)) {
        device uchar *to = planes.low + at.bytes;
        move_row(source.rows, from, source.dtype, to, at.row * dim, encoding.codec, dim, ALIGNED, index, threads);
        return;
    }
    load_row(row, source.rows, from, dim, source.dtype, ALIGNED, index, threads);
    write_row(row, room, shifted(planes, at.bytes, encoding.codec), at.row, dim, encoding, ALIGNED, place);
}

kernel void kv_write(device const uchar *k [[buffer(0)]],
                     device const uchar *v [[buffer(1)]],
                     device const uint *positions [[buffer(2)]],
                     device const uint *sequence [[buffer(3)]],
                     device const uint *lens [[buffer(4)]],
                     device uchar *k_low [[buffer(5)]],
                     device uchar *k_high [[buffer(6), function_constant(K_HAS_HIGH)]],
                     device uchar *k_norms [[buffer(7), function_constant(K_HAS_NORMS)]],
                     device uchar *v_low [[buffer(8)]],
                     device uchar *v_high [[buffer(9), function_constant(V_HAS_HIGH)]],
                     device uchar *v_norms [[buffer(10), function_constant(V_HAS_NORMS)]],
                     constant KvWriteParams &p [[buffer(11)]],
                     device const uint *table [[buffer(12), function_constant(PAGED)]],
                     threadgroup float *row [[threadgroup(0)]],
                     uint3 group [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]]) {
    const StepTokens step = {positions, sequence, lens, PAGED ? table : nullptr};
    const Place place = {lane, simdgroup, simdgroups};
    threadgroup float room[WRITE_ROOM];
    if (group.z == 0) {
        const WritablePlanes to = {k_low, K_HAS_HIGH ? k_high : nullptr, K_HAS_NORMS ? k_norms : nullptr, nullptr};
        const Encoding encoding = {K_CODEC, K_NORM, p.k_scale};
        write(p, step, Source{k, K_DTYPE}, to, encoding, group.y, group.x, row, room, place);
    } else {
        const WritablePlanes to = {v_low, V_HAS_HIGH ? v_high : nullptr, V_HAS_NORMS ? v_norms : nullptr, nullptr};
        const Encoding encoding = {V_CODEC, V_NORM, p.v_scale};
        write(p, step, Source{v, V_DTYPE}, to, encoding, group.y, group.x, row, room, place);
    }
}
