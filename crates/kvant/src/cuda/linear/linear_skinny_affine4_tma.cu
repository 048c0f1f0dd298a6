// linear_skinny_affine4_tma: linear (linear_generic.cu) for affine codes of 4 bits and 2 to 8 rows, or few rows of each
// expert, by bulk copies and on tensor cores. Reading W is the limit.
//
// x [rows, inputs] is bf16; rows begin at multiples of 16 bytes. W is [outputs, inputs], scales and biases 16 bits.
// Results of the parts of W (linear/out_parts.h) follow each other.
//
// The work is in tiles of 16 outputs (of an expert, for up to ROWS of its rows). Every block has consecutive tiles, and
// a multiprocessor to itself. One warp copies the W of a tile with its scales and biases, up to STAGES tiles ahead of
// their use. Other warps multiply: TEAMS teams take tiles in turn, and the WARPS warps of a team divide the inputs:
// each has STEPS times BLOCK neighbouring inputs. A warp keeps its inputs of x in registers, as the B of its products;
// A is 16 outputs. The assignment of inputs to products is arbitrary if A and B agree: lane 4g + t has 16 neighbouring
// codes of a block, of outputs g and g + 8, and the corresponding inputs of row g of x. Codes plus 128 are exact in
// bf16. Adding 128 loses low bits of the sums, so it is subtracted first for results of f32. The sums of a block are
// scaled in float, and its bias is multiplied by the sum of its x. The warps of a team store the sums of a tile in
// shared memory, where another warp adds them up.
//
// If registers cannot hold x of long rows, SPLITS blocks have the same outputs, and INPUTS inputs of each row. They
// store their sums in `partials`, and the last block to arrive adds them up.
//
// EXPERTS: each tile has one expert. linear_gemm_affine_sort has sorted rows into tiles of ROWS rows: `experts` and
// `order`. With few rows, each row is a tile (ALONE), and `experts` are the experts of the rows. Tiles of the same rows
// are consecutive. If a gate needs two halves of the results (linear/gating.h), a tile has eight outputs of each half.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h), unless the expert is not known;
// x is read later.
#include "device/arrivals.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/ring_cursor.h"
#include "device/uniform.h"
#include "linear/gating.h"
#include "linear/out_parts.h"
#include "linear/params.h"
#include "linear/tile_sums.h"

constexpr uint TILE = 16;
constexpr uint ROWS = 8;
constexpr uint BLOCK = 64;
constexpr uint NONE = 0xFFFFFFFF;
// Warps that multiply. The next warp copies, and one more adds if teams have several warps.
constexpr uint CONSUMERS = TEAMS * WARPS;
constexpr uint THREADS = 32 * (CONSUMERS + (WARPS > 1 ? 2 : 1));
constexpr uint OWN = STEPS * BLOCK;
// The block's bytes of a row of codes. Rows of an odd multiple of 32 bytes have no bank conflicts and are copied
// together; other rows are copied one by one, and padded.
constexpr uint CODES = INPUTS / 2;
constexpr bool ODD = CODES % 64 == 32;
constexpr uint PITCH = ODD ? CODES : (CODES + 127) / 128 * 128 + 32;
// Bytes of scales (or biases) of a row. Multiples of 16 bytes are copied row by row, and padded against bank conflicts.
// Otherwise several rows are copied together, from an output on that is a multiple of ALIGNED_ROWS.
constexpr uint FACTOR_BYTES = INPUTS / GROUP * 2;
constexpr bool ROW_BY_ROW = FACTOR_BYTES % 16 == 0;
constexpr uint FACTOR_PITCH = ROW_BY_ROW ? FACTOR_BYTES + 16 : FACTOR_BYTES;
constexpr uint ALIGNED_ROWS = ROW_BY_ROW ? 1 : FACTOR_BYTES % 8 == 0 ? 2 : FACTOR_BYTES % 4 == 0 ? 4 : 8;
constexpr uint FACTORS = TILE * FACTOR_PITCH;
constexpr uint FACTORS_AT = TILE * PITCH;
constexpr uint STAGE = (FACTORS_AT + 2 * FACTORS + 127) / 128 * 128;
// Sums of the blocks of x for each team; sums of tiles.
constexpr uint X_SUMS_AT = STAGES * STAGE;
constexpr uint SUMS_AT = X_SUMS_AT + TEAMS * INPUTS / BLOCK * ROWS * 4;
constexpr uint BARRIERS_AT = SUMS_AT + SLOTS * WARPS * 32 * 16;
// skinny_affine4_tma.rs computes the same sum.
static_assert(BARRIERS_AT + (STAGES + SLOTS) * 16 + 16 == SHARED_BYTES, "linear: the shared memory that Rust asks for");
static_assert(WARPS * OWN == INPUTS && GROUP % BLOCK == 0 && INPUTS % GROUP == 0, "linear: whole blocks and groups");
static_assert(SPLITS == 1 || ROW_BY_ROW && !ODD && !EXPERTS, "linear: parts of rows are copied one by one");
static_assert(GATING == 0 || GATING == HALVES && EXPERTS, "linear: halves of experts' results have gates");
static_assert(TEAMS == 1 || WARPS == 1 && STAGES % TEAMS == 0 && SPLITS == 1, "linear: teams have their own stages, and add up nothing");

struct SkinnyAffine4TmaParams {
    LinearParams linear;
    // Tiles of rows; with experts, the maximum.
    uint row_tiles;
    // Maximum tiles of a block.
    uint max_tiles;
    OutParts parts;
};

constexpr bool EXACT = OUT_DTYPE == F32;
constexpr float OFFSET = EXACT ? 0 : 128;

// Pair i of a lane's 16 codes, as bf16: codes i and i + 4 of the 8 in a word.
inline uint codes_of(uint2 two, uint i) {
    uint pair;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(pair) : "r"((i < 4 ? two.x : two.y) >> i % 4 * 4), "r"(0x000F000F), "r"(0x43004300));
    if (EXACT) {
        asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(0x3F803F80), "r"(0xC300C300));
    }
    return pair;
}

// Scales (or biases) of an output that one load reads: the scales of TOGETHER blocks. With more than 14 warps,
// registers cannot hold the scales of a long row.
constexpr bool FEW_REGISTERS = WARPS > 14 && STEPS > 4;
constexpr uint TOGETHER = GROUP != BLOCK || FEW_REGISTERS           ? 1
                          : STEPS % 4 == 0 && FACTOR_PITCH % 8 == 0 ? 4
                          : STEPS % 2 == 0 && FACTOR_PITCH % 4 == 0 ? 2
                                                                    : 1;
struct Factors {
    ushort halves[TOGETHER];

    inline void load(const uchar *at) {
        if constexpr (TOGETHER == 4) {
            const uint2 two = *reinterpret_cast<const uint2 *>(at);
            halves[0] = ushort(two.x);
            halves[1] = ushort(two.x >> 16);
            halves[2] = ushort(two.y);
            halves[3] = ushort(two.y >> 16);
        } else if constexpr (TOGETHER == 2) {
            const uint two = *reinterpret_cast<const uint *>(at);
            halves[0] = ushort(two);
            halves[1] = ushort(two >> 16);
        } else {
            halves[0] = *reinterpret_cast<const ushort *>(at);
        }
    }
    inline float of(uint step) const {
        const ushort half = halves[step % TOGETHER];
        return W_DTYPE == F16 ? half_to_float(half) : bf16_to_float(half);
    }
};

// A tile of a block: its tile of rows (0 without experts), and its number among the tiles of these rows.
struct Place {
    uint row_tile;
    uint tile;

    inline void advance(uint tiles, uint output_tiles) {
        tile += tiles;
        while (EXPERTS && tile >= output_tiles) {
            tile -= output_tiles;
            row_tile++;
        }
    }
};

// A thread: its warp, and its row g and pair of columns t in the fragments of products.
struct Lane {
    uint lane;
    uint g;
    uint t;
    uint warp;
};

// Tensors of the kernel; `experts` and `order` are those of linear_gemm_affine_sort.
struct Tensors {
    const uchar *x;
    const uchar *codes;
    const uchar *scales;
    const uchar *biases;
    uchar *out;
    float *partials;
    uchar *gated;
    const uint *experts;
    const uint *order;
};

// The tiles of a block: `tiles` tiles from `begin` on. SPLITS neighbouring blocks have the same tiles, and one part of
// the inputs each.
struct Share {
    uint stretch;
    uint part;
    // Outputs or, with EXPERTS, tiles of all experts.
    uint first;
    uint end;
    uint tiles;
    Place begin;

    inline uint output_of(Place place) const {
        return (EXPERTS ? 0 : first) + place.tile * TILE_STEP;
    }
};

// Context of all phases of the kernel.
struct Block {
    const SkinnyAffine4TmaParams &p;
    const Tensors &tensors;
    const Lane &self;
    const Share &share;
    uchar *memory;
    uint shared;
    TileBarriers barriers;
};

// Row r of a tile of rows; at least `rows` if the tile has fewer.
inline uint row_of(const Tensors &tensors, uint row_tile, uint r) {
    return ALONE ? (r == 0 ? row_tile : NONE) : EXPERTS ? tensors.order[row_tile * ROWS + r] : r;
}

// Divides the tiles of experts, or the outputs, evenly. All threads call it.
inline Share share_of_block(const SkinnyAffine4TmaParams &p, const uint *experts) {
    const uint stretch = blockIdx.x / SPLITS, stretches = gridDim.x / SPLITS, part = blockIdx.x % SPLITS;
    const uint outputs = p.linear.outputs, output_tiles = outputs / TILE;
    uint units = outputs / ALIGNED_ROWS;
    if (EXPERTS) {
        // The previous kernel, the sort, writes the number of tiles.
        wait_for_previous();
        uint row_tiles = ALONE ? p.row_tiles : 0;
        for (uint first = 0; !ALONE && first < p.row_tiles; first += THREADS) {
            const uint tile = first + threadIdx.x;
            row_tiles += __syncthreads_count(tile < p.row_tiles && experts[min(tile, p.row_tiles - 1)] != NONE);
        }
        units = of_warp(row_tiles) * output_tiles;
    }
    const auto begin_of = [&](uint stretch) {
        const uint unit = uint(ulong(units) * stretch / stretches);
        return EXPERTS ? unit : unit * ALIGNED_ROWS;
    };
    const uint first = begin_of(stretch), end = begin_of(stretch + 1), tiles = EXPERTS ? end - first : (end - first + TILE - 1) / TILE;
    const Place begin = EXPERTS ? Place{first / output_tiles, first % output_tiles} : Place{0, 0};
    return {stretch, part, first, end, tiles, begin};
}

// Producer: copies `rows` rows of W from `row` on to the rows of the stage at address `stage`, from n on.
inline void copy_rows(const Block &b, uint stage, uint n, uint rows, ulong row, uint barrier) {
    constexpr uint ROW = CODES * SPLITS, FACTOR_ROW = FACTOR_BYTES * SPLITS;
    const uint to = stage + n * PITCH, factors_to = stage + FACTORS_AT + n * FACTOR_PITCH;
    const uchar *from = b.tensors.codes + row * ROW + b.share.part * CODES;
    const uchar *sides[2] = {b.tensors.scales + row * FACTOR_ROW + b.share.part * FACTOR_BYTES, b.tensors.biases + row * FACTOR_ROW + b.share.part * FACTOR_BYTES};
    if (!ROW_BY_ROW) {
#pragma unroll
        for (uint side = 0; side < 2; side++) {
            copy_bulk(factors_to + side * FACTORS, sides[side], rows * FACTOR_BYTES, barrier);
        }
    }
    if (ODD) {
        copy_bulk(to, from, rows * CODES, barrier);
    }
    if (!ODD || ROW_BY_ROW) {
#pragma unroll 1
        for (uint r = 0; r < rows; r++) {
            if (!ODD) {
                copy_bulk(to + r * PITCH, from + r * ROW, CODES, barrier);
            }
            if (ROW_BY_ROW) {
#pragma unroll
                for (uint side = 0; side < 2; side++) {
                    copy_bulk(factors_to + side * FACTORS + r * FACTOR_PITCH, sides[side] + r * FACTOR_ROW, FACTOR_BYTES, barrier);
                }
            }
        }
    }
}

// Producer: one thread copies the W of all tiles, up to STAGES ahead of the products.
inline void copy_tiles(const Block &b) {
    const uint outputs = b.p.linear.outputs;
    RingCursor<STAGES> cursor;
    Place place = b.share.begin;
#pragma unroll 1
    for (uint tile = 0; tile < b.share.tiles; tile++, place.advance(1, outputs / TILE)) {
        const uint output = b.share.output_of(place), rows = EXPERTS ? TILE : min(TILE, b.share.end - output);
        const uint expert = EXPERTS ? b.tensors.experts[place.row_tile] : 0;
        const ulong row = ulong(expert < b.p.linear.experts ? expert : 0) * outputs + output;
        if (tile >= STAGES) {
            barrier_wait(b.barriers.empty(cursor.stage), cursor.parity ^ 1);
        }
        const uint barrier = b.barriers.full(cursor.stage), to = b.shared + cursor.stage * STAGE;
        barrier_expect(barrier, rows * (CODES + 2 * FACTOR_BYTES));
#pragma unroll
        for (uint n = 0; n < TILE; n += TILE_STEP) {
            copy_rows(b, to, n, min(TILE_STEP, rows), row + n / TILE_STEP * (outputs / 2), barrier);
        }
        cursor.next();
    }
}

// Consumer: the warp's inputs of x, eight words for each block. Pair i of a block has inputs i and i + 4 of eight. The
// sums of the blocks of x, the factors of biases, are stored in shared memory; only this team reads them.
inline void load_x(const Block &b, uint (&xs)[STEPS][8], float *x_sums, uint member, uint row_tile) {
    const uint g = b.self.g, t = b.self.t;
    const uint row = row_of(b.tensors, row_tile, g);
    const bool there = row < b.p.linear.rows;
    const uint x_row = EXPERTS ? row / b.p.linear.rows_per_input : row;
    const uchar *x_of_lane = b.tensors.x + (ulong(there ? x_row : 0) * (INPUTS * SPLITS) + b.share.part * INPUTS + member * OWN + t * 16) * 2;
    __syncwarp();
#pragma unroll
    for (uint step = 0; step < STEPS; step++) {
        const uint4 none = make_uint4(0, 0, 0, 0);
        float sum = 0;
#pragma unroll
        for (uint h = 0; h < 2; h++) {
            const uint4 eight = there ? reinterpret_cast<const uint4 *>(x_of_lane + step * (BLOCK * 2))[h] : none;
            xs[step][h * 4] = __byte_perm(eight.x, eight.z, 0x5410);
            xs[step][h * 4 + 1] = __byte_perm(eight.x, eight.z, 0x7632);
            xs[step][h * 4 + 2] = __byte_perm(eight.y, eight.w, 0x5410);
            xs[step][h * 4 + 3] = __byte_perm(eight.y, eight.w, 0x7632);
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                const float2 two = unpack<false>(xs[step][h * 4 + i]);
                sum += two.x + two.y;
            }
        }
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
        if (t == 0) {
            x_sums[(member * STEPS + step) * ROWS + g] = sum;
        }
    }
    __syncwarp();
}

// Consumer: the warp's sums of the tile in `stage`: outputs g and g + 8 by rows 2t and 2t + 1. For outputs after the
// last one, a stage has stale bytes, and the sums are not stored.
inline void multiply_tile(const Block &b, float (&sums)[4], const uchar *stage, const uint (&xs)[STEPS][8], const float *x_sums, uint member) {
    const uint g = b.self.g, t = b.self.t;
    const uchar *of_lane = stage + g * PITCH + member * (OWN / 2) + t * 8;
    const uchar *factors = stage + FACTORS_AT + g * FACTOR_PITCH;
    Factors scale_and_bias[2][2];
#pragma unroll
    for (uint step = 0; step < STEPS; step++) {
        const uint2 w[2] = {*reinterpret_cast<const uint2 *>(of_lane + step * (BLOCK / 2)),
                            *reinterpret_cast<const uint2 *>(of_lane + 8 * PITCH + step * (BLOCK / 2))};
        float products[4];
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            const uint a[4] = {codes_of(w[0], 2 * i), codes_of(w[1], 2 * i), codes_of(w[0], 2 * i + 1), codes_of(w[1], 2 * i + 1)};
            const uint2 b = make_uint2(xs[step][2 * i], xs[step][2 * i + 1]);
            if (i == 0) {
                mma_alone<false>(products, a, b);
            } else {
                mma<false>(products, a, b);
            }
        }
        const uint block = member * STEPS + step;
        if (step % TOGETHER == 0) {
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                const uchar *of_row = factors + i % 2 * FACTORS + i / 2 * (8 * FACTOR_PITCH);
                scale_and_bias[i / 2][i % 2].load(of_row + block / (GROUP / BLOCK) * 2);
            }
        }
        const float2 of_x = *reinterpret_cast<const float2 *>(x_sums + block * ROWS + 2 * t);
#pragma unroll
        for (uint r = 0; r < 2; r++) {
            const float scale = scale_and_bias[r][0].of(step), bias = fmaf(-OFFSET, scale, scale_and_bias[r][1].of(step));
            sums[2 * r] = fmaf(scale, products[2 * r], fmaf(bias, of_x.x, sums[2 * r]));
            sums[2 * r + 1] = fmaf(scale, products[2 * r + 1], fmaf(bias, of_x.y, sums[2 * r + 1]));
        }
    }
}

// Epilogue: stores a lane's sums of a tile, scaled by alpha.
inline void write(const Block &b, Place place, float4 four) {
    const uint g = b.self.g, t = b.self.t, outputs = b.p.linear.outputs;
    const float total[4] = {four.x, four.y, four.z, four.w};
    const uint output = b.share.output_of(place);
    const bool known = !EXPERTS || b.tensors.experts[place.row_tile] < b.p.linear.experts;
    const uint row[2] = {row_of(b.tensors, place.row_tile, 2 * t), row_of(b.tensors, place.row_tile, 2 * t + 1)};
    if constexpr (GATING == HALVES) {
#pragma unroll
        for (uint c = 0; c < 2; c++) {
            if (row[c] < b.p.linear.rows) {
                const float result = known ? b.p.linear.alpha * total[c] : 0, other = known ? b.p.linear.alpha * total[2 + c] : 0;
                store_result(b.tensors.out, nullptr, b.tensors.gated, places_in_row(row[c], outputs, output + g), result, other);
            }
        }
        return;
    }
#pragma unroll
    for (uint c = 0; c < 4; c++) {
        const uint own = output + g + c / 2 * 8;
        if (own < (EXPERTS ? outputs : b.share.end) && row[c % 2] < b.p.linear.rows) {
            store(b.tensors.out, place_in_parts(b.p.linear, b.p.parts, row[c % 2], own), known ? b.p.linear.alpha * total[c] : 0, OUT_DTYPE);
        }
    }
}

// A lane's sums of a tile over part `part` of the inputs, in `partials`.
inline float4 *partial(const Block &b, uint tile, uint part) {
    return reinterpret_cast<float4 *>(b.tensors.partials) + (ulong(b.share.stretch * SPLITS + part) * b.p.max_tiles + tile) * 32 + b.self.lane;
}

// The last warp: adds up the sums of a team's warps.
inline void add_warps(const Block &b) {
    const float4 *all_sums = reinterpret_cast<const float4 *>(b.memory + SUMS_AT);
    RingCursor<SLOTS> slot;
    Place place = b.share.begin;
#pragma unroll 1
    for (uint tile = 0; tile < b.share.tiles; tile++, place.advance(1, b.p.linear.outputs / TILE)) {
        barrier_wait(b.barriers.summed(slot.stage), slot.parity);
        const float4 total = sum_of_warps(all_sums + slot.stage * (WARPS * 32) + b.self.lane);
        barrier_arrive(b.barriers.taken(slot.stage));
        slot.next();
        if (SPLITS == 1) {
            write(b, place, total);
        } else {
            __stcg(partial(b, tile, b.share.part), total);
        }
    }
}

// Consumers: a team multiplies every TEAMS-th tile.
inline void multiply_tiles(const Block &b) {
    const uint warp = b.self.warp, team = warp / WARPS, member = warp % WARPS, output_tiles = b.p.linear.outputs / TILE;
    float4 *all_sums = reinterpret_cast<float4 *>(b.memory + SUMS_AT);
    float *x_sums = reinterpret_cast<float *>(b.memory + X_SUMS_AT) + team * (INPUTS / BLOCK * ROWS);
    uint xs[STEPS][8];
    if (!EXPERTS) {
        load_x(b, xs, x_sums, member, 0);
    }
    RingCursor<SLOTS> slot;
    Place place = b.share.begin;
    uint current = NONE, at = team, parity = 0;
    place.advance(team, output_tiles);
#pragma unroll 1
    for (uint tile = team; tile < b.share.tiles; tile += TEAMS, place.advance(TEAMS, output_tiles)) {
        if (EXPERTS && place.row_tile != current) {
            current = place.row_tile;
            load_x(b, xs, x_sums, member, current);
        }
        float sums[4] = {};
        barrier_wait(b.barriers.full(at), parity);
        multiply_tile(b, sums, b.memory + at * STAGE, xs, x_sums, member);
        // If no later tile uses this stage, no thread waits for it.
        if (b.share.tiles > STAGES) {
            barrier_arrive(b.barriers.empty(at));
        }
        at += TEAMS;
        if (at >= STAGES) {
            at -= STAGES;
            parity ^= 1;
        }
        const float4 own = make_float4(sums[0], sums[1], sums[2], sums[3]);
        if (WARPS == 1) {
            write(b, place, own);
            continue;
        }
        barrier_wait(b.barriers.taken(slot.stage), slot.parity ^ 1);
        all_sums[(slot.stage * WARPS + warp) * 32 + b.self.lane] = own;
        barrier_arrive(b.barriers.summed(slot.stage));
        slot.next();
    }
}

// Epilogue with SPLITS: the block that finishes last adds up the partial sums of all blocks.
inline void add_blocks(const Block &b, uint *arrivals) {
    const uint warp = b.self.warp;
    // The flag is stored after the barriers.
    uint *is_last = reinterpret_cast<uint *>(b.memory + SHARED_BYTES - 16);
    if (warp > CONSUMERS) {
        __syncwarp();
        if (b.self.lane == 0) {
            *is_last = count_arrival(arrivals + b.share.stretch, SPLITS);
        }
    }
    // All warps except the producer.
    asm volatile("bar.sync 1, %0;" ::"n"((WARPS + 1) * 32) : "memory");
    if (*is_last != 0) {
#pragma unroll 1
        for (uint tile = warp < WARPS ? warp : WARPS; tile < b.share.tiles; tile += WARPS + 1) {
            write(b, {0, tile}, sum_of_blocks(partial(b, tile, 0), ulong(b.p.max_tiles) * 32));
        }
    }
}

// Groups of SPLITS neighbouring blocks divide the outputs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KVANT_KERNEL(const uchar *x, const uchar *codes, const uchar *scales, const uchar *biases, uchar *out,
                 const SkinnyAffine4TmaParams p, float *partials, uint *arrivals, uchar *gated, const uint *experts,
                 const uint *order) {
    extern __shared__ __align__(128) uchar memory[];
    const uint lane = threadIdx.x % 32;
    const Lane self = {lane, lane / 4, lane % 4, of_warp(threadIdx.x / 32)};
    const Tensors tensors = {x, codes, scales, biases, out, partials, gated, experts, order};
    const Share share = share_of_block(p, experts);
    const uint shared = shared_address(memory);
    const Block b = {p, tensors, self, share, memory, shared, {shared + BARRIERS_AT}};
    if (threadIdx.x == 0) {
        b.barriers.init(WARPS * 32, 32);
    }
    __syncthreads();
    if (self.warp == CONSUMERS) {
        if (elected()) {
            copy_tiles(b);
        }
        return;
    }
    if (!EXPERTS) {
        wait_for_previous();
    }
    let_next_begin();
    if (self.warp > CONSUMERS) {
        add_warps(b);
    } else {
        multiply_tiles(b);
    }
    if (SPLITS > 1) {
        add_blocks(b, arrivals);
    }
}
