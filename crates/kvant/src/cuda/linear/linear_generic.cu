// linear: out[r] = alpha * W x[r / rows_per_input], f32, f16 or bf16 in and out.
//
// x has rows of `inputs`; W is [outputs, inputs], f32, f16 or bf16, or MLX's affine codes [outputs, inputs * bits / 32]
// with scales and biases [outputs, inputs / group] (BITS is not 0; W_DTYPE is the dtype of the scales), or rows of
// blocks (FORMAT is not 0: device/blocks.h); out is [rows, outputs]. With EXPERTS, W is several consecutive matrices,
// and row r uses matrix ids[r]; the output is 0 if that matrix does not exist.
//
// Two kernels, for products that the other kernels of linear do not support (route.rs): odd alignments, weights of f32,
// mixed dtypes, experts of many rows. linear_few is for a few rows; the time to read W limits it. A warp has ROWS
// outputs of TOKENS rows. Its lanes read neighbouring chunks of 16 bytes of W, several before the first is used, so
// that a small matrix is in flight completely. linear_tiles, for more rows, multiplies tiles of x and W, which are
// converted to float in shared memory.
#include "device/dependent_launch.h"
#include "device/reduce.h"
#include "device/vectors.h"
#include "linear/chunks.h"
#include "linear/params.h"

#if KERNEL_linear_few

// The inputs of chunk c of a row of x, loaded 16 bytes at a time if rows begin at multiples of 16 bytes. Neighbouring
// lanes read neighbouring 16 bytes, so that a warp reads few cache lines at a time.
inline void load_inputs(float4 (&inputs)[FOURS], const uchar *x, ulong start, uint c, uint count) {
    const uint first = c * CHUNK;
    if (X_ALIGNED && X_DTYPE != F32 && FOURS % 2 == 0) {
#pragma unroll
        for (uint j = 0; j < FOURS; j += 2) {
            const uint4 eight = first + j * 4 < count
                                    ? *reinterpret_cast<const uint4 *>(x + (start + first + j * 4) * 2)
                                    : make_uint4(0, 0, 0, 0);
            inputs[j] = halves_of(eight.x, eight.y, X_DTYPE);
            inputs[j + 1] = halves_of(eight.z, eight.w, X_DTYPE);
        }
        return;
    }
#pragma unroll
    for (uint j = 0; j < FOURS; j++) {
        const uint i = first + j * 4;
        inputs[j] = i < count ? load4(x, start + i, count - i, X_DTYPE, X_ALIGNED) : all4(0);
    }
}

// Outputs of a warp, and chunks of a row that a lane reads before it uses them; generic.rs has the first.
constexpr uint ROWS = 2;
constexpr uint AHEAD = TOKENS > 2 ? 2 : BITS == 4 && TOKENS == 1 ? 8 : 4;

// A warp's rows of x and of W. Beyond the last row or output the last is computed again, and not stored.
struct Rows {
    ulong x_start[TOKENS];
    ulong w_row[ROWS];
};

// Adds the products of chunk `c` of a row of x with all rows of W.
inline void multiply_chunk(float (&sums)[ROWS], const Chunk (&read)[ROWS], const uchar *x, ulong x_start, uint c, uint count) {
    float4 inputs[FOURS];
    load_inputs(inputs, x, x_start, c, count);
    // The bias is multiplied by the sum of its inputs.
    float sum = 0;
    if (AFFINE) {
#pragma unroll
        for (uint j = 0; j < FOURS; j++) {
            sum += total(inputs[j]);
        }
    }
#pragma unroll
    for (uint r = 0; r < ROWS; r++) {
        float4 products = all4(0);
#pragma unroll
        for (uint j = 0; j < FOURS; j++) {
            products = products + fields_of(read[r], j) * inputs[j];
        }
        if (AFFINE) {
            const float product = dot(products, field_units(CODE_BITS));
            sums[r] += read[r].scale * product + read[r].bias * sum;
        } else {
            sums[r] += total(products);
        }
    }
}

// The lane's sums over all inputs: AHEAD chunks are read before the first is used.
inline void multiply_rows(float (&sums)[TOKENS][ROWS], const Rows &rows, const Weight &w, const uchar *x, uint inputs, uint lane) {
    const uint chunks = (inputs + CHUNK - 1) / CHUNK;
    for (uint start = lane; start < chunks; start += 32 * AHEAD) {
        Chunk read[AHEAD][ROWS];
#pragma unroll
        for (uint a = 0; a < AHEAD; a++) {
#pragma unroll
            for (uint r = 0; r < ROWS; r++) {
                const uint c = start + 32 * a;
                read[a][r] = c < chunks ? load_chunk(w, rows.w_row[r], c, inputs) : Chunk{};
            }
        }
#pragma unroll
        for (uint a = 0; a < AHEAD; a++) {
            const uint c = start + 32 * a;
            if (c >= chunks) {
                break;
            }
#pragma unroll
            for (uint t = 0; t < TOKENS; t++) {
                multiply_chunk(sums[t], read[a], x, rows.x_start[t], c, inputs);
            }
        }
    }
}

// Blocks: x counts ROWS outputs per warp, y the rows, TOKENS each (one with experts).
extern "C" __global__ void __launch_bounds__(128)
    KVANT_KERNEL(const uchar *x, const uchar *values, const uchar *scales, const uchar *biases, const uint *ids, uchar *out,
               const LinearParams p) {
    take_turn();
    const Weight w = {values, scales, biases};
    const uint lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const uint first_output = (blockIdx.x * warps + warp) * ROWS;
    const uint first_row = blockIdx.y * TOKENS;
    if (first_output >= p.outputs) {
        return;
    }
    const uint expert = EXPERTS ? ids[first_row] : 0;
    const bool known = expert < p.experts;
    Rows rows;
#pragma unroll
    for (uint t = 0; t < TOKENS; t++) {
        rows.x_start[t] = ulong(min(first_row + t, p.rows - 1) / p.rows_per_input) * p.inputs;
    }
#pragma unroll
    for (uint r = 0; r < ROWS; r++) {
        rows.w_row[r] = ulong(known ? expert : 0) * p.outputs + min(first_output + r, p.outputs - 1);
    }
    float sums[TOKENS][ROWS] = {};
    multiply_rows(sums, rows, w, x, p.inputs, lane);
#pragma unroll
    for (uint t = 0; t < TOKENS; t++) {
#pragma unroll
        for (uint r = 0; r < ROWS; r++) {
            const float sum = over_warp<Sum>(sums[t][r]);
            const uint row = first_row + t, output = first_output + r;
            if (lane == r && row < p.rows && output < p.outputs) {
                store(out, ulong(row) * p.outputs + output, known ? p.alpha * sum : 0.0f, OUT_DTYPE);
            }
        }
    }
}

#else

// A tile: rows, outputs and inputs; generic.rs has the first two. Rows of the tiles have one float4 more, so that
// threads which read neighbouring columns meet in few banks.
constexpr uint TILE_M = 64;
constexpr uint TILE_N = 64;
constexpr uint TILE_K = 32;
constexpr uint STRIDE = 68;
constexpr uint THREADS = 256;

// Finds the next rows, from `cursor` on, that chose `expert`: at most TILE_M. Every warp finds them; the first warp
// writes their numbers to `list`.
inline uint gather(const uint *ids, uint rows, uint expert, uint &cursor, uint *list, uint lane, uint warp) {
    uint count = 0;
    while (count < TILE_M && cursor < rows) {
        const uint row = cursor + lane;
        const bool chosen = row < rows && ids[row] == expert;
        const uint place = count + __popc(__ballot_sync(ALL, chosen) & ((1u << lane) - 1));
        const bool fits = chosen && place < TILE_M;
        if (fits && warp == 0) {
            list[place] = row;
        }
        // The next call begins at the first row that does not fit.
        const uint left = __ballot_sync(ALL, chosen && !fits);
        cursor += left != 0 ? __ffs(left) - 1 : 32;
        count += __popc(__ballot_sync(ALL, fits));
    }
    return count;
}

// A block's rows and outputs. With experts, `list` has the numbers of the rows.
struct Tile {
    const LinearParams &p;
    uint first_row;
    uint count;
    uint first_output;
    const uint *list;

    inline uint row(uint i) const {
        return EXPERTS ? list[i] : first_row + i;
    }
};

// Copies inputs k to k + TILE_K of the tile's rows. Rows, outputs and inputs that do not exist are zeros.
inline void load_x(float *x_tile, const Tile &tile, const uchar *x, uint k) {
    const LinearParams &p = tile.p;
    for (uint f = threadIdx.x; f < TILE_M * TILE_K / 4; f += THREADS) {
        const uint i = f % TILE_M, j = f / TILE_M * 4;
        float4 four = all4(0);
        if (i < tile.count && k + j < p.inputs) {
            const uint row = tile.row(i) / p.rows_per_input;
            four = load4(x, ulong(row) * p.inputs + k + j, p.inputs - k - j, X_DTYPE, X_ALIGNED);
        }
#pragma unroll
        for (uint e = 0; e < 4; e++) {
            x_tile[(j + e) * STRIDE + i] = part(four, e);
        }
    }
}

// As load_x, for W and the tile's outputs; `first_w_row` is the row of W of the first output.
inline void load_w(float *w_tile, const Tile &tile, const Weight &w, ulong first_w_row, uint k) {
    const LinearParams &p = tile.p;
    for (uint f = threadIdx.x; f < TILE_N * TILE_K / CHUNK; f += THREADS) {
        const uint i = f % TILE_N, j = f / TILE_N * CHUNK;
        Chunk chunk = {};
        if (tile.first_output + i < p.outputs && k + j < p.inputs) {
            chunk = load_chunk(w, first_w_row + i, (k + j) / CHUNK, p.inputs);
        }
#pragma unroll
        for (uint four = 0; four < FOURS; four++) {
            const float4 v = AFFINE ? field_units(CODE_BITS) * fields_of(chunk, four) : fields_of(chunk, four);
#pragma unroll
            for (uint e = 0; e < 4; e++) {
                w_tile[(j + four * 4 + e) * STRIDE + i] = AFFINE ? chunk.scale * part(v, e) + chunk.bias : part(v, e);
            }
        }
    }
}

// Adds the products of TILE_K inputs to a thread's 4 rows, from `m` on, and 4 outputs, from `n` on.
inline void multiply_tiles(float (&sums)[4][4], const float *x_tile, const float *w_tile, uint m, uint n) {
#pragma unroll 8
    for (uint step = 0; step < TILE_K; step++) {
        const float4 a = *reinterpret_cast<const float4 *>(x_tile + step * STRIDE + m);
        const float4 b = *reinterpret_cast<const float4 *>(w_tile + step * STRIDE + n);
#pragma unroll
        for (uint i = 0; i < 4; i++) {
#pragma unroll
            for (uint j = 0; j < 4; j++) {
                sums[i][j] += part(a, i) * part(b, j);
            }
        }
    }
}

inline void store_tile(const float (&sums)[4][4], const Tile &tile, uchar *out, uint m, uint n) {
#pragma unroll
    for (uint i = 0; i < 4; i++) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            if (m + i < tile.count && tile.first_output + n + j < tile.p.outputs) {
                const ulong row = tile.row(m + i);
                store(out, row * tile.p.outputs + tile.first_output + n + j, tile.p.alpha * sums[i][j], OUT_DTYPE);
            }
        }
    }
}

// Writes zeros to rows whose expert does not exist; no block of an expert processes them.
inline void clear_rows(const LinearParams &p, const uint *ids, uchar *out, uint first_output) {
    for (uint row = threadIdx.x; row < p.rows; row += THREADS) {
        if (ids[row] >= p.experts) {
            for (uint i = first_output; i < min(first_output + TILE_N, p.outputs); i++) {
                store(out, ulong(row) * p.outputs + i, 0.0f, OUT_DTYPE);
            }
        }
    }
}

// Blocks: x counts TILE_N outputs, y TILE_M rows, or the experts. A thread has 4 rows and 4 outputs of a tile.
extern "C" __global__ void __launch_bounds__(THREADS)
    KVANT_KERNEL(const uchar *x, const uchar *values, const uchar *scales, const uchar *biases, const uint *ids, uchar *out,
                 const LinearParams p) {
    take_turn();
    __shared__ __align__(16) float x_tile[TILE_K * STRIDE];
    __shared__ __align__(16) float w_tile[TILE_K * STRIDE];
    __shared__ uint list[TILE_M];
    const Weight w = {values, scales, biases};
    const uint lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
    const uint first_output = blockIdx.x * TILE_N;
    const uint expert = EXPERTS ? blockIdx.y : 0;
    const ulong first_w_row = ulong(expert) * p.outputs + first_output;
    if (EXPERTS && expert == 0) {
        clear_rows(p, ids, out, first_output);
    }
    uint cursor = EXPERTS ? 0 : blockIdx.y * TILE_M;
    while (cursor < p.rows) {
        const uint first_row = cursor;
        uint count;
        if (EXPERTS) {
            count = gather(ids, p.rows, expert, cursor, list, lane, warp);
            __syncthreads();
        } else {
            count = min(TILE_M, p.rows - cursor);
            cursor = p.rows;
        }
        if (count == 0) {
            break;
        }
        const Tile tile = {p, first_row, count, first_output, list};
        float sums[4][4] = {};
        for (uint k = 0; k < p.inputs; k += TILE_K) {
            load_x(x_tile, tile, x, k);
            load_w(w_tile, tile, w, first_w_row, k);
            __syncthreads();
            multiply_tiles(sums, x_tile, w_tile, m, n);
            __syncthreads();
        }
        store_tile(sums, tile, out, m, n);
        __syncthreads();
    }
}

#endif
