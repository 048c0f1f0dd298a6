// linear_gemv_affine_tma: linear (linear_generic.cu) for affine codes and one row, by bulk copies. Reading W is the
// limit.
//
// x is [inputs], f32, f16 or bf16; W is [outputs, inputs], codes of 4, 6 or 8 bits. PART divides the rows of W, 8 bytes
// divide the rows of scales and biases, and 16 divides the outputs.
//
// A block has up to TILES tiles of 16 outputs. Its warps divide the inputs: each has PART inputs of each of CHUNKS
// chunks, which are processed one after the other. A warp converts its part of x to bytes once, and keeps them in
// registers as the B of its products (integer_products.h) for all tiles. The last warp copies W: the rows of a tile in
// one chunk form a stage, and up to STAGES stages are copied ahead of their use. The scales and biases of all inputs of
// a tile are copied with its first chunk.
//
// If a span has several groups, each group has its own columns, which are zero at the inputs of other groups. Sums of
// products are exact. In float, a group's sum is multiplied by its scale, and its bias by the sum of x, which is a
// product with ones. If a number of x is not finite, or at least 2^110 (2^106 with codes of 4 bits), all results are
// NaN.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h); x is read later. Copies in flight
// on the same multiprocessor delay the end of the previous kernel. Until then at most AHEAD stages are copied; AHEAD_L2
// further stages are prefetched to L2, which delays nothing. RESIDENT_BLOCKS blocks fit on a multiprocessor.
//
// This kernel is not folded into linear_skinny_affine4_tma, which has more rows and bulk copies as well. They share the
// copies, and differ in everything else:
//
// - operands: bytes of codes and of x with integer products for 4, 6 and 8 bits; there bf16 for 4 bits only. Byte
//   products took 7.8 us with three rows, bf16 products 5.7 (docs/notes/cuda-linear.md); with one row bytes are faster.
// - x: f32 and f16 are as exact as bf16, because digits of 2^-22 represent each; bf16 products would round them.
// - division: all warps share the inputs of one tile, and chunks continue a tile whose x does not fit in registers;
//   there, teams take tiles in turn, and blocks split long rows.
//
// A common kernel would have both product loops, both layouts of x and both divisions, selected by constants.
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
// Codes of 4 and 8 bits are loaded as matrices: 16 bytes of each row's span, and 16 bytes of its second half, are the
// operands of a product.
constexpr bool MATRICES = BITS != 6;

// Groups of a span and of a row; a tile's scales, or biases.
constexpr uint GROUPS = SPAN > GROUP ? SPAN / GROUP : 1;
constexpr uint ROW_GROUPS = INPUTS / GROUP;
constexpr uint FACTOR_SIZE = size_of(W_DTYPE);
constexpr uint FACTOR_ROW = ROW_GROUPS * FACTOR_SIZE;
// Bytes that are copied at a time.
constexpr uint FACTOR_COPY = FACTOR_ROW % 16 == 0 ? 16 : 8;
// Rows of factors begin at different banks.
constexpr uint FACTOR_PITCH = FACTOR_ROW + (FACTOR_ROW / 16 % 2 == 0 ? 16 : 0);
constexpr uint FACTORS = ROWS * FACTOR_PITCH;
// Factors of a tile are needed until its last chunk.
constexpr uint FACTOR_SLOTS = CHUNKS == 1 ? STAGES : TILES;
// Products for the columns: a group has four columns for its bytes of x (three, or four for pairs), a product has
// eight.
constexpr uint WIDE = (GROUPS + 1) / 2;

// The bytes of a span of x, then zeros: bytes of pairs for codes of 4 bits, otherwise the bytes of make_digits.
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

// Prefetches the copies of begin_tile to L2. Nothing waits for the prefetch.
inline void prefetch_tile(const uchar *values, const uchar *scales, const uchar *biases, ulong first_row, uint chunk) {
    const uint bytes = (CHUNKS == 1 ? WARPS : min(WARPS, PARTS - chunk * WARPS)) * PART_BYTES;
    const uchar *from = values + first_row * W_ROW + chunk * CHUNK_BYTES;
    if (chunk == 0) {
        // The prefetch begins at a multiple of 16 bytes.
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

// The A of a span's four products. `at` is the span's address in row lane % 16, or (codes of 6 bits) in row lane / 4.
inline void operands(uint4 (&a)[4], const uchar *at, uint lane) {
    if constexpr (MATRICES) {
        const uint from = shared_address(at) + lane / 16 * (SPAN_BYTES / 2);
#pragma unroll
        for (uint i = 0; i < (BITS == 4 ? 2 : 4); i++) {
            a[i] = load_matrices(from + i * 16);
        }
        if (BITS == 4) {
            // The low nibbles of the bytes, then the high ones.
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

    // The factor of a span's group 2b, or 2b + 1 if `odd`; of its only group if it has one.
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

// Context of all phases: the weight, the block's tiles, and addresses in shared memory.
struct Block {
    const uchar *values;
    const uchar *scales;
    const uchar *biases;
    uchar *memory;
    uint first_output;
    uint tiles;
    uint items;
    uint shared;
    // Barriers: a stage is full, a stage is empty.
    uint full;
    uint empty;
    uint lane;
    uint warp;
};

// The next item, a tile of a chunk of inputs, and its stage. All tiles of a chunk follow each other.
struct Cursor {
    RingCursor<STAGES> ring;
    uint tile = 0;
    uint chunk = 0;

    inline void next_item(uint tiles) {
        tile++;
        if (tile == tiles) {
            tile = 0;
            chunk++;
        }
    }
};

// Producer: begins to copy an item.
inline void begin_next(const Block &b, Cursor &at) {
    begin_tile(b.values, b.scales, b.biases, b.shared, b.full + at.ring.stage * 8, at.ring.stage, b.first_output + at.tile * ROWS,
               at.tile, at.chunk, b.lane);
    at.ring.next();
    at.next_item(b.tiles);
}

// Producer: sets up the barriers, and begins the copies that do not wait for the previous kernel.
inline void begin_ahead(const Block &b, Cursor &at) {
    if (elected()) {
#pragma unroll
        for (uint s = 0; s < STAGES; s++) {
            // The thread that copies codes, and each lane's copies of factors.
            barrier_init(b.full + s * 8, 1 + 32);
            barrier_init(b.empty + s * 8, WARPS * 32);
        }
        show_barriers_to_copies();
    }
    __syncwarp();
#pragma unroll 1
    for (uint i = 0; i < min(AHEAD, b.items); i++) {
        begin_next(b, at);
    }
    if (elected()) {
        Cursor next = at;
#pragma unroll 1
        for (uint i = AHEAD; i < min(AHEAD + AHEAD_L2, b.items); i++) {
            prefetch_tile(b.values, b.scales, b.biases, b.first_output + next.tile * ROWS, next.chunk);
            next.next_item(b.tiles);
        }
    }
    __syncwarp();
}

// Producer: the other copies.
inline void produce(const Block &b, Cursor &at) {
    if (AHEAD < STAGES) {
        wait_for_previous();
    }
#pragma unroll 1
    for (uint i = AHEAD; i < b.items; i++) {
        if (i >= STAGES) {
            barrier_wait(b.empty + at.ring.stage * 8, at.ring.parity ^ 1);
        }
        begin_next(b, at);
    }
}

// A warp of the consumers: its memory, and the lane's two columns of results. They belong to the lowest two bytes of x,
// or to the highest; `weights` are the values of these bytes in units. `magic` is minus the contribution of MAGIC to
// both columns.
struct Consumer {
    uint *digits;
    float *sums;
    float2 weights;
    float magic;
    uint g;
    uint t;
};

inline Consumer consumer(const Block &b) {
    const uint g = b.lane / 4, t = b.lane % 4;
    const float2 weights = BITS == 4 ? (t % 2 == 0 ? make_float2(0.0625f, 16) : make_float2(4096, 1048576))
                                     : (t % 2 == 0 ? make_float2(1, 256) : make_float2(65536, 0));
    const float magic = -MAGIC * (weights.x + weights.y);
    uint *digits = reinterpret_cast<uint *>(b.memory + DIGITS_AT) + b.warp * DIGITS;
    float *sums = reinterpret_cast<float *>(b.memory + SUMS_AT) + b.warp * (TILES * ROWS);
    // Zeros, for the columns of other groups.
    if (b.lane < (BITS == 4 ? PAIR_DIGIT : 4)) {
#pragma unroll
        for (uint s = 0; s < SPANS; s++) {
            digits[s * SPAN_DIGITS + ZEROS + b.lane] = 0;
        }
    }
    return {digits, sums, weights, magic, g, t};
}

// Consumer: the lane's numbers of a part of x. Parts after the last one repeat it and are not used.
inline void load_part(float4 (&v)[SPANS], const uchar *x, uint part, uint lane) {
#pragma unroll
    for (uint s = 0; s < SPANS; s++) {
        v[s] = load4(x, min(part, PARTS - 1) * PART + s * SPAN + lane * 4, X_DTYPE);
    }
}

// A part of x as B, the units of the lane's two columns of results (`scaled`), the contribution of MAGIC to a product
// (`less`), and the sums of x in each column (`ones`).
struct PartOfX {
    uint4 in[SPANS][WIDE][2];
    float2 scaled[SPANS];
    float less[SPANS];
    float ones[SPANS][WIDE];
};

inline int4 no_products() {
    return make_int4(MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS);
}

// Consumer: writes the bytes of a part of x to shared memory.
inline void write_digits(PartOfX &x, const float4 (&v)[SPANS], const Consumer &c, uint lane) {
#pragma unroll
    for (uint s = 0; s < SPANS; s++) {
        uint *to = c.digits + s * SPAN_DIGITS;
        // The order 0, 4, 1, 5, 2, 6, 3, 7 of the 8 stretches of 16 bytes makes a lane's words of B adjacent.
        const uint at = MATRICES ? lane % 4 * 8 + lane / 4 % 4 * 2 + lane / 16 : lane;
        const float unit = BITS == 4 ? make_pair_digits(to, v[s], lane) : make_digits(to, v[s], at);
        x.scaled[s] = make_float2(unit * c.weights.x, unit * c.weights.y);
        x.less[s] = unit * c.magic;
    }
}

// Consumer: reads the bytes of a part of x as B, and adds them up.
inline void read_digits(PartOfX &x, const Consumer &c) {
#pragma unroll
    for (uint s = 0; s < SPANS; s++) {
#pragma unroll
        for (uint b = 0; b < WIDE; b++) {
            int4 count = no_products();
#pragma unroll
            for (uint half = 0; half < 2; half++) {
                const uint4 four = x.in[s][b][half] = bytes_of(c.digits + s * SPAN_DIGITS, b, half, c.g, c.t);
                // Pairs have sixteen times both numbers.
                const uint n = BITS == 4 && half == 1 ? 0x11111111 : 0x01010101;
                count = mma_bytes(make_uint4(n, n, n, n), make_uint2(four.x, four.y), count);
                count = mma_bytes(make_uint4(n, n, n, n), make_uint2(four.z, four.w), count);
            }
            x.ones[s][b] = fmaf(__int_as_float(count.x), x.scaled[s].x, fmaf(__int_as_float(count.y), x.scaled[s].y, x.less[s]));
        }
    }
}

// Consumer: adds the products of the warp's part of a tile to the sums of rows g and g + 8.
inline void multiply_tile(const Block &b, const Consumer &c, const PartOfX &x, const Cursor &at, uint part, float (&sum)[2]) {
    const uchar *codes = b.memory + at.ring.stage * STAGE + (MATRICES ? b.lane % 16 : c.g) * PITCH + b.warp * PART_BYTES;
    const uchar *factors = b.memory + FACTORS_AT + (CHUNKS == 1 ? at.ring.stage : at.tile) * 2 * FACTORS + c.g * FACTOR_PITCH +
                           part * (SPANS * GROUPS * FACTOR_SIZE);
    const bool odd = c.t >= 2;
    Factors scale[2], bias[2];
#pragma unroll
    for (uint r = 0; r < 2; r++) {
        scale[r].load(factors + r * 8 * FACTOR_PITCH);
        bias[r].load(factors + r * 8 * FACTOR_PITCH + FACTORS);
    }
#pragma unroll
    for (uint s = 0; s < SPANS; s++) {
        uint4 a[4];
        operands(a, codes + s * SPAN_BYTES, b.lane);
        int4 products[WIDE];
#pragma unroll
        for (uint w = 0; w < WIDE; w++) {
            products[w] = no_products();
        }
#pragma unroll
        for (uint i = 0; i < 4; i++) {
#pragma unroll
            for (uint w = 0; w < WIDE; w++) {
                const uint4 two = x.in[s][w][i / 2];
                products[w] = mma_bytes(a[i], i % 2 == 0 ? make_uint2(two.x, two.y) : make_uint2(two.z, two.w), products[w]);
            }
        }
#pragma unroll
        for (uint w = 0; w < WIDE; w++) {
#pragma unroll
            for (uint r = 0; r < 2; r++) {
                const int low = r == 0 ? products[w].x : products[w].z, high = r == 0 ? products[w].y : products[w].w;
                const float product = fmaf(__int_as_float(low), x.scaled[s].x, fmaf(__int_as_float(high), x.scaled[s].y, x.less[s]));
                sum[r] = fmaf(scale[r].of(s, w, odd), product, fmaf(bias[r].of(s, w, odd), x.ones[s][w], sum[r]));
            }
        }
    }
}

// Consumer: adds up the sums of the four lanes of a row. Even lanes keep row g, odd lanes row g + 8.
inline void keep_sums(const Consumer &c, float2 sums, uint tile, uint chunk, bool mine) {
    const bool second = c.t % 2 != 0;
    float sum = (second ? sums.y : sums.x) + __shfl_xor_sync(ALL, second ? sums.x : sums.y, 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    if (mine && c.t < 2) {
        float *to = c.sums + tile * ROWS + c.g + (second ? 8 : 0);
        *to = chunk == 0 ? sum : *to + sum;
    }
}

// Consumer: all tiles of a chunk.
inline void multiply_chunk(const Block &b, const Consumer &c, const PartOfX &x, Cursor &at, uint part) {
    const bool mine = CHUNKS == 1 || part < PARTS;
    float2 before = make_float2(0, 0);
#pragma unroll 1
    for (at.tile = 0; at.tile < b.tiles; at.tile++) {
        barrier_wait(b.full + at.ring.stage * 8, at.ring.parity);
        // The sums of the previous tile: their exchange overlaps with the products of the current tile.
        if (at.tile > 0) {
            keep_sums(c, before, at.tile - 1, at.chunk, mine);
        }
        float sum[2] = {0, 0};
        if (mine) {
            multiply_tile(b, c, x, at, part, sum);
        }
        // The stage may be overwritten.
        if (b.items > STAGES) {
            barrier_arrive(b.empty + at.ring.stage * 8);
        }
        at.ring.next();
        before = make_float2(sum[0], sum[1]);
    }
    keep_sums(c, before, b.tiles - 1, at.chunk, mine);
}

// Consumer: all chunks, each with the warp's part of x.
inline void consume(const Block &b, Cursor &at, const uchar *x) {
    const Consumer c = consumer(b);
    float4 v[SPANS];
    wait_for_previous();
    let_next_begin();
    load_part(v, x, b.warp, b.lane);
#pragma unroll 1
    for (; at.chunk < CHUNKS; at.chunk++) {
        const uint part = at.chunk * WARPS + b.warp;
        PartOfX of_x;
        __syncwarp();
        write_digits(of_x, v, c, b.lane);
        if (CHUNKS > 1) {
            load_part(v, x, part + WARPS, b.lane);
        }
        __syncwarp();
        read_digits(of_x, c);
        multiply_chunk(b, c, of_x, at, part);
    }
}

// Blocks count TILES tiles of outputs each.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), RESIDENT_BLOCKS)
    KVANT_KERNEL(const uchar *x, const uchar *values, const uchar *scales, const uchar *biases, const uint *, uchar *out,
                const LinearParams p) {
    extern __shared__ __align__(128) uchar memory[];
    const uint lane = threadIdx.x % 32, warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
    const uint first_output = blockIdx.x * (TILES * ROWS), tiles = min(TILES, p.outputs / ROWS - blockIdx.x * TILES);
    const uint shared = shared_address(memory), full = shared + BARRIERS_AT, empty = full + STAGES * 8;
    const Block b = {values, scales, biases, memory, first_output, tiles, tiles * CHUNKS, shared, full, empty, lane, warp};
    Cursor at;
    if (warp == WARPS) {
        begin_ahead(b, at);
    }
    __syncthreads();
    if (warp == WARPS) {
        produce(b, at);
    } else {
        consume(b, at, x);
    }
    __syncthreads();
    // Epilogue: the sums of all warps.
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
