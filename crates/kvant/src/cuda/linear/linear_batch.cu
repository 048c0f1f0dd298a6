// linear_batch: linear (linear_generic.cu) of up to 128 rows of bf16, or of rows of experts, with affine codes, on the
// tensor cores of whole warpgroups. Every matrix is read once, which is the limit up to about 32 rows. Results are bf16
// or, of up to 32 rows, f32.
//
// With w = scale * code + bias,
//   out = sum over blocks of  scale * (x . code) + bias * (x . 1)
// where a block is BLOCK inputs of one group. With up to 32 rows, products are of codes plus OFFSET, which bf16 holds
// exactly; they and the second term are scaled and added in float. OFFSET costs some bits of the sums: for results of
// f32 it is subtracted from codes of 4 and 6 bits before the products. With more rows (FOLDED) scaling takes longer
// than making weights of the codes, rounded to bf16.
//
// linear_batch_arrange: x [rows, inputs] -> for every tile of ROWS rows and every DEPTH blocks of inputs a chunk:
// matrices of BLOCK inputs in the layout of wgmma.h, then, unless FOLDED, the sums of the blocks, [DEPTH][ROWS] floats.
// The padding is zeros. A thread has 16 bytes of a row. It also sets the counters of linear_batch to 0.
//
// linear_batch: out^T = W x^T, in tiles of OUTPUTS outputs by ROWS rows. The chunks of all tiles, one after the other,
// are divided evenly among the blocks, wherever that cuts a tile. One warpgroup copies codes and x to a ring in shared
// memory, a chunk a stage, and scales and biases to two slots, for SPAN inputs at once: in smaller pieces they would
// take as long as the codes. The others multiply, 64 outputs each, or twice as many: a thread unpacks 16
// neighbouring codes of two outputs, the left sides of four products. With HALVES of 2, two warpgroups have the same 64
// outputs, each half of a chunk's inputs, and their sums are added through shared memory. Chunks are longer then, and
// longer pieces of rows are read faster. A tile that several blocks share is left in
// `partials`, and added up, in the order of its inputs, by the block that is done last.
//
// Where tiles are at most half as many as multiprocessors, several blocks would share each, and the last one of a small
// matrix would add for longer than it multiplies. There the CLUSTER blocks of a cluster divide the chunks of a tile,
// and each adds up a part of its sums, through distributed shared memory.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h), unless the expert is not known.
#include "device/affine.h"
#include "device/cluster.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/mbarrier.h"
#include "device/ring_cursor.h"
#include "device/vectors.h"
#include "device/wgmma.h"
#include "linear/out_parts.h"
#include "linear/params.h"

constexpr uint NONE = 0xFFFFFFFF;
constexpr uint BLOCK = 64;
// Inputs of a chunk, and the bytes of x in it and of its sums.
constexpr uint INPUTS = DEPTH * BLOCK;
constexpr uint X_BLOCK = ROWS * BLOCK * 2;
constexpr uint X_BYTES = DEPTH * X_BLOCK;
constexpr bool FOLDED = ROWS > 32;
constexpr uint SUMS_BYTES = FOLDED ? 0 : DEPTH * ROWS * 4;

struct LinearBatchParams {
    LinearParams linear;
    // Tiles of rows, fewer of which may exist with experts, and tiles of outputs.
    uint row_tiles;
    uint output_tiles;
    OutParts parts;
};

inline uint chunks_of(uint inputs) {
    return (inputs + INPUTS - 1) / INPUTS;
}

// The order of a lane's 16 codes: pair i are inputs 8 (i % 2) + 2 t and the next one of product i / 2.
constexpr uint code_of(uint pair, uint which) {
    return BITS == 4   ? pair / 4 * 8 + pair % 4 + which * 4
           : BITS == 6 ? pair / 2 * 4 + pair % 2 + which * 2
                       : pair * 2 + which;
}

#if KERNEL_linear_batch_arrange

// Blocks: x counts blocks of inputs, of whole chunks, as many as a block has threads for; y 32 rows, or a tile of
// fewer.
extern "C" __global__ void __launch_bounds__(256)
    KVANT_KERNEL(const uchar *x, uchar *out, uint *counters, const LinearBatchParams p, const uint *experts, const uint *order) {
    take_turn();
    if (blockIdx.x == 0 && blockIdx.y == 0) {
        for (uint i = threadIdx.x; i < p.row_tiles * p.output_tiles; i += 256) {
            counters[i] = 0;
        }
    }
    constexpr uint TOGETHER = ROWS < 32 ? ROWS : 32;
    const uint place = blockIdx.y * TOGETHER + threadIdx.x / 8 % TOGETHER, tile = place / ROWS, r = place % ROWS;
    if (EXPERTS && experts[tile] == NONE) {
        return;
    }
    const uint block = blockIdx.x * (32 / TOGETHER) + threadIdx.x / 8 / TOGETHER, chunks = chunks_of(p.linear.inputs);
    const uint piece = threadIdx.x % 8, row = EXPERTS ? order[place] : place;
    const bool there = row < p.linear.rows && block < p.linear.inputs / BLOCK;
    const ushort *from = reinterpret_cast<const ushort *>(x) + (there ? ulong(row / p.linear.rows_per_input) * p.linear.inputs + block * BLOCK : 0);
    uint words[4];
    float sum = 0;
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        const ushort low = there ? from[i * 16 + code_of(piece, 0)] : 0, high = there ? from[i * 16 + code_of(piece, 1)] : 0;
        words[i] = low | uint(high) << 16;
        sum += bf16_to_float(low) + bf16_to_float(high);
    }
#pragma unroll
    for (uint step = 1; step < 8; step *= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    }
    if (block >= chunks * DEPTH) {
        return;
    }
    uchar *chunk = out + (ulong(tile) * chunks + block / DEPTH) * (X_BYTES + SUMS_BYTES);
    *reinterpret_cast<uint4 *>(chunk + block % DEPTH * X_BLOCK + r * 128 + (piece ^ r % 8) * 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (!FOLDED && piece == 0) {
        reinterpret_cast<float *>(chunk + X_BYTES)[block % DEPTH * ROWS + r] = sum;
    }
}

#else

constexpr uint OUTPUTS = 256 / HALVES;
constexpr uint PRODUCERS = 128;
// Tiles of 64 outputs that a warpgroup multiplies. Registers suffice for so many sums with fewer warpgroups.
constexpr uint TILES = ROWS <= 64 ? 1 : 2;
constexpr uint CONSUMERS = 512 / TILES;
constexpr uint THREADS = PRODUCERS + CONSUMERS;
// Threads whose sums are of different outputs, and blocks of a chunk that a thread multiplies.
constexpr uint WRITERS = CONSUMERS / HALVES;
constexpr uint OWN_BLOCKS = DEPTH / HALVES;
static_assert(HALVES == 1 || !FOLDED, "linear: halves of chunks are for few rows");
// Bytes of a row of codes, and from one to the next, so that the lanes of a load meet in no bank: where rows are not
// padded, their units of 16 bytes are permuted (swizzled).
constexpr uint CODES = INPUTS / 8 * BITS;
constexpr uint PITCH = BITS == 4 ? CODES : BITS == 8 ? CODES + 64 : CODES + 16;
// Lanes that copy a row, 16 bytes at a time.
constexpr uint ROW_LANES = CODES / 16 % 8 == 0 ? 8 : CODES / 16 % 4 == 0 ? 4 : 2;
// A stage: x, codes, sums of x.
constexpr uint AT_CODES = X_BYTES;
constexpr uint AT_SUMS = AT_CODES + OUTPUTS * PITCH;
constexpr uint STAGE = (AT_SUMS + SUMS_BYTES + 1023) / 1024 * 1024;
// Chunks, of SPAN inputs, whose scales and biases are copied together; how many a thread has of a chunk; their bytes
// for an output, and from one output to the next. They are copied in pieces of 8 bytes or, where these are not aligned,
// in words: the first scale, or bias, of all may be in the middle of one (SCALES_ODD, BIASES_ODD: 0 or 1), and that of
// any output.
constexpr uint SPAN_CHUNKS = SPAN / INPUTS;
constexpr uint FACTORS = INPUTS / GROUP / HALVES;
constexpr uint SPAN_BYTES = SPAN / GROUP * 2;
constexpr uint FACTOR_PITCH = SPAN_BYTES + 8;
constexpr uint FACTOR_PIECES = SPAN_BYTES / 8;
constexpr uint SIDE = OUTPUTS * FACTOR_PITCH;
constexpr uint SLOTS = 2;
// The ring begins behind the barriers, at a multiple of 1024 bytes.
constexpr uint AT_RING = 1024;
constexpr uint AT_SLOTS = AT_RING + STAGES * STAGE;
// The sums over the second halves, of two tiles in turn.
constexpr uint AT_HALVES = AT_SLOTS + SLOTS * 2 * SIDE;
constexpr uint HALF_BYTES = HALVES == 1 ? 0 : OUTPUTS * ROWS * 4;
static_assert(1024 + AT_HALVES + 2 * HALF_BYTES == SHARED_BYTES, "linear: the shared memory that Rust asks for");
static_assert(CLUSTER == 1 || STAGES * STAGE >= OUTPUTS * ROWS * 4, "linear: the sums of a tile take the place of the ring");
static_assert(CLUSTER == 1 || !EXPERTS, "linear: how many tiles of experts there are is not known before");
static_assert(INPUTS / HALVES % GROUP == 0 && SPAN % INPUTS == 0 && GROUP % BLOCK == 0, "linear: whole groups in a chunk, whole blocks in a group");
static_assert(X_DTYPE == BF16 && (OUT_DTYPE == BF16 || OUT_DTYPE == F32 && !FOLDED), "linear: the dtypes of rows");
static_assert(W_DTYPE == BF16 || W_DTYPE == F16 && !FOLDED, "linear: the dtype of scales");

// What is added to codes: the lowest of seven bits behind the exponent of 128 counts 1. Codes of 8 bits are counted
// from their middle.
constexpr bool EXACT = OUT_DTYPE == F32 && BITS != 8;
constexpr float OFFSET = BITS == 8 ? -128 : EXACT ? 0 : 128;
constexpr uint MINUS_OFFSET = BITS == 8 ? 0x43004300 : 0xC300C300;

// (word & mask) | 128 in both halves, in one instruction.
inline uint masked(uint word, uint mask) {
    uint out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(mask), "r"(0x43004300));
    return out;
}

// Pair i of a lane's 16 codes.
inline uint pair_of(const uint (&w)[4], uint i) {
    if (BITS == 4) {
        return masked(w[i / 4] >> i % 4 * 4, 0x000F000F);
    }
    if (BITS == 6) {
        // 24 bits, from bit 24 (i / 2) on, of which the pair has bits 0 and 12, or 6 and 18.
        const uint quad = i / 2;
        const uint four = quad == 0 ? w[0] : quad == 1 ? __funnelshift_r(w[0], w[1], 24) : quad == 2 ? __funnelshift_r(w[1], w[2], 16)
                                                                                                  : w[2] >> 8;
        const uint two = four >> i % 2 * 6;
        return masked(two << 4, 0x3F0000) | two & 0x3F;
    }
    const uint two = w[i / 2] >> i % 2 * 16;
    // 2^23 plus the code; minus 2^23 and the middle it has 8 bits, all in the upper half of the float.
    constexpr float OFF = 8388608 + 128;
    const float low = __uint_as_float(two & 255 | 0x4B000000) - OFF, high = __uint_as_float(two >> 8 & 255 | 0x4B000000) - OFF;
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

// Unit `unit` of 16 bytes of a row of codes is in this place.
inline uint swizzled(uint row, uint unit) {
    return BITS == 4 ? unit ^ (DEPTH % 4 == 0 ? row & 3 : row >> 1 & 1) << 1 : unit;
}

// A lane's 16 codes of each of its two outputs.
inline void load_codes(uint (&w)[2][4], const uchar *codes) {
#pragma unroll
    for (uint r = 0; r < 2; r++) {
        const uchar *from = codes + r * 8 * PITCH;
        if (BITS == 4) {
            const uint2 two = *reinterpret_cast<const uint2 *>(from);
            w[r][0] = two.x;
            w[r][1] = two.y;
        } else if (BITS == 6) {
#pragma unroll
            for (uint i = 0; i < 3; i++) {
                w[r][i] = reinterpret_cast<const uint *>(from)[i];
            }
        } else {
            const uint4 four = *reinterpret_cast<const uint4 *>(from);
            w[r][0] = four.x;
            w[r][1] = four.y;
            w[r][2] = four.z;
            w[r][3] = four.w;
        }
    }
}

// Scales and biases of a lane's two outputs for one group. FOLDED: as bf16, twice each.
struct Factors {
    uint scale[2];
    uint bias[2];
};

// Codes as bf16, exactly.
inline uint codes_of(uint pair) {
    uint codes;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(codes) : "r"(pair), "r"(0x3F803F80), "r"(MINUS_OFFSET));
    return codes;
}

// scale * code + bias, rounded once.
inline uint weights_of(uint pair, uint scale, uint bias) {
    uint out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(codes_of(pair)), "r"(scale), "r"(bias));
    return out;
}

// The left sides of N products of a block from the one `first` on: rows g and g + 8 of the warp's outputs.
template <uint N>
inline void operands(uint (&a)[N][4], const uint (&w)[2][4], uint first, const Factors &factors) {
#pragma unroll
    for (uint i = 0; i < N; i++) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const uint pair = pair_of(w[j % 2], 2 * (first + i) + j / 2);
            a[i][j] = FOLDED ? weights_of(pair, factors.scale[j % 2], factors.bias[j % 2]) : EXACT ? codes_of(pair) : pair;
        }
    }
}

// The shares of the blocks: `each` of all chunks of all tiles (in a cluster, of its tile), and one more for the first
// `longer` blocks.
struct Shares {
    uint each;
    uint longer;

    uint begin(uint block) const {
        return block * each + min(block, longer);
    }
    uint block_of(uint unit) const {
        const uint of_longer = longer * (each + 1);
        return unit < of_longer ? unit / (each + 1) : longer + (unit - of_longer) / each;
    }
};

// The chunks of one tile that a block has.
struct Segment {
    uint tile;
    uint from;
    uint to;
};

inline Segment segment_at(uint unit, uint end, uint chunks) {
    const uint tile = unit / chunks, from = unit % chunks;
    return {tile, from, min(chunks, from + (end - unit))};
}

// The scales, or biases, of an output for a chunk; `odd` if they begin in the middle of a word.
inline void load_factors(uint (&to)[FACTORS], const uchar *from, bool odd) {
    ushort halves[FACTORS];
    if constexpr (FACTORS_ALIGNED && FACTORS % 2 == 0) {
#pragma unroll
        for (uint i = 0; i < FACTORS; i += 2) {
            // The compiler joins neighbouring words.
            const uint two = reinterpret_cast<const uint *>(from)[i / 2];
            halves[i] = ushort(two);
            halves[i + 1] = ushort(two >> 16);
        }
    } else {
#pragma unroll
        for (uint i = 0; i < FACTORS; i++) {
            halves[i] = reinterpret_cast<const ushort *>(from)[i + odd];
        }
    }
#pragma unroll
    for (uint i = 0; i < FACTORS; i++) {
        to[i] = FOLDED ? halves[i] * 0x10001u : W_DTYPE == F16 ? __float_as_uint(half_to_float(halves[i])) : uint(halves[i]) << 16;
    }
}

// Blocks: the grid has one dimension.
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED
    KVANT_KERNEL(const uchar *arranged, const uchar *codes, const uchar *scales, const uchar *biases, uchar *out,
                 float *partials, uint *counters, const LinearBatchParams p, const uint *experts, const uint *order) {
    extern __shared__ uchar memory[];
    const uint base = (shared_address(memory) + 1023) / 1024 * 1024;
    const uint full = base, free = base + STAGES * 8, slot_free = base + STAGES * 16, ring = base + AT_RING;
    uchar *stages = memory + (ring - shared_address(memory));
    const uint thread = threadIdx.x;
    if (thread == 0) {
        for (uint i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, PRODUCERS + 1);
            barrier_init(free + i * 8, CONSUMERS);
        }
        for (uint i = 0; i < SLOTS; i++) {
            barrier_init(slot_free + i * 8, CONSUMERS);
        }
        show_barriers_to_copies();
    }
    uint row_tiles = p.row_tiles;
    if (EXPERTS) {
        wait_for_previous();
        row_tiles = 0;
        for (uint first = 0; first < p.row_tiles; first += THREADS) {
            row_tiles += __syncthreads_count(first + thread < p.row_tiles && experts[min(first + thread, p.row_tiles - 1)] != NONE);
        }
        // A number of one lane: see `half`.
        row_tiles = __shfl_sync(0xFFFFFFFF, row_tiles, 0);
    } else {
        __syncthreads();
    }
    const uint chunks = chunks_of(p.linear.inputs), units = row_tiles * p.output_tiles * chunks;
    // Of the chunks of all tiles or, in a cluster, of those of its tile.
    const uint sharers = CLUSTER > 1 ? CLUSTER : gridDim.x, first = CLUSTER > 1 ? blockIdx.x / CLUSTER * chunks : 0;
    const uint shared = CLUSTER > 1 ? chunks : units, own_share = CLUSTER > 1 ? blockIdx.x % CLUSTER : blockIdx.x;
    const Shares shares = {shared / sharers, shared % sharers};
    const uint begin = first + shares.begin(own_share), end = first + shares.begin(own_share + 1);

    // The consumers get the registers.
    if (thread >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(TILES == 1 ? 64 : 72));
        const uint own = thread - CONSUMERS;
        const uint row_bytes = p.linear.inputs / 8 * BITS, groups = p.linear.inputs / GROUP;
        const uint row_of_lane = own / ROW_LANES;
        RingCursor<SLOTS> slot;
        const auto each_chunk = [&](uint from, uint to, auto copy) {
            for (uint unit = from; unit < to;) {
                const Segment segment = segment_at(unit, to, chunks);
                const uint row_tile = segment.tile / p.output_tiles, first = segment.tile % p.output_tiles * OUTPUTS;
                const uint expert = EXPERTS ? experts[row_tile] : 0;
                const ulong first_row = ulong(expert < p.linear.experts ? expert : 0) * p.linear.outputs + first;
                for (uint chunk = segment.from; chunk < segment.to; chunk++) {
                    copy(unit++, chunk, row_tile, first_row, p.linear.outputs - 1 - first);
                }
            }
        };
        const auto copy_factors = [&](uint to, uint span, ulong first_row, uint last) {
            const uint first = span * (SPAN / GROUP);
            if constexpr (FACTORS_ALIGNED) {
                // Neighbouring lanes copy the pieces of an output; zeros behind the last input.
#pragma unroll
                for (uint side = 0; side < 2; side++) {
                    const uchar *of_side = (side == 0 ? scales : biases) + (first_row * groups + first) * 2;
#pragma unroll 4
                    for (uint i = own; i < OUTPUTS * FACTOR_PIECES; i += PRODUCERS) {
                        const uint piece = i % FACTOR_PIECES, row = i / FACTOR_PIECES;
                        const bool there = first + piece * 4 < groups;
                        copy_async<8>(to + side * SIDE + row * FACTOR_PITCH + piece * 8, of_side + (there ? min(row, last) * groups + piece * 4 : 0) * 2, there);
                    }
                }
            } else {
                // Neighbouring lanes copy those of neighbouring outputs: rows are short, or not aligned.
                const ulong count = ulong(p.linear.experts) * p.linear.outputs * groups;
#pragma unroll 1
                for (uint i = own; i < 2 * OUTPUTS; i += PRODUCERS) {
                    const uint row = i % OUTPUTS, side = i / OUTPUTS, odd = side == 0 ? SCALES_ODD : BIASES_ODD;
                    const ulong begins = (first_row + min(row, last)) * groups + odd + first;
                    const uint bytes = min(SPAN / GROUP, groups - first) * 2, before = begins % 2 * 2;
                    // What there is from the word that holds the first one on.
                    const ulong left = (count + odd - begins) * 2 + before;
                    const uchar *from = (side == 0 ? scales : biases) + begins * 2 - odd * 2 - before;
                    const uint to_row = to + side * SIDE + row * FACTOR_PITCH;
                    for (uint at = 0; at < bytes + before; at += 4) {
                        copy_async_part<4>(to_row + at, from + at, left - at >= 4 ? 4 : 2);
                    }
                }
            }
        };
        // Row i of a tile; beyond the last output the last is computed again, and not stored.
        const auto copy_weights = [&](uint stage, uint unit, uint chunk, ulong first_row, uint last) {
            const uint to = ring + stage * STAGE + AT_CODES;
            const uchar *from = codes + first_row * row_bytes + chunk * CODES;
#pragma unroll
            for (uint i = 0; i < OUTPUTS * ROW_LANES / PRODUCERS; i++) {
                const uint row = row_of_lane + i * (PRODUCERS / ROW_LANES);
                const uchar *of_row = from + ulong(min(row, last) * row_bytes);
#pragma unroll
                for (uint piece = 0; piece < CODES / 16; piece += ROW_LANES) {
                    const uint at = (own % ROW_LANES + piece) * 16;
                    const bool there = WHOLE || chunk * CODES + at < row_bytes;
                    copy_async<16>(to + row * PITCH + swizzled(row, at / 16) * 16, there ? of_row + at : codes, there);
                }
            }
            if (unit == begin || chunk % SPAN_CHUNKS == 0) {
                barrier_wait(slot_free + slot.stage * 8, slot.parity ^ 1);
                copy_factors(base + AT_SLOTS + slot.stage * (2 * SIDE), chunk / SPAN_CHUNKS, first_row, last);
                slot.next();
            }
            barrier_arrive_behind_copies(full + stage * 8);
        };
        const auto copy_inputs = [&](uint stage, uint chunk, uint row_tile) {
            if (own == 0) {
                const uint to = ring + stage * STAGE;
                const uchar *from = arranged + (ulong(row_tile) * chunks + chunk) * (X_BYTES + SUMS_BYTES);
                barrier_expect(full + stage * 8, X_BYTES + SUMS_BYTES);
                copy_bulk(to, from, X_BYTES, full + stage * 8);
                if (!FOLDED) {
                    copy_bulk(to + AT_SUMS, from + X_BYTES, SUMS_BYTES, full + stage * 8);
                }
            }
        };
        // Before the previous kernel has ended: what fits, up to the end of a span.
        const uint first_chunk = begin % chunks;
        const uint ahead = begin + min(min(end - begin, STAGES), min(chunks - first_chunk, SPAN_CHUNKS - first_chunk % SPAN_CHUNKS));
        each_chunk(begin, ahead, [&](uint unit, uint chunk, uint, ulong first_row, uint last) {
            copy_weights(unit - begin, unit, chunk, first_row, last);
        });
        if (!EXPERTS) {
            wait_for_previous();
        }
        let_next_begin();
        RingCursor<STAGES> cursor;
        each_chunk(begin, end, [&](uint unit, uint chunk, uint row_tile, ulong first_row, uint last) {
            if (unit >= ahead) {
                barrier_wait(free + cursor.stage * 8, cursor.parity ^ 1);
                copy_weights(cursor.stage, unit, chunk, first_row, last);
            }
            copy_inputs(cursor.stage, chunk, row_tile);
            cursor.next();
        });
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TILES == 1 ? 104 : 216));
    if (!EXPERTS) {
        wait_for_previous();
    }
    let_next_begin();

    const uint lane = thread % 32, g = lane / 4, t = lane % 4;
    // The first of the lane's outputs: the second is 8 later, those of another tile 64.
    // Numbers of one lane are the warp's: the compiler computes with them once, not in each lane.
    const uint half = HALVES == 1 ? 0 : __shfl_sync(0xFFFFFFFF, thread / WRITERS, 0), writer = HALVES == 1 ? thread : thread % WRITERS;
    const uint own = __shfl_sync(0xFFFFFFFF, writer / 128, 0) * (64 * TILES) + thread % 128 / 32 * 16 + g;
    const uint blocks = p.linear.inputs / BLOCK, groups = p.linear.inputs / GROUP;
    const auto meet = [](uint barrier, uint threads) {
        asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
    };
    // Tiles so far.
    uint turn = 0;
    RingCursor<STAGES> cursor;
    RingCursor<SLOTS> slot;
    for (uint unit = begin; unit < end;) {
        const Segment segment = segment_at(unit, end, chunks);
        const uint row_tile = segment.tile / p.output_tiles, first_output = segment.tile % p.output_tiles * OUTPUTS;
        const uint expert = EXPERTS ? experts[row_tile] : 0;
        const bool known = !EXPERTS || expert < p.linear.experts;
        // Odd if the scales, or biases, of an output begin in the middle of a word, unless their first do.
        uint odd[TILES][2];
#pragma unroll
        for (uint i = 0; i < 2 * TILES; i++) {
            const uint row = (known ? expert : 0) * p.linear.outputs + min(first_output + own + i / 2 * 64 + i % 2 * 8, p.linear.outputs - 1);
            odd[i / 2][i % 2] = FACTORS_ALIGNED ? 0 : row * groups;
        }

        float sums[TILES][ROWS / 2] = {};
        // FOLDED: the barrier of the stage before, which the products still read.
        uint before = 0;
        for (uint chunk = segment.from; chunk < segment.to; chunk++, unit++) {
            const uchar *stage = stages + cursor.stage * STAGE;
            barrier_wait(full + cursor.stage * 8, cursor.parity);
            if (chunk % SPAN_CHUNKS == 0 && unit != begin) {
                barrier_arrive(slot_free + slot.stage * 8);
                slot.next();
            }
            const uchar *factors_of_chunk =
                stages + STAGES * STAGE + slot.stage * (2 * SIDE) + own * FACTOR_PITCH +
                (chunk % SPAN_CHUNKS * HALVES + half) * (FACTORS * 2);
            Factors factors[TILES][FACTORS];
#pragma unroll
            for (uint i = 0; i < 2 * TILES; i++) {
                const uint tile = i / 2, r = i % 2;
                const uchar *from = factors_of_chunk + (tile * 64 + r * 8) * FACTOR_PITCH;
                uint of_row[2][FACTORS];
                load_factors(of_row[0], from, (odd[tile][r] + SCALES_ODD) % 2);
                load_factors(of_row[1], from + SIDE, (odd[tile][r] + BIASES_ODD) % 2);
#pragma unroll
                for (uint f = 0; f < FACTORS; f++) {
                    // Behind the last input; aligned ones are zeros there.
                    const bool there = WHOLE || FACTORS_ALIGNED || chunk * DEPTH + half * OWN_BLOCKS + f * (GROUP / BLOCK) < blocks;
                    factors[tile][f].scale[r] = there ? of_row[0][f] : 0;
                    const float less = fmaf(-OFFSET, __uint_as_float(of_row[0][f]), __uint_as_float(of_row[1][f]));
                    factors[tile][f].bias[r] = !there ? 0 : FOLDED ? of_row[1][f] : __float_as_uint(less);
                }
            }
            const ulong x = matrix(ring + cursor.stage * STAGE + half * (OWN_BLOCKS * X_BLOCK), 16);
            const uchar *codes_of_lane = stage + AT_CODES + own * PITCH;
            // All codes are loaded before the products, over which loads cannot be moved.
            uint w[TILES][OWN_BLOCKS][2][4] = {};
#pragma unroll
            for (uint i = 0; i < TILES * OWN_BLOCKS; i++) {
                const uint tile = i % TILES, block = i / TILES;
                const uint at = (half * OWN_BLOCKS + block) * (BLOCK / 8 * BITS) + t * 2 * BITS;
                load_codes(w[tile][block], codes_of_lane + tile * 64 * PITCH + swizzled(g, at / 16) * 16 + at % 16);
            }
            if constexpr (FOLDED) {
                uint a[2][2][4];
#pragma unroll
                for (uint step = 0; step < 2 * TILES * DEPTH; step++) {
                    const uint block = step / (2 * TILES), tile = step / 2 % TILES, part = step % 2;
                    uint(&now)[2][4] = a[step % 2];
                    // Those that read `now` before are done; after the first step also all of the chunk before.
                    products_wait<1>();
                    if (step == 1 && before != 0) {
                        barrier_arrive(before);
                    }
                    operands(now, w[tile][block], part * 2, factors[tile][block * BLOCK / GROUP]);
                    hold(now);
                    products_begin();
#pragma unroll
                    for (uint i = 0; i < 2; i++) {
                        multiply<false>(sums[tile], now[i], matrix_after(x, block * X_BLOCK + (part * 2 + i) * 32), true);
                    }
                    products_commit();
                }
            } else {
                const auto sum_of_x = [&](uint block, uint i) {
                    return reinterpret_cast<const float2 *>(stage + AT_SUMS)[((half * OWN_BLOCKS + block) * (ROWS / 8) + i) * 4 + t];
                };
                // Those of few rows fit into registers.
                float2 sums_of_x[OWN_BLOCKS][ROWS / 8];
                if (ROWS <= 16) {
#pragma unroll
                    for (uint i = 0; i < OWN_BLOCKS * (ROWS / 8); i++) {
                        sums_of_x[i / (ROWS / 8)][i % (ROWS / 8)] = sum_of_x(i / (ROWS / 8), i % (ROWS / 8));
                    }
                }
                uint a[2][4][4];
                float products[2][ROWS / 2];
                const auto add = [&](uint block) {
                    const Factors &of_block = factors[0][block * BLOCK / GROUP];
                    float(&d)[ROWS / 2] = products[block % 2];
                    hold(d);
#pragma unroll
                    for (uint i = 0; i < ROWS / 2; i++) {
                        const float2 two = ROWS <= 16 ? sums_of_x[block][i / 4] : sum_of_x(block, i / 4);
                        const float scale = __uint_as_float(of_block.scale[i % 4 / 2]), bias = __uint_as_float(of_block.bias[i % 4 / 2]);
                        sums[0][i] = fmaf(bias, i % 2 == 0 ? two.x : two.y, sums[0][i]);
                        sums[0][i] = fmaf(scale, d[i], sums[0][i]);
                    }
                };
#pragma unroll
                for (uint block = 0; block < OWN_BLOCKS; block++) {
                    uint(&now)[4][4] = a[block % 2];
                    operands(now, w[0][block], 0, factors[0][0]);
                    hold(now);
                    products_begin();
#pragma unroll
                    for (uint i = 0; i < 4; i++) {
                        multiply<false>(products[block % 2], now[i], matrix_after(x, block * X_BLOCK + i * 32), i > 0);
                    }
                    products_commit();
                    if (block > 0) {
                        products_wait<1>();
                        add(block - 1);
                    }
                }
                products_wait<0>();
                add(OWN_BLOCKS - 1);
                barrier_arrive(free + cursor.stage * 8);
            }
            before = free + cursor.stage * 8;
            cursor.next();
        }
        if (FOLDED) {
            products_wait<0>();
#pragma unroll
            for (uint tile = 0; tile < TILES; tile++) {
                hold(sums[tile]);
            }
            barrier_arrive(before);
        }

        if constexpr (HALVES > 1) {
            float *other = reinterpret_cast<float *>(stages + (AT_HALVES - AT_RING) + turn % 2 * HALF_BYTES) + writer;
            turn++;
            if (half > 0) {
#pragma unroll
                for (uint i = 0; i < ROWS / 2; i++) {
                    other[i * WRITERS] = sums[0][i];
                }
            }
            meet(1, CONSUMERS);
            if (half > 0) {
                continue;
            }
#pragma unroll
            for (uint i = 0; i < ROWS / 2; i++) {
                sums[0][i] += other[i * WRITERS];
            }
        }

        // A thread's numbers are in places of four: place i has columns 8 (i % (ROWS / 8)) + 2 t and the next one, of
        // two outputs of tile i / (ROWS / 8).
        constexpr uint PLACES = TILES * ROWS / 8;
        const auto place_of = [&](uint i) -> const float * { return &sums[i / (ROWS / 8)][i % (ROWS / 8) * 4]; };
        // The lane's outputs h of a tile are this one and the next.
        const auto output_of = [&](uint tile, uint h) { return first_output + own / 2 * 2 + tile * 64 + h * 8; };
        struct Columns {
            Column of[2];
        };
        const auto columns_of = [&](uint tile) -> Columns {
            return {{column_in_parts(p.linear, p.parts, output_of(tile, 0)), column_in_parts(p.linear, p.parts, output_of(tile, 1))}};
        };
        // Lanes of even g take a column of two neighbouring outputs, those of odd g the next column. `columns` are those
        // of the tile: found once, since code that runs once a tile is slow to fetch.
        const auto store = [&](uint i, const float *four, const Columns &columns) {
            const uint at = row_tile * ROWS + i % (ROWS / 8) * 8 + 2 * t + g % 2;
            const uint row = EXPERTS ? order[at] : at;
#pragma unroll
            for (uint h = 0; h < 2; h++) {
                const float *two = four + h * 2;
                const float other = __shfl_xor_sync(0xFFFFFFFF, g % 2 == 0 ? two[1] : two[0], 4);
                const float low = known ? p.linear.alpha * (g % 2 == 0 ? two[0] : other) : 0;
                const float high = known ? p.linear.alpha * (g % 2 == 0 ? other : two[1]) : 0;
                const uint output = output_of(i / (ROWS / 8), h);
                if (row < p.linear.rows && output < p.linear.outputs) {
                    uchar *to = out + columns.of[h].place(row) * size_of(OUT_DTYPE);
                    if (OUT_ALIGNED && OUT_DTYPE == F32) {
                        *reinterpret_cast<float2 *>(to) = make_float2(low, high);
                    } else if (OUT_ALIGNED) {
                        *reinterpret_cast<uint *>(to) = pack<false>(low, high);
                    } else {
                        ::store(to, 0, low, OUT_DTYPE);
                        if (output + 1 < p.linear.outputs) {
                            ::store(out, place_in_parts(p.linear, p.parts, row, output + 1), high, OUT_DTYPE);
                        }
                    }
                }
            }
        };
        if constexpr (CLUSTER > 1) {
            // The warps of the block are done with the ring, and all copies have come.
            meet(2, WRITERS);
            float4 *own_sums = reinterpret_cast<float4 *>(stages) + writer;
#pragma unroll
            for (uint i = 0; i < PLACES; i++) {
                const float *four = place_of(i);
                own_sums[i * WRITERS] = make_float4(four[0], four[1], four[2], four[3]);
            }
            // Threads that have ended count as arrived.
            cluster_arrive();
            cluster_wait();
#pragma unroll 1
            for (uint place = own_share; place < PLACES; place += CLUSTER) {
                float4 part[CLUSTER];
#pragma unroll
                for (uint b = 0; b < CLUSTER; b++) {
                    part[b] = load4_in(own_sums + place * WRITERS, b);
                }
#pragma unroll
                for (uint b = 1; b < CLUSTER; b++) {
                    part[0] = part[0] + part[b];
                }
                const float total[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
                store(place, total, columns_of(place / (ROWS / 8)));
            }
            // No block ends while others read its sums.
            cluster_arrive();
            cluster_wait();
            return;
        }
        if (segment.to - segment.from == chunks) {
#pragma unroll
            for (uint tile = 0; tile < TILES; tile++) {
                const Columns columns = columns_of(tile);
#pragma unroll
                for (uint i = tile * (ROWS / 8); i < (tile + 1) * (ROWS / 8); i++) {
                    store(i, place_of(i), columns);
                }
            }
            continue;
        }
        // A block has two slots: for the tile at which its share begins, and for the one at which it ends.
        const uint first_unit = segment.tile * chunks;
        const uint lowest = shares.block_of(first_unit), highest = shares.block_of(first_unit + chunks - 1);
        const auto slot_of = [&](uint block) {
            const uint slot = block * 2 + (shares.begin(block) >= first_unit ? 0 : 1);
            return reinterpret_cast<float4 *>(partials + ulong(slot) * (OUTPUTS * ROWS)) + writer;
        };
        float4 *to = slot_of(blockIdx.x);
#pragma unroll
        for (uint i = 0; i < PLACES; i++) {
            const float *four = place_of(i);
            to[i * WRITERS] = make_float4(four[0], four[1], four[2], four[3]);
        }
        // Behind the ring's barriers.
        uint *is_last = reinterpret_cast<uint *>(stages - AT_RING + STAGES * 16 + SLOTS * 8);
        meet(2, WRITERS);
        if (writer == 0) {
            __threadfence();
            *is_last = atomicAdd(counters + segment.tile, 1) == highest - lowest;
            __threadfence();
        }
        meet(2, WRITERS);
        if (*is_last == 0) {
            continue;
        }
        // Numbers of several places and blocks are read at once: two blocks, mostly, where tiles are many.
        constexpr uint SOME = PLACES < 8 ? PLACES : 8, AT_ONCE = SOME == 8 ? 2 : 4;
#pragma unroll 1
        for (uint place = 0; place < PLACES; place += SOME) {
            float total[SOME][4] = {};
            for (uint first = lowest; first <= highest; first += AT_ONCE) {
                float4 part[AT_ONCE][SOME];
#pragma unroll
                for (uint b = 0; b < AT_ONCE; b++) {
                    const float4 *from = slot_of(min(first + b, highest)) + place * WRITERS;
#pragma unroll
                    for (uint i = 0; i < SOME; i++) {
                        part[b][i] = __ldcg(from + i * WRITERS);
                    }
                }
#pragma unroll
                for (uint b = 0; b < AT_ONCE; b++) {
#pragma unroll
                    for (uint i = 0; i < SOME; i++) {
                        if (first + b <= highest) {
                            total[i][0] += part[b][i].x;
                            total[i][1] += part[b][i].y;
                            total[i][2] += part[b][i].z;
                            total[i][3] += part[b][i].w;
                        }
                    }
                }
            }
            const Columns columns = columns_of(place / (ROWS / 8));
#pragma unroll
            for (uint i = 0; i < SOME; i++) {
                store(place + i, total[i], columns);
            }
        }
    }
}

#endif
