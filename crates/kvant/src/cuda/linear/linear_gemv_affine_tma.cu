// linear_gemv_affine_tma: linear (linear_generic.cu) for affine codes and one row, by bulk copies. Reading W is the
// limit.
//
// x is [inputs], f32, f16 or bf16; W is [outputs, inputs], codes of 4, 6 or 8 bits. Rows of W have a whole number of
// PARTs, rows of scales and biases one of 8 bytes, and outputs are a multiple of 16.
//
// A block has up to TILES tiles of 16 outputs. Its warps divide the inputs: each has PART of them or, one after the
// other, a part of each of CHUNKS. A warp converts its part of x to bytes once, and keeps them in registers as the B of
// its products (integer_products.h) for all tiles. A last warp copies W, the rows of a tile in a chunk at a time, up to
// STAGES of these ahead of their use; scales and biases are copied with a tile's first chunk, for all of its inputs.
//
// Where a span has several groups, each has columns of its own, zero at the inputs of the others. Sums of products are
// exact; a group's sum is multiplied by its scale in float, and its bias by the sum of x, a product with ones. If one x
// of a span is not finite, or 2^110 and more (2^106 with codes of 4 bits), all results are NaN.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h); x is read later. The previous
// kernel's end waits for copies in flight on the same multiprocessor, so at most AHEAD stages are copied by then, and
// AHEAD_L2 others are prefetched to L2, which nothing waits for. RESIDENT_BLOCKS blocks fit on a multiprocessor.
#include "device/affine.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/mbarrier.h"
#include "device/reduce.h"
#include "device/ring_cursor.h"
#include "linear/integer_products.h"
#include "linear/params.h"

constexpr uint ROWS = 16;
constexpr uint PART = SPANS * SPAN;
constexpr uint PARTS = INPUTS / PART;
constexpr uint CHUNKS = (PARTS + WARPS - 1) / WARPS;
constexpr uint PART_BYTES = PART / 8 * BITS;
constexpr uint W_ROW = INPUTS / 8 * BITS;
constexpr uint CHUNK_BYTES = WARPS * PART_BYTES;
// Rows of a stage are padded against bank conflicts.
constexpr uint PITCH = (CHUNK_BYTES + 127) / 128 * 128 + (BITS == 6 ? 32 : 16);
constexpr uint STAGE = ROWS * PITCH;
constexpr uint SPAN_BYTES = SPAN / 8 * BITS;
constexpr uint WORDS = UNITS * UNIT_WORDS;
// Codes of 4 and 8 bits come to lanes as 16 bytes of each row's span, and 16 of its second half, are operands of a
// product.
constexpr bool MATRICES = BITS != 6;

// Groups of a span and of a row; a tile's scales, or biases.
constexpr uint GROUPS = SPAN > GROUP ? SPAN / GROUP : 1;
constexpr uint ROW_GROUPS = INPUTS / GROUP;
constexpr uint FACTOR_SIZE = size_of(W_DTYPE);
constexpr uint FACTOR_ROW = ROW_GROUPS * FACTOR_SIZE;
// Bytes that are copied at a time.
constexpr uint FACTOR_COPY = FACTOR_ROW % 16 == 0 ? 16 : 8;
// Rows of them begin at different banks.
constexpr uint FACTOR_PITCH = FACTOR_ROW + (FACTOR_ROW / 16 % 2 == 0 ? 16 : 0);
constexpr uint FACTORS = ROWS * FACTOR_PITCH;
// Factors of a tile are needed until its last chunk.
constexpr uint FACTOR_SLOTS = CHUNKS == 1 ? STAGES : TILES;
// Four columns for each group, bytes of x (three, or four for pairs); eight columns a product.
constexpr uint WIDE = (GROUPS + 1) / 2;

// The bytes of a span of x: of pairs (4 bits), else as make_digits has them, with zeros behind them.
constexpr uint ZEROS = BITS == 4 ? PAIR_ZEROS : 3 * DIGIT;
constexpr uint SPAN_DIGITS = BITS == 4 ? PAIR_DIGITS : 3 * DIGIT + 4;
constexpr uint DIGITS = SPANS * SPAN_DIGITS;

constexpr uint FACTORS_AT = STAGES * STAGE;
constexpr uint DIGITS_AT = FACTORS_AT + FACTOR_SLOTS * 2 * FACTORS;
constexpr uint SUMS_AT = DIGITS_AT + WARPS * DIGITS * 4;
constexpr uint BARRIERS_AT = SUMS_AT + WARPS * TILES * ROWS * 4;
// gemv_affine_tma.rs computes the same sum.
static_assert(BARRIERS_AT + STAGES * 16 == SHARED_BYTES, "linear: the shared memory that Rust asks for");
static_assert(INPUTS % PART == 0 && WARPS <= PARTS && FACTOR_ROW % FACTOR_COPY == 0 && AHEAD <= STAGES, "linear: shapes that linear_gemv_affine_tma takes");

// Begins to copy the rows of a tile in a chunk. All lanes of a warp call it.
inline void begin_tile(const uchar *values, const uchar *scales, const uchar *biases, uint shared, uint full, uint slot, ulong first_row,
                uint tile, uint chunk, uint lane) {
    const uint bytes = (CHUNKS == 1 ? WARPS : min(WARPS, PARTS - chunk * WARPS)) * PART_BYTES;
    if (chunk == 0) {
        // Scales and biases of a tile are neighbours.
        constexpr uint PIECES = FACTOR_ROW / FACTOR_COPY;
        const uint to = shared + FACTORS_AT + (CHUNKS == 1 ? slot : tile) * 2 * FACTORS;
#pragma unroll
        for (uint k = 0; k < 2; k++) {
            const uchar *from = (k == 0 ? scales : biases) + first_row * FACTOR_ROW;
#pragma unroll 4
            for (uint i = lane; i < ROWS * PIECES; i += 32) {
                copy_async<FACTOR_COPY>(to + k * FACTORS + i / PIECES * FACTOR_PITCH + i % PIECES * FACTOR_COPY,
                                        from + i * FACTOR_COPY, true);
            }
        }
    }
    if (elected()) {
        barrier_expect(full, ROWS * bytes);
        const uchar *from = values + first_row * W_ROW + chunk * CHUNK_BYTES;
        const uint to = shared + slot * STAGE;
#pragma unroll 4
        for (uint r = 0; r < ROWS; r++) {
            copy_bulk(to + r * PITCH, from + r * W_ROW, bytes, full);
        }
    }
    barrier_arrive_behind_copies(full);
}

// Prefetches to L2 what begin_tile will copy. Nothing waits for that.
inline void prefetch_tile(const uchar *values, const uchar *scales, const uchar *biases, ulong first_row, uint chunk) {
    const uint bytes = (CHUNKS == 1 ? WARPS : min(WARPS, PARTS - chunk * WARPS)) * PART_BYTES;
    const uchar *from = values + first_row * W_ROW + chunk * CHUNK_BYTES;
    if (chunk == 0) {
        // From a multiple of 16 bytes on.
        const auto prefetch = [&](const uchar *from) { prefetch_bulk(from - reinterpret_cast<ulong>(from) % 16, ROWS * FACTOR_ROW); };
        prefetch(scales + first_row * FACTOR_ROW);
        prefetch(biases + first_row * FACTOR_ROW);
    }
    if (CHUNKS == 1) {
        prefetch_bulk(from, ROWS * W_ROW);
    } else {
#pragma unroll 4
        for (uint r = 0; r < ROWS; r++) {
            prefetch_bulk(from + r * W_ROW, bytes);
        }
    }
}

// The A of a span's four products. `at` is where that begins in row lane % 16, or (codes of 6 bits) in row lane / 4.
inline void operands(uint4 (&a)[4], const uchar *at, uint lane) {
    if constexpr (MATRICES) {
        const uint from = shared_address(at) + lane / 16 * (SPAN_BYTES / 2);
#pragma unroll
        for (uint i = 0; i < (BITS == 4 ? 2 : 4); i++) {
            a[i] = load_matrices(from + i * 16);
        }
        if (BITS == 4) {
            // The low halves of bytes, then all of these.
            constexpr uint LOW = 0x0F0F0F0F;
#pragma unroll
            for (uint i = 0; i < 2; i++) {
                a[2 + i] = a[i];
                a[i] = make_uint4(a[i].x & LOW, a[i].y & LOW, a[i].z & LOW, a[i].w & LOW);
            }
        }
    } else {
        uint w[2][WORDS];
#pragma unroll
        for (uint r = 0; r < 2; r++) {
#pragma unroll
            for (uint i = 0; i < WORDS; i += 2) {
                const uint2 two = *reinterpret_cast<const uint2 *>(at + r * 8 * PITCH + lane % 4 * WORDS * 4 + i * 4);
                w[r][i] = two.x;
                w[r][i + 1] = two.y;
            }
        }
#pragma unroll
        for (uint unit = 0; unit < UNITS; unit++) {
            uint words[2][UNIT_WORDS], low[4], high[4];
#pragma unroll
            for (uint i = 0; i < UNIT_WORDS; i++) {
                words[0][i] = w[0][unit * UNIT_WORDS + i];
                words[1][i] = w[1][unit * UNIT_WORDS + i];
            }
            unpack_unit(low, words[0]);
            unpack_unit(high, words[1]);
            a[2 * unit] = make_uint4(low[0], high[0], low[1], high[1]);
            a[2 * unit + 1] = make_uint4(low[2], high[2], low[3], high[3]);
        }
    }
}

// The B of two of the four products, 2 * half and the next: the bytes of x for the groups 2b and 2b + 1, or zeros.
inline uint4 bytes_of(const uint *digits, uint b, uint half, uint g, uint t) {
    const uint group = 2 * b + g / 4, digit = g % 4;
    if constexpr (!MATRICES) {
        const uint i = t * LANE + half * UNIT;
        const bool mine = digit < 3 && group < GROUPS && (GROUPS == 1 || i / GROUP == group);
        return in_order(*reinterpret_cast<const uint4 *>(digits + (mine ? digit * DIGIT + i / 4 : ZEROS)));
    }
    const uint at = BITS == 4 ? (half * 4 + digit) * PAIR_DIGIT + t * 4 : digit < 3 ? digit * DIGIT + t * 8 + half * 4 : ZEROS;
    const uint4 four = *reinterpret_cast<const uint4 *>(digits + at);
    // Whether the lane's column has the group of these codes.
    const auto mask = [&](uint product, uint second) {
        const uint i = (BITS == 4 ? product * 32 : (2 * half + product) * 16) + second * (SPAN / 2);
        return i / (GROUP < SPAN ? GROUP : SPAN) == group ? 0xFFFFFFFF : 0;
    };
    return make_uint4(four.x & mask(0, 0), four.y & mask(0, 1), four.z & mask(1, 0), four.w & mask(1, 1));
}

// The scales, or biases, of a row's part; those of 16 bits in words.
constexpr uint FACTOR_WORDS = SPANS * GROUPS * FACTOR_SIZE / 4;
struct Factors {
    uint words[FACTOR_WORDS];

    inline void load(const uchar *at) {
        static_assert(FACTOR_PITCH % (FACTOR_WORDS % 4 == 0 ? 16 : 8) == 0, "linear: factors begin where loads may");
        if constexpr (FACTOR_WORDS % 4 == 0) {
#pragma unroll
            for (uint i = 0; i < FACTOR_WORDS; i += 4) {
                const uint4 four = reinterpret_cast<const uint4 *>(at)[i / 4];
                words[i] = four.x;
                words[i + 1] = four.y;
                words[i + 2] = four.z;
                words[i + 3] = four.w;
            }
        } else if constexpr (FACTOR_WORDS % 2 == 0) {
#pragma unroll
            for (uint i = 0; i < FACTOR_WORDS; i += 2) {
                const uint2 two = reinterpret_cast<const uint2 *>(at)[i / 2];
                words[i] = two.x;
                words[i + 1] = two.y;
            }
        } else {
#pragma unroll
            for (uint i = 0; i < FACTOR_WORDS; i++) {
                words[i] = reinterpret_cast<const uint *>(at)[i];
            }
        }
    }

    // Of a span's groups 2b and 2b + 1, if it has several, the second for `odd`.
    inline float of(uint span, uint b, bool odd) const {
        const uint i = span * GROUPS + 2 * b;
        if constexpr (W_DTYPE == F32) {
            return __uint_as_float(GROUPS > 1 && odd ? words[i + (GROUPS > 1 ? 1 : 0)] : words[i]);
        }
        const bool high = GROUPS > 1 ? odd : i % 2 != 0;
        const uint word = words[i / 2];
        if constexpr (W_DTYPE == BF16) {
            return __uint_as_float(__byte_perm(word, 0, high ? 0x3244 : 0x1044));
        }
        return half_to_float(ushort(word >> (high ? 16 : 0)));
    }
};

// Blocks count TILES tiles of outputs each.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), RESIDENT_BLOCKS)
    KVANT_KERNEL(const uchar *x, const uchar *values, const uchar *scales, const uchar *biases, const uint *, uchar *out,
                const LinearParams p) {
    extern __shared__ __align__(128) uchar memory[];
    const uint lane = threadIdx.x % 32, warp = __shfl_sync(ALL, threadIdx.x / 32, 0), g = lane / 4, t = lane % 4;
    const uint first_output = blockIdx.x * (TILES * ROWS), tiles = min(TILES, p.outputs / ROWS - blockIdx.x * TILES);
    const uint shared = shared_address(memory), full = shared + BARRIERS_AT, empty = full + STAGES * 8;
    const uint items = tiles * CHUNKS;
    // The stage that is filled or used next.
    RingCursor<STAGES> cursor;
    uint tile = 0, chunk = 0;
    const auto begin_next = [&] {
        begin_tile(values, scales, biases, shared, full + cursor.stage * 8, cursor.stage, first_output + tile * ROWS, tile, chunk, lane);
        cursor.next();
        tile++;
        if (tile == tiles) {
            tile = 0;
            chunk++;
        }
    };
    if (warp == WARPS) {
        if (elected()) {
#pragma unroll
            for (uint s = 0; s < STAGES; s++) {
                // The thread that copies codes, and each lane's copies of factors.
                barrier_init(full + s * 8, 1 + 32);
                barrier_init(empty + s * 8, WARPS * 32);
            }
            show_barriers_to_copies();
        }
        __syncwarp();
#pragma unroll 1
        for (uint i = 0; i < min(AHEAD, items); i++) {
            begin_next();
        }
        if (elected()) {
            uint next_tile = tile, next_chunk = chunk;
#pragma unroll 1
            for (uint i = AHEAD; i < min(AHEAD + AHEAD_L2, items); i++) {
                prefetch_tile(values, scales, biases, first_output + next_tile * ROWS, next_chunk);
                next_tile++;
                if (next_tile == tiles) {
                    next_tile = 0;
                    next_chunk++;
                }
            }
        }
        __syncwarp();
    }
    __syncthreads();
    if (warp == WARPS) {
        if (AHEAD < STAGES) {
            wait_for_previous();
        }
#pragma unroll 1
        for (uint i = AHEAD; i < items; i++) {
            if (i >= STAGES) {
                barrier_wait(empty + cursor.stage * 8, cursor.parity ^ 1);
            }
            begin_next();
        }
    } else {
        uint *digits = reinterpret_cast<uint *>(memory + DIGITS_AT) + warp * DIGITS;
        float *sums = reinterpret_cast<float *>(memory + SUMS_AT) + warp * (TILES * ROWS);
        // Zeros, for the columns of other groups.
        if (lane < (BITS == 4 ? PAIR_DIGIT : 4)) {
#pragma unroll
            for (uint s = 0; s < SPANS; s++) {
                digits[s * SPAN_DIGITS + ZEROS + lane] = 0;
            }
        }
        // The lane's two columns of results: the lowest two bytes of x, or the highest.
        const float2 weights = BITS == 4 ? (t % 2 == 0 ? make_float2(0.0625f, 16) : make_float2(4096, 1048576))
                                         : (t % 2 == 0 ? make_float2(1, 256) : make_float2(65536, 0));
        const int4 none = make_int4(MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS);
        const float magic = -MAGIC * (weights.x + weights.y);
        const bool odd = t >= 2;
        float4 v[SPANS];
        const auto load_part = [&](uint part) {
#pragma unroll
            for (uint s = 0; s < SPANS; s++) {
                // Beyond the end the last one again, which is not used.
                v[s] = load4(x, min(part, PARTS - 1) * PART + s * SPAN + lane * 4, X_DTYPE);
            }
        };
        wait_for_previous();
        let_next_begin();
        load_part(warp);
#pragma unroll 1
        for (; chunk < CHUNKS; chunk++) {
            const uint part = chunk * WARPS + warp;
            const bool mine = CHUNKS == 1 || part < PARTS;
            uint4 in[SPANS][WIDE][2];
            // The sum of x in each column, and the unit of a product.
            float2 scaled[SPANS];
            float less[SPANS], ones[SPANS][WIDE];
            __syncwarp();
#pragma unroll
            for (uint s = 0; s < SPANS; s++) {
                uint *to = digits + s * SPAN_DIGITS;
                // The order 0, 4, 1, 5, 2, 6, 3, 7 of the 8 stretches of 16 bytes makes a lane's words of B adjacent.
                const uint at = MATRICES ? lane % 4 * 8 + lane / 4 % 4 * 2 + lane / 16 : lane;
                const float unit = BITS == 4 ? make_pair_digits(to, v[s], lane) : make_digits(to, v[s], at);
                scaled[s] = make_float2(unit * weights.x, unit * weights.y);
                less[s] = unit * magic;
            }
            if (CHUNKS > 1) {
                load_part(part + WARPS);
            }
            __syncwarp();
#pragma unroll
            for (uint s = 0; s < SPANS; s++) {
#pragma unroll
                for (uint b = 0; b < WIDE; b++) {
                    int4 count = none;
#pragma unroll
                    for (uint half = 0; half < 2; half++) {
                        const uint4 four = in[s][b][half] = bytes_of(digits + s * SPAN_DIGITS, b, half, g, t);
                        // Of pairs, sixteen times both numbers.
                        const uint n = BITS == 4 && half == 1 ? 0x11111111 : 0x01010101;
                        count = mma_bytes(make_uint4(n, n, n, n), make_uint2(four.x, four.y), count);
                        count = mma_bytes(make_uint4(n, n, n, n), make_uint2(four.z, four.w), count);
                    }
                    ones[s][b] = fmaf(__int_as_float(count.x), scaled[s].x, fmaf(__int_as_float(count.y), scaled[s].y, less[s]));
                }
            }
            float2 before = make_float2(0, 0);
            // Adds up what the four lanes of a row have: the even ones of row g, the odd ones of row g + 8.
            const auto keep = [&](uint tile) {
                const bool second = t % 2 != 0;
                float sum = (second ? before.y : before.x) + __shfl_xor_sync(ALL, second ? before.x : before.y, 1);
                sum += __shfl_xor_sync(ALL, sum, 2);
                if (mine && t < 2) {
                    float *to = sums + tile * ROWS + g + (second ? 8 : 0);
                    *to = chunk == 0 ? sum : *to + sum;
                }
            };
#pragma unroll 1
            for (tile = 0; tile < tiles; tile++) {
                barrier_wait(full + cursor.stage * 8, cursor.parity);
                // Of the previous tile: this waits while the products of the current tile run.
                if (tile > 0) {
                    keep(tile - 1);
                }
                float sum[2] = {0, 0};
                if (mine) {
                    const uchar *codes = memory + cursor.stage * STAGE + (MATRICES ? lane % 16 : g) * PITCH + warp * PART_BYTES;
                    const uchar *factors = memory + FACTORS_AT + (CHUNKS == 1 ? cursor.stage : tile) * 2 * FACTORS +
                                           g * FACTOR_PITCH + part * (SPANS * GROUPS * FACTOR_SIZE);
                    Factors scale[2], bias[2];
#pragma unroll
                    for (uint r = 0; r < 2; r++) {
                        scale[r].load(factors + r * 8 * FACTOR_PITCH);
                        bias[r].load(factors + r * 8 * FACTOR_PITCH + FACTORS);
                    }
#pragma unroll
                    for (uint s = 0; s < SPANS; s++) {
                        uint4 a[4];
                        operands(a, codes + s * SPAN_BYTES, lane);
                        int4 products[WIDE];
#pragma unroll
                        for (uint b = 0; b < WIDE; b++) {
                            products[b] = none;
                        }
#pragma unroll
                        for (uint i = 0; i < 4; i++) {
#pragma unroll
                            for (uint b = 0; b < WIDE; b++) {
                                const uint4 two = in[s][b][i / 2];
                                products[b] = mma_bytes(a[i], i % 2 == 0 ? make_uint2(two.x, two.y) : make_uint2(two.z, two.w), products[b]);
                            }
                        }
#pragma unroll
                        for (uint b = 0; b < WIDE; b++) {
#pragma unroll
                            for (uint r = 0; r < 2; r++) {
                                const int low = r == 0 ? products[b].x : products[b].z, high = r == 0 ? products[b].y : products[b].w;
                                const float product =
                                    fmaf(__int_as_float(low), scaled[s].x, fmaf(__int_as_float(high), scaled[s].y, less[s]));
                                sum[r] = fmaf(scale[r].of(s, b, odd), product, fmaf(bias[r].of(s, b, odd), ones[s][b], sum[r]));
                            }
                        }
                    }
                }
                // The stage may be overwritten.
                if (items > STAGES) {
                    barrier_arrive(empty + cursor.stage * 8);
                }
                cursor.next();
                before = make_float2(sum[0], sum[1]);
            }
            keep(tiles - 1);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (uint i = threadIdx.x; i < tiles * ROWS; i += 32 * (WARPS + 1)) {
        const float *of = reinterpret_cast<const float *>(memory + SUMS_AT) + i;
        float sum = 0;
#pragma unroll
        for (uint w = 0; w < WARPS; w++) {
            sum += of[w * (TILES * ROWS)];
        }
        store(out, first_output + i, p.alpha * sum, OUT_DTYPE);
    }
}
