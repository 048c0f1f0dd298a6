// delta_rule_wgmma: delta_rule (delta_rule.cu) of prompts, in chunks of 64 tokens, with products of warpgroups.
//
// For each chunk, delta_rule_chunks.cu has computed the keys K and queries Q as matrices, `solved`, `scores` and
// vectors f. With S [D, Dv] the state before a chunk, and V the chunk's values:
//
//   R   = V - f0 * (K S)            the values, less their prediction from S
//   V'  = solved R                  the changes: beta times the values, less all that earlier tokens predict
//   out = f1 * (Q S) + scores V'
//   S   = f3 * S + (f2 * K)^T V'
//
// A warpgroup has 64 columns of the state of one head for a whole run, as the accumulators of S^T in f32. All products
// are transposed, so that a result becomes the left side of the next product without leaving its registers. Left sides
// are rounded to bf16. A second warpgroup copies chunks ahead.
#include "delta_rule/chunks.h"
#include "device/dependent_launch.h"
#include "device/fragments.h"
#include "device/mbarrier.h"
#include "device/ring_cursor.h"

constexpr uint WARPGROUP = 128;
constexpr uint COLUMNS = 64;
// A buffer: keys and queries, the chunk's matrices and vectors of the head, and values. Rows of values have a gap,
// so that adjacent rows are in different banks.
constexpr uint VALUE_ROW = COLUMNS * 2 + 16;
constexpr uint AT_HEAD = CHUNK_KEYS;
constexpr uint AT_VALUES = AT_HEAD + CHUNK_HEAD;
constexpr uint STAGE = (AT_VALUES + CHUNK * VALUE_ROW + 1023) / 1024 * 1024;
constexpr uint AT_FULL = STAGES * STAGE;
constexpr uint AT_FREE = AT_FULL + STAGES * 8;

typedef RingCursor<STAGES> Cursor;

// A buffer, as the products address it.
struct Stage {
    const uchar *memory;

    inline uint keys() const { return shared_address(memory); }
    inline uint queries() const { return keys() + KEYS; }
    inline uint solved() const { return keys() + AT_HEAD; }
    inline uint scores() const { return solved() + AT_SCORES; }
    inline uint values() const { return keys() + AT_VALUES; }
    inline const float *factors(uint which) const {
        return reinterpret_cast<const float *>(memory + AT_HEAD + AT_FACTORS) + which * CHUNK;
    }
};

// The chunks of a run that this pass computes, as numbers in the run and in the pass.
struct Range {
    uint start, end; // rows of the run
    uint from, to;
    uint slot; // of chunk `from`
};

inline Range own_chunks(const Runs &runs, uint run) {
    const DeltaRuleChunksParams &p = runs.p;
    const uint before = runs.chunks_before(run), after = before + runs.chunks(run);
    const uint from = max(before, p.first), to = min(after, p.first + p.slots);
    const uint start = runs.starts[run];
    // wgmma must not seem to be in a loop that threads leave at different times.
    return {of_warp(start), of_warp(start + runs.rows(run)), of_warp(from - before), of_warp(max(from, to) - before),
            of_warp(from - p.first)};
}

// Copies chunks to the buffers, by one warpgroup: values in rows, the rest in bulk.
inline void produce(const uchar *qkv, const uchar *keys, const uchar *of_heads, const DeltaRuleParams &p,
                    const Range &range, uint head, uint first_column, uint base) {
    constexpr uint UNITS = COLUMNS / 8, TOGETHER = WARPGROUP / UNITS;
    const uint key_head = head / p.key_repeats % p.key_heads, thread = threadIdx.x % WARPGROUP;
    const ulong row_bytes = ulong(2 * p.key_heads * KEY_DIM + p.heads * p.value_dim) * 2;
    const uchar *values = qkv + (2 * p.key_heads * KEY_DIM + head * p.value_dim + first_column) * 2 + thread % UNITS * 16;
    const uint first = thread / UNITS, to = AT_VALUES + first * VALUE_ROW + thread % UNITS * 16;
    Cursor cursor;
    for (uint i = range.from; i < range.to; i++) {
        const uint slot = range.slot + i - range.from, row = range.start + i * CHUNK, count = min(CHUNK, range.end - row);
        const uint stage = base + cursor.stage * STAGE, full = base + AT_FULL + cursor.stage * 8;
        barrier_wait(base + AT_FREE + cursor.stage * 8, cursor.parity ^ 1);
        if (thread < 32 && elected()) {
            barrier_expect(full, CHUNK_KEYS + CHUNK_HEAD);
            copy_bulk(stage, keys + (ulong(slot) * p.key_heads + key_head) * CHUNK_KEYS, CHUNK_KEYS, full);
            copy_bulk(stage + AT_HEAD, of_heads + (ulong(slot) * p.heads + head) * CHUNK_HEAD, CHUNK_HEAD, full);
        }
        const uchar *from = values + (row + first) * row_bytes;
#pragma unroll
        for (uint r = 0; r < CHUNK; r += TOGETHER) {
            const bool is_there = first + r < count;
            copy_async<16>(stage + to + r * VALUE_ROW, is_there ? from : values, is_there);
            from += TOGETHER * row_bytes;
        }
        barrier_arrive_behind_copies(full);
        cursor.next();
    }
}

// The left side of products over 16 columns of the former result each.
template <uint N> inline void left_side(const float (&d)[N], uint (&a)[N / 8][4]) {
#pragma unroll
    for (uint i = 0; i < N / 8; i++) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            a[i][j] = pack<false>(d[i * 8 + j * 2], d[i * 8 + j * 2 + 1]);
        }
    }
}

// As above, of results whose column c is multiplied by factors[c].
inline void left_side_scaled(const float (&d)[32], const float *factors, uint (&a)[4][4]) {
#pragma unroll
    for (uint unit = 0; unit < 8; unit++) {
        const float2 f = *reinterpret_cast<const float2 *>(factors + unit * 8 + threadIdx.x % 4 * 2);
        a[unit / 2][unit % 2 * 2] = pack<false>(d[unit * 4] * f.x, d[unit * 4 + 1] * f.y);
        a[unit / 2][unit % 2 * 2 + 1] = pack<false>(d[unit * 4 + 2] * f.x, d[unit * 4 + 3] * f.y);
    }
}

inline void scale_columns(float (&d)[32], const float *factors) {
#pragma unroll
    for (uint unit = 0; unit < 8; unit++) {
        const float2 f = *reinterpret_cast<const float2 *>(factors + unit * 8 + threadIdx.x % 4 * 2);
        d[unit * 4] *= f.x;
        d[unit * 4 + 1] *= f.y;
        d[unit * 4 + 2] *= f.x;
        d[unit * 4 + 3] *= f.y;
    }
}

// The address of the row of the warp's values that a lane has for four matrices of 8 rows by 8 columns: of rows
// 16 * `pair` to 16 * `pair` + 15 of the chunk, and 16 columns.
inline uint values_at(uint values, uint pair) {
    const uint lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return values + (pair * 16 + lane / 16 * 8 + lane % 8) * VALUE_ROW + warp * 32 + lane / 8 % 2 * 16;
}

// d = V - factors * d.
inline void subtract_from_values(float (&d)[32], uint values, const float *factors) {
    const uint first = threadIdx.x % 4 * 2;
#pragma unroll
    for (uint pair = 0; pair < 4; pair++) {
        const uint4 v = load_matrices_transposed(values_at(values, pair));
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            const uint unit = pair * 2 + i, c = unit * 8 + first;
            const float2 f = *reinterpret_cast<const float2 *>(factors + c);
            const float2 low = unpack<false>(i == 0 ? v.x : v.z), high = unpack<false>(i == 0 ? v.y : v.w);
            float *own = d + unit * 4;
            own[0] = fmaf(-f.x, own[0], low.x);
            own[1] = fmaf(-f.y, own[1], low.y);
            own[2] = fmaf(-f.x, own[2], high.x);
            own[3] = fmaf(-f.y, own[3], high.y);
        }
    }
}

// Waits for the other warps that multiply.
inline void meet_warpgroup() {
    asm volatile("bar.sync 1, 128;" ::: "memory");
}

// Writes results through the place of the values, so that a store has whole rows.
inline void write_out(const float (&d)[32], const Stage &stage, uchar *out, ulong row_bytes, uint count) {
    uint a[4][4];
    left_side(d, a);
#pragma unroll
    for (uint pair = 0; pair < 4; pair++) {
        store_matrices_transposed(values_at(stage.values(), pair), a[pair]);
    }
    meet_warpgroup();
    const uint first = threadIdx.x / 8, column = threadIdx.x % 8 * 16;
    const uchar *from = stage.memory + AT_VALUES + first * VALUE_ROW + column;
    out += first * row_bytes + column;
#pragma unroll
    for (uint row = 0; row < CHUNK; row += 16) {
        if (first + row < count) {
            *reinterpret_cast<uint4 *>(out) = *reinterpret_cast<const uint4 *>(from + row * VALUE_ROW);
        }
        out += 16 * row_bytes;
    }
}

// The columns of K at 16 of its columns, for products over the key dimension.
inline ulong over_keys(uint matrix_at, uint i) {
    return matrix(matrix_at + i / 4 * BLOCK + i % 4 * 32, 0);
}

// Begins d = S^T X^T, of keys or queries X.
inline void multiply_state(float (&d)[32], const uint (&state)[KEY_DIM / 16][4], uint x) {
    products_begin();
#pragma unroll
    for (uint i = 0; i < KEY_DIM / 16; i++) {
        multiply<false>(d, state[i], over_keys(x, i), i > 0);
    }
    products_commit();
}

// The left side of products with the state before a chunk, in bf16; the state then decays over the chunk.
inline void begin_chunk(float (&s)[KEY_DIM / 2], uint (&state)[KEY_DIM / 16][4], float decay) {
    left_side(s, state);
    hold(state);
#pragma unroll
    for (uint i = 0; i < KEY_DIM / 2; i++) {
        s[i] *= decay;
    }
}

// The products K S (in r) and Q S (in o) have begun. Replaces r by V' of the chunk, and o by the part of the results
// that comes from the state before the chunk.
inline void compute_changes(float (&r)[32], float (&o)[32], const Stage &stage) {
    subtract_from_values(r, stage.values(), stage.factors(0));
    uint left[4][4];
    left_side(r, left);
    hold(left);
    products_begin();
#pragma unroll
    for (uint k = 0; k < 4; k++) {
        multiply<false>(r, left[k], matrix(stage.solved() + k * 32, 0), k > 0);
    }
    products_commit();
    products_wait<1>();
    hold(o);
    scale_columns(o, stage.factors(1));
    products_wait<0>();
    hold(r);
    hold(left);
}

// V' (in r) as left sides of products: unscaled for the results, scaled for the state.
struct Changes {
    uint plain[4][4], scaled[4][4];
};

// Begins S^T += V'^T (f2 * K), then o += V'^T scores^T.
inline void begin_updates(float (&s)[KEY_DIM / 2], float (&o)[32], const Changes &changes, const Stage &stage) {
    products_begin();
#pragma unroll
    for (uint k = 0; k < 4; k++) {
        multiply_rows<false>(s, changes.scaled[k], matrix(stage.keys() + k * 16 * 128, BLOCK));
    }
    products_commit();
#pragma unroll
    for (uint k = 0; k < 4; k++) {
        multiply<false>(o, changes.plain[k], matrix(stage.scores() + k * 32, 0), true);
    }
    products_commit();
}

// All chunks of the range: results for `out`, and S^T. The products of a chunk with the state begin before the results
// of the chunk before are written.
inline void compute_chunks(float (&s)[KEY_DIM / 2], const Range &range, const uchar *memory, uchar *out,
                           ulong row_bytes) {
    const uint base = shared_address(memory);
    Cursor cursor;
    Stage stage = {memory};
    uint state[KEY_DIM / 16][4];
    float r[32], o[32];
    barrier_wait(base + AT_FULL, 0);
    begin_chunk(s, state, *stage.factors(3));
    multiply_state(r, state, stage.keys());
    products_wait<0>();
    hold(r);
    for (uint i = range.from; i < range.to; i++) {
        multiply_state(o, state, stage.queries());
        compute_changes(r, o, stage);
        Changes changes;
        left_side_scaled(r, stage.factors(2), changes.scaled);
        left_side(r, changes.plain);
        hold(changes.scaled);
        hold(changes.plain);
        hold(s);
        hold(o);
        begin_updates(s, o, changes, stage);
        const Stage own = stage;
        const uint number = cursor.stage, row = range.start + i * CHUNK;
        if (i + 1 < range.to) {
            cursor.next();
            stage = {memory + cursor.stage * STAGE};
            barrier_wait(base + AT_FULL + cursor.stage * 8, cursor.parity);
            products_wait<1>();
            hold(s);
            hold(changes.scaled);
            begin_chunk(s, state, *stage.factors(3));
            multiply_state(r, state, stage.keys());
            products_wait<1>();
        } else {
            products_wait<0>();
            hold(s);
        }
        hold(o);
        hold(changes.plain);
        write_out(o, own, out + row * row_bytes, row_bytes, min(CHUNK, range.end - row));
        barrier_arrive(base + AT_FREE + number * 8);
        products_wait<0>();
        hold(r);
        hold(state);
    }
}

// A head's part of the warpgroup, for a run: from one state to another.
inline void consume(const DeltaRuleParams &p, const Range &range, uint head, uint first_column, bool is_fresh,
                    const uchar *memory, const float *from, float *to, uchar *out) {
    const uint lane = threadIdx.x % 32, column = first_column + threadIdx.x / 32 * 16 + lane / 4;
    const ulong own = (ulong(head) * KEY_DIM + lane % 4 * 2) * p.value_dim + column;
    // The offset of element i of s in the state.
    const auto at = [&](uint i) { return own + ulong(i / 4 * 8 + i % 2) * p.value_dim + i / 2 % 2 * 8; };
    float s[KEY_DIM / 2];
#pragma unroll
    for (uint i = 0; i < KEY_DIM / 2; i++) {
        s[i] = is_fresh ? 0.0f : from[at(i)];
    }
    out += (ulong(head) * p.value_dim + first_column) * 2;
    compute_chunks(s, range, memory, out, ulong(p.heads) * p.value_dim * 2);
#pragma unroll
    for (uint i = 0; i < KEY_DIM / 2; i++) {
        to[at(i)] = s[i];
    }
}

extern "C" __global__ void __launch_bounds__(2 * WARPGROUP, 1)
    KVANT_KERNEL(const uchar *qkv, const uint *starts, const uint *slots, const uint *past, const uint *after,
                 const uchar *keys, const uchar *of_heads, float *state, uchar *out, const DeltaRuleChunksParams p) {
    extern __shared__ __align__(1024) uchar memory[];
    take_turn();
    const uint first_column = blockIdx.x * COLUMNS, head = blockIdx.y, run = blockIdx.z;
    const Range range = own_chunks({starts, slots, p}, run);
    const uint slot_after = range.from < range.to ? of_warp(after[range.end - 1]) : p.rule.states;
    if (slot_after >= p.rule.states) {
        return;
    }
    const uint base = shared_address(memory);
    // wgmma.h needs this condition; it always holds.
    if (base % 1024 != 0) {
        __trap();
    }
    if (threadIdx.x == 0) {
        for (uint i = 0; i < STAGES; i++) {
            barrier_init(base + AT_FULL + i * 8, 1 + WARPGROUP);
            barrier_init(base + AT_FREE + i * 8, WARPGROUP);
        }
        show_barriers_to_copies();
    }
    __syncthreads();
    if (threadIdx.x >= WARPGROUP) {
        produce(qkv, keys, of_heads, p.rule, range, head, first_column, base);
    } else {
        // Later passes continue the state that the first one leaves.
        float *to = state + ulong(slot_after) * p.rule.stride;
        const float *from = range.from == 0 ? state + ulong(slots[run]) * p.rule.stride : to;
        consume(p.rule, range, head, first_column, past[run] == 0 && range.from == 0, memory, from, to, out);
    }
}
