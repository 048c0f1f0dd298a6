// Partial states of attention: o, m and l of an item's rows, left in device memory by every block that has a part of the
// item, merged by whoever comes last; and the end of a row, rotated back and divided by l.
#ifndef KVANT_ATTEND_MERGE_H
#define KVANT_ATTEND_MERGE_H
#include "attend_plan.h"
#include "attend_rotate.h"
#include "elements.h"

// The maximum of no scores.
inline float nothing() {
    return __uint_as_float(0xFF800000);
}

inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// exp2(part - whole), also where both are infinite or there is nothing.
inline float factor_of(float part, float whole) {
    return part == whole ? 1 : exp2_fast(part - whole);
}

// The state of an item's rows in shared memory, with room to merge in.
struct State {
    // Rows of HEAD_DIM.
    float *o;
    // m and l of each row.
    float2 *ends;
    // MAX_MERGE for each row.
    float2 *parts;
    uint *flag;
};

struct Partials {
    float *states;
    uint *counters;
    // Of the step's own keys, to be added by the launch that has them; or null.
    float *cached;
    uchar *out;
};

// o, then m and l, of the rows of an item; a multiple of 16 bytes.
inline ulong state_floats(const AttendParams &p) {
    return ulong(p.item_rows) * HEAD_DIM + (p.item_rows * 2 + 3) / 4 * 4;
}

inline void leave_state(const AttendParams &p, const Partials &to, const State &state, uint slot, uint rows) {
    float *at = to.states + slot * state_floats(p);
    for (uint i = threadIdx.x; i < rows * (HEAD_DIM / 4); i += THREADS) {
        __stcg(reinterpret_cast<float4 *>(at) + i, reinterpret_cast<const float4 *>(state.o)[i]);
    }
    for (uint r = threadIdx.x; r < rows; r += THREADS) {
        __stcg(reinterpret_cast<float2 *>(at + p.item_rows * HEAD_DIM) + r, state.ends[r]);
    }
}

// Counts this block's arrival; whether it is the last of `all`, who then sees what the others have left.
inline bool arrive(const State &state, uint *counter, uint all) {
    __syncthreads();
    if (threadIdx.x == 0) {
        uint before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        const bool last = before == all - 1;
        if (last) {
            // For the next launch.
            *counter = 0;
        }
        *state.flag = last;
    }
    __syncthreads();
    return *state.flag != 0;
}

// Merges `count` parts of an item, the first one and every `step`-th after it, in this order, into the state.
inline void merge_parts(const AttendParams &p, const Partials &b, const State &state, const Piece &piece, uint rows,
                        uint first, uint count, uint step) {
    const ulong stride = state_floats(p);
    // m and l of every part and row; m becomes the factor of the part.
    float2 *parts = state.parts;
    for (uint at = threadIdx.x; at < count * rows; at += THREADS) {
        const float *from = b.states + piece.slot(first + at / rows * step) * stride + p.item_rows * HEAD_DIM;
        parts[at] = __ldcg(reinterpret_cast<const float2 *>(from) + at % rows);
    }
    __syncthreads();
    for (uint r = threadIdx.x; r < rows; r += THREADS) {
        float m = nothing(), l = 0;
        for (uint part = 0; part < count; part++) {
            m = fmaxf(m, parts[part * rows + r].x);
        }
        for (uint part = 0; part < count; part++) {
            const float2 of_part = parts[part * rows + r];
            const float factor = factor_of(of_part.x, m);
            l += of_part.y * factor;
            parts[part * rows + r].x = factor;
        }
        state.ends[r] = make_float2(m, l);
    }
    __syncthreads();
    constexpr uint QUADS = HEAD_DIM / 4;
    for (uint at = threadIdx.x; at < rows * QUADS; at += THREADS) {
        const uint r = at / QUADS;
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (uint part = 0; part < count; part++) {
            const float *from = b.states + piece.slot(first + part * step) * stride;
            const float4 x = __ldcg(reinterpret_cast<const float4 *>(from) + at);
            const float f = parts[part * rows + r].x;
            o = make_float4(o.x + x.x * f, o.y + x.y * f, o.z + x.z * f, o.w + x.w * f);
        }
        reinterpret_cast<float4 *>(state.o)[at] = o;
    }
    __syncthreads();
}

// Leaves this block's state, and merges: parts into groups of about the square root of their number, groups into the
// whole. Whoever comes last does it. True for the block that then holds the whole.
inline bool merge(const AttendParams &p, const Partials &b, const State &state, const Piece &piece, uint rows) {
    uint group = piece.parts;
    if (piece.parts > MAX_MERGE) {
        group = uint(ceilf(sqrtf(float(piece.parts))));
    }
    const uint groups = (piece.parts + group - 1) / group;
    const uint first = piece.part / group * group;
    const uint members = min(group, piece.parts - first);
    uint *of_item = b.counters + piece.item * p.kv_heads + piece.head;
    uint *of_group = groups == 1 ? of_item : b.counters + p.items * p.kv_heads + piece.slot(first);
    // First the members of the group, then the groups.
    uint *counter = of_group;
    uint slot = piece.slot(piece.part), begin = first, count = members, step = 1;
#pragma unroll 1
    while (true) {
        leave_state(p, b, state, slot, rows);
        if (!arrive(state, counter, count)) {
            return false;
        }
        merge_parts(p, b, state, piece, rows, begin, count, step);
        if (counter == of_item) {
            return true;
        }
        slot = piece.slot(first);
        counter = of_item;
        begin = 0;
        count = groups;
        step = group;
    }
}

#endif
