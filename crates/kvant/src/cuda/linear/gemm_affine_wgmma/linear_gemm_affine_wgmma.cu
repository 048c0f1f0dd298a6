// linear_gemm_affine_wgmma: linear (linear_generic.cu) of up to 128 rows of bf16, or of rows of experts, with affine
// codes, on the tensor cores of whole warpgroups. Every matrix is read once, which is the limit up to about 32 rows.
// Results are bf16 or, of up to 32 rows, f32.
//
// With w = scale * code + bias,
//   out = sum over blocks of  scale * (x . code) + bias * (x . 1)
// where a block is BLOCK inputs of one group. With up to 32 rows, products are of codes plus OFFSET, which bf16 holds
// exactly; they and the second term are scaled and added in float. OFFSET costs some bits of the sums: for results of
// f32 it is subtracted from codes of 4 and 6 bits before the products. With more rows (FOLDED) scaling takes longer
// than making weights of the codes, rounded to bf16.
//
// x is in chunks, by linear_gemm_affine_wgmma_arrange.cu. Tiles are OUTPUTS outputs by ROWS rows, of out^T = W x^T. The
// chunks of all tiles, one after the other, are divided evenly among the blocks, wherever that cuts a tile. One
// warpgroup copies codes and x to a ring in shared memory, a chunk a stage, and scales and biases to two slots, for
// SPAN inputs at once: in smaller pieces they would take as long as the codes. The others multiply, 64 outputs each, or
// twice as many: a thread unpacks 16 neighbouring codes of two outputs, the left sides of four products (codes.h). With
// HALVES of 2, two warpgroups have the same 64 outputs, each half of a chunk's inputs, and their sums are added through
// shared memory. Chunks are longer then, and longer pieces of rows are read faster. A tile that several blocks share is
// left in `partials`, and added up, in the order of its inputs, by the block that is done last.
//
// Where tiles are at most half as many as multiprocessors, several blocks would share each, and the last one of a small
// matrix would add for longer than it multiplies. There the CLUSTER blocks of a cluster divide the chunks of a tile,
// and each adds up a part of its sums, through distributed shared memory.
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

// Blocks: the grid has one dimension.
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTERED
    KVANT_KERNEL(const uchar *arranged, const uchar *codes, const uchar *scales, const uchar *biases, uchar *out,
                 float *partials, uint *counters, const GemmAffineWgmmaParams p, const uint *experts, const uint *order) {
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
        row_tiles = of_warp(row_tiles);
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
    const uint half = HALVES == 1 ? 0 : of_warp(thread / WRITERS), writer = HALVES == 1 ? thread : thread % WRITERS;
    const uint own = of_warp(writer / 128) * (64 * TILES) + thread % 128 / 32 * 16 + g;
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
            const auto column = [&](uint h) { return column_in_parts(p.linear, p.parts, output_of(tile, h)); };
            return {{column(0), column(1)}};
        };
        // Lanes of even g take a column of two neighbouring outputs, those of odd g the next column.
        // `columns` are found once for all rows, which leaves less code.
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
