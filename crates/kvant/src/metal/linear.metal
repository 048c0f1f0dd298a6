// linear: out[r] = alpha * W x[r / rows_per_input], f32, f16 or bf16 in and out.
//
// x has rows of `inputs`; W is [outputs, inputs], f32, f16 or bf16, or MLX's affine codes [outputs, inputs * bits / 32]
// with scales and biases [outputs, inputs / group], or rows of blocks (blocks.h); out is [rows, outputs]. With EXPERTS,
// W is several such matrices, one after the other, and ids[r] selects the matrix of row r; a row without a valid matrix
// gets zeros.
//
// Two kernels. linear_few, for the rows of a decode step, is bound by reading W: a SIMD-group takes ROWS outputs of
// TOKENS rows, and its lanes neighbouring inputs, so that W is read in long pieces and x is read once for ROWS outputs.
// linear_tiles, for more rows, multiplies tiles of x and W, widened to float in threadgroup memory, with simdgroup
// matrices.
#include "vectors.h"
#include "affine.h"
#include "blocks.h"
#include <metal_simdgroup_matrix>

struct LinearParams {
    uint rows;
    uint outputs;
    uint inputs;
    uint experts;
    uint rows_per_input;
    float alpha;
};

constant uint X_DTYPE [[function_constant(0)]];
constant uint OUT_DTYPE [[function_constant(1)]];
// The dtype of a dense W, otherwise of scales and biases.
constant uint W_DTYPE [[function_constant(2)]];
// Bits of a code; 0 for a dense W.
constant uint BITS [[function_constant(3)]];
constant uint GROUP [[function_constant(4)]];
constant bool EXPERTS [[function_constant(5)]];
constant bool X_ALIGNED [[function_constant(6)]];
constant bool W_ALIGNED [[function_constant(7)]];
// The format of a W in blocks, else 0; the alignment of blocks in bytes.
constant uint FORMAT [[function_constant(8)]];
constant uint BLOCK_ALIGNMENT [[function_constant(9)]];
constant bool AFFINE = BITS != 0;
constant bool BLOCKS = FORMAT != 0;
constant bool DENSE = !AFFINE && !BLOCKS;
constant bool SCALES = AFFINE || has_separate_scales(FORMAT);

struct Weight {
    device const uchar *values;
    device const uchar *scales;
    device const uchar *biases;
};

// A row of W; for a dense or affine W, its start.
struct WeightRow {
    device const uchar *values;
    device const uchar *scales;
    device const uchar *biases;
    ulong row;
};

inline ulong bytes_of(uint dtype) {
    return dtype == F32 ? 4 : 2;
}

inline WeightRow row_of(Weight w, ulong row, uint inputs) {
    if (BLOCKS) {
        return WeightRow{w.values, w.scales, w.biases, row};
    }
    const ulong values = DENSE ? inputs * bytes_of(W_DTYPE) : ulong(inputs / 32 * BITS) * 4;
    const ulong groups = AFFINE ? inputs / GROUP * bytes_of(W_DTYPE) : 0;
    return WeightRow{w.values + row * values, w.scales + row * groups, w.biases + row * groups, row};
}

// Inputs 16 c .. 16 c + 15 of a row of an affine W or of blocks, as scale * q + bias. With PLACED, no code is shifted:
// q of a 4-bit code is 16^i times the code, where i is its place in a half word, and `placed` divides inputs or scales
// by 16^i.
struct Chunk {
    float4 q[4];
    float scale;
    float bias;
};

inline float4 placed(float4 x) {
    return BITS == 4 ? float4(x.x, x.yzw * float3(1.0f / 16, 1.0f / 256, 1.0f / 4096)) : x;
}

template <bool PLACED> inline void load_chunk(WeightRow w, uint c, uint inputs, thread Chunk &chunk) {
    if (BLOCKS) {
        uint words[4];
        load_block_codes(w.values, w.scales, FORMAT, BLOCK_ALIGNMENT, w.row, c, inputs, words, chunk.scale, chunk.bias);
        for (uint i = 0; i < 4; i++) {
            chunk.q[i] = numbers_of_codes(words[i], FORMAT);
        }
        return;
    }
    device const uint *codes = reinterpret_cast<device const uint *>(w.values);
    if (PLACED && BITS == 4) {
        load_placed_codes(codes, c, W_ALIGNED, chunk.q);
    } else {
        load_codes(codes, c, BITS, W_ALIGNED, chunk.q);
    }
    const uint group = c * 16 / GROUP;
    chunk.scale = load(w.scales, group, W_DTYPE);
    chunk.bias = load(w.biases, group, W_DTYPE);
}

// Outputs per SIMD-group of linear_few; must match metal/linear.rs.
constant constexpr uint ROWS = 4;

// Groups: x counts ROWS outputs per SIMD-group, y the rows, TOKENS each (one with experts).
template <uint TOKENS>
kernel void linear_few(device const uchar *x [[buffer(0)]],
                       device const uchar *values [[buffer(1)]],
                       device const uchar *scales [[buffer(2), function_constant(SCALES)]],
                       device const uchar *biases [[buffer(3), function_constant(AFFINE)]],
                       device const uint *ids [[buffer(4), function_constant(EXPERTS)]],
                       device uchar *out [[buffer(5)]],
                       constant LinearParams &p [[buffer(6)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint simdgroups [[simdgroups_per_threadgroup]]) {
    const Weight w = {values, SCALES ? scales : values, AFFINE ? biases : values};
    const uint first_output = (group.x * simdgroups + simdgroup) * ROWS;
    const uint first_row = group.y * TOKENS;
    if (first_output >= p.outputs) {
        return;
    }
    uint expert = 0;
    if (EXPERTS) {
        expert = ids[first_row];
    }
    const bool known = expert < p.experts;

    // Missing rows and outputs repeat the last one and are not stored.
    device const uchar *x_rows[TOKENS];
    WeightRow w_rows[ROWS];
    for (uint t = 0; t < TOKENS; t++) {
        x_rows[t] = x + ulong(min(first_row + t, p.rows - 1) / p.rows_per_input) * p.inputs * bytes_of(X_DTYPE);
    }
    for (uint r = 0; r < ROWS; r++) {
        w_rows[r] = row_of(w, ulong(known ? expert : 0) * p.outputs + min(first_output + r, p.outputs - 1), p.inputs);
    }
    float sums[TOKENS][ROWS] = {};
    if (!DENSE) {
        for (uint c = lane; c < p.inputs / 16; c += 32) {
            // A bias is multiplied by the sum of its inputs.
            float4 inputs[TOKENS][4];
            float totals[TOKENS];
            for (uint t = 0; t < TOKENS; t++) {
                for (uint j = 0; j < 4; j++) {
                    inputs[t][j] = load4(x_rows[t], c * 16 + j * 4, 4, X_DTYPE, X_ALIGNED);
                }
                const float4 total = (inputs[t][0] + inputs[t][1]) + (inputs[t][2] + inputs[t][3]);
                totals[t] = (total.x + total.y) + (total.z + total.w);
                for (uint j = 0; j < 4; j++) {
                    inputs[t][j] = placed(inputs[t][j]);
                }
            }
            for (uint r = 0; r < ROWS; r++) {
                Chunk chunk;
                load_chunk<true>(w_rows[r], c, p.inputs, chunk);
                for (uint t = 0; t < TOKENS; t++) {
                    // One chain of fused multiply-adds.
                    float product = 0;
                    for (uint j = 0; j < 4; j++) {
                        for (uint e = 0; e < 4; e++) {
                            product += chunk.q[j][e] * inputs[t][j][e];
                        }
                    }
                    sums[t][r] = sums[t][r] + chunk.scale * product + chunk.bias * totals[t];
                }
            }
        }
    } else {
        for (uint i = lane * 4; i < p.inputs; i += 32 * 4) {
            const uint count = p.inputs - i;
            float4 inputs[TOKENS];
            for (uint t = 0; t < TOKENS; t++) {
                inputs[t] = load4(x_rows[t], i, count, X_DTYPE, X_ALIGNED);
            }
            for (uint r = 0; r < ROWS; r++) {
                const float4 weights = load4(w_rows[r].values, i, count, W_DTYPE, W_ALIGNED);
                for (uint t = 0; t < TOKENS; t++) {
                    sums[t][r] += dot(weights, inputs[t]);
                }
            }
        }
    }
    for (uint t = 0; t < TOKENS; t++) {
        for (uint r = 0; r < ROWS; r++) {
            const float sum = simd_sum(sums[t][r]);
            const uint row = first_row + t, output = first_output + r;
            if (lane == r && row < p.rows && output < p.outputs) {
                store(out, ulong(row) * p.outputs + output, known ? p.alpha * sum : 0.0f, OUT_DTYPE);
            }
        }
    }
}

// A tile of linear_tiles: rows, outputs and inputs; the first two must match metal/linear.rs. Tiles are stored as
// float4, with one more at the end of each row, so that the rows begin in different banks.
constant constexpr uint TILE_M = 32;
constant constexpr uint TILE_N = 64;
constant constexpr uint TILE_K = 32;
constant constexpr uint FOURS = TILE_K / 4;
constant constexpr uint STRIDE = FOURS + 1;
constant constexpr uint OUT_STRIDE = TILE_N + 4;
constant constexpr uint TILE_THREADS = 128;
// f16 x is not widened: its tile has rows of halves.
constant bool X_HALVES = X_DTYPE == F16;
constant constexpr uint HALVES_STRIDE = TILE_K + 8;
// Fours of x that a thread loads.
constant constexpr uint X_FOURS = TILE_M * FOURS / TILE_THREADS;
static_assert(TILE_THREADS % FOURS == 0, "a thread loads the same inputs of each row");
static_assert(TILE_M * OUT_STRIDE <= 4 * TILE_N * STRIDE, "the result overwrites W's tile");
static_assert(TILE_N * TILE_K == 16 * TILE_THREADS, "each thread widens one chunk of an affine tile");

// Finds the next rows, from `cursor` on, that chose `expert`: at most TILE_M; their numbers are written to `list`.
// Every SIMD-group finds them, the first one writes them.
inline uint gather(device const uint *ids, uint rows, uint expert, thread uint &cursor, threadgroup uint *list, uint lane,
                   uint simdgroup) {
    uint count = 0;
    while (count < TILE_M && cursor < rows) {
        const uint row = cursor + lane;
        const bool chosen = row < rows && ids[row] == expert;
        const uint place = count + simd_prefix_exclusive_sum(uint(chosen));
        const bool fits = chosen && place < TILE_M;
        if (fits && simdgroup == 0) {
            list[place] = row;
        }
        // The next call begins at the first row that does not fit.
        cursor += simd_min(chosen && !fits ? lane : 32u);
        count += simd_sum(uint(fits));
    }
    return count;
}

// Groups: x counts TILE_N outputs, y TILE_M rows, or the experts.
kernel void linear_tiles(device const uchar *x [[buffer(0)]],
                         device const uchar *values [[buffer(1)]],
                         device const uchar *scales [[buffer(2), function_constant(SCALES)]],
                         device const uchar *biases [[buffer(3), function_constant(AFFINE)]],
                         device const uint *ids [[buffer(4), function_constant(EXPERTS)]],
                         device uchar *out [[buffer(5)]],
                         constant LinearParams &p [[buffer(6)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 x_tile[TILE_M * STRIDE];
    threadgroup float4 w_tile[TILE_N * STRIDE];
    threadgroup uint list[TILE_M];
    threadgroup float *x_floats = reinterpret_cast<threadgroup float *>(x_tile);
    threadgroup half *x_halves = reinterpret_cast<threadgroup half *>(x_tile);
    threadgroup float *w_floats = reinterpret_cast<threadgroup float *>(w_tile);
    const Weight w = {values, SCALES ? scales : values, AFFINE ? biases : values};
    const uint first_output = group.x * TILE_N;
    const uint expert = EXPERTS ? group.y : 0;
    const ulong first_w_row = ulong(expert) * p.outputs + first_output;
    // The part that a thread loads: a chunk of an output's weights, and fours of some rows of x.
    const uint w_output = thread_index / 2, w_chunk = thread_index % 2;
    const WeightRow w_row = row_of(w, first_w_row + min(w_output, p.outputs - 1 - first_output), p.inputs);
    const uint x_first = thread_index / FOURS, x_four = thread_index % FOURS;
    // A SIMD-group computes 16 rows and 32 outputs of the tile.
    const uint m = simdgroup % 2 * 16, n = simdgroup / 2 * 32;

    if (EXPERTS && expert == 0) {
        for (uint row = thread_index; row < p.rows; row += TILE_THREADS) {
            if (ids[row] >= p.experts) {
                for (uint i = first_output; i < min(first_output + TILE_N, p.outputs); i++) {
                    store(out, ulong(row) * p.outputs + i, 0.0f, OUT_DTYPE);
                }
            }
        }
    }

    uint cursor = EXPERTS ? 0 : group.y * TILE_M;
    while (cursor < p.rows) {
        const uint first_row = cursor;
        uint count = 0;
        if (EXPERTS) {
            count = gather(ids, p.rows, expert, cursor, list, lane, simdgroup);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        } else {
            count = min(TILE_M, p.rows - cursor);
            cursor = p.rows;
        }
        if (count == 0) {
            break;
        }
        simdgroup_float8x8 sums[2][4];
#pragma unroll
        for (uint i = 0; i < 2; i++) {
#pragma unroll
            for (uint j = 0; j < 4; j++) {
                sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            }
        }
        device const uchar *x_rows[X_FOURS];
#pragma unroll
        for (uint f = 0; f < X_FOURS; f++) {
            const uint i = min(x_first + f * (TILE_THREADS / FOURS), count - 1);
            const uint row = (EXPERTS ? list[i] : first_row + i) / p.rows_per_input;
            x_rows[f] = x + ulong(row) * p.inputs * bytes_of(X_DTYPE);
        }
        for (uint k = 0; k < p.inputs; k += TILE_K) {
            // Missing inputs are zero; missing rows and outputs repeat the last one.
            const uint j = k + x_four * 4;
#pragma unroll
            for (uint f = 0; f < X_FOURS; f++) {
                const uint i = x_first + f * (TILE_THREADS / FOURS);
                if (X_HALVES) {
                    half4 four = 0;
                    if (j < p.inputs) {
                        four = X_ALIGNED ? *reinterpret_cast<device const half4 *>(x_rows[f] + j * 2ul)
                                         : half4(load4(x_rows[f], j, p.inputs - j, F16, false));
                    }
                    *reinterpret_cast<threadgroup half4 *>(x_halves + i * HALVES_STRIDE + x_four * 4) = four;
                } else {
                    x_tile[i * STRIDE + x_four] =
                        j < p.inputs ? load4(x_rows[f], j, p.inputs - j, X_DTYPE, X_ALIGNED) : float4(0);
                }
            }
            if (!DENSE) {
                Chunk chunk = {};
                load_chunk<true>(w_row, k / 16 + w_chunk, p.inputs, chunk);
                const float4 scales4 = placed(float4(chunk.scale));
                for (uint f = 0; f < 4; f++) {
                    w_tile[w_output * STRIDE + w_chunk * 4 + f] = scales4 * chunk.q[f] + chunk.bias;
                }
            } else {
                for (uint f = thread_index; f < TILE_N * FOURS; f += TILE_THREADS) {
                    const uint i = f / FOURS, j = f % FOURS * 4;
                    float4 four = 0;
                    if (first_output + i < p.outputs && k + j < p.inputs) {
                        four = load4(w.values, (first_w_row + i) * p.inputs + k + j, p.inputs - k - j, W_DTYPE, W_ALIGNED);
                    }
                    w_tile[i * STRIDE + j / 4] = four;
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint step = 0; step < TILE_K; step += 8) {
                simdgroup_float8x8 a[2], b[4];
                simdgroup_half8x8 halves[2];
#pragma unroll
                for (uint i = 0; i < 2; i++) {
                    if (X_HALVES) {
                        simdgroup_load(halves[i], x_halves + (m + i * 8) * HALVES_STRIDE + step, HALVES_STRIDE);
                    } else {
                        simdgroup_load(a[i], x_floats + (m + i * 8) * STRIDE * 4 + step, STRIDE * 4);
                    }
                }
#pragma unroll
                for (uint j = 0; j < 4; j++) {
                    simdgroup_load(b[j], w_floats + (n + j * 8) * STRIDE * 4 + step, STRIDE * 4, ulong2(0, 0), true);
                }
#pragma unroll
                for (uint i = 0; i < 2; i++) {
#pragma unroll
                    for (uint j = 0; j < 4; j++) {
                        if (X_HALVES) {
                            simdgroup_multiply_accumulate(sums[i][j], halves[i], b[j], sums[i][j]);
                        } else {
                            simdgroup_multiply_accumulate(sums[i][j], a[i], b[j], sums[i][j]);
                        }
                    }
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
#pragma unroll
        for (uint i = 0; i < 2; i++) {
#pragma unroll
            for (uint j = 0; j < 4; j++) {
                simdgroup_store(sums[i][j], w_floats + (m + i * 8) * OUT_STRIDE + n + j * 8, OUT_STRIDE);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint e = thread_index; e < TILE_M * TILE_N; e += TILE_THREADS) {
            const uint i = e / TILE_N, output = first_output + e % TILE_N;
            if (i < count && output < p.outputs) {
                const ulong row = EXPERTS ? list[i] : first_row + i;
                store(out, row * p.outputs + output, p.alpha * w_floats[i * OUT_STRIDE + e % TILE_N], OUT_DTYPE);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

template [[host_name("linear_few_1")]] kernel decltype(linear_few<1>) linear_few<1>;
template [[host_name("linear_few_2")]] kernel decltype(linear_few<2>) linear_few<2>;
template [[host_name("linear_few_4")]] kernel decltype(linear_few<4>) linear_few<4>;
