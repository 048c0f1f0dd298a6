// Partial states, where several blocks share an item: how they are left, merged, and turned into the output.
#ifndef KVANT_ATTEND_PARTIAL_H
#define KVANT_ATTEND_PARTIAL_H
#include "attend_rotate.h"
#include "attend_shared.h"

// o, then m and l, of the rows of an item; a multiple of 16 bytes.
inline ulong state_floats(const AttendParams &p) {
    return ulong(p.item_rows) * HEAD_DIM + (p.item_rows * 2 + 3) / 4 * 4;
}

// exp2(part - whole), also where both are infinite or there is nothing.
inline float factor_of(float part, float whole) {
    return part == whole ? 1 : exp2_fast(part - whole);
}

// Leaves the rows in shared.output(), with their m and l, as a partial state.
inline void leave_state(const AttendParams &p, const Buffers &b, const Shared &shared, uint slot, uint rows) {
    float *to = b.partials + slot * state_floats(p);
    for (uint at = threadIdx.x; at < rows * (HEAD_DIM / 4); at += THREADS) {
        __stcg(reinterpret_cast<float4 *>(to) + at, reinterpret_cast<const float4 *>(shared.output())[at]);
    }
    for (uint r = threadIdx.x; r < rows; r += THREADS) {
        __stcg(reinterpret_cast<float2 *>(to + p.item_rows * HEAD_DIM) + r,
               make_float2(shared.rows()[r].m, shared.rows()[r].l));
    }
}

// Counts this block's arrival; whether it is the last of `all`, who then sees what the others have left.
inline bool arrive(const Shared &shared, uint *counter, uint all) {
    __syncthreads();
    if (threadIdx.x == 0) {
        uint before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        const bool last = before == all - 1;
        if (last) {
            // For the next launch.
            *counter = 0;
        }
        shared.words()[2] = last;
    }
    __syncthreads();
    return shared.words()[2] != 0;
}

// Merges `count` parts of an item, the first one and every `step`-th after it, in this order, into shared.output() and the
// rows' m and l.
inline void merge_parts(const AttendParams &p, const Buffers &b, const Shared &shared, const Piece &piece, uint rows,
                        uint first, uint count, uint step) {
    const ulong stride = state_floats(p);
    // m and l of every part and row; m becomes the factor of the part.
    float2 *parts = reinterpret_cast<float2 *>(shared.queries());
    static_assert(MAX_MERGE * ROWS * 8 <= (Q_TERMS * STEPS + VARIANTS * P_TERMS * KEY_GROUPS) * NT * 256, "attend: room");
    for (uint at = threadIdx.x; at < count * rows; at += THREADS) {
        const float *from = b.partials + piece.slot(first + at / rows * step) * stride + p.item_rows * HEAD_DIM;
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
        shared.rows()[r].m = m;
        shared.rows()[r].l = l;
    }
    __syncthreads();
    constexpr uint QUADS = HEAD_DIM / 4;
    for (uint at = threadIdx.x; at < rows * QUADS; at += THREADS) {
        const uint r = at / QUADS;
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (uint part = 0; part < count; part++) {
            const float *from = b.partials + piece.slot(first + part * step) * stride;
            const float4 x = __ldcg(reinterpret_cast<const float4 *>(from) + at);
            const float f = parts[part * rows + r].x;
            o = make_float4(o.x + x.x * f, o.y + x.y * f, o.z + x.z * f, o.w + x.w * f);
        }
        reinterpret_cast<float4 *>(shared.output())[at] = o;
    }
    __syncthreads();
}

// Leaves this block's state, and merges: parts into groups of about the square root of their number, groups into the
// whole. Whoever comes last does it. True for the block that then holds the whole.
inline bool merge(const AttendParams &p, const Buffers &b, const Shared &shared, const Piece &piece, uint rows) {
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
        leave_state(p, b, shared, slot, rows);
        if (!arrive(shared, counter, count)) {
            return false;
        }
        merge_parts(p, b, shared, piece, rows, begin, count, step);
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

// Takes the rows in shared.output() to the output, or to the state that the step's own keys are added to.
inline void finish_rows(const AttendParams &p, const Buffers &b, const Shared &shared, Range item, uint head) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint r = warp; r < item.len(); r += WARPS) {
        const uint row = item.first + r;
        const ulong at = ulong(row / p.group) * p.kv_heads * p.group + head * p.group + row % p.group;
        float m = shared.rows()[r].m, l = shared.rows()[r].l;
        float x[HEAD_DIM / 32];
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            x[i] = shared.output()[r * HEAD_DIM + lane + 32 * i];
        }
        if (V::QUANTISED) {
            unrotate<HEAD_DIM>(x, lane);
        }
        if (b.state != nullptr) {
            float *state = b.state + at * (HEAD_DIM + 2);
            if (!FRESH) {
#pragma unroll
                for (uint i = 0; i < HEAD_DIM / 32; i++) {
                    state[lane + 32 * i] = x[i];
                }
                if (lane == 0) {
                    state[HEAD_DIM] = m;
                    state[HEAD_DIM + 1] = l;
                }
                continue;
            }
            const float cached_m = state[HEAD_DIM], cached_l = state[HEAD_DIM + 1];
            const float whole = fmaxf(m, cached_m);
            const float f = factor_of(m, whole), g = factor_of(cached_m, whole);
            l = l * f + cached_l * g;
#pragma unroll
            for (uint i = 0; i < HEAD_DIM / 32; i++) {
                x[i] = x[i] * f + state[lane + 32 * i] * g;
            }
        }
        const float inverse = l == 0 ? 0 : 1 / l;
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            store(b.out, at * HEAD_DIM + lane + 32 * i, x[i] * inverse, OUT_DTYPE);
        }
    }
}

#endif
