// merge_attention: out = sum of 2^end * x over the ranks, divided by the sum of 2^end and of the sink's weight.
//
// x is f32 [T, H, D] and ends f32 [T, H] on every rank; out has `own_heads` of the H heads, from `first_head` on. A
// thread merges four neighbouring elements of an output row at a time; the last four of a row may have fewer. It reads
// them straight from the memory of all ranks, and adds them in the order of ranks. Blocks with one index meet before
// the merge (all results are complete) and after it (all results are free).
#include "device/dependent_launch.h"
#include "device/peers.h"
#include "device/vectors.h"

struct MergeAttentionParams {
    // Fours of all rows of the output.
    uint fours;
    uint head_dim;
    uint heads;
    uint own_heads;
    uint first_head;
    uint rank;
};

struct Parts {
    const uchar *x[MAX_RANKS];
    const float *ends[MAX_RANKS];
};

constexpr float LOG2_E = 1.4426950408889634f;

inline float nothing() {
    return __uint_as_float(0xFF800000);
}

// Four elements of an output row, from `column` on.
inline void merge_four(const MergeAttentionParams &p, const Parts &parts, const float *sinks, uchar *out, uint row, uint column) {
    const uint count = p.head_dim - column, head = row % p.own_heads;
    const ulong at = ulong(row / p.own_heads) * p.heads + p.first_head + head;
    float ends[RANKS];
    float4 x[RANKS];
#pragma unroll
    for (uint r = 0; r < RANKS; r++) {
        ends[r] = parts.ends[r][at];
        x[r] = load4(parts.x[r], at * p.head_dim + column, count, F32, ALIGNED);
    }
    const float sink = SINKS ? sinks[head] * LOG2_E : nothing();
    float highest = sink;
#pragma unroll
    for (uint r = 0; r < RANKS; r++) {
        highest = fmaxf(highest, ends[r]);
    }
    float sum = sink == nothing() ? 0 : exp2f(sink - highest);
    float4 merged = all4(0);
#pragma unroll
    for (uint r = 0; r < RANKS; r++) {
        // Skips a result over no keys: its elements are undefined.
        if (ends[r] != nothing()) {
            const float weight = exp2f(ends[r] - highest);
            sum += weight;
            merged = merged + weight * x[r];
        }
    }
    const float inverse = sum == 0 ? 0 : 1 / sum;
    store4(out, ulong(row) * p.head_dim + column, count, inverse * merged, OUT_DTYPE, ALIGNED);
}

inline void merge_all(const MergeAttentionParams &p, const Parts &parts, const float *sinks, uchar *out) {
    const uint of_row = (p.head_dim + 3) / 4;
    const ulong step = ulong(gridDim.x) * blockDim.x;
    for (ulong i = blockIdx.x * blockDim.x + threadIdx.x; i < p.fours; i += step) {
        merge_four(p, parts, sinks, out, uint(i) / of_row, uint(i) % of_row * 4);
    }
}

extern "C" __global__ void __launch_bounds__(512)
    KVANT_KERNEL(const MergeAttentionParams p, const float *sinks, uchar *out, const uchar *x0, const uchar *x1, const uchar *x2,
                 const uchar *x3, const uchar *x4, const uchar *x5, const uchar *x6, const uchar *x7, const float *ends0,
                 const float *ends1, const float *ends2, const float *ends3, const float *ends4, const float *ends5,
                 const float *ends6, const float *ends7, uint *failed, Exchange *own, Exchange *e0, Exchange *e1, Exchange *e2,
                 Exchange *e3, Exchange *e4, Exchange *e5, Exchange *e6, Exchange *e7) {
    take_turn();
    const Parts parts = {{x0, x1, x2, x3, x4, x5, x6, x7}, {ends0, ends1, ends2, ends3, ends4, ends5, ends6, ends7}};
    if (RANKS == 1) {
        merge_all(p, parts, sinks, out);
        return;
    }
    const uint number = number_of_collective(own);
    const Ranks ranks = {{e0, e1, e2, e3, e4, e5, e6, e7}, own, p.rank};
    if (!begin_collective<RANKS>(ranks, number, failed)) {
        return;
    }
    merge_all(p, parts, sinks, out);
    meet<RANKS, true>(ranks, number, failed);
}
