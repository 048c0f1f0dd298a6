// Partial states of attention and how they come together: of one KV head's GROUP query rows each has the output before it
// is divided by the sum of weights, the maximum of the scores (in units of log 2) and that sum. A thread works on four
// coordinates of a row, a quad.
#ifndef KVANT_ATTEND_STATE_H
#define KVANT_ATTEND_STATE_H
#include "attend_cluster.h"
#include "attend_plan.h"
#include "attend_softmax.h"
#include "elements.h"

constexpr uint QUADS = GROUP * HEAD_DIM / 4;
// Those that one block of a cluster merges.
constexpr uint SHARE = (QUADS + CLUSTER - 1) / CLUSTER;
// More bytes of states than these are not merged by one block.
constexpr uint MOST_MERGED_BYTES = 192 * 1024;

// A quad of several states.
struct Sum {
    float m = nothing();
    float l = 0;
    float4 o = make_float4(0, 0, 0, 0);

    // Raises the maximum.
    void raise(float to) {
        const float f = factor_of(m, to);
        m = to;
        l *= f;
        o = make_float4(o.x * f, o.y * f, o.z * f, o.w * f);
    }
    // Adds a state whose maximum is not above this one's.
    void add(float2 ml, float4 x) {
        const float f = factor_of(ml.x, m);
        l += ml.y * f;
        o = make_float4(o.x + x.x * f, o.y + x.y * f, o.z + x.z * f, o.w + x.w * f);
    }
};

// The states that blocks leave to each other, in device memory, and the counters of who has. A block of a cluster leaves its
// share of the cluster's state, for the blocks of other clusters that have the same share.
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
    void leave(uint slot, uint quad, const Sum &sum) const {
        float *to = at(slot);
        __stcg(reinterpret_cast<float4 *>(to) + quad, sum.o);
        if (quad % (HEAD_DIM / 4) == 0 || quad == rank * SHARE) {
            __stcg(reinterpret_cast<float2 *>(to + end_of(quad)), make_float2(sum.m, sum.l));
        }
    }
    // Of an item and head, and of a slot.
    uint *counter(uint number) const {
        return counters + number * CLUSTER + rank;
    }
};

// Where the rows of an item and head go: the output, or the state that the step's own keys are added to.
struct Output {
    uchar *out;
    float *state;
    ulong row;
    // Whether the item's token sees any key.
    bool sees;

    void finish(uint quad, const Sum &sum) const {
        const ulong at = row + quad / (HEAD_DIM / 4);
        const uint column = quad % (HEAD_DIM / 4) * 4;
        if (state != nullptr) {
            float *to = state + at * (HEAD_DIM + 2);
            to[column] = sum.o.x;
            to[column + 1] = sum.o.y;
            to[column + 2] = sum.o.z;
            to[column + 3] = sum.o.w;
            if (column == 0) {
                to[HEAD_DIM] = sum.m;
                to[HEAD_DIM + 1] = sum.l;
            }
            return;
        }
        const float inverse = inverse_of_sum(sum.l, [&] { return sees; });
        const float4 o = make_float4(sum.o.x * inverse, sum.o.y * inverse, sum.o.z * inverse, sum.o.w * inverse);
        store4(out, at * HEAD_DIM + column, o, OUT_DTYPE);
    }
};

// A block's state in shared memory, where the others read it: rows `pitch` floats apart.
struct Room {
    float *o;
    uint pitch;
    float2 *ml;

    float4 *at(uint quad) const {
        return reinterpret_cast<float4 *>(o + quad / (HEAD_DIM / 4) * pitch + quad % (HEAD_DIM / 4) * 4);
    }
};

// Adds up the states of all blocks, in their order, for the quads of this one's share: `use` gets each.
template <typename Use>
inline void merge_in_cluster(const Room &room, uint rank, Use use) {
#if CLUSTER > 1
#pragma unroll 1
    for (uint quad = rank * SHARE + threadIdx.x; quad < min((rank + 1) * SHARE, QUADS); quad += THREADS) {
        float2 ml[CLUSTER];
        float4 x[CLUSTER];
        Sum sum;
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            ml[b] = load2_in(room.ml + quad / (HEAD_DIM / 4), b);
            x[b] = load4_in(room.at(quad), b);
            sum.m = fmaxf(sum.m, ml[b].x);
        }
#pragma unroll
        for (uint b = 0; b < CLUSTER; b++) {
            sum.add(ml[b], x[b]);
        }
        use(quad, sum);
    }
#endif
}

// When this block has left its state: merges parts, if many into groups of about the square root of their number and
// those into the whole. Whoever comes last does it. `room`: shared memory that nobody uses, of 96 bytes for each of its quads.
inline void merge(const States &states, const Piece &piece, const Output &output, uint *flag, float *room) {
    constexpr uint OWN = (SHARE + THREADS - 1) / THREADS;
    constexpr uint TOGETHER = OWN >= 8 ? 3 : OWN >= 4 ? 6 : OWN >= 2 ? 10 : 12;
    // Where there are threads enough, several have parts of the same quad.
    constexpr uint SIDES = THREADS / SHARE > 4 ? 4 : THREADS / SHARE > 1 ? THREADS / SHARE : 1;
    const uint side = SIDES > 1 ? threadIdx.x / SHARE : 0;
    const uint thread = threadIdx.x - side * SHARE, first_quad = states.rank * SHARE, end_quad = min(first_quad + SHARE, QUADS);
    float4 *room_o = reinterpret_cast<float4 *>(room);
    float2 *room_ml = reinterpret_cast<float2 *>(room + (SIDES - 1) * SHARE * 4);
    uint group = piece.parts;
    if (piece.parts * (SHARE * 16) > MOST_MERGED_BYTES) {
        group = uint(ceilf(sqrtf(float(piece.parts))));
    }
    const uint groups = (piece.parts + group - 1) / group;
    const uint first = piece.part / group * group;
    uint *of_item = states.counter(piece.item * states.kv_heads + piece.head);
    uint *counter = groups == 1 ? of_item : states.counter(states.pairs + piece.slot(first));
    // First the members of the group, then the groups, each in its first member's place.
    uint begin = first, count = min(group, piece.parts - first), step = 1;
#pragma unroll 1
    while (arrive(flag, counter, count)) {
        // A thread's quads together, so that enough loads are in flight.
        Sum sums[OWN];
#pragma unroll 1
        for (uint part = side; part < count && side < SIDES; part += TOGETHER * SIDES) {
            float2 ml[TOGETHER][OWN];
            float4 x[TOGETHER][OWN];
#pragma unroll
            for (uint i = 0; i < TOGETHER; i++) {
                const float *from = states.at(piece.slot(begin + min(part + i * SIDES, count - 1) * step));
#pragma unroll
                for (uint j = 0; j < OWN; j++) {
                    const uint quad = first_quad + thread + j * THREADS;
                    ml[i][j] = make_float2(nothing(), 0);
                    x[i][j] = make_float4(0, 0, 0, 0);
                    if (part + i * SIDES < count && quad < end_quad) {
                        x[i][j] = __ldcg(reinterpret_cast<const float4 *>(from) + quad);
                        ml[i][j] = __ldcg(reinterpret_cast<const float2 *>(from + states.end_of(quad)));
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
                sums[j].raise(m);
#pragma unroll
                for (uint i = 0; i < TOGETHER; i++) {
                    sums[j].add(ml[i][j], x[i][j]);
                }
            }
        }
        if constexpr (SIDES > 1) {
            if (side > 0 && side < SIDES) {
                room_o[(side - 1) * SHARE + thread] = sums[0].o;
                room_ml[(side - 1) * SHARE + thread] = make_float2(sums[0].m, sums[0].l);
            }
        }
        // Before the state of the first member is written over, too.
        __syncthreads();
        if constexpr (SIDES > 1) {
            if (side == 0) {
                float m = sums[0].m;
#pragma unroll
                for (uint i = 1; i < SIDES; i++) {
                    m = fmaxf(m, room_ml[(i - 1) * SHARE + thread].x);
                }
                sums[0].raise(m);
#pragma unroll
                for (uint i = 1; i < SIDES; i++) {
                    sums[0].add(room_ml[(i - 1) * SHARE + thread], room_o[(i - 1) * SHARE + thread]);
                }
            }
        }
#pragma unroll
        for (uint j = 0; j < OWN; j++) {
            const uint quad = first_quad + thread + j * THREADS;
            if (quad >= end_quad || side > 0) {
                continue;
            }
            if (counter == of_item) {
                output.finish(quad, sums[j]);
            } else {
                states.leave(piece.slot(first), quad, sums[j]);
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
