// Merges the states (state.h) of blocks for one work item, row by row, for attend_generic.cu and attend_quantised.cu.
// Every block with a part of an item leaves o, m and l of the item's rows in device memory; the last block to arrive
// merges them. It then finishes rows: they are rotated back and divided by l.
//
// The block's own state is in shared memory. A kernel describes it by a type S with
//   float *o()         rows of HEAD_DIM,
//   float2 end(r)      m and l of a row, and set_end(r, m, l) to change them,
//   float2 *parts()    room for m and l of MAX_MERGE parts of each row,
//   uint *flag()       an unused word.
#ifndef KVANT_CUDA_ATTEND_MERGE_ROWS_H
#define KVANT_CUDA_ATTEND_MERGE_ROWS_H
#include "attend/state.h"
#include "attend/work.h"
#include "codec/rotate_warp.h"
#include "device/cluster.h"
#include "device/elements.h"

// Coordinates of a row that a lane of a warp holds, lane + 32 i. If 32 does not divide the head size, the last lanes
// have one fewer.
constexpr uint LANE_COORDS = (HEAD_DIM + 31) / 32;
inline bool has_coord(uint i, uint lane) {
    return HEAD_DIM % 32 == 0 || lane + 32 * i < HEAD_DIM;
}

struct Partials {
    float *states;
    uint *counters;
    RowEnds ends;
    uchar *out;
};

// Rows of the state that a block of a cluster has. Its part of the state is o, then m and l; a multiple of 16 bytes.
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

// Quads of a row, of four coordinates each.
constexpr uint ROW_QUADS = HEAD_DIM / 4;

// The sum of a quad over every `step`-th of `parts`, in this order, with AT_ONCE loads in flight. quad(part) is the
// address of the part's quad, factor(part) its factor.
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
            add_scaled(o, x[i], f);
        }
    }
    return o;
}

// Merges `count` parts of an item, the first one and every `step`-th after it, in this order, into the state.
template <typename S>
inline void merge_parts(const AttendParams &p, const Partials &from, const S &state, const ItemPart &part_of_item, uint rows,
                        uint first, uint count, uint step) {
    const ulong stride = state_floats(p);
    // m and l of every part and row. m is replaced by the factor of the part.
    float2 *parts = state.parts();
    for (uint at = threadIdx.x; at < count * rows; at += THREADS) {
        const float *state_of_part = from.states + in_cluster(part_of_item.slot(first + at / rows * step)) * stride;
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
            return reinterpret_cast<const float4 *>(from.states + in_cluster(part_of_item.slot(first + part * step)) * stride) + at;
        };
        const auto factor = [&](uint part) { return parts[part * rows + at / ROW_QUADS].x; };
        reinterpret_cast<float4 *>(state.o())[at] = sum_of_parts<8>({0, count}, 1, quad, factor);
    }
    __syncthreads();
}

// Stores this block's state. The last block to arrive merges the parts; many parts are first merged in groups of about
// the square root of their number. Returns true in the block with the merged state.
template <typename S>
inline bool merge(const AttendParams &p, const Partials &to, const S &state, const ItemPart &part_of_item, uint rows) {
    uint group = part_of_item.parts;
    if (part_of_item.parts > MAX_MERGE) {
        group = uint(ceilf(sqrtf(float(part_of_item.parts))));
    }
    const uint groups = (part_of_item.parts + group - 1) / group;
    const uint first = part_of_item.part / group * group;
    const uint members = min(group, part_of_item.parts - first);
    uint *of_item = to.counters + in_cluster(part_of_item.item * p.kv_heads + part_of_item.head);
    uint *of_group = groups == 1 ? of_item : to.counters + in_cluster(p.items * p.kv_heads + part_of_item.slot(first));
    // Merge the members of the group first, then the groups.
    uint *counter = of_group;
    uint slot = part_of_item.slot(part_of_item.part), begin = first, count = members, step = 1;
#pragma unroll 1
    while (true) {
        leave_state(p, to, state, slot, rows);
        if (!arrive(state.flag(), counter, count)) {
            return false;
        }
        merge_parts(p, to, state, part_of_item, rows, begin, count, step);
        if (counter == of_item) {
            return true;
        }
        slot = part_of_item.slot(first);
        counter = of_item;
        begin = 0;
        count = groups;
        step = group;
    }
}

// Writes the rows of the state, rotated back if they are ROTATED, to the output. row_of(r) is the output's row, sees(r)
// whether the row's token sees any key.
template <bool ROTATED, typename S, typename RowOf, typename Sees>
inline void finish_rows(const AttendParams &p, const Partials &to, const S &state, uint rows, RowOf row_of, Sees sees) {
    const uint warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint r = warp; r < rows; r += WARPS) {
        const ulong at = row_of(r);
        float x[LANE_COORDS];
#pragma unroll
        for (uint i = 0; i < LANE_COORDS; i++) {
            x[i] = has_coord(i, lane) ? state.o()[r * HEAD_DIM + lane + 32 * i] : 0;
        }
        if constexpr (ROTATED) {
            unrotate<HEAD_DIM>(x, lane);
        }
        const float2 end = state.end(r);
        const RowFactors f = finish_row(p, to.ends, at, end.x, end.y, to.ends.of_earlier(at), [&] { return sees(r); });
#pragma unroll
        for (uint i = 0; i < LANE_COORDS; i++) {
            if (has_coord(i, lane)) {
                const ulong to_coord = at * HEAD_DIM + lane + 32 * i;
                float y = x[i] * f.own;
                if (EARLIER) {
                    y += to.ends.earlier_at<float>(to_coord) * f.earlier;
                }
                store(to.out, to_coord, y, OUT_DTYPE);
            }
        }
        if (ENDS) {
            // All lanes have read the earlier end.
            __syncwarp();
            if (lane == 0) {
                to.ends.leave(at, f.end);
            }
        }
    }
}

#endif
