// linear_gemm_affine: linear (linear_generic.cu) of many rows with one W, affine or (BITS is 0) of bf16, on tensor
// cores: by products of warpgroups (WARPGROUP_PRODUCTS), otherwise of warps.
//
// The products of an affine W use its codes, counted from the middle of their range, which bf16 holds exactly. With w =
// scale * code + bias,
//   out = sum over groups of  scale * (x . code)  +  sum over groups of  bias * (x . 1)
// Therefore W is never dequantised. The second sum is a product, too: of biases and sums of x. Both operands are sums
// of TERMS bf16 numbers. An x of f32 is a sum of three bf16 numbers, its parts; an x of f16 is a sum of two. Each part
// is multiplied by the codes, or weights.
//
// linear_gemm_affine_sort, with EXPERTS: sorts rows by their experts `ids` [rows], into tiles of ROWS places of one
// expert each. `experts` has the expert of a tile, or NONE if the tile does not exist; `order` has the row at a place,
// or NONE for padding. Rows whose expert does not exist come last, as rows of one more expert. One block.
//
// linear_gemm_affine_arrange: arranges x [rows, inputs] in chunks, one for every tile of ROWS rows and BLOCK inputs. A
// chunk has the parts of x, each a matrix in the layout of wgmma.h. For an affine W, chunks of sums of x follow; each
// has BLOCK sums and one term. The padding is zeros. A thread has 16 bytes of a row.
//
// linear_gemm_affine: out^T = W x^T. A block has OUTPUTS outputs of ROWS rows and loops over the chunks. One thread
// (without WARPGROUP_PRODUCTS, the threads that multiply) copies them into a ring in shared memory, and two warpgroups
// multiply, 64 outputs each. A thread reads the codes, or weights, of its two outputs directly into the registers of
// the products' operands: the order of inputs within BLOCK is free, so a lane has 16 neighbours, or eight in each half
// (HALVED). With groups of 32, each half has its own sums and scales (SUMS is 2). While warpgroups multiply 64 rows,
// the products of the other 64 rows are scaled and added, and the next codes are converted. Dense products are added in
// the same way, BLOCK inputs at a time: tensor cores truncate sums instead of rounding them, which is visible after
// some hundred inputs.
#include "device/affine.h"
#include "device/dependent_launch.h"
#include "device/fragments.h"
#include "device/mbarrier.h"
#include "device/ring_cursor.h"
#include "device/vectors.h"
#include "linear/params.h"
#if KERNEL_linear_gemm_affine
#include "device/products.h"
#endif

constexpr uint NONE = 0xFFFFFFFF;

struct GemmAffineParams {
    uint rows;
    uint outputs;
    uint inputs;
    uint experts;
    float alpha;
    uint first_expert;
    uint present;
};

struct GemmAffineSortParams {
    uint rows;
    uint experts;
    uint tiles;
};

#if KERNEL_linear_gemm_affine_sort

extern "C" __global__ void __launch_bounds__(1024)
    KVANT_KERNEL(const uint *ids, uint *experts, uint *order, const GemmAffineSortParams p) {
    // Rows of each expert; later the place of its next row.
    extern __shared__ uint counts[];
    uint *next = counts + p.experts + 1;
    const uint thread = threadIdx.x, threads = blockDim.x;
    for (uint e = thread; e <= p.experts; e += threads) {
        counts[e] = 0;
    }
    take_turn();
    for (uint i = thread; i < p.tiles; i += threads) {
        experts[i] = NONE;
    }
    for (uint i = thread; i < p.tiles * ROWS; i += threads) {
        order[i] = NONE;
    }
    __syncthreads();
    for (uint row = thread; row < p.rows; row += threads) {
        atomicAdd(counts + min(ids[row], p.experts), 1);
    }
    __syncthreads();
    if (thread < 32) {
        // The first tile of every expert: the number of tiles of earlier experts, 32 experts at a time.
        uint before = 0;
        for (uint first = 0; first <= p.experts; first += 32) {
            const uint e = first + thread, tiles = e <= p.experts ? (counts[e] + ROWS - 1) / ROWS : 0;
            uint sum = tiles;
#pragma unroll
            for (uint step = 1; step < 32; step *= 2) {
                const uint other = __shfl_up_sync(0xFFFFFFFF, sum, step);
                sum += thread >= step ? other : 0;
            }
            if (e <= p.experts) {
                next[e] = (before + sum - tiles) * ROWS;
                for (uint tile = 0; tile < tiles; tile++) {
                    experts[before + sum - tiles + tile] = e;
                }
            }
            before += __shfl_sync(0xFFFFFFFF, sum, 31);
        }
    }
    __syncthreads();
    // The order within an expert differs from run to run; no result depends on it.
    for (uint row = thread; row < p.rows; row += threads) {
        order[atomicAdd(next + min(ids[row], p.experts), 1)] = row;
    }
}

#else

constexpr bool AFFINE = BITS != 0;
constexpr uint BLOCK = 64;
// Inputs of a sum: their products are added before the sum is scaled, and their x before the sum is multiplied by a
// bias. BLOCK has SUMS sums.
constexpr uint SUM_INPUTS = BLOCK / SUMS;
constexpr uint PARTS = X_DTYPE == F32 ? 3 : X_DTYPE == F16 ? 2 : 1;
// Bytes of one part of x, and of all parts: the size of a stage.
constexpr uint PART = ROWS * BLOCK * 2;
constexpr uint STAGE = PARTS * PART;
// 16-bit numbers whose sum is a bias, or a sum of x.
constexpr uint TERMS = OUT_DTYPE == F32 ? 3 : 2;
// Blocks of inputs whose products follow each other without a gap. The number of blocks is padded to a multiple of it.
constexpr uint DEPTH = 4;

inline uint blocks_of(uint inputs) {
    return ((inputs / SUM_INPUTS + SUMS - 1) / SUMS + DEPTH - 1) / DEPTH * DEPTH;
}

inline uint blocks_of_sums(uint inputs) {
    return !AFFINE ? 0 : (inputs / SUM_INPUTS + BLOCK - 1) / BLOCK;
}

inline uint chunks_of(uint inputs) {
    return blocks_of(inputs) + blocks_of_sums(inputs) * TERMS;
}

// Whether a lane has eight neighbours in each half of BLOCK, instead of 16: if each half has its own sums, and for
// codes of 2, 3 and 5 bits, because two words hold eight of them.
constexpr bool HALVED = SUMS == 2 || BITS == 2 || BITS == 3 || BITS == 5;

// The order of a lane's 16 codes, or weights: pair i are inputs 8 (i % 2) + 2 t and the next one of product i / 2.
constexpr uint code_of(uint pair, uint which) {
    return BITS == 4              ? pair / 4 * 8 + pair % 4 + which * 4
           : BITS == 6 && !HALVED ? pair / 2 * 4 + pair % 2 + which * 2
                                  : pair * 2 + which;
}
// The input within BLOCK of a code of lane 0; those of the next lane are NEIGHBOURS later.
constexpr uint NEIGHBOURS = HALVED ? 8 : 16;
constexpr uint input_of(uint code) {
    return HALVED ? code / 8 * 32 + code % 8 : code;
}

#if KERNEL_linear_gemm_affine_arrange

// Blocks: x counts BLOCK inputs, up to whole blocks of sums if there are any, y 32 places.
extern "C" __global__ void __launch_bounds__(256)
    KVANT_KERNEL(const uchar *x, uchar *out, const LinearParams p, const uint *experts, const uint *order) {
    take_turn();
    const uint place = blockIdx.y * 32 + threadIdx.x / 8, tile = place / ROWS, r = place % ROWS;
    if (EXPERTS && experts[tile] == NONE) {
        return;
    }
    const uint piece = threadIdx.x % 8, row = EXPERTS ? order[place] : place, block = blockIdx.x;
    const uint of_sum = block * SUMS + piece / (8 / SUMS);
    const bool there = row < p.rows && of_sum < p.inputs / SUM_INPUTS;
    const ulong from = there ? ulong(row / p.rows_per_input) * p.inputs + block * BLOCK : 0;
    float values[8];
    float sum = 0;
#pragma unroll
    for (uint i = 0; i < 8; i++) {
        values[i] = there ? load(x, from + i / 2 * NEIGHBOURS + input_of(code_of(piece, i % 2)), X_DTYPE) : 0;
        sum += values[i];
    }
#pragma unroll
    for (uint step = 1; step < 8 / SUMS; step *= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    }
    uchar *chunks = out + ulong(tile) * chunks_of(p.inputs) * STAGE;
    if (block < blocks_of(p.inputs)) {
        uint words[4][PARTS];
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            split<false>(values[2 * i], values[2 * i + 1], words[i]);
        }
#pragma unroll
        for (uint part = 0; part < PARTS; part++) {
            *reinterpret_cast<uint4 *>(chunks + ulong(block) * STAGE + part * PART + r * 128 + (piece ^ r % 8) * 16) =
                make_uint4(words[0][part], words[1][part], words[2][part], words[3][part]);
        }
    }
    if (AFFINE && piece % (8 / SUMS) == 0) {
        // The sums are in the order in which lanes have the biases: a lane has 16 neighbours, two at a time.
        const uint in_block = of_sum % BLOCK, pair = in_block % 16 / 2, element = in_block / 16 * 2 + in_block % 2;
        uchar *to = chunks + (blocks_of(p.inputs) + ulong(of_sum / BLOCK) * TERMS) * STAGE + r * 128 + (pair ^ r % 8) * 16;
        uint terms[TERMS];
        split<false>(sum, 0, terms);
#pragma unroll
        for (uint term = 0; term < TERMS; term++) {
            reinterpret_cast<ushort *>(to + term * STAGE)[element] = ushort(terms[term]);
        }
    }
}

#else

constexpr uint OUTPUTS = 128;
constexpr uint CONSUMERS = 256;
// One thread copies in bulk; its warpgroup gives registers to the consumers. Without warpgroup products the consumers
// copy, because a ninth warp would limit each thread to 168 registers.
constexpr uint COPIERS = WARPGROUP_PRODUCTS ? 1 : CONSUMERS;
constexpr uint THREADS = CONSUMERS + (WARPGROUP_PRODUCTS ? 128 : 0);
// Pieces of 64 rows: the products of one piece run while the products of the other are added.
constexpr uint PIECES = ROWS / 64;
// Blocks of codes in registers. Products of warps take twice the time, and leave fewer registers; scales of two sums
// need more registers.
constexpr uint AHEAD = WARPGROUP_PRODUCTS || PIECES == 1 ? DEPTH : DEPTH / 2 / SUMS;
// Floats of a row of the tile of results, padded against bank conflicts.
constexpr uint RESULTS = OUTPUTS + 4;
// Shared memory, after the first multiple of 1024 bytes: barriers and the ring, or the results.
constexpr uint AT_RING = 1024;
static_assert(1024 + AT_RING + STAGES * STAGE == SHARED_BYTES, "linear: the shared memory that Rust asks for");
static_assert(!AFFINE || GROUP % SUM_INPUTS == 0, "linear: one scale for SUM_INPUTS inputs");
static_assert(AFFINE || W_DTYPE == BF16 && W_ALIGNED, "linear: weights as products take them");
static_assert(ROWS * RESULTS * 4 <= STAGES * STAGE && STAGES <= 64, "linear: room for results and barriers");

// Converted codes are (code - MIDDLE) / UNITS.
constexpr float MIDDLE = AFFINE ? 1 << (BITS - 1) : 0;
constexpr float UNITS = BITS == 8 ? 1 : 128;

// Scales and biases.
inline uint bits_at(const uchar *from, ulong i) {
    return W_DTYPE == F32 ? reinterpret_cast<const uint *>(from)[i] : reinterpret_cast<const ushort *>(from)[i];
}

inline float float_of(uint bits) {
    return W_DTYPE == F32 ? __uint_as_float(bits) : W_DTYPE == F16 ? half_to_float(ushort(bits)) : __uint_as_float(bits << 16);
}

// A lane's codes of an output for BLOCK inputs. They are not yet converted, so that the load is waited for only at
// their use. A dense row has two words of four.
struct Codes {
    uint4 words[AFFINE ? 1 : 2];
    uint scales[SUMS];
};

// Whether eight codes may begin within a word. Two words hold them in that case.
constexpr bool WITHIN_WORDS = HALVED && BITS != 4 && BITS != 8;

// Codes 8 t to 8 t + 7 of the 32 codes that begin at `from`, or the words with these codes.
inline uint2 load_eight(const uint *from, uint t) {
    if (BITS == 4) {
        return make_uint2(from[t], 0);
    }
    if (BITS == 8) {
        return W_ALIGNED ? reinterpret_cast<const uint2 *>(from)[t] : make_uint2(from[2 * t], from[2 * t + 1]);
    }
    const uint first = t * BITS / 4;
    return make_uint2(from[first], from[min(first + 1, BITS - 1)]);
}

struct Weight {
    const uchar *codes;
    const uchar *scales;
    const uchar *biases;
    uint inputs;

    ulong group_of(uint output, uint sum) const {
        return ulong(output) * (inputs / GROUP) + sum * SUM_INPUTS / GROUP;
    }
    // The index of a sum, limited to the last one.
    uint sum_of(uint sum) const {
        return min(sum, inputs / SUM_INPUTS - 1);
    }
    // The index of a block, limited to the last one.
    uint block_of(uint block) const {
        return min(block, inputs / BLOCK - 1);
    }
    // The matrix of an expert.
    void select(ulong first_row) {
        codes += AFFINE ? first_row * (inputs / 32 * BITS) * 4 : first_row * inputs * 2;
        scales += AFFINE ? first_row * (inputs / GROUP) * size_of(W_DTYPE) : 0;
        biases += AFFINE ? first_row * (inputs / GROUP) * size_of(W_DTYPE) : 0;
    }
    Codes load(uint output, uint block) const {
        if constexpr (HALVED) {
            // A half after the end repeats the last half; x is zero there.
            const uint *row = reinterpret_cast<const uint *>(codes) + ulong(output) * (inputs / 32 * BITS);
            uint2 eight[2];
#pragma unroll
            for (uint half = 0; half < 2; half++) {
                eight[half] = load_eight(row + min(block * 2 + half, inputs / 32 - 1) * BITS, threadIdx.x % 4);
            }
            Codes out = {{BITS == 4 ? make_uint4(eight[0].x, eight[1].x, 0, 0)
                                    : make_uint4(eight[0].x, eight[0].y, eight[1].x, eight[1].y)}};
#pragma unroll
            for (uint sum = 0; sum < SUMS; sum++) {
                out.scales[sum] = bits_at(scales, group_of(output, sum_of(block * SUMS + sum)));
            }
            return out;
        }
        block = block_of(block);
        if constexpr (!AFFINE) {
            const uchar *row = codes + (ulong(output) * inputs + block * BLOCK) * 2;
            const uint4 *own = reinterpret_cast<const uint4 *>(row) + threadIdx.x % 4 * 2;
            Codes out = {{own[0]}, {0}};
            out.words[AFFINE ? 0 : 1] = own[1];
            return out;
        }
        const uint *row = reinterpret_cast<const uint *>(codes) + ulong(output) * (inputs / 32 * BITS);
        return {{load_words(row, block * 4 + threadIdx.x % 4, BITS, W_ALIGNED)}, {bits_at(scales, group_of(output, block))}};
    }
    // The bias for codes counted from their middle.
    float bias(uint output, uint sum) const {
        const ulong group = group_of(output, sum_of(sum));
        return float_of(bits_at(biases, group)) + float_of(bits_at(scales, group)) * MIDDLE;
    }
};

// a - b of bf16 pairs; exact here.
inline uint subtract(uint a, uint b) {
    if constexpr (!WARPGROUP_PRODUCTS) {
        return minus<false>(a, b);
    }
    uint out;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// Pair i of 16 codes, or weights. A code in the seven mantissa bits of the bf16 number 1 counts 1 / 128.
inline uint pair_of(const Codes &codes, uint i) {
    const uint4 w = codes.words[AFFINE ? 0 : i / 4];
    if (!AFFINE) {
        return i % 4 == 0 ? w.x : i % 4 == 1 ? w.y : i % 4 == 2 ? w.z : w.w;
    }
    constexpr uint ONES = 0x3F803F80, MIDDLES = ONES + (AFFINE ? 0x10001 << (BITS - 1) : 0);
    if (WITHIN_WORDS) {
        const uint2 two_words = i < 4 ? make_uint2(w.x, w.y) : make_uint2(w.z, w.w);
        const uint first = threadIdx.x % 4 * BITS % 4 * 8;
        const uint low = __funnelshift_r(two_words.x, two_words.y, first), high = two_words.y >> first;
        constexpr uint MASK = (1 << BITS) - 1;
        const uint bit = i % 4 * 2 * BITS, two = bit < 32 ? __funnelshift_r(low, high, bit) : high >> bit % 32;
        return subtract(two & MASK | two << (16 - BITS) & MASK << 16 | ONES, MIDDLES);
    }
    if (BITS == 4) {
        return subtract((i < 4 ? w.x : w.y) >> i % 4 * 4 & 0x000F000F | ONES, MIDDLES);
    }
    if (BITS == 6) {
        // 24 bits, from bit 24 (i / 2) on. The pair has bits 0 and 12, or 6 and 18.
        const uint quad = i / 2;
        const uint four = quad == 0 ? w.x : quad == 1 ? __funnelshift_r(w.x, w.y, 24) : quad == 2 ? __funnelshift_r(w.y, w.z, 16)
                                                                                                   : w.z >> 8;
        const uint two = four >> i % 2 * 6;
        return subtract(two & 0x3F | two << 4 & 0x3F0000 | ONES, MIDDLES);
    }
    const uint word = i / 2 == 0 ? w.x : i / 2 == 1 ? w.y : i / 2 == 2 ? w.z : w.w;
    const uint two = word >> i % 2 * 16;
    // The float 2^23 plus the code, less 2^23 and MIDDLE: 8 bits, which fit into the upper half of the float.
    constexpr float OFF = 8388608 + MIDDLE;
    const float low = __uint_as_float(two & 255 | 0x4B000000) - OFF, high = __uint_as_float(two >> 8 & 255 | 0x4B000000) - OFF;
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

// The left sides of the products of BLOCK inputs: rows g and g + 8 of the warp's outputs.
inline void operands(const Codes (&codes)[2], uint (&a)[4][4]) {
#pragma unroll
    for (uint i = 0; i < 4; i++) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            a[i][j] = pair_of(codes[j % 2], 2 * i + j / 2);
        }
    }
}

// Copies a chunk, by COPIERS threads, and signals the barrier.
inline void copy_chunk(uint to, const uchar *from, uint bytes, uint barrier) {
    if constexpr (WARPGROUP_PRODUCTS) {
        barrier_expect(barrier, bytes);
        copy_bulk(to, from, bytes, barrier);
    } else {
        for (uint at = threadIdx.x * 16; at < bytes; at += COPIERS * 16) {
            copy_async<16>(to + at, from + at, true);
        }
        barrier_arrive_behind_copies(barrier);
    }
}

// Context of all phases: addresses in shared memory, and the tile of rows.
struct Block {
    const GemmAffineParams &p;
    const uchar *chunks;
    // Barriers: a stage is full, a stage is free.
    uint full;
    uint free;
    uint ring;
};

// Copies the chunks of the block's tile of rows to the ring, one after the other.
struct Copier {
    const Block &b;
    // The cursor's parity: all buffers are free at the beginning.
    RingCursor<STAGES> at = {0, 1};
    uint copied = 0;

    inline bool has_next() const {
        return copied < chunks_of(b.p.inputs);
    }
    inline void copy_next() {
        const uchar *from = b.chunks + (ulong(blockIdx.y) * chunks_of(b.p.inputs) + copied) * STAGE;
        // A chunk of sums has the size of one part.
        const uint bytes = copied < blocks_of(b.p.inputs) ? STAGE : PART;
        barrier_wait(b.free + at.stage * 8, at.parity);
        copy_chunk(b.ring + at.stage * STAGE, from, bytes, b.full + at.stage * 8);
        at.next();
        copied++;
    }
};

// A thread of the consumers: its two outputs of W, and the sums of their products with each row of the tile.
struct Consumer {
    const Block &b;
    Copier &copier;
    Weight w;
    uint outputs[2];
    RingCursor<STAGES> at;
    float sums[PIECES][32] = {};

    // Waits for the chunk at the cursor, and returns its matrix.
    inline ulong next_chunk() const {
        barrier_wait(b.full + at.stage * 8, at.parity);
        return matrix(b.ring + at.stage * STAGE, 16);
    }
    inline void give_back(uint stage) {
        if (WARPGROUP_PRODUCTS && threadIdx.x % 32 == 0) {
            barrier_arrive(b.free + stage * 8);
        }
        if constexpr (!WARPGROUP_PRODUCTS) {
            // Products of warps read buffers by ordinary instructions.
            barrier_arrive_warp(b.free + stage * 8);
            // The copy goes to the buffer before this one, which other warps may still read.
            if (copier.has_next()) {
                copier.copy_next();
            }
        }
    }
    inline void hold_sums() {
#pragma unroll
        for (uint piece = 0; piece < PIECES; piece++) {
            hold(sums[piece]);
        }
    }
};

// Codes, or weights, in registers, AHEAD blocks ahead of their use; products in progress, and the scales of their
// block.
struct Pipeline {
    Codes ahead[AHEAD][2];
    float products[PIECES][32];
    float scale[SUMS][2];
};

// Consumer: adds the products of a piece, scaled.
inline void add_products(Consumer &c, Pipeline &line, uint piece, uint sum) {
    hold(line.products[piece]);
#pragma unroll
    for (uint i = 0; i < 32; i++) {
        c.sums[piece][i] += line.scale[sum][i / 2 % 2] * line.products[piece][i];
    }
}

// Consumer: takes the scales of a block whose codes have been converted, and loads the block that reuses its registers.
inline void advance(const Consumer &c, Pipeline &line, uint block, uint d) {
#pragma unroll
    for (uint i = 0; i < 2; i++) {
#pragma unroll
        for (uint sum = 0; sum < SUMS; sum++) {
            line.scale[sum][i] = AFFINE ? float_of(line.ahead[d % AHEAD][i].scales[sum]) * UNITS : 1;
        }
        line.ahead[d % AHEAD][i] = c.w.load(c.outputs[i], block + d + AHEAD);
    }
}

// Consumer: begins the products of a piece of rows with the inputs of one sum.
inline void begin_products(Pipeline &line, uint (&a)[4][4], ulong x, uint piece, uint sum) {
    hold(a);
    products_begin();
#pragma unroll
    for (uint i = 0; i < 4 / SUMS * PARTS; i++) {
        const uint of_block = sum * (4 / SUMS) + i / PARTS;
        const uint at = i % PARTS * PART + piece * 64 * 128 + of_block * 32;
        multiply<false>(line.products[piece], a[of_block], matrix_after(x, at), i > 0);
    }
    products_commit();
}

// Consumer: the products of block `block` + d. By warpgroups, they are added while the next ones run: `d` is not 0 if
// products are in progress.
inline void multiply_block(Consumer &c, Pipeline &line, uint block, uint d) {
    uint a[4][4];
    operands(line.ahead[d % AHEAD], a);
    if constexpr (!WARPGROUP_PRODUCTS) {
        advance(c, line, block, d);
    }
    const ulong x = c.next_chunk();
#pragma unroll
    for (uint sum = 0; sum < SUMS; sum++) {
#pragma unroll
        for (uint piece = 0; piece < PIECES; piece++) {
            if (WARPGROUP_PRODUCTS && d + sum > 0) {
                products_wait<PIECES - 1>();
                add_products(c, line, piece, (sum + SUMS - 1) % SUMS);
            }
            begin_products(line, a, x, piece, sum);
            if (!WARPGROUP_PRODUCTS) {
                add_products(c, line, piece, sum);
            }
        }
        if (WARPGROUP_PRODUCTS && sum == 0) {
            if (d > 0) {
                c.give_back(c.at.before());
            }
            advance(c, line, block, d);
        }
    }
    if constexpr (!WARPGROUP_PRODUCTS) {
        c.give_back(c.at.stage);
        c.at.next();
    } else if (d + 1 < DEPTH) {
        c.at.next();
    }
}

// Consumer: the products of all blocks of inputs.
inline void multiply_blocks(Consumer &c) {
    Pipeline line;
#pragma unroll
    for (uint d = 0; d < AHEAD; d++) {
        line.ahead[d][0] = c.w.load(c.outputs[0], d);
        line.ahead[d][1] = c.w.load(c.outputs[1], d);
    }
    const uint blocks = blocks_of(c.b.p.inputs);
#pragma unroll 1
    for (uint block = 0; block < blocks; block += DEPTH) {
#pragma unroll
        for (uint d = 0; d < DEPTH; d++) {
            multiply_block(c, line, block, d);
        }
        if constexpr (WARPGROUP_PRODUCTS) {
            products_wait<PIECES - 1>();
            add_products(c, line, 0, SUMS - 1);
            if (PIECES > 1) {
                products_wait<0>();
                add_products(c, line, PIECES - 1, SUMS - 1);
            }
            c.give_back(c.at.stage);
            c.at.next();
        }
    }
}

// Consumer: the terms of a block's biases, as left sides of products.
inline void biases_of(const Consumer &c, uint block, uint (&a)[TERMS][4][4]) {
#pragma unroll
    for (uint i = 0; i < 4; i++) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const uint first = block * BLOCK + threadIdx.x % 4 * 16 + (2 * i + j / 2) * 2;
            uint terms[TERMS];
            split<false>(c.w.bias(c.outputs[j % 2], first), c.w.bias(c.outputs[j % 2], first + 1), terms);
#pragma unroll
            for (uint term = 0; term < TERMS; term++) {
                a[term][i][j] = terms[term];
            }
        }
    }
}

// Consumer: adds biases times sums of x. Only the larger products of their terms are computed.
inline void multiply_biases(Consumer &c) {
#pragma unroll 1
    for (uint block = 0; block < blocks_of_sums(c.b.p.inputs); block++) {
        uint a[TERMS][4][4];
        biases_of(c, block, a);
#pragma unroll
        for (uint of_sums = 0; of_sums < TERMS; of_sums++) {
            const ulong x = c.next_chunk();
            c.hold_sums();
#pragma unroll
            for (uint term = 0; term < TERMS; term++) {
                hold(a[term]);
            }
            products_begin();
#pragma unroll
            for (uint term = 0; term + of_sums < TERMS; term++) {
#pragma unroll
                for (uint i = 0; i < 4 * PIECES; i++) {
                    multiply<false>(c.sums[i / 4], a[term][i % 4], matrix_after(x, i / 4 * 64 * 128 + i % 4 * 32), true);
                }
            }
            products_commit();
            products_wait<0>();
            c.give_back(c.at.stage);
            c.at.next();
        }
    }
    c.hold_sums();
}

// Epilogue: stores the sums through shared memory, in the memory of the ring, so that neighbours are stored together.
// Results of an expert that is not `known` are zeros.
inline void store_sums(const GemmAffineParams &p, const float (&sums)[PIECES][32], float *results, uchar *out, const uint *order, bool known) {
    const uint thread = threadIdx.x, own = thread / 32 * 16 + thread % 32 / 4, t = thread % 4, first_output = blockIdx.x * OUTPUTS;
    const auto meet = [] {
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    };
    meet();
#pragma unroll
    for (uint i = 0; i < ROWS / 2; i++) {
        results[(i / 4 * 8 + 2 * t + i % 2) * RESULTS + own + i / 2 % 2 * 8] = p.alpha * sums[i / 32][i % 32];
    }
    meet();
    for (uint i = thread; i < ROWS * OUTPUTS / 4; i += CONSUMERS) {
        const uint r = i / (OUTPUTS / 4), place = blockIdx.y * ROWS + r, output = first_output + i % (OUTPUTS / 4) * 4;
        const uint row = EXPERTS ? order[place] : place;
        if (row < p.rows && output < p.outputs) {
            const float4 of_row = *reinterpret_cast<const float4 *>(results + r * RESULTS + i % (OUTPUTS / 4) * 4);
            const float4 four = known ? of_row : make_float4(0, 0, 0, 0);
            store4(out, ulong(row) * p.outputs + output, p.outputs - output, four, OUT_DTYPE, OUT_ALIGNED);
        }
    }
}

inline void init_barriers(const Block &b) {
    if (threadIdx.x == 0) {
        for (uint i = 0; i < STAGES; i++) {
            barrier_init(b.full + i * 8, COPIERS);
            barrier_init(b.free + i * 8, CONSUMERS / 32 * (WARPGROUP_PRODUCTS ? 1 : WARP_ARRIVALS));
        }
        if constexpr (WARPGROUP_PRODUCTS) {
            show_barriers_to_copies();
        }
    }
}

// Blocks: x counts OUTPUTS outputs, y tiles of ROWS rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KVANT_KERNEL(const uchar *chunks, const uchar *codes, const uchar *scales, const uchar *biases, uchar *out,
                const GemmAffineParams p, const uint *experts, const uint *order) {
    extern __shared__ uchar memory[];
    const uint base = (shared_address(memory) + 1023) / 1024 * 1024;
    const Block b = {p, chunks, base, base + STAGES * 8, base + AT_RING};
    const uint thread = threadIdx.x;
    init_barriers(b);
    __syncthreads();
    take_turn();
    const uint expert = EXPERTS ? experts[blockIdx.y] : 0;
    // Rows of an expert that does not exist are zeros; the first launch stores them.
    const bool known = expert < p.experts;
    if (EXPERTS && (expert == NONE || (known ? expert - p.first_expert >= p.present : p.first_expert > 0))) {
        return;
    }
    Copier copier = {b};
    if constexpr (WARPGROUP_PRODUCTS) {
        // Consumers get registers that the copying warps give up.
        if (thread >= CONSUMERS) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
            if (thread == CONSUMERS) {
                while (copier.has_next()) {
                    copier.copy_next();
                }
            }
            return;
        }
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    } else {
        while (copier.copied < min(STAGES - 1, chunks_of(p.inputs))) {
            copier.copy_next();
        }
    }
    const uint own = thread / 32 * 16 + thread % 32 / 4, output = blockIdx.x * OUTPUTS + own;
    // Missing outputs repeat the last one and are not stored.
    Consumer c = {b, copier, {codes, scales, biases, p.inputs}, {min(output, p.outputs - 1), min(output + 8, p.outputs - 1)}};
    c.w.select(known ? ulong(expert - p.first_expert) * p.outputs : 0);
    multiply_blocks(c);
    multiply_biases(c);
    store_sums(p, c.sums, reinterpret_cast<float *>(memory + (b.ring - shared_address(memory))), out, order, known);
}

#endif
#endif
