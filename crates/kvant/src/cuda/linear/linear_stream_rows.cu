// linear_stream_rows: linear (linear_generic.cu) for a dense weight and 2 to 8 rows, by bulk copies and on tensor
// cores. Reading W is the limit.
//
// x [rows, inputs] and W [outputs, inputs] have one dtype, f16 or bf16; rows begin at multiples of 16 bytes. Results of
// the parts of W (LinearStreamRowsParams) follow each other.
//
// Every block has a stretch of outputs, and a multiprocessor to itself. Warp WARPS copies SEGMENT inputs of a tile of
// 16 rows of W at a time, up to STAGES of these ahead of their use. The warps before it divide the inputs of a segment
// among them. Each keeps its inputs of all segments of x in registers, as the B of its products; the A are 16 outputs.
// Which inputs meet in one product is arbitrary, so long as A and B agree: lane 4g + t has 8 neighbouring inputs of row
// g of x, and of outputs g and g + 8. After a tile the warps leave their sums in shared memory, and one of them,
// another one each time, adds them up.
//
// If x takes many registers (MANY), three idle warps complete the copying warp's warpgroup, so that it can give its
// registers to the others.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h); x is read later.
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/mbarrier.h"
#include "device/ring_cursor.h"
#include "linear/out_parts.h"

constexpr uint TILE = 16;
constexpr uint THREADS = 32 * (WARPS + (MANY ? 4 : 1));
constexpr uint SEGMENTS = INPUTS / SEGMENT;
// Inputs of a warp in a segment, and of a lane in a step of the warp.
constexpr uint OWN = SEGMENT / WARPS;
constexpr uint LANE = 8;
constexpr uint STEPS = OWN / (4 * LANE);
constexpr uint ROW = INPUTS * 2;
// Of an output in a stage: padded, so that lanes meet in no bank.
constexpr uint PITCH = SEGMENT * 2 + 64;
constexpr uint STAGE = TILE * PITCH;
// Sums of two successive tiles.
constexpr uint SUMS_AT = STAGES * STAGE;
constexpr uint BARRIERS_AT = SUMS_AT + 2 * WARPS * 32 * 16;
// stream_rows.rs computes the same sum.
static_assert(BARRIERS_AT + STAGES * 16 == SHARED_BYTES, "linear: the shared memory that Rust asks for");
static_assert(SEGMENTS * SEGMENT == INPUTS && STEPS * 4 * LANE * WARPS == SEGMENT, "linear: whole steps");
static_assert(SEGMENT * 2 % 128 == 0, "linear: the padding is for rows of whole lines of banks");

struct LinearStreamRowsParams {
    uint rows;
    uint outputs;
    float alpha;
    OutParts parts;
};

// Blocks divide the outputs among them.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    KVANT_KERNEL(const uchar *x, const uchar *values, uchar *out, const LinearStreamRowsParams p) {
    extern __shared__ __align__(128) uchar memory[];
    const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const uint first = uint(ulong(p.outputs) * blockIdx.x / gridDim.x), end = uint(ulong(p.outputs) * (blockIdx.x + 1) / gridDim.x);
    const uint items = (end - first + TILE - 1) / TILE * SEGMENTS;
    const uint shared = shared_address(memory), full = shared + BARRIERS_AT, empty = full + STAGES * 8;
    // The stage that is filled or used next.
    RingCursor<STAGES> cursor;
    // What warp WARPS copies next.
    uint row = first, segment = 0;
    const auto begin_next = [&] {
        const uint rows = min(TILE, end - row), barrier = full + cursor.stage * 8;
        const uchar *from = values + ulong(row) * ROW + segment * (SEGMENT * 2);
        barrier_expect(barrier, rows * SEGMENT * 2);
#pragma unroll 1
        for (uint r = 0; r < rows; r++) {
            copy_bulk(shared + cursor.stage * STAGE + r * PITCH, from + r * ROW, SEGMENT * 2, barrier);
        }
        cursor.next();
        segment = segment + 1 == SEGMENTS ? 0 : segment + 1;
        row += segment == 0 ? TILE : 0;
    };
    if (threadIdx.x == 0) {
#pragma unroll
        for (uint s = 0; s < STAGES; s++) {
            barrier_init(full + s * 8, 1);
            barrier_init(empty + s * 8, WARPS * 32);
        }
        show_barriers_to_copies();
    }
    __syncthreads();
    if (warp >= WARPS) {
        if (MANY) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        }
        if (warp == WARPS && elected()) {
#pragma unroll 1
            for (uint i = 0; i < items; i++) {
                if (i >= STAGES) {
                    barrier_wait(empty + cursor.stage * 8, cursor.parity ^ 1);
                }
                begin_next();
            }
        }
        return;
    }
    if (MANY) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    }
    wait_for_previous();
    let_next_begin();
    uint4 xs[SEGMENTS][STEPS];
    const uchar *x_of_lane = x + ulong(g) * ROW + (warp * OWN + t * LANE) * 2;
#pragma unroll
    for (uint s = 0; s < SEGMENTS; s++) {
#pragma unroll
        for (uint i = 0; i < STEPS; i++) {
            const uint at = (s * SEGMENT + i * 4 * LANE) * 2;
            xs[s][i] = g < p.rows ? *reinterpret_cast<const uint4 *>(x_of_lane + at) : make_uint4(0, 0, 0, 0);
        }
    }
    float4 *all_sums = reinterpret_cast<float4 *>(memory + SUMS_AT);
    uint tile = 0;
#pragma unroll 1
    for (uint output = first; output < end; output += TILE, tile++) {
        // Two of each, because a product waits for the one before it into the same sums. Beyond the last output a stage
        // has what it held before; such sums are not stored.
        float sums[2][4] = {};
#pragma unroll
        for (uint s = 0; s < SEGMENTS; s++) {
            barrier_wait(full + cursor.stage * 8, cursor.parity);
            const uchar *of_lane = memory + cursor.stage * STAGE + g * PITCH + (warp * OWN + t * LANE) * 2;
#pragma unroll
            for (uint i = 0; i < STEPS; i++) {
                const uint4 a = *reinterpret_cast<const uint4 *>(of_lane + i * (4 * LANE * 2));
                const uint4 b = *reinterpret_cast<const uint4 *>(of_lane + 8 * PITCH + i * (4 * LANE * 2));
                const uint low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
                mma<DTYPE == F16>(sums[0], low, make_uint2(xs[s][i].x, xs[s][i].y));
                mma<DTYPE == F16>(sums[1], high, make_uint2(xs[s][i].z, xs[s][i].w));
            }
            // The stage may be overwritten.
            if (items > STAGES) {
                barrier_arrive(empty + cursor.stage * 8);
            }
            cursor.next();
        }
        // Of outputs g and g + 8, rows 2t and 2t + 1. A tile's sums are overwritten two tiles later, behind the next
        // barrier.
        float4 *of_tile = all_sums + tile % 2 * (WARPS * 32);
        of_tile[warp * 32 + lane] =
            make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]);
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
        if (warp == tile % WARPS) {
            float total[4] = {};
#pragma unroll
            for (uint w = 0; w < WARPS; w++) {
                const float4 of_warp = of_tile[w * 32 + lane];
                total[0] += of_warp.x;
                total[1] += of_warp.y;
                total[2] += of_warp.z;
                total[3] += of_warp.w;
            }
#pragma unroll
            for (uint c = 0; c < 4; c++) {
                const uint own = output + g + c / 2 * 8, r = 2 * t + c % 2;
                if (own < end && r < p.rows) {
                    store(out, place_in_parts(p, p.parts, r, own), p.alpha * total[c], OUT_DTYPE);
                }
            }
        }
    }
}
