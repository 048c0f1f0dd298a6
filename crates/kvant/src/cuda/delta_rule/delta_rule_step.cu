// delta_rule of runs of few tokens: reads a state once, and writes those that stay, in whole cache lines; f32 states.
//
// Tensors and runs are those of delta_rule.cu. A block has COLUMNS columns of one head's state, in registers for all
// tokens of a run: thread t has the four columns from 4 * (t % QUADS), and the rows i with i % PARTS = t / QUADS. A
// warp's load reads 128 adjacent bytes of four rows. All loads of the state are issued before the first token, and
// while the previous kernel ends.
//
// A token has three barriers: queries and keys, then Sᵀk, then Sᵀq are complete. Sums are added in one order. The next
// token's inputs are loaded before a token is computed.
#include "delta_rule/gates.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/reduce.h"

constexpr uint WARPS = 4;
constexpr uint COLUMNS = 32;
constexpr uint QUADS = COLUMNS / 4;
constexpr uint PARTS = WARPS * 32 / QUADS;
constexpr uint OWN_ROWS = KEY_DIM / PARTS; // of the state, for a thread
constexpr uint PER_LANE = KEY_DIM / 32;    // of a query or key

inline float4 fma4(float x, float4 y, float4 z) {
    return make_float4(fmaf(x, y.x, z.x), fmaf(x, y.y, z.y), fmaf(x, y.z, z.z), fmaf(x, y.w, z.w));
}

inline float4 add4(float4 x, float4 y) {
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

// A token as a thread loads it: its warp's part of the query (warp 0) or key (warp 1), the values of its columns, the
// gates, and the slot of the state after the token.
struct Token {
    float x[PER_LANE], v[4];
    float a, b;
    uint to;
};

struct Head {
    const uchar *qkv, *a, *b;
    const uint *after;
    ulong width, x_at, v_at; // columns of qkv
    uint heads, head;
    bool has_columns;
};

inline Token load_token(const Head &h, uint row, uint lane) {
    Token t;
    const ulong at = row * h.width, gate = ulong(row) * h.heads + h.head;
#pragma unroll
    for (uint i = 0; i < PER_LANE; i++) {
        t.x[i] = load(h.qkv, at + h.x_at + i * 32 + lane, QKV_DTYPE);
    }
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        t.v[i] = h.has_columns ? load(h.qkv, at + h.v_at + i, QKV_DTYPE) : 0.0f;
    }
    t.a = load(h.a, gate, A_DTYPE);
    t.b = load(h.b, gate, B_DTYPE);
    t.to = h.after[row];
    return t;
}

// A warp's query or key, divided by its norm and multiplied by `scale`, in shared memory.
inline void normalise(const float (&x)[PER_LANE], float scale, float *to, uint lane) {
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

// Adds x of all rows of four columns. All threads call it; it has one barrier, before `room` is read.
inline float4 over_rows(float4 x, float4 (&room)[WARPS][QUADS], uint warp, uint lane) {
#pragma unroll
    for (uint distance = QUADS; distance < 32; distance *= 2) {
        x = add4(x, make_float4(__shfl_xor_sync(ALL, x.x, distance), __shfl_xor_sync(ALL, x.y, distance),
                                __shfl_xor_sync(ALL, x.z, distance), __shfl_xor_sync(ALL, x.w, distance)));
    }
    if (lane < QUADS) {
        room[warp][lane] = x;
    }
    __syncthreads();
    x = room[0][lane % QUADS];
#pragma unroll
    for (uint i = 1; i < WARPS; i++) {
        x = add4(x, room[i][lane % QUADS]);
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    KVANT_KERNEL(const uchar *qkv, const uchar *a, const uchar *b, const float *rate, const float *a_bias,
                 const uint *starts, const uint *slots, const uint *past, const uint *after, float *state, uchar *out,
                 const DeltaRuleParams p) {
    __shared__ float q[KEY_DIM], k[KEY_DIM];
    __shared__ float4 seen_room[WARPS][QUADS], sum_room[WARPS][QUADS];
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = threadIdx.x / QUADS;
    const uint column = blockIdx.x * COLUMNS + lane % QUADS * 4;
    const uint head = blockIdx.y, run = blockIdx.z;
    const uint slot = slots[run], start = starts[run], end = min(starts[run + 1], p.rows);
    if (slot >= p.states || start >= end || end - start > p.max_rows || after[end - 1] >= p.states) {
        take_turn();
        return;
    }
    // Threads beyond the columns compute zeros and join the barriers; value_dim is a multiple of four.
    const bool has_columns = column < p.value_dim;
    const bool reads = has_columns && past[run] != 0;
    state += (ulong(head) * KEY_DIM + part) * p.value_dim + column;
    const float *from = state + ulong(slot) * p.stride;
    const ulong next_row = ulong(PARTS) * p.value_dim;
    float4 s[OWN_ROWS];
#pragma unroll
    for (uint i = 0; i < OWN_ROWS; i++) {
        s[i] = reads ? *reinterpret_cast<const float4 *>(from + i * next_row) : make_float4(0, 0, 0, 0);
    }
    take_turn();
    const uint of_keys = p.key_heads * KEY_DIM, key_head = head / p.key_repeats % p.key_heads * KEY_DIM;
    const Head h = {qkv,
                    a,
                    b,
                    after,
                    2 * of_keys + p.heads * p.value_dim,
                    warp == 1 ? of_keys + key_head : key_head,
                    2 * of_keys + head * p.value_dim + column,
                    p.heads,
                    head,
                    has_columns};
    const float own_rate = rate[head], own_bias = a_bias[head];
    Token next = load_token(h, start, lane);
    for (uint row = start; row < end; row++) {
        const Token t = next;
        if (row + 1 < end) {
            next = load_token(h, row + 1, lane);
        }
        if (warp == 0) {
            normalise(t.x, rsqrtf(float(KEY_DIM)), q, lane);
        } else if (warp == 1) {
            normalise(t.x, 1.0f, k, lane);
        }
        const float decay = decay_of(own_rate, t.a + own_bias), beta = beta_of(t.b);
        __syncthreads();
        float4 seen = make_float4(0, 0, 0, 0), sum = seen;
#pragma unroll
        for (uint i = 0; i < OWN_ROWS; i++) {
            seen = fma4(k[i * PARTS + part], s[i], seen);
        }
        seen = over_rows(seen, seen_room, warp, lane);
        const float4 change = make_float4(beta * (t.v[0] - decay * seen.x), beta * (t.v[1] - decay * seen.y),
                                          beta * (t.v[2] - decay * seen.z), beta * (t.v[3] - decay * seen.w));
#pragma unroll
        for (uint i = 0; i < OWN_ROWS; i++) {
            const float4 old = make_float4(decay * s[i].x, decay * s[i].y, decay * s[i].z, decay * s[i].w);
            s[i] = fma4(k[i * PARTS + part], change, old);
            sum = fma4(q[i * PARTS + part], s[i], sum);
        }
        if (t.to < p.states && has_columns) {
            float *to = state + ulong(t.to) * p.stride;
#pragma unroll
            for (uint i = 0; i < OWN_ROWS; i++) {
                *reinterpret_cast<float4 *>(to + i * next_row) = s[i];
            }
        }
        sum = over_rows(sum, sum_room, warp, lane);
        if (part == 0 && has_columns) {
            const float results[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                store(out, (ulong(row) * p.heads + head) * p.value_dim + column + i, results[i], OUT_DTYPE);
            }
        }
    }
}
