// Merge of the parts of an item and head in attend_quantised.cu if all blocks are resident at once and have one part
// each. Every block stores its state. When all states are stored, the first blocks, the owners, merge and write one row
// of the output each, so that no block reads more than one row of each part. The wait of an owner is limited:
// afterwards it hands its rows to the last block to arrive, and ends, so that blocks which have not begun can have its
// multiprocessor.
#ifndef KVANT_CUDA_ATTEND_QUANTISED_GATHER_H
#define KVANT_CUDA_ATTEND_QUANTISED_GATHER_H
#include "attend/quantised/layout.h"

// Maximum parts: their ends are in shared memory.
constexpr uint MAX_GATHERED = MAX_MERGE * ROWS;
// Threads with every SIDES-th part of the same four coordinates.
constexpr uint SIDES = THREADS / ROW_QUADS;
static_assert(!GATHER || (SIDES > 0 && SIDES * ROW_QUADS * 16 <= SUMS_BYTES), "attend: room for the sums of the sides");

// Merges a row of all parts, always in the same order, into the first row of the state.
inline void merge_row(const AttendParams &p, const Partials &from, const State &state, const ItemPart &part_of_item, uint r) {
    const uint thread = threadIdx.x, lane = thread % 32;
    const ulong stride = state_floats(p);
    const float *first = from.states + part_of_item.first_slot * stride;
    float2 *ends = state.parts();
    for (uint part = thread; part < part_of_item.parts; part += THREADS) {
        ends[part] = __ldcg(reinterpret_cast<const float2 *>(first + part * stride + p.item_rows * HEAD_DIM) + r);
    }
    __syncthreads();
    float m = nothing(), l = 0;
    for (uint part = lane; part < part_of_item.parts; part += 32) {
        m = fmaxf(m, ends[part].x);
    }
#pragma unroll
    for (uint step = 1; step < 32; step *= 2) {
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, step));
    }
    const uint side = thread / ROW_QUADS, quad = thread % ROW_QUADS;
    float4 *sums = sums_of_warps();
    if (side < SIDES) {
        const float4 *row = reinterpret_cast<const float4 *>(first + r * HEAD_DIM) + quad;
        sums[thread] = sum_of_parts<12>(
            {side, part_of_item.parts}, SIDES, [&](uint part) { return row + part * (stride / 4); },
            [&](uint part) { return factor_of(ends[part].x, m); });
    }
    if (thread < 32) {
        for (uint part = lane; part < part_of_item.parts; part += 32) {
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
    if (thread < ROW_QUADS) {
        float4 o = sums[thread];
#pragma unroll
        for (uint i = 1; i < SIDES; i++) {
            const float4 x = sums[i * ROW_QUADS + thread];
            o = make_float4(o.x + x.x, o.y + x.y, o.z + x.z, o.w + x.w);
        }
        reinterpret_cast<float4 *>(state.o())[thread] = o;
    }
    __syncthreads();
}

// Polls after which an owner stops waiting: a few milliseconds. Launches in other streams may keep some blocks from
// being resident.
constexpr uint PATIENCE = 1 << 12;

// A counter of an item and head has three fields: parts that have arrived, owners that have stopped waiting, owners
// that are done.
constexpr uint GAVE_UP = 1 << 16;
constexpr uint DONE = 1 << 24;
inline uint arrived_of(uint counter) {
    return counter % GAVE_UP;
}

inline uint load_acquire(const uint *at) {
    uint x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}

// The owners whose rows this block merges, as bits. An owner merges its own row unless it has stopped waiting for the
// other parts. The last block to arrive also merges the rows of owners that have stopped.
inline uint owned(uint *counter, uint part, uint parts, uint owners) {
    uint before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    const bool last = arrived_of(before) == parts - 1;
    uint mine = last ? before / GAVE_UP % (DONE / GAVE_UP) : 0;
    if (part < owners) {
        bool all = last;
        for (uint polls = 0; !all && polls < PATIENCE; polls++) {
            all = arrived_of(load_acquire(counter)) == parts;
        }
        if (!all) {
            asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;"
                         : "=r"(before)
                         : "l"(counter), "r"(GAVE_UP << part)
                         : "memory");
            // If the last part has arrived meanwhile, its block does not know that this owner has stopped.
            all = arrived_of(before) == parts;
        }
        mine |= all ? 1u << part : 0;
    }
    return mine;
}

// Stores this block's state, and writes the rows that it owns, if any.
template <typename Sees>
inline void gather(const AttendParams &p, const Partials &to, const State &state, const ItemPart &part_of_item,
                   const QueryRows &rows, Sees sees) {
    const uint owners = min(rows.count, part_of_item.parts);
    uint *counter = to.counters + part_of_item.item * p.kv_heads + part_of_item.head;
    leave_state(p, to, state, part_of_item.slot(part_of_item.part), rows.count);
    __syncthreads();
    if (threadIdx.x == 0) {
        *state.flag() = owned(counter, part_of_item.part, part_of_item.parts, owners);
    }
    __syncthreads();
    const uint mine = *state.flag();
    if (mine == 0) {
        return;
    }
#pragma unroll 1
    for (uint r = 0; r < rows.count; r++) {
        if ((mine >> r % owners & 1) != 0) {
            merge_row(p, to, state, part_of_item, r);
            finish_rows<true>(p, to, state, 1, [&](uint) { return rows.first + r; }, sees);
            __syncthreads();
        }
    }
    if (threadIdx.x == 0) {
        const uint done = __popc(mine);
        uint before;
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(done * DONE) : "memory");
        if (before / DONE + done == owners) {
            // For the next launch.
            *counter = 0;
        }
    }
}

#endif
