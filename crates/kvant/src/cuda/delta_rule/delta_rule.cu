// delta_rule: the gated delta rule of linear attention, token by token; f32 states.
//
// qkv is [rows, 2 * key_heads * KEY_DIM + heads * value_dim]; a and b are [rows, heads]; state is [heads, KEY_DIM,
// value_dim] in each slot; out is [rows, heads, value_dim]. Run z has the rows starts[z] .. starts[z + 1], continues
// the state slots[z], and writes the state after row t to slot after[t]; what is out of range is skipped.
//
// A warp has COLUMNS columns of one head's state, in registers for all tokens of a run: lane l has column l % COLUMNS
// and OWN_ROWS adjacent rows, from OWN_ROWS * (l / COLUMNS). Columns do not depend on each other, so warps never wait
// for each other: each normalises the query and the key itself. The time of a token is the latency of its dependent
// steps, so inputs are loaded three tokens ahead, and the next token is prepared while the current one is computed.
#include "device/dependent_launch.h"
#include "delta_rule/gates.h"
#include "device/elements.h"
#include "device/reduce.h"

constexpr uint WARPS = 4;
constexpr uint COLUMNS = 8;
constexpr uint PARTS = 32 / COLUMNS;
constexpr uint OWN_ROWS = KEY_DIM / PARTS; // of the state, for a lane
constexpr uint PER_LANE = KEY_DIM / 32;    // of a query or key
// The rows of a part, and a gap: the parts of a warp read different banks.
constexpr uint PART_STRIDE = OWN_ROWS + 4;
constexpr uint PADDED = PARTS * PART_STRIDE;

// A token as a lane loads it.
struct Token {
    float q[PER_LANE], k[PER_LANE];
    float v, a, b;
};

struct Head {
    const uchar *qkv, *a, *b;
    uint width, q_at, k_at, v_at; // columns of qkv
    uint heads, head;
};

inline Token load_token(const Head &h, uint row, uint lane) {
    Token t;
    const ulong at = ulong(row) * h.width;
#pragma unroll
    for (uint i = 0; i < PER_LANE; i++) {
        t.q[i] = load(h.qkv, at + h.q_at + i * 32 + lane, QKV_DTYPE);
        t.k[i] = load(h.qkv, at + h.k_at + i * 32 + lane, QKV_DTYPE);
    }
    t.v = load(h.qkv, at + h.v_at, QKV_DTYPE);
    t.a = load(h.a, ulong(row) * h.heads + h.head, A_DTYPE);
    t.b = load(h.b, ulong(row) * h.heads + h.head, B_DTYPE);
    return t;
}

// The inputs of a token whose query and key are in shared memory.
struct Prepared {
    float v, decay, beta;
};

// The place of a row of the state in a padded vector.
inline uint place(uint row) {
    return row + row / OWN_ROWS * (PART_STRIDE - OWN_ROWS);
}

// Writes x * scale / sqrt(sum of squares + eps).
inline void normalise(const float *x, float scale, float *to, uint lane) {
    float squares = 0;
#pragma unroll
    for (uint i = 0; i < PER_LANE; i++) {
        squares = fmaf(x[i], x[i], squares);
    }
    const float factor = scale / sqrtf(over_warp<Sum>(squares) + NORM_EPS);
#pragma unroll
    for (uint i = 0; i < PER_LANE; i++) {
        to[place(i * 32 + lane)] = x[i] * factor;
    }
}

inline Prepared prepare(const Token &t, float rate, float a_bias, float (&qk)[2][PADDED], uint lane) {
    normalise(t.q, rsqrtf(float(KEY_DIM)), qk[0], lane);
    normalise(t.k, 1.0f, qk[1], lane);
    return Prepared{t.v, decay_of(rate, t.a + a_bias), beta_of(t.b)};
}

// The sum over the lanes of a column.
inline float over_column(float x) {
#pragma unroll
    for (uint distance = COLUMNS; distance < 32; distance *= 2) {
        x += __shfl_xor_sync(ALL, x, distance);
    }
    return x;
}

inline float4 four(const float *x, uint i) {
    return *reinterpret_cast<const float4 *>(x + i);
}

// One token: changes the lane's rows of the state, and returns the column's result. Four chains of additions each.
inline float step(float (&s)[OWN_ROWS], const Prepared &t, const float (&qk)[2][PADDED], uint part) {
    const float *q = qk[0] + part * PART_STRIDE, *k = qk[1] + part * PART_STRIDE;
    float4 seen = make_float4(0, 0, 0, 0), sum = seen;
#pragma unroll
    for (uint i = 0; i < OWN_ROWS; i += 4) {
        const float4 key = four(k, i);
        seen = make_float4(fmaf(key.x, s[i], seen.x), fmaf(key.y, s[i + 1], seen.y), fmaf(key.z, s[i + 2], seen.z),
                           fmaf(key.w, s[i + 3], seen.w));
    }
    const float change = t.beta * (t.v - t.decay * over_column((seen.x + seen.y) + (seen.z + seen.w)));
#pragma unroll
    for (uint i = 0; i < OWN_ROWS; i += 4) {
        const float4 key = four(k, i), query = four(q, i);
        s[i] = fmaf(key.x, change, t.decay * s[i]);
        s[i + 1] = fmaf(key.y, change, t.decay * s[i + 1]);
        s[i + 2] = fmaf(key.z, change, t.decay * s[i + 2]);
        s[i + 3] = fmaf(key.w, change, t.decay * s[i + 3]);
        sum = make_float4(fmaf(query.x, s[i], sum.x), fmaf(query.y, s[i + 1], sum.y), fmaf(query.z, s[i + 2], sum.z),
                          fmaf(query.w, s[i + 3], sum.w));
    }
    return over_column((sum.x + sum.y) + (sum.z + sum.w));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    KVANT_KERNEL(const uchar *qkv, const uchar *a, const uchar *b, const float *rate, const float *a_bias,
                 const uint *starts, const uint *slots, const uint *past, const uint *after, float *state, uchar *out,
                 const DeltaRuleParams p) {
    // Queries and keys of two tokens.
    __shared__ __align__(16) float shared[WARPS][2][2][PADDED];
    take_turn();
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane / COLUMNS;
    const uint column = (blockIdx.x * WARPS + warp) * COLUMNS + lane % COLUMNS;
    const uint head = blockIdx.y, run = blockIdx.z;
    const uint slot = slots[run], start = starts[run], end = min(starts[run + 1], p.rows);
    // Whole warps: value_dim is a multiple of COLUMNS.
    if (column >= p.value_dim || slot >= p.states || start >= end || end - start > p.max_rows ||
        after[end - 1] >= p.states) {
        return;
    }
    const uint of_keys = p.key_heads * KEY_DIM, key_head = head / p.key_repeats % p.key_heads * KEY_DIM;
    const uint width = 2 * of_keys + p.heads * p.value_dim, v_at = 2 * of_keys + head * p.value_dim + column;
    const Head h = {qkv, a, b, width, key_head, of_keys + key_head, v_at, p.heads, head};
    const float own_rate = rate[head], own_bias = a_bias[head];
    state += (ulong(head) * KEY_DIM + part * OWN_ROWS) * p.value_dim + column;
    const float *from = state + ulong(slot) * p.stride;
    float s[OWN_ROWS];
#pragma unroll
    for (uint i = 0; i < OWN_ROWS; i++) {
        s[i] = past[run] == 0 ? 0.0f : from[i * p.value_dim];
    }
    // Token i of the run is in ahead[i % 2] until it is prepared in shared[warp][i % 2]. Beyond the end, the last token
    // is prepared again, so that no branch separates the instructions of two tokens.
    const uint last = end - 1, first_kept = end - start <= MAX_KEPT ? start : last;
    Token ahead[2] = {load_token(h, start, lane), load_token(h, min(start + 1, last), lane)};
    Prepared next = prepare(ahead[0], own_rate, own_bias, shared[warp][0], lane);
    ahead[0] = load_token(h, min(start + 2, last), lane);
    __syncwarp();
    for (uint pair = start; pair < end; pair += 2) {
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            const uint row = pair + i;
            if (row >= end) {
                break;
            }
            const Prepared t = next;
            next = prepare(ahead[1 - i], own_rate, own_bias, shared[warp][1 - i], lane);
            ahead[1 - i] = load_token(h, min(row + 3, last), lane);
            const float y = step(s, t, shared[warp][i], part);
            if (part == 0) {
                store(out, (ulong(row) * p.heads + head) * p.value_dim + column, y, OUT_DTYPE);
            }
            if (row >= first_kept && after[row] < p.states) {
                float *to = state + ulong(after[row]) * p.stride;
#pragma unroll
                for (uint j = 0; j < OWN_ROWS; j++) {
                    to[j * p.value_dim] = s[j];
                }
            }
            __syncwarp();
        }
    }
}
