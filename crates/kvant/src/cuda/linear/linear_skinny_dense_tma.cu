// linear_skinny_dense_tma: linear (linear_generic.cu) for a dense weight and 1 to 32 rows, by bulk copies and on tensor
// cores. Reading W is the limit.
//
// x [rows, inputs] and W [outputs, inputs] have one dtype, f16 or bf16; rows begin at multiples of 16 bytes. The
// results of the parts of W (SkinnyDenseTmaParams) are consecutive.
//
// Every block has consecutive outputs, and a multiprocessor to itself. Warp WARPS copies segments, SEGMENT inputs of a
// tile of 16 rows of W (the last segment may be shorter), up to STAGES segments ahead of their use. Warps 0 to WARPS -
// 1 divide the inputs of a segment among them. Each keeps its inputs of all segments of x in registers, as the B of its
// products, for every eight rows of x; A is 16 outputs. The assignment of inputs to products is arbitrary if A and B
// agree: lane 4g + t has 8 neighbouring inputs of rows g, g + 8... of x, and of outputs g and g + 8. The warps store
// the sums of a tile in shared memory, where the last ADDERS warps add them up.
//
// If x takes many registers (MANY), the warps that do not multiply form a whole warpgroup, with idle warps, so that it
// can give its registers to the warps that multiply.
//
// If registers cannot hold x of long rows, SPLITS blocks have the same outputs, and INPUTS inputs of each row. They
// store their sums in `partials`, and the last block to arrive adds them up.
//
// A gate may follow (linear/gating.h). If it takes the results in halves, half of a tile's outputs belong to the second
// half.
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
// Independent sums, because a product waits for the previous product into the same sums. With several groups of eight
// rows of x, these are independent already.
constexpr uint CHAINS = EIGHTS == 1 ? 2 : 1;
// Warps that add up sums. Each adds those of every ADDERS-th group of eight rows.
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
// Bytes of an output in a stage, padded against bank conflicts.
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
    // Maximum tiles of a block.
    uint max_tiles;
    // Columns of a gate's factors.
    uint up_width;
    OutParts parts;
};

// Context of all phases: tensors, the block's outputs, its part of the inputs, and addresses in shared memory.
struct Block {
    const SkinnyDenseTmaParams &p;
    const uchar *x;
    const uchar *values;
    uchar *out;
    float *partials;
    uint *arrivals;
    const uchar *up;
    uchar *gated;
    uchar *memory;
    uint lane;
    uint warp;
    uint stretch;
    uint part;
    // Outputs, or pairs of outputs: the number for all blocks; this block has those from `first` to `end`.
    ulong all;
    uint first;
    uint end;
    uint tiles;
    uint items;
    TileBarriers barriers;

    inline float4 *sums() const {
        return reinterpret_cast<float4 *>(memory + SUMS_AT);
    }
    // The flag after the barriers: whether an adding warp was the last among the blocks with these outputs.
    inline uint *is_last() const {
        return reinterpret_cast<uint *>(memory + SHARED_BYTES - 16);
    }
    // The sums of eight rows of x of a tile, of this block or of another one with the same outputs.
    inline float4 *partial(uint of_part, uint tile, uint eight) const {
        const ulong tiles_before = ulong(stretch * SPLITS + of_part) * p.max_tiles + tile;
        return reinterpret_cast<float4 *>(partials) + (tiles_before * EIGHTS + eight) * 32 + lane;
    }
    // Waits for the warps that multiply and the warps that add.
    static inline void meet() {
        asm volatile("bar.sync 1, %0;" ::"n"((WARPS + ADDERS) * 32) : "memory");
    }
    // Stores results of outputs g and g + 8 of a tile, rows 2t and 2t + 1 of eight.
    inline void write(uint tile, uint eight, float4 four) const {
        const float total[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint c = 0; c < 4 / SIDES; c++) {
            const uint own = first + tile * TILE_STEP + lane / 4 + c / 2 * 8, r = eight * EIGHT + 2 * (lane % 4) + c % 2;
            if (own < end && r < p.rows) {
                const auto place = [&](uint output) { return place_in_parts(p, p.parts, r, output); };
                const Places at = {place(own), SIDES == 2 ? place(uint(all) + own) : 0, ulong(r) * p.up_width + own, ulong(r) * uint(all) + own};
                store_result(out, up, gated, at, p.alpha * total[c], p.alpha * total[(c + 2) % 4]);
            }
        }
    }
};

// Producer, one thread: copies W, a segment of a tile to a stage.
inline void produce(const Block &b) {
    RingCursor<STAGES> at;
    uint row = b.first, segment = 0;
#pragma unroll 1
    for (uint i = 0; i < b.items; i++) {
        if (i >= STAGES) {
            barrier_wait(b.barriers.empty(at.stage), at.parity ^ 1);
        }
        const uint rows = min(TILE_STEP, b.end - row), barrier = b.barriers.full(at.stage);
        const uint bytes = min(SEGMENT, INPUTS - segment * SEGMENT) * 2;
        barrier_expect(barrier, SIDES * rows * bytes);
#pragma unroll
        for (uint side = 0; side < SIDES; side++) {
            const uchar *from = b.values + (side * b.all + row) * ROW + (b.part * INPUTS + segment * SEGMENT) * 2;
            const uint to = shared_address(b.memory) + at.stage * STAGE + side * (TILE_STEP * PITCH);
#pragma unroll 1
            for (uint r = 0; r < rows; r++) {
                copy_bulk(to + r * PITCH, from + r * ROW, bytes, barrier);
            }
        }
        at.next();
        segment = segment + 1 == SEGMENTS ? 0 : segment + 1;
        row += segment == 0 ? TILE_STEP : 0;
    }
}

// Adder, a warp: adds up the warps' sums of a tile. Stores the results, or the partial sums for the last block.
inline void add(const Block &b, uint adder) {
    RingCursor<SLOTS> slot;
    wait_for_previous();
    let_next_begin();
#pragma unroll 1
    for (uint tile = 0; tile < b.tiles; tile++) {
        barrier_wait(b.barriers.summed(slot.stage), slot.parity);
#pragma unroll
        for (uint i = 0; i < EIGHTS / ADDERS; i++) {
            const uint eight = i * ADDERS + adder;
            const float4 total = sum_of_warps(b.sums() + (slot.stage * EIGHTS + eight) * (WARPS * 32) + b.lane);
            if (i + 1 == EIGHTS / ADDERS) {
                barrier_arrive(b.barriers.taken(slot.stage));
            }
            if (SPLITS == 1) {
                b.write(tile, eight, total);
            } else {
                __stcg(b.partial(b.part, tile, eight), total);
            }
        }
        slot.next();
    }
    if (SPLITS > 1) {
        __syncwarp();
        if (b.lane == 0) {
            b.is_last()[adder] = count_arrival(b.arrivals + b.stretch, SPLITS * ADDERS);
        }
        b.meet();
    }
}

// Consumer: the warp's inputs of x, which stay in registers.
inline void load_inputs(uint4 (&xs)[EIGHTS][SEGMENTS][STEPS], const Block &b) {
#pragma unroll
    for (uint e = 0; e < EIGHTS; e++) {
        const uint r = e * EIGHT + b.lane / 4;
        const uchar *x_of_lane = b.x + ulong(r) * ROW + (b.part * INPUTS + b.lane % 4 * LANE) * 2;
#pragma unroll
        for (uint s = 0; s < SEGMENTS; s++) {
#pragma unroll
            for (uint i = 0; i < steps_of(s); i++) {
                const uint at = (s * SEGMENT + b.warp * own_of(s) + i * 4 * LANE) * 2;
                xs[e][s][i] = r < b.p.rows ? *reinterpret_cast<const uint4 *>(x_of_lane + at) : make_uint4(0, 0, 0, 0);
            }
        }
    }
}

// Consumer: adds the products of segment `s`, from a stage.
inline void multiply_segment(float (&sums)[EIGHTS][CHAINS][4], const uint4 (&xs)[EIGHTS][SEGMENTS][STEPS], const Block &b,
                             uint stage, uint s) {
    const uchar *of_lane = b.memory + stage * STAGE + b.lane / 4 * PITCH + (b.warp * own_of(s) + b.lane % 4 * LANE) * 2;
#pragma unroll
    for (uint i = 0; i < steps_of(s); i++) {
        const uint4 first = *reinterpret_cast<const uint4 *>(of_lane + i * (4 * LANE * 2));
        const uint4 second = *reinterpret_cast<const uint4 *>(of_lane + 8 * PITCH + i * (4 * LANE * 2));
        const uint low[4] = {first.x, second.x, first.y, second.y}, high[4] = {first.z, second.z, first.w, second.w};
#pragma unroll
        for (uint e = 0; e < EIGHTS; e++) {
            mma<DTYPE == F16>(sums[e][0], low, make_uint2(xs[e][s][i].x, xs[e][s][i].y));
        }
#pragma unroll
        for (uint e = 0; e < EIGHTS; e++) {
            mma<DTYPE == F16>(sums[e][CHAINS - 1], high, make_uint2(xs[e][s][i].z, xs[e][s][i].w));
        }
    }
}

// Consumer: stores the warp's sums of a tile for the adders.
inline void leave_sums(const Block &b, const float (&sums)[EIGHTS][CHAINS][4], uint slot) {
#pragma unroll
    for (uint e = 0; e < EIGHTS; e++) {
        float4 total = make_float4(sums[e][0][0], sums[e][0][1], sums[e][0][2], sums[e][0][3]);
#pragma unroll
        for (uint c = 1; c < CHAINS; c++) {
            total = total + make_float4(sums[e][c][0], sums[e][c][1], sums[e][c][2], sums[e][c][3]);
        }
        b.sums()[((slot * EIGHTS + e) * WARPS + b.warp) * 32 + b.lane] = total;
    }
}

// Consumer, a warp: its part of the inputs of all tiles.
inline void consume(const Block &b) {
    RingCursor<STAGES> at;
    RingCursor<SLOTS> slot;
    uint4 xs[EIGHTS][SEGMENTS][STEPS];
    load_inputs(xs, b);
#pragma unroll 1
    for (uint tile = 0; tile < b.tiles; tile++) {
        // For outputs after the last one, a stage has stale bytes, and the sums are not stored.
        float sums[EIGHTS][CHAINS][4] = {};
#pragma unroll
        for (uint s = 0; s < SEGMENTS; s++) {
            barrier_wait(b.barriers.full(at.stage), at.parity);
            multiply_segment(sums, xs, b, at.stage, s);
            // The stage may be overwritten.
            if (b.items > STAGES) {
                barrier_arrive(b.barriers.empty(at.stage));
            }
            at.next();
        }
        barrier_wait(b.barriers.taken(slot.stage), slot.parity ^ 1);
        leave_sums(b, sums, slot.stage);
        barrier_arrive(b.barriers.summed(slot.stage));
        slot.next();
    }
}

// Epilogue with SPLITS: in the block whose adders arrive last, the consumers add up the sums of all blocks.
inline void add_blocks(const Block &b) {
    b.meet();
    bool is_done = false;
#pragma unroll
    for (uint i = 0; i < ADDERS; i++) {
        is_done |= b.is_last()[i] != 0;
    }
    if (is_done) {
#pragma unroll 1
        for (uint i = b.warp; i < b.tiles * EIGHTS; i += WARPS) {
            const uint tile = i / EIGHTS, eight = i % EIGHTS;
            b.write(tile, eight, sum_of_blocks(b.partial(0, tile, eight), ulong(b.p.max_tiles) * (EIGHTS * 32)));
        }
    }
}

// Groups of SPLITS neighbouring blocks divide the outputs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KVANT_KERNEL(const uchar *x, const uchar *values, uchar *out, const SkinnyDenseTmaParams p, float *partials,
                 uint *arrivals, const uchar *up, uchar *gated) {
    extern __shared__ __align__(128) uchar memory[];
    const uint lane = threadIdx.x % 32, warp = of_warp(threadIdx.x / 32);
    const uint stretch = blockIdx.x / SPLITS, stretches = gridDim.x / SPLITS, part = blockIdx.x % SPLITS;
    const ulong all = p.outputs / SIDES;
    const uint first = uint(all * stretch / stretches), end = uint(all * (stretch + 1) / stretches);
    const uint tiles = (end - first + TILE_STEP - 1) / TILE_STEP, items = tiles * SEGMENTS;
    const TileBarriers barriers = {shared_address(memory) + BARRIERS_AT};
    const Block b = {p,    x,    values,  out,  partials, arrivals, up,  gated, memory,
                     lane, warp, stretch, part, all,      first,    end, tiles, items,  barriers};
    if (threadIdx.x == 0) {
        barriers.init(WARPS * 32, ADDERS * 32);
    }
    __syncthreads();
    if (warp >= WARPS) {
        if (MANY) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        }
        if (warp == WARPS && elected()) {
            produce(b);
        }
        if (warp > WARPS && warp <= WARPS + ADDERS) {
            add(b, warp - WARPS - 1);
        }
        return;
    }
    if (MANY) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    }
    wait_for_previous();
    let_next_begin();
    consume(b);
    if (SPLITS > 1) {
        add_blocks(b);
    }
}
