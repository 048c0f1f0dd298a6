// linear_stream: linear (linear_generic.cu) for a dense weight and one row, by bulk copies. Reading W is the limit.
//
// x is [inputs], f32, f16 or bf16; W is [outputs, inputs], f16 or bf16, and its rows begin at multiples of 16 bytes.
//
// Every block has a stretch of outputs, and a multiprocessor to itself or with another block. A last warp copies rows
// of W, ROWS of them at a time or, of long rows, SEGMENT inputs of ROWS rows, up to STAGES of these ahead of their use.
// Each of the other warps multiplies PER_WARP of these rows by x, which shared memory holds as floats: all products and
// sums are those of floats. Where a gate takes the results in halves (linear/gating.h), half of the rows are of the
// second.
//
// Copies of W begin before the previous kernel has ended (device/dependent_launch.h); x is read later.
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "device/fragments.h"
#include "device/mbarrier.h"
#include "device/reduce.h"
#include "device/ring_cursor.h"
#include "linear/gating.h"
#include "linear/params.h"

constexpr uint ROWS = WARPS * PER_WARP;
// Where outputs are in halves, a stage has as many of each, and a warp.
constexpr uint SIDES = GATING == HALVES ? 2 : 1;
constexpr uint STEP = ROWS / SIDES;
constexpr uint OWN = PER_WARP / SIDES;
// Weights that a lane reads at a time, and a warp.
constexpr uint LANE = 8;
constexpr uint PIECE = 32 * LANE;
constexpr uint SEGMENTS = (INPUTS + SEGMENT - 1) / SEGMENT;
constexpr uint W_ROW = INPUTS * 2;
constexpr uint STAGE = ROWS * SEGMENT * 2;
constexpr bool HALF = W_DTYPE == F16;

constexpr uint X_AT = STAGES * STAGE;
constexpr uint BARRIERS_AT = X_AT + (INPUTS + PIECE - 1) / PIECE * PIECE * 4;
// stream.rs computes the same sum.
static_assert(BARRIERS_AT + STAGES * 16 == SHARED_BYTES, "linear: the shared memory that Rust asks for");
static_assert(GATING != HALVES || PER_WARP % 2 == 0, "linear: a warp has both rows of a pair");
static_assert(INPUTS % LANE == 0 && (SEGMENTS == 1 || SEGMENT % PIECE == 0), "linear: shapes that linear_stream takes");

// Begins to copy `rows` rows of each side, of a segment. One thread calls it.
inline void begin_rows(const uchar *from, ulong other_side, uint to, uint barrier, uint rows, uint segment) {
    const uint bytes = SEGMENTS == 1 ? W_ROW : min(SEGMENT, INPUTS - segment * SEGMENT) * 2;
    barrier_expect(barrier, SIDES * rows * bytes);
#pragma unroll
    for (uint side = 0; side < SIDES; side++) {
        const uchar *of_side = from + side * other_side + segment * (SEGMENT * 2);
        const uint to_side = to + side * STEP * (SEGMENT * 2);
        if constexpr (SEGMENTS == 1) {
            copy_bulk(to_side, of_side, rows * W_ROW, barrier);
        } else {
#pragma unroll 1
            for (uint r = 0; r < rows; r++) {
                copy_bulk(to_side + r * (SEGMENT * 2), of_side + r * W_ROW, bytes, barrier);
            }
        }
    }
}

// Blocks divide the outputs among them. `up` and `gated` are those of linear/gating.h.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), BESIDE)
    KVANT_KERNEL(const uchar *x, const uchar *values, const uchar *, const uchar *, const uint *, uchar *out, const LinearParams p,
                const uchar *up, uchar *gated) {
    extern __shared__ __align__(128) uchar memory[];
    const uint lane = threadIdx.x % 32, warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
    const ulong outputs = p.outputs / SIDES;
    const uint first = uint(outputs * blockIdx.x / gridDim.x), end = uint(outputs * (blockIdx.x + 1) / gridDim.x);
    const uint items = (end - first + STEP - 1) / STEP * SEGMENTS;
    const uint shared = shared_address(memory), full = shared + BARRIERS_AT, empty = full + STAGES * 8;
    float *xs = reinterpret_cast<float *>(memory + X_AT);
    // The stage that is filled or used next.
    RingCursor<STAGES> cursor;
    uint row = first, segment = 0;
    const auto begin_next = [&] {
        begin_rows(values + ulong(row) * W_ROW, outputs * W_ROW, shared + cursor.stage * STAGE, full + cursor.stage * 8,
                   min(STEP, end - row), segment);
        cursor.next();
        segment++;
        if (segment == SEGMENTS) {
            segment = 0;
            row += STEP;
        }
    };
    if (warp == WARPS) {
        if (elected()) {
#pragma unroll
            for (uint s = 0; s < STAGES; s++) {
                barrier_init(full + s * 8, 1);
                barrier_init(empty + s * 8, WARPS * 32);
            }
            show_barriers_to_copies();
#pragma unroll 1
            for (uint i = 0; i < min(STAGES, items); i++) {
                begin_next();
            }
        }
        __syncwarp();
    } else {
        wait_for_previous();
        let_next_begin();
        // The eight numbers that a lane multiplies lie in two halves of a piece, for loads without bank conflicts.
#pragma unroll 4
        for (uint i = threadIdx.x * 4; i < INPUTS; i += WARPS * 32 * 4) {
            *reinterpret_cast<float4 *>(xs + i / PIECE * PIECE + i / 4 % 2 * (PIECE / 2) + i % PIECE / LANE * 4) = load4(x, i, X_DTYPE);
        }
    }
    __syncthreads();
    if (warp == WARPS) {
        if (elected()) {
#pragma unroll 1
            for (uint i = STAGES; i < items; i++) {
                barrier_wait(empty + cursor.stage * 8, cursor.parity ^ 1);
                begin_next();
            }
        }
        return;
    }
    float sums[PER_WARP][2] = {};
#pragma unroll 1
    for (uint i = 0; i < items; i++) {
        barrier_wait(full + cursor.stage * 8, cursor.parity);
        const uint own = row + warp * OWN;
        if (own < end) {
            const uchar *codes = memory + cursor.stage * STAGE + warp * (OWN * SEGMENT * 2) + lane * (LANE * 2);
            const float *in = xs + segment * SEGMENT + lane * 4;
            const uint inputs = SEGMENTS == 1 ? INPUTS : min(SEGMENT, INPUTS - segment * SEGMENT);
#pragma unroll 5
            for (uint at = 0; at < inputs; at += PIECE) {
                // Of a last piece only a part may be there.
                if (INPUTS % PIECE != 0 && at + lane * LANE >= inputs) {
                    break;
                }
                const float4 low = *reinterpret_cast<const float4 *>(in + at), high = *reinterpret_cast<const float4 *>(in + at + PIECE / 2);
#pragma unroll
                for (uint r = 0; r < PER_WARP; r++) {
                    // Of rows beyond the last one, what a stage held before.
                    const uint4 w = *reinterpret_cast<const uint4 *>(codes + (r / OWN * STEP + r % OWN) * (SEGMENT * 2) + at * 2);
                    const float2 a = unpack<HALF>(w.x), b = unpack<HALF>(w.y), c = unpack<HALF>(w.z), d = unpack<HALF>(w.w);
                    sums[r][0] = fmaf(a.x, low.x, fmaf(a.y, low.y, fmaf(b.x, low.z, fmaf(b.y, low.w, sums[r][0]))));
                    sums[r][1] = fmaf(c.x, high.x, fmaf(c.y, high.y, fmaf(d.x, high.z, fmaf(d.y, high.w, sums[r][1]))));
                }
            }
        }
        // The stage may be overwritten.
        if (items > STAGES) {
            barrier_arrive(empty + cursor.stage * 8);
        }
        cursor.next();
        segment++;
        if (segment == SEGMENTS) {
            float results[PER_WARP];
#pragma unroll
            for (uint r = 0; r < PER_WARP; r++) {
                results[r] = p.alpha * over_warp<Sum>(sums[r][0] + sums[r][1]);
                sums[r][0] = sums[r][1] = 0;
            }
#pragma unroll
            for (uint r = 0; r < OWN; r++) {
                if (lane == r && own + r < end) {
                    store_result(out, up, gated, 0, p.outputs, own + r, results[r], results[PER_WARP - OWN + r]);
                }
            }
            segment = 0;
            row += STEP;
        }
    }
}
