// Work items of attend_prefill.cu whose keys several blocks share: their states, and the merge.
#ifndef KVANT_CUDA_ATTEND_PREFILL_SPLIT_H
#define KVANT_CUDA_ATTEND_PREFILL_SPLIT_H
#include "attend/prefill/products.h"
#include "attend/state.h"

// Quads of a thread's sums. A thread's state has one quad more: m of both rows, then l. States are stored by quads:
// quad i of all threads, then quad i + 1.
constexpr uint SUM_QUADS = CHUNKS * PARTS * WIDTH / 8;

// Stores the block's state. The block that arrives last merges all states in the order of the keys, and gets true.
inline bool merge(const AttendParams &p, const Shared &shared, const Item &item, float *states, uint *arrivals, Accumulators &acc) {
    float4 *first = reinterpret_cast<float4 *>(states) + ulong(item.pair) * p.splits * (SUM_QUADS + 1) * CONSUMERS + threadIdx.x;
    float4 *own = first + ulong(item.part) * (SUM_QUADS + 1) * CONSUMERS;
    __stcg(own, make_float4(acc.m[0], acc.m[1], acc.l[0], acc.l[1]));
#pragma unroll
    for (uint i = 0; i < SUM_QUADS; i++) {
        const float *o = acc.o[i / (WIDTH / 8)] + i % (WIDTH / 8) * 4;
        __stcg(own + (1 + i) * CONSUMERS, make_float4(o[0], o[1], o[2], o[3]));
    }
    meet(1, CONSUMERS);
    if (threadIdx.x == 0) {
        shared.state().last = count_arrival(arrivals + item.pair, p.splits);
    }
    meet(1, CONSUMERS);
    if (!shared.state().last) {
        return false;
    }
    clear(acc);
    for (uint part = 0; part < p.splits; part++) {
        const float4 ends = __ldcg(first + ulong(part) * (SUM_QUADS + 1) * CONSUMERS);
        acc.m[0] = fmaxf(acc.m[0], ends.x);
        acc.m[1] = fmaxf(acc.m[1], ends.y);
    }
#pragma unroll 1
    for (uint part = 0; part < p.splits; part++) {
        const float4 *of_part = first + ulong(part) * (SUM_QUADS + 1) * CONSUMERS;
        const float4 ends = __ldcg(of_part);
        const float f[2] = {factor_of(ends.x, acc.m[0]), factor_of(ends.y, acc.m[1])};
        acc.l[0] += ends.z * f[0];
        acc.l[1] += ends.w * f[1];
#pragma unroll
        for (uint i = 0; i < SUM_QUADS; i++) {
            const float4 x = __ldcg(of_part + (1 + i) * CONSUMERS);
            float *o = acc.o[i / (WIDTH / 8)] + i % (WIDTH / 8) * 4;
            // o[0] and o[1] belong to the first row, o[2] and o[3] to the second.
            o[0] += x.x * f[0];
            o[1] += x.y * f[0];
            o[2] += x.z * f[1];
            o[3] += x.w * f[1];
        }
    }
    return true;
}

#endif
