// delta_rule: the gated delta rule of linear attention, token by token; f32 states.
//
// qkv is [rows, 2 * key_heads * KEY_DIM + heads * value_dim]; a and b are [rows, heads]; state is [heads, KEY_DIM,
// value_dim] in each slot; out is [rows, heads, value_dim]. Run z has the rows starts[z] .. starts[z + 1] and the state
// slots[z]; what is out of range is skipped.
//
// A warp has COLUMNS columns of one head's state, in registers for all tokens of a run: lane l has column l % COLUMNS
// and the rows i with i % PARTS = l / COLUMNS. Columns do not depend on each other, so warps never wait for each other:
// each normalises the query and the key itself. The inputs of the next token are loaded before the current one is
// computed.
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/reduce.h"

struct DeltaRuleParams {
    uint rows;
    uint states;
    uint stride; // floats between states
    uint heads;
    uint key_heads;
    uint key_repeats; // adjacent heads with one key head
    uint value_dim;
};

constexpr uint WARPS = 4;
constexpr uint COLUMNS = 8;
constexpr uint PARTS = 32 / COLUMNS;
constexpr uint OWN_ROWS = KEY_DIM / PARTS; // of the state, for a lane
constexpr uint PER_LANE = KEY_DIM / 32;    // of a query or key
constexpr float NORM_EPS = 1e-6f;

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

// Writes x * scale / sqrt(sum of squares + eps) where all lanes read it.
inline void normalise(const float *x, float scale, float *to, uint lane) {
    float squares = 0;
#pragma unroll
    for (uint i = 0; i < PER_LANE; i++) {
        squares = fmaf(x[i], x[i], squares);
    }
    const float factor = scale / sqrtf(over_warp<Sum>(squares) + NORM_EPS);
#pragma unroll
    for (uint i = 0; i < PER_LANE; i++) {
        to[i * 32 + lane] = x[i] * factor;
    }
}

// The sum over the lanes of a column.
inline float over_column(float x) {
#pragma unroll
    for (uint distance = COLUMNS; distance < 32; distance *= 2) {
        x += __shfl_xor_sync(ALL, x, distance);
    }
    return x;
}

inline float softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

// One token: changes the lane's rows of the state, and returns the column's result.
inline float step(float (&s)[OWN_ROWS], const float *q, const float *k, float v, float decay, float beta, uint part) {
    float seen = 0;
#pragma unroll
    for (uint i = 0; i < OWN_ROWS; i++) {
        seen = fmaf(k[i * PARTS + part], s[i], seen);
    }
    const float change = beta * (v - decay * over_column(seen));
    float sum = 0;
#pragma unroll
    for (uint i = 0; i < OWN_ROWS; i++) {
        s[i] = fmaf(k[i * PARTS + part], change, decay * s[i]);
        sum = fmaf(q[i * PARTS + part], s[i], sum);
    }
    return over_column(sum);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    KVANT_KERNEL(const uchar *qkv, const uchar *a, const uchar *b, const float *rate, const float *a_bias,
                 const uint *starts, const uint *slots, const uint *past, float *state, uchar *out,
                 const DeltaRuleParams p) {
    __shared__ float shared[WARPS][2][KEY_DIM];
    take_turn();
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane / COLUMNS;
    const uint column = (blockIdx.x * WARPS + warp) * COLUMNS + lane % COLUMNS;
    const uint head = blockIdx.y, run = blockIdx.z;
    const uint slot = slots[run], start = starts[run], end = min(starts[run + 1], p.rows);
    // Whole warps: value_dim is a multiple of COLUMNS.
    if (column >= p.value_dim || slot >= p.states || start >= end) {
        return;
    }
    const uint of_keys = p.key_heads * KEY_DIM, key_head = head / p.key_repeats % p.key_heads * KEY_DIM;
    const Head h = {qkv,      a,       b, 2 * of_keys + p.heads * p.value_dim, key_head, of_keys + key_head, 2 * of_keys + head * p.value_dim + column,
                    p.heads, head};
    float *column_of_state = state + ulong(slot) * p.stride + ulong(head) * KEY_DIM * p.value_dim + column;
    float s[OWN_ROWS];
#pragma unroll
    for (uint i = 0; i < OWN_ROWS; i++) {
        s[i] = past[run] == 0 ? 0.0f : column_of_state[(i * PARTS + part) * p.value_dim];
    }
    float *q = shared[warp][0], *k = shared[warp][1];
    Token next = load_token(h, start, lane);
    for (uint row = start; row < end; row++) {
        const Token t = next;
        if (row + 1 < end) {
            next = load_token(h, row + 1, lane);
        }
        normalise(t.q, rsqrtf(float(KEY_DIM)), q, lane);
        normalise(t.k, 1.0f, k, lane);
        __syncwarp();
        const float decay = expf(rate[head] * softplus(t.a + a_bias[head]));
        const float y = step(s, q, k, t.v, decay, 1.0f / (1.0f + expf(-t.b)), part);
        if (part == 0) {
            store(out, (ulong(row) * p.heads + head) * p.value_dim + column, y, OUT_DTYPE);
        }
        __syncwarp();
    }
#pragma unroll
    for (uint i = 0; i < OWN_ROWS; i++) {
        column_of_state[(i * PARTS + part) * p.value_dim] = s[i];
    }
}
