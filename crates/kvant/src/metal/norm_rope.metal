// norm_rope: RMS norm and rotary embedding of the heads of x [T, H, D], to out [T, H, D] or [H, T, D], with an optional
// Hadamard rotation of the result; f32, f16 or bf16 in and out.
//
// A threadgroup takes one head, group.x, of one token, group.y. It reads the whole head before it writes, so that `out`
// may be `x`. A token whose position is beyond the tables is skipped.
#include "norm_rope.h"
#include "rotate.h"

struct NormRopeParams {
    RopeParams rope;
    uint tokens;
    uint heads;
    uint head_dim;
    float eps;
};

constant uint X_DTYPE [[function_constant(0)]];
constant uint OUT_DTYPE [[function_constant(1)]];
constant uint NORM [[function_constant(2)]];
constant uint WEIGHT_DTYPE [[function_constant(3)]];
constant uint ANGLES [[function_constant(4)]];
constant uint LAYOUT [[function_constant(5)]];
constant bool ROTATE [[function_constant(6)]];
constant bool HEAD_MAJOR [[function_constant(7)]];
constant bool ALIGNED [[function_constant(8)]];
constant bool HAS_WEIGHT = NORM == WEIGHTED_NORM;
constant bool HAS_FACTORS = ANGLES == THETA_FACTORS;
constant bool HAS_TABLES = ANGLES == TABLES;

kernel void norm_rope(device const uchar *x [[buffer(0)]],
                      device const uint *positions [[buffer(1)]],
                      device const uchar *weight [[buffer(2), function_constant(HAS_WEIGHT)]],
                      device const float *cos [[buffer(3), function_constant(HAS_TABLES)]],
                      device const float *sin [[buffer(4), function_constant(HAS_TABLES)]],
                      device const float *factors [[buffer(5), function_constant(HAS_FACTORS)]],
                      device uchar *out [[buffer(6)]],
                      constant NormRopeParams &p [[buffer(7)]],
                      threadgroup float *row [[threadgroup(0)]],
                      uint3 group [[threadgroup_position_in_grid]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]]) {
    const uint head = group.x, token = group.y, dim = p.head_dim;
    const uint position = positions[token];
    if (HAS_TABLES && position >= p.rope.table_rows) {
        return;
    }
    const Place place = {lane, simdgroup, simdgroups};
    const uint index = index_of(place), threads = threads_of(place);
    const Norm norm = {NORM, HAS_WEIGHT ? weight : nullptr, WEIGHT_DTYPE, p.eps};
    const Rope rope = {ANGLES, LAYOUT, HAS_TABLES ? cos : nullptr, HAS_TABLES ? sin : nullptr,
                       HAS_FACTORS ? factors : nullptr};
    const ulong from = (ulong(token) * p.heads + head) * dim;
    threadgroup float room[NORM_ROOM];
    norm_rope_head(row, room, x, from, X_DTYPE, ALIGNED, dim, norm, rope, p.rope, position, place);
    if (ROTATE) {
        rotate(row, 1, dim, false, index, threads);
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const ulong to = HEAD_MAJOR ? (ulong(head) * p.tokens + token) * dim : from;
    store_row(out, to, row, dim, OUT_DTYPE, ALIGNED, index, threads);
}
