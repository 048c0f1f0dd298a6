// linear_skinny_dense_tma: linear (linear_generic.cu) for a dense weight and 1 to 32 rows, by bulk copies and on tensor
// cores. Reading W is the limit.
//
// x [rows, inputs] and W [outputs, inputs] have one dtype, f16 or bf16; rows begin at multiples of 16 bytes. Results of
// the parts of W (SkinnyDenseTmaParams) follow each other.
//
// Every block has a stretch of outputs, and a multiprocessor to itself. Warp WARPS copies SEGMENT inputs (at last those
// that are left) of a tile of 16 rows of W at a time, up to STAGES of these ahead of their use. The warps before it
// divide the inputs of a segment among them. Each keeps its inputs of all segments of x in registers, as the B of its
// products, for every eight rows of x; the A are 16 outputs. Which inputs meet in one product is arbitrary, so long as
// A and B agree: lane 4g + t has 8 neighbouring inputs of rows g, g + 8... of x, and of outputs g and g + 8. The warps
// leave the sums of a tile in shared memory, where ADDERS last warps add them up.
//
// If x takes many registers (MANY), the warps behind those that multiply are a warpgroup, idle ones among them, so that
// it can give its registers to the others.
//
// Registers do not hold x of long rows. SPLITS blocks then have the same outputs, and INPUTS of each row: they leave
// their sums in `partials`, and the one that is done last adds them up.
//
// A gate may follow (linear/gating.h). If it takes the results in halves, half of a tile's outputs are of the second.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h); x is read later.
#include "device/arrivals.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/ring_cursor.h"
#include "device/uniform.h"
#include "device/vectors.h"
#include "linear/gating.h"
#include "linear/out_parts.h"
#include "linear/tile_sums.h"

constexpr uint TILE = 16;
constexpr uint SIDES = TILE / TILE_STEP;
// Rows of x in a product.
constexpr uint EIGHT = 8;
constexpr uint EIGHTS = ROWS / EIGHT;
// Sums of one product each, because a product waits for the one before it into the same sums; those of other rows of x
// need not.
constexpr uint CHAINS = EIGHTS == 1 ? 2 : 1;
// Warps that add up the sums of every ADDERS-th eight rows.
constexpr uint ADDERS = EIGHTS == 1 ? 1 : 2;
constexpr uint THREADS = 32 * (WARPS + (MANY ? 4 : 1 + ADDERS));
constexpr uint SEGMENTS = (INPUTS + SEGMENT - 1) / SEGMENT;
// Inputs of a lane in a step of its warp; steps of a segment, and inputs of a warp in it.
constexpr uint LANE = 8;
constexpr uint STEPS = SEGMENT / (4 * LANE * WARPS);
constexpr uint steps_of(uint segment) {
    return segment + 1 < SEGMENTS ? STEPS : (INPUTS - segment * SEGMENT) / (4 * LANE * WARPS);
}
constexpr uint own_of(uint segment) {
    return steps_of(segment) * 4 * LANE;
}
constexpr uint ROW = INPUTS * SPLITS * 2;
// Of an output in a stage: padded, so that lanes meet in no bank.
constexpr uint PITCH = SEGMENT * 2 + 64;
constexpr uint STAGE = TILE * PITCH;
// Sums of tiles.
constexpr uint SUMS_AT = STAGES * STAGE;
constexpr uint BARRIERS_AT = SUMS_AT + SLOTS * EIGHTS * WARPS * 32 * 16;
// skinny_dense_tma.rs computes the same sum.
static_assert(BARRIERS_AT + (STAGES + SLOTS) * 16 + 16 == SHARED_BYTES, "linear: the shared memory that Rust asks for");
static_assert(STEPS * 4 * LANE * WARPS == SEGMENT && INPUTS % (4 * LANE * WARPS) == 0, "linear: whole steps");
static_assert(SEGMENT * 2 % 128 == 0, "linear: the padding is for rows of whole lines of banks");

struct SkinnyDenseTmaParams {
    uint rows;
    uint outputs;
    float alpha;
    // Tiles of a stretch, at most.
    uint max_tiles;
    // Columns of a gate's factors.
    uint up_width;
    OutParts parts;
};

// Blocks divide the outputs among them, SPLITS neighbouring ones together.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KVANT_KERNEL(const uchar *x, const uchar *values, uchar *out, const SkinnyDenseTmaParams p, float *partials,
                 uint *arrivals, const uchar *up, uchar *gated) {
    extern __shared__ __align__(128) uchar memory[];
    const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = of_warp(threadIdx.x / 32);
    const uint stretch = blockIdx.x / SPLITS, stretches = gridDim.x / SPLITS, part = blockIdx.x % SPLITS;
    // Outputs, or pairs of them.
    const ulong all = p.outputs / SIDES;
    const uint first = uint(all * stretch / stretches), end = uint(all * (stretch + 1) / stretches);
    const uint tiles = (end - first + TILE_STEP - 1) / TILE_STEP, items = tiles * SEGMENTS;
    const uint shared = shared_address(memory);
    const TileBarriers barriers = {shared + BARRIERS_AT};
    // Behind the barriers: whether an adding warp was the last of all with these outputs.
    uint *is_last = reinterpret_cast<uint *>(memory + SHARED_BYTES - 16);
    // The stage that is filled or used next.
    RingCursor<STAGES> cursor;
    if (threadIdx.x == 0) {
        barriers.init(WARPS * 32, ADDERS * 32);
    }
    __syncthreads();
    float4 *all_sums = reinterpret_cast<float4 *>(memory + SUMS_AT);
    // The sums of eight rows of x of a tile, of this block or of another one with the same outputs.
    const auto partial = [&](uint part, uint tile, uint eight) {
        const ulong tiles_before = ulong(stretch * SPLITS + part) * p.max_tiles + tile;
        return reinterpret_cast<float4 *>(partials) + (tiles_before * EIGHTS + eight) * 32 + lane;
    };
    // Of outputs g and g + 8 of a tile, rows 2t and 2t + 1 of eight.
    const auto write = [&](uint tile, uint eight, float4 four) {
        const float total[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint c = 0; c < 4 / SIDES; c++) {
            const uint own = first + tile * TILE_STEP + g + c / 2 * 8, r = eight * EIGHT + 2 * t + c % 2;
            if (own < end && r < p.rows) {
                const auto place = [&](uint output) { return place_in_parts(p, p.parts, r, output); };
                const Places at = {place(own), SIDES == 2 ? place(uint(all) + own) : 0, ulong(r) * p.up_width + own, ulong(r) * uint(all) + own};
                store_result(out, up, gated, at, p.alpha * total[c], p.alpha * total[(c + 2) % 4]);
            }
        }
    };
    // Warps that multiply, and those that add.
    const auto meet = [] {
        asm volatile("bar.sync 1, %0;" ::"n"((WARPS + ADDERS) * 32) : "memory");
    };
    RingCursor<SLOTS> slot;
    if (warp >= WARPS) {
        if (MANY) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        }
        if (warp == WARPS && elected()) {
            uint row = first, segment = 0;
#pragma unroll 1
            for (uint i = 0; i < items; i++) {
                if (i >= STAGES) {
                    barrier_wait(barriers.empty(cursor.stage), cursor.parity ^ 1);
                }
                const uint rows = min(TILE_STEP, end - row), barrier = barriers.full(cursor.stage);
                const uint bytes = min(SEGMENT, INPUTS - segment * SEGMENT) * 2;
                barrier_expect(barrier, SIDES * rows * bytes);
#pragma unroll
                for (uint side = 0; side < SIDES; side++) {
                    const uchar *from = values + (side * all + row) * ROW + (part * INPUTS + segment * SEGMENT) * 2;
                    const uint to = shared + cursor.stage * STAGE + side * (TILE_STEP * PITCH);
#pragma unroll 1
                    for (uint r = 0; r < rows; r++) {
                        copy_bulk(to + r * PITCH, from + r * ROW, bytes, barrier);
                    }
                }
                cursor.next();
                segment = segment + 1 == SEGMENTS ? 0 : segment + 1;
                row += segment == 0 ? TILE_STEP : 0;
            }
        }
        if (warp > WARPS && warp <= WARPS + ADDERS) {
            const uint adder = warp - WARPS - 1;
            wait_for_previous();
            let_next_begin();
#pragma unroll 1
            for (uint tile = 0; tile < tiles; tile++) {
                barrier_wait(barriers.summed(slot.stage), slot.parity);
#pragma unroll
                for (uint i = 0; i < EIGHTS / ADDERS; i++) {
                    const uint eight = i * ADDERS + adder;
                    const float4 total = sum_of_warps(all_sums + (slot.stage * EIGHTS + eight) * (WARPS * 32) + lane);
                    if (i + 1 == EIGHTS / ADDERS) {
                        barrier_arrive(barriers.taken(slot.stage));
                    }
                    if (SPLITS == 1) {
                        write(tile, eight, total);
                    } else {
                        __stcg(partial(part, tile, eight), total);
                    }
                }
                slot.next();
            }
            if (SPLITS > 1) {
                __syncwarp();
                if (lane == 0) {
                    is_last[adder] = count_arrival(arrivals + stretch, SPLITS * ADDERS);
                }
                meet();
            }
        }
        return;
    }
    if (MANY) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    }
    wait_for_previous();
    let_next_begin();
    uint4 xs[EIGHTS][SEGMENTS][STEPS];
#pragma unroll
    for (uint e = 0; e < EIGHTS; e++) {
        const uint r = e * EIGHT + g;
        const uchar *x_of_lane = x + ulong(r) * ROW + (part * INPUTS + t * LANE) * 2;
#pragma unroll
        for (uint s = 0; s < SEGMENTS; s++) {
#pragma unroll
            for (uint i = 0; i < steps_of(s); i++) {
                const uint at = (s * SEGMENT + warp * own_of(s) + i * 4 * LANE) * 2;
                xs[e][s][i] = r < p.rows ? *reinterpret_cast<const uint4 *>(x_of_lane + at) : make_uint4(0, 0, 0, 0);
            }
        }
    }
#pragma unroll 1
    for (uint tile = 0; tile < tiles; tile++) {
        // Beyond the last output a stage has what it held before; such sums are not stored.
        float sums[EIGHTS][CHAINS][4] = {};
#pragma unroll
        for (uint s = 0; s < SEGMENTS; s++) {
            barrier_wait(barriers.full(cursor.stage), cursor.parity);
            const uchar *of_lane = memory + cursor.stage * STAGE + g * PITCH + (warp * own_of(s) + t * LANE) * 2;
#pragma unroll
            for (uint i = 0; i < steps_of(s); i++) {
                const uint4 a = *reinterpret_cast<const uint4 *>(of_lane + i * (4 * LANE * 2));
                const uint4 b = *reinterpret_cast<const uint4 *>(of_lane + 8 * PITCH + i * (4 * LANE * 2));
                const uint low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
                for (uint e = 0; e < EIGHTS; e++) {
                    mma<DTYPE == F16>(sums[e][0], low, make_uint2(xs[e][s][i].x, xs[e][s][i].y));
                }
#pragma unroll
                for (uint e = 0; e < EIGHTS; e++) {
                    mma<DTYPE == F16>(sums[e][CHAINS - 1], high, make_uint2(xs[e][s][i].z, xs[e][s][i].w));
                }
            }
            // The stage may be overwritten.
            if (items > STAGES) {
                barrier_arrive(barriers.empty(cursor.stage));
            }
            cursor.next();
        }
        barrier_wait(barriers.taken(slot.stage), slot.parity ^ 1);
#pragma unroll
        for (uint e = 0; e < EIGHTS; e++) {
            float4 total = make_float4(sums[e][0][0], sums[e][0][1], sums[e][0][2], sums[e][0][3]);
#pragma unroll
            for (uint c = 1; c < CHAINS; c++) {
                total = total + make_float4(sums[e][c][0], sums[e][c][1], sums[e][c][2], sums[e][c][3]);
            }
            all_sums[((slot.stage * EIGHTS + e) * WARPS + warp) * 32 + lane] = total;
        }
        barrier_arrive(barriers.summed(slot.stage));
        slot.next();
    }
    if (SPLITS > 1) {
        meet();
        bool is_done = false;
#pragma unroll
        for (uint i = 0; i < ADDERS; i++) {
            is_done |= is_last[i] != 0;
        }
        if (is_done) {
#pragma unroll 1
            for (uint i = warp; i < tiles * EIGHTS; i += WARPS) {
                const uint tile = i / EIGHTS, eight = i % EIGHTS;
                write(tile, eight, sum_of_blocks(partial(0, tile, eight), ulong(p.max_tiles) * (EIGHTS * 32)));
            }
        }
    }
}
