// How the parts of an item and head come together where all blocks are resident at once and each has one piece, for
// attend_quantised.cu: every block leaves its state, and the first of them take a row of the output each, as soon as all have
// left theirs. So no block reads more than a row of each part.
#ifndef KVANT_ATTEND_QUANTISED_GATHER_H
#define KVANT_ATTEND_QUANTISED_GATHER_H
#include "attend_quantised_shared.h"

// The most parts: their ends are in shared memory.
constexpr uint MAX_GATHERED = MAX_MERGE * ROWS;
// Threads with every SIDES-th part of the same four coordinates.
constexpr uint QUADS = HEAD_DIM / 4;
constexpr uint SIDES = THREADS / QUADS;
static_assert(SIDES > 0 && SIDES * QUADS * 16 <= SUMS_BYTES, "attend: room for the sums of the sides");

// Merges a row of all parts, always in the same order, into the first row of the state.
inline void merge_row(const AttendParams &p, const Partials &from, const State &state, const Piece &piece, uint r) {
    const uint thread = threadIdx.x, lane = thread % 32;
    const ulong stride = state_floats(p);
    const float *first = from.states + piece.first_slot * stride;
    float2 *ends = state.parts();
    for (uint part = thread; part < piece.parts; part += THREADS) {
        ends[part] = __ldcg(reinterpret_cast<const float2 *>(first + part * stride + p.item_rows * HEAD_DIM) + r);
    }
    __syncthreads();
    float m = nothing(), l = 0;
    for (uint part = lane; part < piece.parts; part += 32) {
        m = fmaxf(m, ends[part].x);
    }
#pragma unroll
    for (uint step = 1; step < 32; step *= 2) {
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, step));
    }
    const uint side = thread / QUADS, quad = thread % QUADS;
    float4 *sums = sums_of_warps();
    if (side < SIDES) {
        const float4 *row = reinterpret_cast<const float4 *>(first + r * HEAD_DIM) + quad;
        float4 o = make_float4(0, 0, 0, 0);
        // Enough loads in flight.
        constexpr uint AT_ONCE = 12;
#pragma unroll 1
        for (uint begin = side; begin < piece.parts; begin += SIDES * AT_ONCE) {
            float4 x[AT_ONCE];
#pragma unroll
            for (uint i = 0; i < AT_ONCE; i++) {
                const uint part = begin + i * SIDES;
                x[i] = make_float4(0, 0, 0, 0);
                if (part < piece.parts) {
                    x[i] = __ldcg(row + part * (stride / 4));
                }
            }
#pragma unroll
            for (uint i = 0; i < AT_ONCE; i++) {
                const uint part = begin + i * SIDES;
                const float f = part < piece.parts ? factor_of(ends[part].x, m) : 0;
                o = make_float4(o.x + x[i].x * f, o.y + x[i].y * f, o.z + x[i].z * f, o.w + x[i].w * f);
            }
        }
        sums[thread] = o;
    }
    if (thread < 32) {
        for (uint part = lane; part < piece.parts; part += 32) {
            l += ends[part].y * factor_of(ends[part].x, m);
        }
#pragma unroll
        for (uint step = 1; step < 32; step *= 2) {
            l += __shfl_xor_sync(0xFFFFFFFF, l, step);
        }
        if (lane == 0) {
            state.set_end(0, m, l);
        }
    }
    __syncthreads();
    if (thread < QUADS) {
        float4 o = sums[thread];
#pragma unroll
        for (uint i = 1; i < SIDES; i++) {
            const float4 x = sums[i * QUADS + thread];
            o = make_float4(o.x + x.x, o.y + x.y, o.z + x.z, o.w + x.w);
        }
        reinterpret_cast<float4 *>(state.o())[thread] = o;
    }
    __syncthreads();
}

// Leaves this block's state; takes its rows, if it has some, to the output.
inline void gather(const AttendParams &p, const Partials &to, const State &state, const Piece &piece, ulong first_row) {
    const uint owners = min(p.group, piece.parts);
    uint *counter = to.counters + piece.item * p.kv_heads + piece.head;
    leave_state(p, to, state, piece.slot(piece.part), p.group);
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        // The upper half counts owners that are done.
        for (uint left = 0; piece.part < owners && left % 65536 < piece.parts;) {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(left) : "l"(counter) : "memory");
        }
    }
    if (piece.part >= owners) {
        return;
    }
    __syncthreads();
#pragma unroll 1
    for (uint r = piece.part; r < p.group; r += owners) {
        merge_row(p, to, state, piece, r);
        finish_rows<true>(to, state, 1, [&](uint) { return first_row + r; });
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        uint before;
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 65536;" : "=r"(before) : "l"(counter) : "memory");
        if (before / 65536 == owners - 1) {
            // For the next launch.
            *counter = 0;
        }
    }
}

#endif
