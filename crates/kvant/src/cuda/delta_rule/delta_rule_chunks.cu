// delta_rule_chunks: the part of delta_rule (delta_rule.cu) that does not depend on states, for chunks of 64 tokens.
//
// With unit keys k and queries q (also divided by sqrt(D)), and G the running sum of the logarithms of decays in the
// chunk, of a head:
//
//   L[i, j]      = beta[i] * exp(G[i] - G[j]) * k[i] . k[j]   for j < i, else 0
//   solved       = (1 + L)^-1 diag(beta)
//   scores[i, j] = exp(G[i] - G[j]) * q[i] . k[j]             for j <= i, else 0
//
// and four vectors: exp(G[i]) / |k[i]|, exp(G[i]) / (|q[i]| sqrt(D)), exp(G[last] - G[i]) / |k[i]|, exp(G[last]).
// delta_rule_wgmma.cu says what they are for. Rows beyond the end of a run are zeros. Keys and queries are written in
// the layout of wgmma.h, as they are, once for all heads that share them.
//
// A block of one warpgroup has a chunk, and all heads that share a key. Two products compute k . k and q . k. The
// inverse of 1 + L is computed in blocks of 16: each warp inverts a block of the diagonal by substitution in f32, and
// then computes the blocks below it, X[I, J] = -X[I, I] (sum of L[I, K] X[K, J] for J <= K < I), with products in tf32.
#include "delta_rule/chunks.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/mbarrier.h"

constexpr uint THREADS = 128;
// Floats of a row of L, with a gap: pairs of four adjacent rows are in different banks.
constexpr uint PITCH = CHUNK + 8;
// exp(LEAST) is 0 in f32. Smaller logarithms would only cost precision of the sums.
constexpr float LEAST = -104.0f;

// Shared memory: keys and queries; after the products, in their place, a head's matrices and vectors as they are
// written, then L.
constexpr uint AT_LOWER = CHUNK_HEAD;

struct Vectors {
    float key[CHUNK], query[CHUNK]; // 1 / |k|, 1 / (|q| sqrt(D))
    float sum[CHUNK];               // G
    float beta[CHUNK];
};

struct Chunk {
    uint row, count; // the first row, and how many
};

// Which rows chunk `index` has; none beyond the last chunk. All lanes of a warp call it.
inline Chunk find_chunk(const Runs &runs, uint index) {
    const uint lane = threadIdx.x % 32;
    uint before = 0;
    for (uint base = 0; base < runs.p.runs; base += 32) {
        const uint run = base + lane, own = run < runs.p.runs ? runs.chunks(run) : 0;
        uint upto = own;
#pragma unroll
        for (uint distance = 1; distance < 32; distance *= 2) {
            const uint x = __shfl_up_sync(ALL, upto, distance);
            upto += lane >= distance ? x : 0;
        }
        const uint behind = __ballot_sync(ALL, before + upto > index);
        if (behind != 0) {
            const uint which = __ffs(behind) - 1, of_run = base + which;
            const uint number = index - before - __shfl_sync(ALL, upto - own, which);
            return {runs.starts[of_run] + number * CHUNK, min(CHUNK, runs.rows(of_run) - number * CHUNK)};
        }
        before += __shfl_sync(ALL, upto, 31);
    }
    return {0, 0};
}

// Begins to copy a chunk's rows of the columns from `column` on; rows that are not there become zeros.
inline void copy_rows(const uchar *qkv, const Chunk &chunk, uint width, uint column, uint to) {
    constexpr uint UNITS = KEY_DIM / 8, TOGETHER = THREADS / UNITS;
    const uint unit = threadIdx.x % UNITS;
#pragma unroll
    for (uint i = 0; i < CHUNK; i += TOGETHER) {
        const uint row = i + threadIdx.x / UNITS;
        const bool is_there = row < chunk.count;
        const ulong at = ulong(chunk.row + (is_there ? row : 0)) * width + column + unit * 8;
        copy_async<16>(to + unit_at(row, unit), qkv + at * 2, is_there);
    }
}

// The inverse of a row's norm.
inline float inverse_norm(const uchar *rows, uint row) {
    float squares[2] = {NORM_EPS, 0};
#pragma unroll
    for (uint unit = 0; unit < KEY_DIM / 8; unit++) {
        const uint4 x = *reinterpret_cast<const uint4 *>(rows + unit_at(row, unit));
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            const float2 pair = unpack<false>(i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w);
            squares[0] = fmaf(pair.x, pair.x, squares[0]);
            squares[1] = fmaf(pair.y, pair.y, squares[1]);
        }
    }
    return rsqrtf(squares[0] + squares[1]);
}

// The sum of x over the lanes up to this one.
inline float sum_up(float x) {
    const uint lane = threadIdx.x % 32;
#pragma unroll
    for (uint distance = 1; distance < 32; distance *= 2) {
        const float other = __shfl_up_sync(ALL, x, distance);
        x += lane >= distance ? other : 0;
    }
    return x;
}

// The logarithm of a token's decay, and its beta; 0 behind the end of a chunk.
struct Gates {
    float decay, beta;
};

inline Gates load_gates(const uchar *a, const uchar *b, float rate, float a_bias, const Chunk &chunk, uint heads,
                        uint head) {
    const uint i = threadIdx.x % CHUNK;
    if (i >= chunk.count) {
        return {0, 0};
    }
    const ulong at = ulong(chunk.row + i) * heads + head;
    const float decay = log_decay_of(rate, load(a, at, A_DTYPE) + a_bias);
    return {decay < LEAST ? LEAST : decay, beta_of(load(b, at, B_DTYPE))};
}

// The sums of the logarithms of decays, and betas. All threads call it; it has a barrier, and ends with one.
inline void write_gates(const Gates &gates, Vectors &v) {
    const uint i = threadIdx.x % CHUNK;
    const float sum = sum_up(gates.decay);
    if (threadIdx.x == 31) {
        v.sum[31] = sum;
    }
    __syncthreads();
    if (threadIdx.x < CHUNK && threadIdx.x != 31) {
        v.sum[i] = i < 32 ? sum : v.sum[31] + sum;
    }
    if (threadIdx.x < CHUNK) {
        v.beta[i] = gates.beta;
    }
    __syncthreads();
}

inline void write_factors(const Vectors &v, float *to) {
    const uint i = threadIdx.x;
    if (i < CHUNK) {
        // Rows behind the end have keys and queries of zeros.
        const float last = v.sum[CHUNK - 1], decay = expf(v.sum[i]);
        to[i] = decay * v.key[i];
        to[CHUNK + i] = decay * v.query[i];
        to[2 * CHUNK + i] = expf(last - v.sum[i]) * v.key[i];
        to[3 * CHUNK + i] = expf(last);
    }
}

// Writes L and the scores, of products of keys with keys and with queries.
inline void write_products(const float (&of_keys)[32], const float (&of_queries)[32], const Vectors &v, float *lower,
                           uchar *scores) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (uint half = 0; half < 2; half++) {
        const uint i = warp * 16 + lane / 4 + half * 8;
        const float sum = v.sum[i], by = v.beta[i] * v.key[i], query = v.query[i];
#pragma unroll
        for (uint unit = 0; unit < CHUNK / 8; unit++) {
            float x[2] = {0, 0}, y[2] = {0, 0};
            const uint column = unit * 8 + lane % 4 * 2;
            if (unit <= warp * 2 + 1) {
#pragma unroll
                for (uint e = 0; e < 2; e++) {
                    const uint j = column + e, at = unit * 4 + half * 2 + e;
                    const float decay = __expf(sum - v.sum[j]) * v.key[j];
                    x[e] = j < i ? by * decay * of_keys[at] : 0.0f;
                    y[e] = j <= i ? query * decay * of_queries[at] : 0.0f;
                }
                *reinterpret_cast<float2 *>(lower + i * PITCH + column) = make_float2(x[0], x[1]);
            }
            *reinterpret_cast<uint *>(scores + unit_at(i, unit) + lane % 4 * 4) = pack<false>(y[0], y[1]);
        }
    }
}

// Replaces block `warp` of the diagonal of L by the inverse of 1 + L, by one warp: lane j has column j.
inline void invert_diagonal(float *lower, uint warp) {
    constexpr uint SIZE = 16;
    const uint j = threadIdx.x % SIZE;
    float *own = lower + warp * SIZE * (PITCH + 1);
    float x[SIZE] = {};
#pragma unroll
    for (uint i = 0; i < SIZE; i++) {
        float sum[2] = {i == j ? 1.0f : 0.0f, 0};
#pragma unroll
        for (uint m = 0; m < i; m += 4) {
            const float4 l = *reinterpret_cast<const float4 *>(own + i * PITCH + m);
            sum[0] = fmaf(-l.x, x[m], sum[0]);
            sum[1] = fmaf(-l.y, x[m + 1], sum[1]);
            sum[0] = fmaf(-l.z, x[m + 2], sum[0]);
            sum[1] = fmaf(-l.w, x[m + 3], sum[1]);
        }
        x[i] = sum[0] + sum[1];
    }
    __syncwarp();
    if (threadIdx.x % 32 < SIZE) {
#pragma unroll
        for (uint i = 0; i < SIZE; i++) {
            own[i * PITCH + j] = x[i];
        }
    }
}

// A block of 16 by 16, transposed, as results of two products of 8 columns: lane 4g + t has elements (8 n + 2 t, g),
// (8 n + 2 t + 1, g), (8 n + 2 t, g + 8) and (8 n + 2 t + 1, g + 8) of the block in d[n].
struct Transposed {
    float d[2][4];
};

// to += (the block at `left`, times x)^T.
inline void add_product(Transposed &to, const Transposed &x, const float *left) {
    const uint lane = threadIdx.x % 32;
#pragma unroll
    for (uint k = 0; k < 2; k++) {
        const float(&of)[4] = x.d[k];
        const uint a[4] = {tf32(of[0]), tf32(of[2]), tf32(of[1]), tf32(of[3])};
#pragma unroll
        for (uint n = 0; n < 2; n++) {
            const uint at = (n * 8 + lane / 4) * PITCH + k * 8 + lane % 4 * 2;
            const float2 b = *reinterpret_cast<const float2 *>(left + at);
            mma_tf32(to.d[n], a, make_uint2(tf32(b.x), tf32(b.y)));
        }
    }
}

inline Transposed load_transposed(const float *block) {
    const uint g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Transposed x;
#pragma unroll
    for (uint n = 0; n < 2; n++) {
#pragma unroll
        for (uint e = 0; e < 4; e++) {
            x.d[n][e] = block[(n * 8 + t * 2 + e % 2) * PITCH + g + e / 2 * 8];
        }
    }
    return x;
}

// Writes block (I, J) of the result, whose column j is multiplied by beta[j].
inline void write_block(const Transposed &x, const float *beta, uint row_block, uint column_block, uchar *to) {
    const uint g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (uint n = 0; n < 2; n++) {
#pragma unroll
        for (uint half = 0; half < 2; half++) {
            const float by = beta[column_block * 16 + half * 8 + g];
            const uint pair = transpose8(pack<false>(x.d[n][half * 2] * by, x.d[n][half * 2 + 1] * by));
            const uint row = row_block * 16 + n * 8 + g;
            *reinterpret_cast<uint *>(to + unit_at(row, column_block * 2 + half) + t * 4) = pair;
        }
    }
}

// The blocks of (1 + L)^-1 diag(beta) in column J of blocks, by one warp.
inline void solve_column(const float *lower, uint column, const float *beta, uchar *to) {
    constexpr uint BLOCKS = CHUNK / 16;
    const auto block = [&](uint i, uint j) { return lower + (i * PITCH + j) * 16; };
    Transposed x[BLOCKS];
#pragma unroll
    for (uint i = 0; i < BLOCKS; i++) {
        x[i] = {};
        if (i == column) {
            x[i] = load_transposed(block(i, i));
        } else if (i > column) {
            Transposed sum = {};
#pragma unroll
            for (uint k = 0; k < i; k++) {
                if (k >= column) {
                    add_product(sum, x[k], block(i, k));
                }
            }
#pragma unroll
            for (uint e = 0; e < 8; e++) {
                sum.d[e / 4][e % 4] *= -1;
            }
            add_product(x[i], sum, block(i, i));
        }
        write_block(x[i], beta, i, column, to);
    }
}

// The head of number i among those that share a key.
inline uint head_of(const DeltaRuleParams &p, uint key_head, uint i) {
    return (i / p.key_repeats * p.key_heads + key_head) * p.key_repeats + i % p.key_repeats;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    KVANT_KERNEL(const uchar *qkv, const uchar *a, const uchar *b, const float *rate, const float *a_bias,
                 const uint *starts, const uint *slots, uchar *keys, uchar *of_heads, const DeltaRuleChunksParams p) {
    extern __shared__ __align__(1024) uchar memory[];
    __shared__ Vectors v;
    take_turn();
    const uint key_head = blockIdx.x, slot = blockIdx.y, warp = threadIdx.x / 32, heads = p.rule.heads;
    const Chunk chunk = find_chunk({starts, slots, p}, p.first + slot);
    if (chunk.count == 0) {
        return;
    }
    const uint base = shared_address(memory), sharing = heads / p.rule.key_heads;
    const uint of_keys = p.rule.key_heads * KEY_DIM, width = 2 * of_keys + heads * p.rule.value_dim;
    copy_rows(qkv, chunk, width, of_keys + key_head * KEY_DIM, base);
    copy_rows(qkv, chunk, width, key_head * KEY_DIM, base + KEYS);
    copies_commit();
    uint head = head_of(p.rule, key_head, 0);
    Gates gates = load_gates(a, b, rate[head], a_bias[head], chunk, heads, head);
    copies_wait<0>();
    show_to_copies();
    __syncthreads();
    float of_k[32], of_q[32];
    products_begin();
#pragma unroll
    for (uint i = 0; i < KEY_DIM / 16; i++) {
        const uint at = base + i / 4 * BLOCK + i % 4 * 32;
        multiply<false>(of_k, matrix(at, 0), matrix(at, 0), i > 0);
        multiply<false>(of_q, matrix(at + KEYS, 0), matrix(at, 0), i > 0);
    }
    products_commit();
    if (warp == 0 && elected()) {
        store_bulk(keys + (ulong(slot) * p.rule.key_heads + key_head) * CHUNK_KEYS, base, CHUNK_KEYS);
    }
    if (threadIdx.x < CHUNK) {
        v.key[threadIdx.x] = inverse_norm(memory, threadIdx.x);
    } else {
        v.query[threadIdx.x % CHUNK] = inverse_norm(memory + KEYS, threadIdx.x % CHUNK) * rsqrtf(float(KEY_DIM));
    }
    products_wait<0>();
    hold(of_k);
    hold(of_q);
    if (warp == 0) {
        stores_wait();
    }
    float *lower = reinterpret_cast<float *>(memory + AT_LOWER);
    for (uint i = 0; i < sharing; i++) {
        const uint own = head;
        write_gates(gates, v);
        if (i + 1 < sharing) {
            head = head_of(p.rule, key_head, i + 1);
            gates = load_gates(a, b, rate[head], a_bias[head], chunk, heads, head);
        }
        write_products(of_k, of_q, v, lower, memory + AT_SCORES);
        write_factors(v, reinterpret_cast<float *>(memory + AT_FACTORS));
        __syncwarp();
        // A warp has written the rows of its block of the diagonal.
        invert_diagonal(lower, warp);
        __syncthreads();
        solve_column(lower, warp, v.beta, memory);
        show_to_copies();
        __syncthreads();
        if (warp == 0 && elected()) {
            store_bulk(of_heads + (ulong(slot) * heads + own) * CHUNK_HEAD, base, CHUNK_HEAD);
            stores_wait();
        }
    }
}
