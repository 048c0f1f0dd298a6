// linear_gemm_affine_wgmma: linear (linear_generic.cu) of up to 128 rows of bf16, or of rows of experts, with affine
// codes, on the tensor cores of whole warpgroups. Every matrix is read once; up to about 32 rows, the time to read it
// is the limit. Results are bf16 or, of up to 32 rows, f32.
//
// With w = scale * code + bias,
//   out = sum over blocks of  scale * (x . code) + bias * (x . 1)
// A block is BLOCK inputs of one group. With up to 32 rows, the operands are codes plus OFFSET, which bf16 holds
// exactly; products and the second term are scaled and added in float. OFFSET costs some bits of the sums, so for
// results of f32 it is subtracted from codes of 4 and 6 bits before the products. With more rows (FOLDED), codes become
// weights rounded to bf16, which is faster than scaling.
//
// linear_gemm_affine_wgmma_arrange.cu has divided x into chunks. A tile of out^T = W x^T is OUTPUTS outputs by ROWS
// rows. The chunks of all tiles are concatenated and divided evenly among the blocks; a tile may be cut anywhere. One
// warpgroup copies codes and x to a ring in shared memory, one chunk per stage. It copies scales and biases to two
// slots, for SPAN inputs at once: in smaller pieces they would take as long as the codes. Consumer warpgroups multiply,
// 64 or 128 outputs each: a thread unpacks 16 neighbouring codes of two outputs, the left sides of four products
// (codes.h). With HALVES of 2, two warpgroups have the same 64 outputs and half of a chunk's inputs each, and their
// sums are added through shared memory. Chunks are longer then: longer pieces of rows are read faster. Blocks that
// share a tile store their sums in `partials`, and the last of them adds the sums up, in the order of the inputs.
//
// If the tiles are at most half as many as the multiprocessors, several blocks would share each tile, and for a small
// matrix the last block would spend more time on additions than on products. In that case the CLUSTER blocks of a
// cluster divide the chunks of a tile, and each adds up a part of its sums, through distributed shared memory.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h), unless the expert is not known.
#include "device/cluster.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/mbarrier.h"
#include "device/ring_cursor.h"
#include "device/uniform.h"
#include "device/vectors.h"
#include "device/wgmma.h"
#include "linear/gemm_affine_wgmma/chunk.h"
#include "linear/gemm_affine_wgmma/codes.h"
#include "linear/gemm_affine_wgmma/layout.h"
#include "linear/out_parts.h"

// Tensors of the kernel. `experts` and `order` are those of linear_gemm_affine_sort.
struct Tensors {
    const uchar *arranged;
    const uchar *codes;
    const uchar *scales;
    const uchar *biases;
    uchar *out;
    float *partials;
    uint *counters;
    const uint *experts;
    const uint *order;
};

// Context of all phases: addresses in shared memory, and the block's share of the chunks of all tiles (in a cluster, of
// its tile).
struct Block {
    const GemmAffineWgmmaParams &p;
    const Tensors &tensors;
    uint base;
    // Barriers: a stage is full, a stage is free, a slot of factors is free.
    uint full;
    uint free;
    uint slot_free;
    uint ring;
    uchar *stages;
    // Chunks of a row.
    uint chunks;
    Shares shares;
    uint own_share;
    // Units: chunks of all tiles, one tile after the other.
    uint begin;
    uint end;
};

// The number of tiles of rows. With experts, the tiles that the sort has filled; these come first. All threads call it.
inline uint count_row_tiles(const GemmAffineWgmmaParams &p, const uint *experts) {
    if (!EXPERTS) {
        __syncthreads();
        return p.row_tiles;
    }
    wait_for_previous();
    uint row_tiles = 0;
    for (uint first = 0; first < p.row_tiles; first += THREADS) {
        row_tiles += __syncthreads_count(first + threadIdx.x < p.row_tiles && experts[min(first + threadIdx.x, p.row_tiles - 1)] != NONE);
    }
    return of_warp(row_tiles);
}

// A thread of the producers, and bytes of codes and groups of a row of W.
struct Producer {
    uint own;
    uint row_bytes;
    uint groups;
    uint row_of_lane;
};

// Producer: calls copy(unit, chunk, row_tile, first_row, last) for each unit: `first_row` is the row of W of the tile's
// first output, `last` the tile's last output.
template <typename Copy>
inline void each_chunk(const Block &b, uint from, uint to, Copy copy) {
    for (uint unit = from; unit < to;) {
        const Segment segment = segment_at(unit, to, b.chunks);
        const uint row_tile = segment.tile / b.p.output_tiles, first = segment.tile % b.p.output_tiles * OUTPUTS;
        const uint expert = EXPERTS ? b.tensors.experts[row_tile] : 0;
        const ulong first_row = ulong(expert < b.p.linear.experts ? expert : 0) * b.p.linear.outputs + first;
        for (uint chunk = segment.from; chunk < segment.to; chunk++) {
            copy(unit++, chunk, row_tile, first_row, b.p.linear.outputs - 1 - first);
        }
    }
}

// Producer: scales and biases of a span of inputs.
inline void copy_factors(const Block &b, const Producer &self, uint to, uint span, ulong first_row, uint last) {
    const uint first = span * (SPAN / GROUP);
    if constexpr (FACTORS_ALIGNED) {
        // Neighbouring lanes copy the pieces of an output; pieces after the last input are zeros.
#pragma unroll
        for (uint side = 0; side < 2; side++) {
            const uchar *of_side = (side == 0 ? b.tensors.scales : b.tensors.biases) + (first_row * self.groups + first) * 2;
#pragma unroll 4
            for (uint i = self.own; i < OUTPUTS * FACTOR_PIECES; i += PRODUCERS) {
                const uint piece = i % FACTOR_PIECES, row = i / FACTOR_PIECES;
                const bool there = first + piece * 4 < self.groups;
                copy_async<8>(to + side * SIDE + row * FACTOR_PITCH + piece * 8, of_side + (there ? min(row, last) * self.groups + piece * 4 : 0) * 2, there);
            }
        }
    } else {
        // Neighbouring lanes copy scales (or biases) of neighbouring outputs, because rows are short or not aligned.
        const ulong count = ulong(b.p.linear.experts) * b.p.linear.outputs * self.groups;
#pragma unroll 1
        for (uint i = self.own; i < 2 * OUTPUTS; i += PRODUCERS) {
            const uint row = i % OUTPUTS, side = i / OUTPUTS, odd = side == 0 ? SCALES_ODD : BIASES_ODD;
            const ulong begins = (first_row + min(row, last)) * self.groups + odd + first;
            const uint bytes = min(SPAN / GROUP, self.groups - first) * 2, before = begins % 2 * 2;
            // Bytes of the tensor from the word with the first factor on.
            const ulong left = (count + odd - begins) * 2 + before;
            const uchar *from = (side == 0 ? b.tensors.scales : b.tensors.biases) + begins * 2 - odd * 2 - before;
            const uint to_row = to + side * SIDE + row * FACTOR_PITCH;
            for (uint at = 0; at < bytes + before; at += 4) {
                copy_async_part<4>(to_row + at, from + at, left - at >= 4 ? 4 : 2);
            }
        }
    }
}

// Producer: codes of a chunk and, at the beginning of a span, its scales and biases. Beyond the last output, the last
// one is computed again and not stored.
inline void copy_weights(const Block &b, const Producer &self, RingCursor<SLOTS> &slot, uint stage, uint unit, uint chunk,
                         ulong first_row, uint last) {
    const uint to = b.ring + stage * STAGE + AT_CODES;
    const uchar *from = b.tensors.codes + first_row * self.row_bytes + chunk * CODES;
#pragma unroll
    for (uint i = 0; i < OUTPUTS * ROW_LANES / PRODUCERS; i++) {
        const uint row = self.row_of_lane + i * (PRODUCERS / ROW_LANES);
        const uchar *of_row = from + ulong(min(row, last) * self.row_bytes);
#pragma unroll
        for (uint piece = 0; piece < CODES / 16; piece += ROW_LANES) {
            const uint at = (self.own % ROW_LANES + piece) * 16;
            const bool there = WHOLE || chunk * CODES + at < self.row_bytes;
            copy_async<16>(to + row * PITCH + swizzled(row, at / 16) * 16, there ? of_row + at : b.tensors.codes, there);
        }
    }
    if (unit == b.begin || chunk % SPAN_CHUNKS == 0) {
        barrier_wait(b.slot_free + slot.stage * 8, slot.parity ^ 1);
        copy_factors(b, self, b.base + AT_SLOTS + slot.stage * (2 * SIDE), chunk / SPAN_CHUNKS, first_row, last);
        slot.next();
    }
    barrier_arrive_behind_copies(b.full + stage * 8);
}

// Producer: x of a chunk, and its sums.
inline void copy_inputs(const Block &b, const Producer &self, uint stage, uint chunk, uint row_tile) {
    if (self.own == 0) {
        const uint to = b.ring + stage * STAGE;
        const uchar *from = b.tensors.arranged + (ulong(row_tile) * b.chunks + chunk) * (X_BYTES + SUMS_BYTES);
        barrier_expect(b.full + stage * 8, X_BYTES + SUMS_BYTES);
        copy_bulk(to, from, X_BYTES, b.full + stage * 8);
        if (!FOLDED) {
            copy_bulk(to + AT_SUMS, from + X_BYTES, SUMS_BYTES, b.full + stage * 8);
        }
    }
}

// The producers' warpgroup: fills the ring. Before the previous kernel has ended it copies only W, up to the end of a
// span.
inline void produce(const Block &b, uint own) {
    const Producer self = {own, b.p.linear.inputs / 8 * BITS, b.p.linear.inputs / GROUP, own / ROW_LANES};
    RingCursor<SLOTS> slot;
    const uint first_chunk = b.begin % b.chunks;
    const uint ahead = b.begin + min(min(b.end - b.begin, STAGES), min(b.chunks - first_chunk, SPAN_CHUNKS - first_chunk % SPAN_CHUNKS));
    each_chunk(b, b.begin, ahead, [&](uint unit, uint chunk, uint, ulong first_row, uint last) {
        copy_weights(b, self, slot, unit - b.begin, unit, chunk, first_row, last);
    });
    if (!EXPERTS) {
        wait_for_previous();
    }
    let_next_begin();
    RingCursor<STAGES> cursor;
    each_chunk(b, b.begin, b.end, [&](uint unit, uint chunk, uint row_tile, ulong first_row, uint last) {
        if (unit >= ahead) {
            barrier_wait(b.free + cursor.stage * 8, cursor.parity ^ 1);
            copy_weights(b, self, slot, cursor.stage, unit, chunk, first_row, last);
        }
        copy_inputs(b, self, cursor.stage, chunk, row_tile);
        cursor.next();
    });
}

// A thread of the consumers. Its outputs of a tile are `own` and `own` + 8; in the next tile of the warpgroup, 64
// later. `half` is its half of a chunk's inputs; `writer` is its number among the threads of that half.
struct Consumer {
    uint g;
    uint t;
    uint half;
    uint writer;
    uint own;
    uint blocks;
    uint groups;
};

inline Consumer consumer(const GemmAffineWgmmaParams &p) {
    const uint thread = threadIdx.x, lane = thread % 32, g = lane / 4, t = lane % 4;
    const uint half = HALVES == 1 ? 0 : of_warp(thread / WRITERS), writer = HALVES == 1 ? thread : thread % WRITERS;
    const uint own = of_warp(writer / 128) * (64 * TILES) + thread % 128 / 32 * 16 + g;
    return {g, t, half, writer, own, p.linear.inputs / BLOCK, p.linear.inputs / GROUP};
}

// Waits for `threads` threads of the consumers.
inline void meet(uint barrier, uint threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Consumer: scales and biases of the lane's outputs for a chunk. `odd`: whether an output's scales (or biases) begin in
// the middle of a word.
inline void factors_of_outputs(const uchar *factors_of_chunk, const Consumer &c, uint chunk, const uint (&odd)[TILES][2],
                               Factors (&factors)[TILES][FACTORS]) {
#pragma unroll
    for (uint i = 0; i < 2 * TILES; i++) {
        const uint tile = i / 2, r = i % 2;
        const uchar *from = factors_of_chunk + (tile * 64 + r * 8) * FACTOR_PITCH;
        uint of_row[2][FACTORS];
        load_factors(of_row[0], from, (odd[tile][r] + SCALES_ODD) % 2);
        load_factors(of_row[1], from + SIDE, (odd[tile][r] + BIASES_ODD) % 2);
#pragma unroll
        for (uint f = 0; f < FACTORS; f++) {
            // Factors after the last input are zero; aligned factors have been copied as zeros.
            const bool there = WHOLE || FACTORS_ALIGNED || chunk * DEPTH + c.half * OWN_BLOCKS + f * (GROUP / BLOCK) < c.blocks;
            factors[tile][f].scale[r] = there ? of_row[0][f] : 0;
            const float less = fmaf(-OFFSET, __uint_as_float(of_row[0][f]), __uint_as_float(of_row[1][f]));
            factors[tile][f].bias[r] = !there ? 0 : FOLDED ? of_row[1][f] : __float_as_uint(less);
        }
    }
}

// Consumer: all codes of a chunk. They are loaded before the products, because the compiler cannot move loads across
// products.
inline void codes_of_outputs(const Consumer &c, const uchar *codes_of_lane, uint (&w)[TILES][OWN_BLOCKS][2][4]) {
#pragma unroll
    for (uint i = 0; i < TILES * OWN_BLOCKS; i++) {
        const uint tile = i % TILES, block = i / TILES;
        const uint at = (c.half * OWN_BLOCKS + block) * (BLOCK / 8 * BITS) + c.t * 2 * BITS;
        load_codes(w[tile][block], codes_of_lane + tile * 64 * PITCH + swizzled(c.g, at / 16) * 16 + at % 16);
    }
}

// Consumer, FOLDED: converts the codes of a chunk to weights, and adds their products. `before` is the barrier of the
// previous stage, which products still read, or 0.
inline void multiply_weights(ulong x, const uint (&w)[TILES][OWN_BLOCKS][2][4], const Factors (&factors)[TILES][FACTORS], uint before,
                             float (&sums)[TILES][ROWS / 2]) {
    uint a[2][2][4];
#pragma unroll
    for (uint step = 0; step < 2 * TILES * DEPTH; step++) {
        const uint block = step / (2 * TILES), tile = step / 2 % TILES, part = step % 2;
        uint(&now)[2][4] = a[step % 2];
        // All products except those just begun have finished; after the first step, this includes all products of the
        // previous chunk.
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
}

// Consumer: adds the products of a chunk by its codes, scaled, and the sums of x times biases.
inline void multiply_codes(const Consumer &c, const uchar *stage, ulong x, const uint (&w)[TILES][OWN_BLOCKS][2][4],
                           const Factors (&factors)[TILES][FACTORS], float (&sums)[TILES][ROWS / 2]) {
    const auto sum_of_x = [&](uint block, uint i) {
        return reinterpret_cast<const float2 *>(stage + AT_SUMS)[((c.half * OWN_BLOCKS + block) * (ROWS / 8) + i) * 4 + c.t];
    };
    // With few rows, the sums fit into registers.
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
}

// Cursors of a consumer: the ring, the slots of factors, and the number of tiles that it has multiplied.
struct Cursors {
    RingCursor<STAGES> ring;
    RingCursor<SLOTS> slot;
    uint turn = 0;
};

// Consumer: the sums of the block's chunks of a tile, from `unit` on. `weight` is the row of W of output 0.
inline void multiply_segment(const Block &b, const Consumer &c, Cursors &at, const Segment &segment, uint &unit, uint weight,
                             uint first_output, float (&sums)[TILES][ROWS / 2]) {
    // Whether an output's first scale (or bias) has another parity in its word than the tensor's first.
    uint odd[TILES][2];
#pragma unroll
    for (uint i = 0; i < 2 * TILES; i++) {
        const uint row = weight + min(first_output + c.own + i / 2 * 64 + i % 2 * 8, b.p.linear.outputs - 1);
        odd[i / 2][i % 2] = FACTORS_ALIGNED ? 0 : row * c.groups;
    }
    // FOLDED: the barrier of the previous stage, which the products still read.
    uint before = 0;
    for (uint chunk = segment.from; chunk < segment.to; chunk++, unit++) {
        const uchar *stage = b.stages + at.ring.stage * STAGE;
        barrier_wait(b.full + at.ring.stage * 8, at.ring.parity);
        if (chunk % SPAN_CHUNKS == 0 && unit != b.begin) {
            barrier_arrive(b.slot_free + at.slot.stage * 8);
            at.slot.next();
        }
        Factors factors[TILES][FACTORS];
        const uchar *factors_of_chunk =
            b.stages + STAGES * STAGE + at.slot.stage * (2 * SIDE) + c.own * FACTOR_PITCH +
            (chunk % SPAN_CHUNKS * HALVES + c.half) * (FACTORS * 2);
        factors_of_outputs(factors_of_chunk, c, chunk, odd, factors);
        const ulong x = matrix(b.ring + at.ring.stage * STAGE + c.half * (OWN_BLOCKS * X_BLOCK), 16);
        uint w[TILES][OWN_BLOCKS][2][4] = {};
        codes_of_outputs(c, stage + AT_CODES + c.own * PITCH, w);
        if constexpr (FOLDED) {
            multiply_weights(x, w, factors, before, sums);
        } else {
            multiply_codes(c, stage, x, w, factors, sums);
            barrier_arrive(b.free + at.ring.stage * 8);
        }
        before = b.free + at.ring.stage * 8;
        at.ring.next();
    }
    if (FOLDED) {
        products_wait<0>();
#pragma unroll
        for (uint tile = 0; tile < TILES; tile++) {
            hold(sums[tile]);
        }
        barrier_arrive(before);
    }
}

// HALVES of 2: adds the sums over the second half of each chunk to those over the first, through shared memory. Returns
// whether the thread has sums to store.
inline bool add_halves(const Block &b, const Consumer &c, uint turn, float (&sums)[TILES][ROWS / 2]) {
    float *other = reinterpret_cast<float *>(b.stages + (AT_HALVES - AT_RING) + turn % 2 * HALF_BYTES) + c.writer;
    if (c.half > 0) {
#pragma unroll
        for (uint i = 0; i < ROWS / 2; i++) {
            other[i * WRITERS] = sums[0][i];
        }
    }
    meet(1, CONSUMERS);
    if (c.half > 0) {
        return false;
    }
#pragma unroll
    for (uint i = 0; i < ROWS / 2; i++) {
        sums[0][i] += other[i * WRITERS];
    }
    return true;
}

// A thread's sums are divided into places of four: place i has two neighbouring columns, from 8 (i % (ROWS / 8)) + 2 t
// on, of two outputs of tile i / (ROWS / 8).
constexpr uint PLACES = TILES * ROWS / 8;
inline const float *place_of(const float (&sums)[TILES][ROWS / 2], uint i) {
    return &sums[i / (ROWS / 8)][i % (ROWS / 8) * 4];
}

struct Columns {
    Column of[2];
};

// Epilogue: the destination of a tile's results.
struct Results {
    const Block &b;
    const Consumer &c;
    Segment segment;
    uint row_tile;
    uint first_output;
    // Whether the tile's expert exists; otherwise the results are zeros.
    bool known;

    // The lane's outputs h of a tile are this one and the next.
    inline uint output_of(uint tile, uint h) const {
        return first_output + c.own / 2 * 2 + tile * 64 + h * 8;
    }
    // Columns are found once for all rows, which leaves less code.
    inline Columns columns_of(uint tile) const {
        const auto column = [&](uint h) { return column_in_parts(b.p.linear, b.p.parts, output_of(tile, h)); };
        return {{column(0), column(1)}};
    }
    // Lanes of even g store a column of two neighbouring outputs, those of odd g the next column.
    inline void store(uint i, const float *four, const Columns &columns) const {
        const uint at = row_tile * ROWS + i % (ROWS / 8) * 8 + 2 * c.t + c.g % 2;
        const uint row = EXPERTS ? b.tensors.order[at] : at;
#pragma unroll
        for (uint h = 0; h < 2; h++) {
            const float *two = four + h * 2;
            const float other = __shfl_xor_sync(0xFFFFFFFF, c.g % 2 == 0 ? two[1] : two[0], 4);
            const float low = known ? b.p.linear.alpha * (c.g % 2 == 0 ? two[0] : other) : 0;
            const float high = known ? b.p.linear.alpha * (c.g % 2 == 0 ? other : two[1]) : 0;
            const uint output = output_of(i / (ROWS / 8), h);
            if (row < b.p.linear.rows && output < b.p.linear.outputs) {
                uchar *to = b.tensors.out + columns.of[h].place(row) * size_of(OUT_DTYPE);
                if (OUT_ALIGNED && OUT_DTYPE == F32) {
                    *reinterpret_cast<float2 *>(to) = make_float2(low, high);
                } else if (OUT_ALIGNED) {
                    *reinterpret_cast<uint *>(to) = pack<false>(low, high);
                } else {
                    ::store(to, 0, low, OUT_DTYPE);
                    if (output + 1 < b.p.linear.outputs) {
                        ::store(b.tensors.out, place_in_parts(b.p.linear, b.p.parts, row, output + 1), high, OUT_DTYPE);
                    }
                }
            }
        }
    }
};

// Epilogue in a cluster: each block adds up one part of the tile's sums over all blocks. The sums are stored in the
// memory of the ring, which is free.
inline void add_in_cluster(const Block &b, const Consumer &c, const Results &results, const float (&sums)[TILES][ROWS / 2]) {
    // The warps of the block have finished with the ring, and all copies have arrived.
    meet(2, WRITERS);
    float4 *own_sums = reinterpret_cast<float4 *>(b.stages) + c.writer;
#pragma unroll
    for (uint i = 0; i < PLACES; i++) {
        const float *four = place_of(sums, i);
        own_sums[i * WRITERS] = make_float4(four[0], four[1], four[2], four[3]);
    }
    // Threads that have ended count as arrived.
    cluster_arrive();
    cluster_wait();
#pragma unroll 1
    for (uint place = b.own_share; place < PLACES; place += CLUSTER) {
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
        results.store(place, total, results.columns_of(place / (ROWS / 8)));
    }
    // No block ends while others read its sums.
    cluster_arrive();
    cluster_wait();
}

// Epilogue of a tile that several blocks share: stores the sums in `partials`. The last block to arrive adds them up,
// in the order of the inputs.
inline void add_blocks(const Block &b, const Consumer &c, const Results &results, const float (&sums)[TILES][ROWS / 2]) {
    // A block has two slots: for the tile in which its share begins, and for the tile in which it ends.
    const uint first_unit = results.segment.tile * b.chunks;
    const uint lowest = b.shares.block_of(first_unit), highest = b.shares.block_of(first_unit + b.chunks - 1);
    const auto slot_of = [&](uint block) {
        const uint slot = block * 2 + (b.shares.begin(block) >= first_unit ? 0 : 1);
        return reinterpret_cast<float4 *>(b.tensors.partials + ulong(slot) * (OUTPUTS * ROWS)) + c.writer;
    };
    float4 *to = slot_of(blockIdx.x);
#pragma unroll
    for (uint i = 0; i < PLACES; i++) {
        const float *four = place_of(sums, i);
        to[i * WRITERS] = make_float4(four[0], four[1], four[2], four[3]);
    }
    // After the ring's barriers.
    uint *is_last = reinterpret_cast<uint *>(b.stages - AT_RING + STAGES * 16 + SLOTS * 8);
    meet(2, WRITERS);
    if (c.writer == 0) {
        __threadfence();
        *is_last = atomicAdd(b.tensors.counters + results.segment.tile, 1) == highest - lowest;
        __threadfence();
    }
    meet(2, WRITERS);
    if (*is_last == 0) {
        return;
    }
    // Sums of several places and blocks are read at once. With many tiles, a shared tile mostly has two blocks.
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
        const Columns columns = results.columns_of(place / (ROWS / 8));
#pragma unroll
        for (uint i = 0; i < SOME; i++) {
            results.store(place + i, total[i], columns);
        }
    }
}

// The consumers' warpgroups: multiply the block's chunks, and store each tile that is complete.
inline void consume(const Block &b) {
    const Consumer c = consumer(b.p);
    Cursors at;
    for (uint unit = b.begin; unit < b.end;) {
        const Segment segment = segment_at(unit, b.end, b.chunks);
        const uint row_tile = segment.tile / b.p.output_tiles, first_output = segment.tile % b.p.output_tiles * OUTPUTS;
        const uint expert = EXPERTS ? b.tensors.experts[row_tile] : 0;
        const bool known = !EXPERTS || expert < b.p.linear.experts;
        const Results results = {b, c, segment, row_tile, first_output, known};
        float sums[TILES][ROWS / 2] = {};
        multiply_segment(b, c, at, segment, unit, (known ? expert : 0) * b.p.linear.outputs, first_output, sums);
        if (HALVES > 1 && !add_halves(b, c, at.turn++, sums)) {
            continue;
        }
        if constexpr (CLUSTER > 1) {
            add_in_cluster(b, c, results, sums);
            return;
        }
        if (segment.to - segment.from == b.chunks) {
#pragma unroll
            for (uint tile = 0; tile < TILES; tile++) {
                const Columns columns = results.columns_of(tile);
#pragma unroll
                for (uint i = tile * (ROWS / 8); i < (tile + 1) * (ROWS / 8); i++) {
                    results.store(i, place_of(sums, i), columns);
                }
            }
        } else {
            add_blocks(b, c, results, sums);
        }
    }
}

// Blocks: the grid has one dimension.
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED
    KVANT_KERNEL(const uchar *arranged, const uchar *codes, const uchar *scales, const uchar *biases, uchar *out,
                 float *partials, uint *counters, const GemmAffineWgmmaParams p, const uint *experts, const uint *order) {
    extern __shared__ uchar memory[];
    const uint base = (shared_address(memory) + 1023) / 1024 * 1024;
    const uint full = base, free = base + STAGES * 8, slot_free = base + STAGES * 16, ring = base + AT_RING;
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
    const uint row_tiles = count_row_tiles(p, experts);
    const uint chunks = chunks_of(p.linear.inputs), units = row_tiles * p.output_tiles * chunks;
    // In a cluster, the chunks of its tile are divided; otherwise the chunks of all tiles.
    const uint sharers = CLUSTER > 1 ? CLUSTER : gridDim.x, first = CLUSTER > 1 ? blockIdx.x / CLUSTER * chunks : 0;
    const uint shared = CLUSTER > 1 ? chunks : units, own_share = CLUSTER > 1 ? blockIdx.x % CLUSTER : blockIdx.x;
    const Shares shares = {shared / sharers, shared % sharers};
    const uint begin = first + shares.begin(own_share), end = first + shares.begin(own_share + 1);
    const Tensors tensors = {arranged, codes, scales, biases, out, partials, counters, experts, order};
    uchar *stages = memory + (ring - shared_address(memory));
    const Block b = {p, tensors, base, full, free, slot_free, ring, stages, chunks, shares, own_share, begin, end};
    // Consumers get registers that the copying warps give up.
    if (thread >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(TILES == 1 ? 64 : 72));
        produce(b, thread - CONSUMERS);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TILES == 1 ? 104 : 216));
    if (!EXPERTS) {
        wait_for_previous();
    }
    let_next_begin();
    consume(b);
}
