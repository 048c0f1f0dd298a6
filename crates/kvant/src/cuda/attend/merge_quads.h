// Merges the states (state.h) of blocks for one work item, quad by quad, for kernels of dense decode. An item is the
// GROUP query rows of one KV head. A thread has four coordinates of a row, a quad.
//
// The blocks of a cluster merge through distributed shared memory (merge_in_cluster). The blocks of different clusters
// leave their states in device memory (States), and the last to arrive merges them (merge).
#ifndef KVANT_CUDA_ATTEND_MERGE_QUADS_H
#define KVANT_CUDA_ATTEND_MERGE_QUADS_H
#include "attend/state.h"
#include "attend/work.h"
#include "device/cluster.h"
#include "device/elements.h"

constexpr uint QUADS = GROUP * HEAD_DIM / 4;
// Quads that one block of a cluster merges.
constexpr uint SHARE = (QUADS + CLUSTER - 1) / CLUSTER;
// Maximum bytes of states that one block merges.
constexpr uint MAX_MERGED_BYTES = 192 * 1024;

// States in device memory, and counters of blocks that have left theirs. A block of a cluster stores its share of the
// cluster's state; a block of another cluster with the same share merges it.
struct States {
    float *partials;
    uint *counters;
    uint pairs;
    uint kv_heads;
    // The block's number in its cluster.
    uint rank;

    // o, then m and l for each block of a cluster; a multiple of 16 bytes.
    float *at(uint slot) const {
        return partials + slot * ulong(GROUP * HEAD_DIM + (CLUSTER * GROUP * 2 + 3) / 4 * 4);
    }
    uint end_of(uint quad) const {
        return GROUP * HEAD_DIM + (rank * GROUP + quad / (HEAD_DIM / 4)) * 2;
    }
    void leave(uint slot, uint quad, const SoftmaxState &sum) const {
        float *to = at(slot);
        __stcg(reinterpret_cast<float4 *>(to) + quad, sum.o);
        if (quad % (HEAD_DIM / 4) == 0 || quad == rank * SHARE) {
            __stcg(reinterpret_cast<float2 *>(to + end_of(quad)), make_float2(sum.m, sum.l));
        }
    }
    // The counter of an item and head, or of a slot.
    uint *counter(uint number) const {
        return counters + number * CLUSTER + rank;
    }
};

// The destination of the rows of an item and head. Quads of a row belong to several threads and blocks, which do not
// wait for each other, so the ends of an earlier result must not be overwritten: `merges_in_place` in route.rs.
struct Output {
    const AttendParams &p;
    uchar *out;
    RowEnds ends;
    QueryRows rows;
    // Whether the item's token sees any key, if pages hold all of them; over pages, the range of these keys.
    bool sees;
    Range seen;
    Pages pages;

    void finish(uint quad, const SoftmaxState &sum) const {
        if (!rows.has(quad / (HEAD_DIM / 4))) {
            return;
        }
        const ulong at = rows.at(quad / (HEAD_DIM / 4));
        const uint column = quad % (HEAD_DIM / 4) * 4;
        const RowFactors f = finish_row(p, ends, at, sum.m, sum.l, ends.of_earlier(at),
                                        [&] { return sees && (PAGE_SHIFT == 0 || pages.hold_any(seen)); });
        float4 o = make_float4(sum.o.x * f.own, sum.o.y * f.own, sum.o.z * f.own, sum.o.w * f.own);
        if (EARLIER) {
            add_scaled(o, ends.earlier_at<float4>(at * HEAD_DIM + column), f.earlier);
        }
        store4(out, at * HEAD_DIM + column, o, OUT_DTYPE);
        if (column == 0) {
            ends.leave(at, f.end);
        }
    }
};

// A block's state in shared memory, where the cluster's other blocks read it: rows are `pitch` floats apart.
struct SharedState {
    float *o;
    uint pitch;
    float2 *ml;

    float4 *at(uint quad) const {
        return reinterpret_cast<float4 *>(o + quad / (HEAD_DIM / 4) * pitch + quad % (HEAD_DIM / 4) * 4);
    }
};

// Merges the states of the cluster's blocks, in their order, for this block's share of the quads. Calls use(quad,
// state) for each.
template <typename Use>
inline void merge_in_cluster(const SharedState &own, uint rank, Use use) {
#if CLUSTER > 1
#pragma unroll 1
    for (uint quad = rank * SHARE + threadIdx.x; quad < min((rank + 1) * SHARE, QUADS); quad += THREADS) {
        float2 ml[CLUSTER];
        float4 x[CLUSTER];
        SoftmaxState sum;
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            ml[b] = load2_in(own.ml + quad / (HEAD_DIM / 4), b);
            x[b] = load4_in(own.at(quad), b);
            sum.merge_max(ml[b].x);
        }
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            sum.merge(ml[b], x[b]);
        }
        use(quad, sum);
    }
#endif
}

// Division of a share's quads among the threads of a block: OWN quads per thread, TOGETHER parts loaded at once. With
// enough threads, SIDES threads have different parts of a quad.
constexpr uint OWN = (SHARE + THREADS - 1) / THREADS;
constexpr uint TOGETHER = OWN >= 8 ? 3 : OWN >= 4 ? 6 : OWN >= 2 ? 10 : 12;
constexpr uint SIDES = THREADS / SHARE > 4 ? 4 : THREADS / SHARE > 1 ? THREADS / SHARE : 1;

// A thread's quads: thread + j * THREADS of the share, in every SIDES-th part from `side` on.
struct QuadThread {
    uint side, thread, first_quad, end_quad;

    uint quad(uint j) const {
        return first_quad + thread + j * THREADS;
    }
};

// Merges the thread's parts among `count` parts; `from(part)` is the address of a part's state. All quads of a thread
// are loaded together, so that enough loads are in flight.
template <typename From>
inline void merge_parts(const States &states, const QuadThread &of, uint count, From from, SoftmaxState (&sums)[OWN]) {
#pragma unroll 1
    for (uint part = of.side; part < count && of.side < SIDES; part += TOGETHER * SIDES) {
        float2 ml[TOGETHER][OWN];
        float4 x[TOGETHER][OWN];
#pragma unroll
        for (uint i = 0; i < TOGETHER; i++) {
            const float *state = from(min(part + i * SIDES, count - 1));
#pragma unroll
            for (uint j = 0; j < OWN; j++) {
                const uint quad = of.quad(j);
                ml[i][j] = make_float2(nothing(), 0);
                x[i][j] = make_float4(0, 0, 0, 0);
                if (part + i * SIDES < count && quad < of.end_quad) {
                    x[i][j] = __ldcg(reinterpret_cast<const float4 *>(state) + quad);
                    ml[i][j] = __ldcg(reinterpret_cast<const float2 *>(state + states.end_of(quad)));
                }
            }
        }
#pragma unroll
        for (uint j = 0; j < OWN; j++) {
            float m = sums[j].m;
#pragma unroll
            for (uint i = 0; i < TOGETHER; i++) {
                m = fmaxf(m, ml[i][j].x);
            }
            sums[j].rescale(m);
#pragma unroll
            for (uint i = 0; i < TOGETHER; i++) {
                sums[j].merge(ml[i][j], x[i][j]);
            }
        }
    }
}

// Merges the sums of the sides into those of side 0, through `room`. All threads of the block call it.
inline void merge_sides(const QuadThread &of, float *room, SoftmaxState &sum) {
    float4 *room_o = reinterpret_cast<float4 *>(room);
    float2 *room_ml = reinterpret_cast<float2 *>(room + (SIDES - 1) * SHARE * 4);
    if constexpr (SIDES > 1) {
        if (of.side > 0 && of.side < SIDES) {
            room_o[(of.side - 1) * SHARE + of.thread] = sum.o;
            room_ml[(of.side - 1) * SHARE + of.thread] = make_float2(sum.m, sum.l);
        }
    }
    // The state of the first member may then be overwritten.
    __syncthreads();
    if constexpr (SIDES > 1) {
        if (of.side == 0) {
            float m = sum.m;
#pragma unroll
            for (uint i = 1; i < SIDES; i++) {
                m = fmaxf(m, room_ml[(i - 1) * SHARE + of.thread].x);
            }
            sum.rescale(m);
#pragma unroll
            for (uint i = 1; i < SIDES; i++) {
                sum.merge(room_ml[(i - 1) * SHARE + of.thread], room_o[(i - 1) * SHARE + of.thread]);
            }
        }
    }
}

// Called after this block has stored its state. The last block to arrive merges the parts; many parts are first merged
// in groups of about the square root of their number. `room` is unused shared memory, of 96 bytes for each quad of the
// share.
inline void merge(const States &states, const ItemPart &part_of_item, const Output &output, uint *flag, float *room) {
    const uint side = SIDES > 1 ? threadIdx.x / SHARE : 0, first_quad = states.rank * SHARE;
    const QuadThread of = {side, threadIdx.x - side * SHARE, first_quad, min(first_quad + SHARE, QUADS)};
    uint group = part_of_item.parts;
    if (part_of_item.parts * (SHARE * 16) > MAX_MERGED_BYTES) {
        group = uint(ceilf(sqrtf(float(part_of_item.parts))));
    }
    const uint groups = (part_of_item.parts + group - 1) / group;
    const uint first = part_of_item.part / group * group;
    uint *of_item = states.counter(part_of_item.item * states.kv_heads + part_of_item.head);
    uint *counter = groups == 1 ? of_item : states.counter(states.pairs + part_of_item.slot(first));
    // Merge the members of the group first, then the groups, each in the slot of its first member.
    uint begin = first, count = min(group, part_of_item.parts - first), step = 1;
#pragma unroll 1
    while (arrive(flag, counter, count)) {
        SoftmaxState sums[OWN];
        const auto from = [&](uint part) { return states.at(part_of_item.slot(begin + part * step)); };
        merge_parts(states, of, count, from, sums);
        merge_sides(of, room, sums[0]);
#pragma unroll
        for (uint j = 0; j < OWN; j++) {
            const uint quad = of.quad(j);
            if (quad >= of.end_quad || of.side > 0) {
                continue;
            }
            if (counter == of_item) {
                output.finish(quad, sums[j]);
            } else {
                states.leave(part_of_item.slot(first), quad, sums[j]);
            }
        }
        if (counter == of_item) {
            return;
        }
        counter = of_item;
        begin = 0;
        count = groups;
        step = group;
    }
}

#endif
