// delta_rule: the gated delta rule of linear attention, token by token; f32 states.
//
// qkv is [rows, 2 * key_heads * KEY_DIM + heads * value_dim]; a and b are [rows, heads]; state is [heads, KEY_DIM,
// value_dim] in each slot; out is [rows, heads, value_dim]. Run z has the rows starts[z] .. starts[z + 1], continues
// the state slots[z], and writes the state after row t to slot after[t]; what is out of range is skipped.
//
// A SIMD-group has COLUMNS columns of one head's state, in registers for all tokens of a run: lane l has column l %
// COLUMNS and the rows i with i % PARTS = l / COLUMNS. Columns do not depend on each other, so SIMD-groups never wait
// for each other: each normalises the query and the key itself.
#include "delta_rule/gates.h"

constant constexpr uint WARPS = 4;
constant constexpr uint COLUMNS = 8;
constant constexpr uint PARTS = 32 / COLUMNS;
constant constexpr uint MAX_DIM = 256;

// Writes x * scale / sqrt(sum of squares + eps) where all lanes read it.
inline void normalise(device const uchar *x, ulong at, float scale, threadgroup float *to, uint lane) {
    float squares = 0;
    for (uint i = lane; i < KEY_DIM; i += 32) {
        const float value = load(x, at + i, QKV_DTYPE);
        squares = fma(value, value, squares);
        to[i] = value;
    }
    const float factor = scale / sqrt(simd_sum(squares) + NORM_EPS);
    for (uint i = lane; i < KEY_DIM; i += 32) {
        to[i] *= factor;
    }
}

// The sum over the lanes of a column.
inline float over_column(float x) {
    for (ushort distance = COLUMNS; distance < 32; distance *= 2) {
        x += simd_shuffle_xor(x, distance);
    }
    return x;
}

kernel void delta_rule(device const uchar *qkv [[buffer(0)]],
                       device const uchar *a [[buffer(1)]],
                       device const uchar *b [[buffer(2)]],
                       device const float *rate [[buffer(3)]],
                       device const float *a_bias [[buffer(4)]],
                       device const uint *starts [[buffer(5)]],
                       device const uint *slots [[buffer(6)]],
                       device const uint *past [[buffer(7)]],
                       device const uint *after [[buffer(8)]],
                       device float *state [[buffer(9)]],
                       device uchar *out [[buffer(10)]],
                       constant DeltaRuleParams &p [[buffer(11)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint warp [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float shared[WARPS * 2 * MAX_DIM];
    const uint part = lane / COLUMNS, own_rows = KEY_DIM / PARTS;
    const uint column = (group.x * WARPS + warp) * COLUMNS + lane % COLUMNS;
    const uint head = group.y, run = group.z;
    const uint slot = slots[run], start = starts[run], end = min(starts[run + 1], p.rows);
    // Whole SIMD-groups: value_dim is a multiple of COLUMNS.
    if (column >= p.value_dim || slot >= p.states || start >= end || end - start > p.max_rows) {
        return;
    }
    if (after[end - 1] >= p.states) {
        return;
    }
    const uint of_keys = p.key_heads * KEY_DIM, key_head = head / p.key_repeats % p.key_heads * KEY_DIM;
    const ulong width = 2 * of_keys + p.heads * p.value_dim;
    device float *of_head = state + ulong(head) * KEY_DIM * p.value_dim + column;
    device const float *from = of_head + ulong(slot) * p.stride;
    float s[MAX_DIM / PARTS];
    for (uint i = 0; i < own_rows; i++) {
        s[i] = past[run] == 0 ? 0.0f : from[(i * PARTS + part) * p.value_dim];
    }
    const uint first_kept = end - start <= MAX_KEPT ? start : end - 1;
    threadgroup float *q = shared + warp * 2 * MAX_DIM, *k = q + MAX_DIM;
    for (uint row = start; row < end; row++) {
        normalise(qkv, row * width + key_head, rsqrt(float(KEY_DIM)), q, lane);
        normalise(qkv, row * width + of_keys + key_head, 1.0f, k, lane);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        const ulong gate = ulong(row) * p.heads + head;
        const float decay = decay_of(rate[head], load(a, gate, A_DTYPE) + a_bias[head]);
        const float beta = beta_of(load(b, gate, B_DTYPE));
        float seen = 0;
        for (uint i = 0; i < own_rows; i++) {
            seen = fma(k[i * PARTS + part], s[i], seen);
        }
        const float v = load(qkv, row * width + 2 * of_keys + head * p.value_dim + column, QKV_DTYPE);
        const float change = beta * (v - decay * over_column(seen));
        float sum = 0;
        for (uint i = 0; i < own_rows; i++) {
            s[i] = fma(k[i * PARTS + part], change, decay * s[i]);
            sum = fma(q[i * PARTS + part], s[i], sum);
        }
        sum = over_column(sum);
        if (part == 0) {
            store(out, gate * p.value_dim + column, sum, OUT_DTYPE);
        }
        if (row >= first_kept && after[row] < p.states) {
            device float *to = of_head + ulong(after[row]) * p.stride;
            for (uint i = 0; i < own_rows; i++) {
                to[(i * PARTS + part) * p.value_dim] = s[i];
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}
