// Partial states of attention: o, m and l of an item's rows, left in device memory by every block that has a part of the
// item, merged by whoever comes last; and the end of a row, rotated back and divided by l.
//
// The state of the block at hand is in shared memory; a kernel says where by a type S with
//   float *o()         rows of HEAD_DIM,
//   float2 end(r)      m and l of a row, set_end(r, m, l) to change them,
//   float2 *parts()    room for MAX_MERGE of these for each row,
//   uint *flag()       a word that nobody uses.
#ifndef KVANT_ATTEND_MERGE_H
#define KVANT_ATTEND_MERGE_H
#include "attend_cluster.h"
#include "attend_plan.h"
#include "attend_rotate.h"
#include "attend_softmax.h"
#include "elements.h"

struct Partials {
    float *states;
    uint *counters;
    // Of the step's own keys, to be added by the launch that has them; or null.
    float *cached;
    uchar *out;
};

// o, then m and l, of the rows of an item that a block of a cluster has; a multiple of 16 bytes.
inline uint rows_of_share(const AttendParams &p) {
    return (p.item_rows + CLUSTER - 1) / CLUSTER;
}
inline ulong state_floats(const AttendParams &p) {
    return ulong(rows_of_share(p)) * HEAD_DIM + (rows_of_share(p) * 2 + 3) / 4 * 4;
}
// Each block of a cluster has slots and counters of its own.
inline uint in_cluster(uint number) {
    return number * CLUSTER + blockIdx.x % CLUSTER;
}

template <typename S>
inline void leave_state(const AttendParams &p, const Partials &to, const S &state, uint slot, uint rows) {
    float *at = to.states + in_cluster(slot) * state_floats(p);
    for (uint i = threadIdx.x; i < rows * (HEAD_DIM / 4); i += THREADS) {
        __stcg(reinterpret_cast<float4 *>(at) + i, reinterpret_cast<const float4 *>(state.o())[i]);
    }
    for (uint r = threadIdx.x; r < rows; r += THREADS) {
        __stcg(reinterpret_cast<float2 *>(at + rows_of_share(p) * HEAD_DIM) + r, state.end(r));
    }
}

// Of a row, four coordinates each.
constexpr uint ROW_QUADS = HEAD_DIM / 4;

// The sum of four coordinates of every `step`-th of `parts`, in this order, AT_ONCE loads in flight: `quad` is where a part has
// them, and `factor` what they are multiplied by.
template <uint AT_ONCE, typename Quad, typename Factor>
inline float4 sum_of_parts(Range parts, uint step, Quad quad, Factor factor) {
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (uint first = parts.first; first < parts.end; first += step * AT_ONCE) {
        float4 x[AT_ONCE];
#pragma unroll
        for (uint i = 0; i < AT_ONCE; i++) {
            const uint part = first + i * step;
            x[i] = make_float4(0, 0, 0, 0);
            if (part < parts.end) {
                x[i] = __ldcg(quad(part));
            }
        }
#pragma unroll
        for (uint i = 0; i < AT_ONCE; i++) {
            const uint part = first + i * step;
            const float f = part < parts.end ? factor(part) : 0;
            o = make_float4(o.x + x[i].x * f, o.y + x[i].y * f, o.z + x[i].z * f, o.w + x[i].w * f);
        }
    }
    return o;
}

// Merges `count` parts of an item, the first one and every `step`-th after it, in this order, into the state.
template <typename S>
inline void merge_parts(const AttendParams &p, const Partials &from, const S &state, const Piece &piece, uint rows,
                        uint first, uint count, uint step) {
    const ulong stride = state_floats(p);
    // m and l of every part and row; m becomes the factor of the part.
    float2 *parts = state.parts();
    for (uint at = threadIdx.x; at < count * rows; at += THREADS) {
        const float *state_of_part = from.states + in_cluster(piece.slot(first + at / rows * step)) * stride;
        const float *ends = state_of_part + rows_of_share(p) * HEAD_DIM;
        parts[at] = __ldcg(reinterpret_cast<const float2 *>(ends) + at % rows);
    }
    __syncthreads();
    // A warp for each row, a lane for each part.
    static_assert(MAX_MERGE <= 32, "attend: a lane for each part");
    const uint lane = threadIdx.x % 32;
    for (uint r = threadIdx.x / 32; r < rows; r += WARPS) {
        const float2 of_part = lane < count ? parts[lane * rows + r] : make_float2(nothing(), 0);
        float m = of_part.x;
#pragma unroll
        for (uint step = 1; step < 32; step *= 2) {
            m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, step));
        }
        const float factor = factor_of(of_part.x, m);
        float l = of_part.y * factor;
#pragma unroll
        for (uint step = 1; step < 32; step *= 2) {
            l += __shfl_xor_sync(0xFFFFFFFF, l, step);
        }
        if (lane < count) {
            parts[lane * rows + r].x = factor;
        }
        if (lane == 0) {
            state.set_end(r, m, l);
        }
    }
    __syncthreads();
    for (uint at = threadIdx.x; at < rows * ROW_QUADS; at += THREADS) {
        const auto quad = [&](uint part) {
            return reinterpret_cast<const float4 *>(from.states + in_cluster(piece.slot(first + part * step)) * stride) + at;
        };
        const auto factor = [&](uint part) { return parts[part * rows + at / ROW_QUADS].x; };
        reinterpret_cast<float4 *>(state.o())[at] = sum_of_parts<8>({0, count}, 1, quad, factor);
    }
    __syncthreads();
}

// Leaves this block's state, and merges: parts into groups of about the square root of their number, groups into the
// whole. Whoever comes last does it. True for the block that then holds the whole.
template <typename S>
inline bool merge(const AttendParams &p, const Partials &to, const S &state, const Piece &piece, uint rows) {
    uint group = piece.parts;
    if (piece.parts > MAX_MERGE) {
        group = uint(ceilf(sqrtf(float(piece.parts))));
    }
    const uint groups = (piece.parts + group - 1) / group;
    const uint first = piece.part / group * group;
    const uint members = min(group, piece.parts - first);
    uint *of_item = to.counters + in_cluster(piece.item * p.kv_heads + piece.head);
    uint *of_group = groups == 1 ? of_item : to.counters + in_cluster(p.items * p.kv_heads + piece.slot(first));
    // First the members of the group, then the groups.
    uint *counter = of_group;
    uint slot = piece.slot(piece.part), begin = first, count = members, step = 1;
#pragma unroll 1
    while (true) {
        leave_state(p, to, state, slot, rows);
        if (!arrive(state.flag(), counter, count)) {
            return false;
        }
        merge_parts(p, to, state, piece, rows, begin, count, step);
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

// Takes the rows of the state, rotated back if they are ROTATED, to the output, or to the state that the step's own keys
// are added to. `row_of`: the output's row; `sees`: whether a row's token sees any key.
template <bool ROTATED, typename S, typename RowOf, typename Sees>
inline void finish_rows(const Partials &to, const S &state, uint rows, RowOf row_of, Sees sees) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint r = warp; r < rows; r += WARPS) {
        const ulong at = row_of(r);
        const float m = state.end(r).x;
        float l = state.end(r).y;
        float x[HEAD_DIM / 32];
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            x[i] = state.o()[r * HEAD_DIM + lane + 32 * i];
        }
        if (ROTATED) {
            unrotate<HEAD_DIM>(x, lane);
        }
        if (to.cached != nullptr) {
            float *cached = to.cached + at * (HEAD_DIM + 2);
            if (!FRESH) {
#pragma unroll
                for (uint i = 0; i < HEAD_DIM / 32; i++) {
                    cached[lane + 32 * i] = x[i];
                }
                if (lane == 0) {
                    cached[HEAD_DIM] = m;
                    cached[HEAD_DIM + 1] = l;
                }
                continue;
            }
            const float cached_m = cached[HEAD_DIM], cached_l = cached[HEAD_DIM + 1];
            const float whole = fmaxf(m, cached_m);
            const float f = factor_of(m, whole), g = factor_of(cached_m, whole);
            l = l * f + cached_l * g;
#pragma unroll
            for (uint i = 0; i < HEAD_DIM / 32; i++) {
                x[i] = x[i] * f + cached[lane + 32 * i] * g;
            }
        }
        const float inverse = inverse_of_sum(l, [&] { return sees(r); });
#pragma unroll
        for (uint i = 0; i < HEAD_DIM / 32; i++) {
            store(to.out, at * HEAD_DIM + lane + 32 * i, x[i] * inverse, OUT_DTYPE);
        }
    }
}

#endif
