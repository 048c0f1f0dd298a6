// Partial states of attention and how they come together: of one KV head's GROUP query rows each has the output before it
// is divided by the sum of weights, the maximum of the scores (in units of log 2) and that sum. A thread works on four
// coordinates of a row, a quad.
#ifndef KVANT_ATTEND_STATE_H
#define KVANT_ATTEND_STATE_H
#include "attend_plan.h"
#include "attend_softmax.h"
#include "elements.h"

constexpr uint QUADS = GROUP * HEAD_DIM / 4;
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

// The states that blocks leave to each other, in device memory, and the counters of who has.
struct States {
    float *partials;
    uint *counters;
    uint pairs;
    uint kv_heads;
    // Slots of blocks; those of groups of blocks follow.
    uint slots;

    // o, then m and l; a multiple of 16 bytes.
    float *at(uint slot) const {
        return partials + slot * ulong(GROUP * HEAD_DIM + (GROUP * 2 + 3) / 4 * 4);
    }
    void leave(uint slot, uint quad, const Sum &sum) const {
        float *to = at(slot);
        __stcg(reinterpret_cast<float4 *>(to) + quad, sum.o);
        if (quad % (HEAD_DIM / 4) == 0) {
            __stcg(reinterpret_cast<float2 *>(to + GROUP * HEAD_DIM) + quad / (HEAD_DIM / 4), make_float2(sum.m, sum.l));
        }
    }
};

// Where the rows of an item and head go: the output, or the state that the step's own keys are added to.
struct Output {
    uchar *out;
    float *state;
    ulong row;

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
        const float inverse = sum.l == 0 ? 0 : 1 / sum.l;
        const float4 o = make_float4(sum.o.x * inverse, sum.o.y * inverse, sum.o.z * inverse, sum.o.w * inverse);
        store4(out, at * HEAD_DIM + column, o, OUT_DTYPE);
    }
};

// When this block has left its state: merges parts, if many into groups of about the square root of their number and
// those into the whole. Whoever comes last does it.
inline void merge(const States &states, const Piece &piece, const Output &output, uint *flag) {
    constexpr uint OWN = (QUADS + THREADS - 1) / THREADS;
    constexpr uint TOGETHER = OWN >= 8 ? 3 : OWN >= 4 ? 6 : OWN >= 2 ? 10 : 12;
    uint group = piece.parts;
    if (piece.parts * (GROUP * HEAD_DIM * 4) > MOST_MERGED_BYTES) {
        group = uint(ceilf(sqrtf(float(piece.parts))));
    }
    const uint groups = (piece.parts + group - 1) / group;
    const uint first = piece.part / group * group;
    uint *of_item = states.counters + piece.item * states.kv_heads + piece.head;
    uint *counter = groups == 1 ? of_item : states.counters + states.pairs + piece.slot(first);
    // First the members of the group, then the groups.
    uint begin = first, count = min(group, piece.parts - first), step = 1, slots = 0;
#pragma unroll 1
    while (arrive(flag, counter, count)) {
        // A thread's quads together, so that enough loads are in flight.
        Sum sums[OWN];
#pragma unroll 1
        for (uint part = 0; part < count; part += TOGETHER) {
            float2 ml[TOGETHER][OWN];
            float4 x[TOGETHER][OWN];
#pragma unroll
            for (uint i = 0; i < TOGETHER; i++) {
                const float *from = states.at(slots + piece.slot(begin + min(part + i, count - 1) * step));
#pragma unroll
                for (uint j = 0; j < OWN; j++) {
                    const uint quad = threadIdx.x + j * THREADS;
                    ml[i][j] = make_float2(nothing(), 0);
                    x[i][j] = make_float4(0, 0, 0, 0);
                    if (part + i < count && quad < QUADS) {
                        x[i][j] = __ldcg(reinterpret_cast<const float4 *>(from) + quad);
                        ml[i][j] = __ldcg(reinterpret_cast<const float2 *>(from + GROUP * HEAD_DIM) + quad / (HEAD_DIM / 4));
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
#pragma unroll
        for (uint j = 0; j < OWN; j++) {
            const uint quad = threadIdx.x + j * THREADS;
            if (quad < QUADS && counter == of_item) {
                output.finish(quad, sums[j]);
            } else if (quad < QUADS) {
                states.leave(states.slots + piece.slot(first), quad, sums[j]);
            }
        }
        if (counter == of_item) {
            return;
        }
        counter = of_item;
        slots = states.slots;
        begin = 0;
        count = groups;
        step = group;
    }
}

#endif
