// delta_rule (delta_rule.metal) of prompts, in chunks of CHUNK tokens; all products in float.
//
// With unit keys K and queries Q (also divided by sqrt(D)), and d(j, i) the product of the decays after token j up to
// token i, delta_rule_chunks computes the part that does not depend on states, for all chunks at once:
//
//   L[i, j]      = beta[i] * d(j, i) * K[i] . K[j]   for j < i, else 0
//   solved       = (1 + L)^-1 diag(beta)
//   scores[i, j] = d(j, i) * Q[i] . K[j]             for j <= i, else 0
//   from[i]      = the product of the decays up to i
//   rest[i]      = d(i, last)
//
// With S [D, Dv] the state before a chunk and V the chunk's values, delta_rule_products goes through the chunks of a
// run:
//
//   V'  = solved (V - from * K S)          the changes
//   out = from * Q S + scores V'
//   S   = from[last] * S + K^T (rest * V')
//
// A chunk begins at a multiple of CHUNK of its run's rows. Chunks are counted over all runs that are computed in
// chunks; a pass has `slots` of them, starting at `first`. Rows beyond the end of a run are zeros.
#include "attend/fragments.h"
#include "delta_rule/gates.h"

struct DeltaRuleChunksParams {
    DeltaRuleParams rule; // max_rows: of runs that are not computed in chunks
    uint runs;
    uint first;
    uint slots;
};

constant constexpr uint CHUNK = 32; // also the lanes of a SIMD-group
constant constexpr uint BLOCKS = CHUNK / 8;
constant constexpr uint WARPS = 4;
constant constexpr uint MAX_KEY_DIM = 128;
// Matrices of 8 by 8 beside each other that a SIMD-group has of a state.
constant constexpr uint WIDTH = 2;
// Floats that a head has of a chunk: solved, scores, from, rest.
constant constexpr uint CHUNK_HEAD = 2 * CHUNK * CHUNK + 2 * CHUNK;

typedef simdgroup_float8x8 Matrix;

// Rows of a run; 0 if it is not computed in chunks.
inline uint rows_of(device const uint *starts, device const uint *slots, constant DeltaRuleParams &p, uint run) {
    const uint start = starts[run], end = min(starts[run + 1], p.rows);
    return slots[run] < p.states && start < end && end - start > p.max_rows ? end - start : 0;
}

inline uint chunks_in(uint rows) {
    return (rows + CHUNK - 1) / CHUNK;
}

struct Chunk {
    uint row;
    uint count;
};

// The rows of chunk `index`; none beyond the last chunk.
inline Chunk find_chunk(device const uint *starts, device const uint *slots, constant DeltaRuleChunksParams &p,
                        uint index) {
    for (uint run = 0; run < p.runs; run++) {
        const uint rows = rows_of(starts, slots, p.rule, run), chunks = chunks_in(rows);
        if (index < chunks) {
            return {starts[run] + index * CHUNK, min(CHUNK, rows - index * CHUNK)};
        }
        index -= chunks;
    }
    return {0, 0};
}

// Writes x * scale / sqrt(sum of squares + eps), or zeros for a row beyond the end.
inline void write_unit(device const uchar *qkv, ulong at, float scale, bool is_there, device float *to, uint lane) {
    float own[MAX_KEY_DIM / 32];
    float squares = 0;
    for (uint i = 0; i < KEY_DIM / 32; i++) {
        own[i] = is_there ? load(qkv, at + i * 32 + lane, QKV_DTYPE) : 0.0f;
        squares = fma(own[i], own[i], squares);
    }
    const float factor = scale / sqrt(simd_sum(squares) + NORM_EPS);
    for (uint i = 0; i < KEY_DIM / 32; i++) {
        to[i * 32 + lane] = own[i] * factor;
    }
}

// The products of 8 rows with all keys of the chunk.
inline void multiply_keys(device const float *rows, device const float *keys, threadgroup float *to) {
    Matrix sums[BLOCKS];
    for (uint j = 0; j < BLOCKS; j++) {
        sums[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (uint i = 0; i < KEY_DIM; i += 8) {
        Matrix a, b;
        simdgroup_load(a, rows + i, KEY_DIM);
        for (uint j = 0; j < BLOCKS; j++) {
            simdgroup_load(b, keys + j * 8 * KEY_DIM + i, KEY_DIM, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(sums[j], a, b, sums[j]);
        }
    }
    for (uint j = 0; j < BLOCKS; j++) {
        simdgroup_store(sums[j], to + j * 8, CHUNK);
    }
}

// The matrices and vectors of a head, by one SIMD-group: lane j has token j, and column j of the matrices.
inline void write_head(float decay, float beta, threadgroup const float *of_keys, threadgroup const float *of_queries,
                       device float *to, uint lane) {
    device float *solved = to, *scores = solved + CHUNK * CHUNK, *factors = scores + CHUNK * CHUNK;
    // Substitution: row i of the inverse is row i of the identity, minus row i of L times the rows before.
    float inverse[CHUNK];
    float since = 0; // d(lane, i); 0 before the token
#pragma unroll
    for (uint i = 0; i < CHUNK; i++) {
        // All lanes take part in a broadcast.
        const float own_decay = simd_broadcast(decay, ushort(i)), own_beta = simd_broadcast(beta, ushort(i));
        since = i == lane ? 1.0f : since * own_decay;
        const float lower = lane < i ? own_beta * since * of_keys[i * CHUNK + lane] : 0.0f;
        float sum = i == lane ? 1.0f : 0.0f;
#pragma unroll
        for (uint j = 0; j < i; j++) {
            sum = fma(-simd_broadcast(lower, ushort(j)), inverse[j], sum);
        }
        inverse[i] = sum;
        solved[i * CHUNK + lane] = sum * beta;
        scores[i * CHUNK + lane] = lane <= i ? since * of_queries[i * CHUNK + lane] : 0.0f;
    }
    factors[lane] = simd_prefix_inclusive_product(decay);
    factors[CHUNK + lane] = since;
}

// A threadgroup has a chunk, and all heads that share a key.
kernel void delta_rule_chunks(device const uchar *qkv [[buffer(0)]],
                              device const uchar *a [[buffer(1)]],
                              device const uchar *b [[buffer(2)]],
                              device const float *rate [[buffer(3)]],
                              device const float *a_bias [[buffer(4)]],
                              device const uint *starts [[buffer(5)]],
                              device const uint *slots [[buffer(6)]],
                              device float *keys [[buffer(7)]],
                              device float *of_heads [[buffer(8)]],
                              constant DeltaRuleChunksParams &p [[buffer(9)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint warp [[simdgroup_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float of_keys[CHUNK * CHUNK], of_queries[CHUNK * CHUNK];
    const uint key_head = group.x, slot = group.y, heads = p.rule.heads;
    const Chunk chunk = find_chunk(starts, slots, p, p.first + slot);
    if (chunk.count == 0) {
        return;
    }
    const uint all_keys = p.rule.key_heads * KEY_DIM;
    const ulong width = 2 * all_keys + heads * p.rule.value_dim;
    device float *k = keys + (ulong(slot) * p.rule.key_heads + key_head) * 2 * CHUNK * KEY_DIM;
    device float *q = k + CHUNK * KEY_DIM;
    for (uint i = warp; i < CHUNK; i += WARPS) {
        const ulong at = (chunk.row + i) * width + key_head * KEY_DIM;
        write_unit(qkv, at + all_keys, 1.0f, i < chunk.count, k + i * KEY_DIM, lane);
        write_unit(qkv, at, rsqrt(float(KEY_DIM)), i < chunk.count, q + i * KEY_DIM, lane);
    }
    threadgroup_barrier(mem_flags::mem_device);
    multiply_keys(k + warp * 8 * KEY_DIM, k, of_keys + warp * 8 * CHUNK);
    multiply_keys(q + warp * 8 * KEY_DIM, k, of_queries + warp * 8 * CHUNK);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint repeats = p.rule.key_repeats;
    for (uint i = warp; i < heads / p.rule.key_heads; i += WARPS) {
        const uint head = (i / repeats * p.rule.key_heads + key_head) * repeats + i % repeats;
        float decay = 1, beta = 0;
        if (lane < chunk.count) {
            const ulong gate = ulong(chunk.row + lane) * heads + head;
            decay = decay_of(rate[head], load(a, gate, A_DTYPE) + a_bias[head]);
            beta = beta_of(load(b, gate, B_DTYPE));
        }
        write_head(decay, beta, of_keys, of_queries, of_heads + (ulong(slot) * heads + head) * CHUNK_HEAD, lane);
    }
}

// The columns of a state that a SIMD-group has, and the two elements of each matrix that a lane has.
struct Place {
    uint row;
    uint column;
};

// Keys or queries of the chunk, times the state.
inline void multiply_state(thread Matrix (&to)[BLOCKS][WIDTH], device const float *x,
                           thread const Matrix (&s)[MAX_KEY_DIM / 8][WIDTH]) {
    for (uint b = 0; b < BLOCKS; b++) {
        for (uint j = 0; j < WIDTH; j++) {
            to[b][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
        for (uint i = 0; i < KEY_DIM / 8; i++) {
            Matrix left;
            simdgroup_load(left, x + b * 8 * KEY_DIM + i * 8, KEY_DIM);
            for (uint j = 0; j < WIDTH; j++) {
                simdgroup_multiply_accumulate(to[b][j], left, s[i][j], to[b][j]);
            }
        }
    }
}

// to += left * right, where `left` is a lower triangle.
inline void add_product(thread Matrix (&to)[BLOCKS][WIDTH], device const float *left,
                        thread const Matrix (&right)[BLOCKS][WIDTH]) {
    for (uint b = 0; b < BLOCKS; b++) {
        for (uint i = 0; i <= b; i++) {
            Matrix block;
            simdgroup_load(block, left + b * 8 * CHUNK + i * 8, CHUNK);
            for (uint j = 0; j < WIDTH; j++) {
                simdgroup_multiply_accumulate(to[b][j], block, right[i][j], to[b][j]);
            }
        }
    }
}

// Multiplies the rows by factors.
inline void scale_rows(thread Matrix (&x)[BLOCKS][WIDTH], device const float *factors, Place place) {
    for (uint b = 0; b < BLOCKS; b++) {
        const float factor = factors[b * 8 + place.row];
        for (uint j = 0; j < WIDTH; j++) {
            x[b][j].thread_elements()[0] *= factor;
            x[b][j].thread_elements()[1] *= factor;
        }
    }
}

// s = decay * s + K^T changes.
inline void update_state(thread Matrix (&s)[MAX_KEY_DIM / 8][WIDTH], float decay, device const float *keys,
                         thread const Matrix (&changes)[BLOCKS][WIDTH]) {
    for (uint i = 0; i < KEY_DIM / 8; i++) {
        for (uint j = 0; j < WIDTH; j++) {
            s[i][j].thread_elements()[0] *= decay;
            s[i][j].thread_elements()[1] *= decay;
        }
        for (uint b = 0; b < BLOCKS; b++) {
            Matrix left;
            simdgroup_load(left, keys + b * 8 * KEY_DIM + i * 8, KEY_DIM, ulong2(0, 0), true);
            for (uint j = 0; j < WIDTH; j++) {
                simdgroup_multiply_accumulate(s[i][j], left, changes[b][j], s[i][j]);
            }
        }
    }
}

// A SIMD-group has 8 * WIDTH columns of a head's state for a whole run, in registers. Columns do not depend on each
// other, so SIMD-groups never wait for each other.
kernel void delta_rule_products(device const uchar *qkv [[buffer(0)]],
                                device const uint *starts [[buffer(1)]],
                                device const uint *slots [[buffer(2)]],
                                device const uint *past [[buffer(3)]],
                                device const uint *after [[buffer(4)]],
                                device const float *keys [[buffer(5)]],
                                device const float *of_heads [[buffer(6)]],
                                device float *state [[buffer(7)]],
                                device uchar *out [[buffer(8)]],
                                constant DeltaRuleChunksParams &p [[buffer(9)]],
                                uint3 group [[threadgroup_position_in_grid]],
                                uint warp [[simdgroup_index_in_threadgroup]],
                                uint lane [[thread_index_in_simdgroup]]) {
    const uint first_column = (group.x * WARPS + warp) * 8 * WIDTH, head = group.y, run = group.z;
    const uint heads = p.rule.heads, value_dim = p.rule.value_dim;
    uint before = 0;
    for (uint i = 0; i < run; i++) {
        before += chunks_in(rows_of(starts, slots, p.rule, i));
    }
    const uint rows = rows_of(starts, slots, p.rule, run);
    const uint from = max(before, p.first), to = min(before + chunks_in(rows), p.first + p.slots);
    // Whole SIMD-groups: value_dim is a multiple of 8 * WIDTH.
    if (first_column >= value_dim || from >= to) {
        return;
    }
    const uint slot_after = after[starts[run] + rows - 1];
    if (slot_after >= p.rule.states) {
        return;
    }
    const uint of_keys = p.rule.key_heads * KEY_DIM, key_head = head / p.rule.key_repeats % p.rule.key_heads;
    const ulong width = 2 * of_keys + heads * value_dim;
    const Place place = {fragment_row(lane), first_column + fragment_column(lane)};
    device float *own = state + ulong(slot_after) * p.rule.stride + ulong(head) * KEY_DIM * value_dim + first_column;
    // Later passes continue the state that the first one leaves.
    const ulong of_slot = ulong(from == before ? slots[run] : slot_after) * p.rule.stride;
    device const float *old = state + of_slot + ulong(head) * KEY_DIM * value_dim + first_column;
    Matrix s[MAX_KEY_DIM / 8][WIDTH];
    const bool is_fresh = past[run] == 0 && from == before;
    for (uint i = 0; i < KEY_DIM / 8; i++) {
        for (uint j = 0; j < WIDTH; j++) {
            s[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            if (!is_fresh) {
                simdgroup_load(s[i][j], old + i * 8 * value_dim + j * 8, value_dim);
            }
        }
    }
    for (uint chunk = from; chunk < to; chunk++) {
        const uint first = (chunk - before) * CHUNK, count = min(CHUNK, rows - first);
        const ulong row = starts[run] + first, slot = chunk - p.first;
        device const float *k = keys + (slot * p.rule.key_heads + key_head) * 2 * CHUNK * KEY_DIM;
        device const float *solved = of_heads + (slot * heads + head) * CHUNK_HEAD, *scores = solved + CHUNK * CHUNK;
        device const float *factors = scores + CHUNK * CHUNK;
        Matrix x[BLOCKS][WIDTH], changes[BLOCKS][WIDTH];
        multiply_state(x, k, s);
        for (uint b = 0; b < BLOCKS; b++) {
            const uint token = b * 8 + place.row;
            for (uint j = 0; j < WIDTH; j++) {
                changes[b][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                for (uint e = 0; e < 2; e++) {
                    const ulong at = (row + token) * width + 2 * of_keys + head * value_dim + place.column + j * 8 + e;
                    const float v = token < count ? load(qkv, at, QKV_DTYPE) : 0.0f;
                    x[b][j].thread_elements()[e] = fma(-factors[token], x[b][j].thread_elements()[e], v);
                }
            }
        }
        add_product(changes, solved, x);
        multiply_state(x, k + CHUNK * KEY_DIM, s);
        scale_rows(x, factors, place);
        add_product(x, scores, changes);
        for (uint b = 0; b < BLOCKS; b++) {
            const uint token = b * 8 + place.row;
            for (uint j = 0; j < WIDTH && token < count; j++) {
                const ulong at = ((row + token) * heads + head) * value_dim + place.column + j * 8;
                store(out, at, x[b][j].thread_elements()[0], OUT_DTYPE);
                store(out, at + 1, x[b][j].thread_elements()[1], OUT_DTYPE);
            }
        }
        scale_rows(changes, factors + CHUNK, place);
        update_state(s, factors[CHUNK - 1], k, changes);
    }
    for (uint i = 0; i < KEY_DIM / 8; i++) {
        for (uint j = 0; j < WIDTH; j++) {
            simdgroup_store(s[i][j], own + i * 8 * value_dim + j * 8, value_dim);
        }
    }
}
