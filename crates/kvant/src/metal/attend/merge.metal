// attend, the merge of splits.
//
// attend_merge: merges the partial states of the splits in order, a threadgroup per query row.
#include "attend/params.h"
#include "attend/softmax.h"

template <uint D>
kernel void attend_merge(device uchar *out [[buffer(1)]],
                         device const float *sinks [[buffer(11), function_constant(SINKS)]],
                         device const float *partial_o [[buffer(13)]],
                         device const float2 *partial_states [[buffer(14)]],
                         constant MetalAttendParams &p [[buffer(15)]],
                         uint row [[threadgroup_position_in_grid]],
                         uint index [[thread_index_in_threadgroup]]) {
    constexpr uint MERGE_THREADS = 64;
    const ulong rows = ulong(p.tokens) * p.heads;
    State total = no_keys();
    float o[D / MERGE_THREADS];
    for (uint n = 0; n < D / MERGE_THREADS; n++) {
        o[n] = 0;
    }
    for (uint split = 0; split < p.splits; split++) {
        const ulong at = split * rows + row;
        const State part = unpacked(partial_states[at]);
        // Without keys o was not written.
        if (part.m != -INFINITY) {
            const float2 factors = merge(total, part);
            for (uint n = 0; n < D / MERGE_THREADS; n++) {
                o[n] = o[n] * factors.x + partial_o[at * D + n * MERGE_THREADS + index] * factors.y;
            }
        }
    }
    const float factor = finish(with_sink(total, SINKS ? sinks : nullptr, row, p));
    for (uint n = 0; n < D / MERGE_THREADS; n++) {
        store(out, ulong(row) * D + n * MERGE_THREADS + index, o[n] * factor, OUT_DTYPE);
    }
}

template [[host_name("attend_merge_64")]] [[kernel]] decltype(attend_merge<64>) attend_merge<64>;
template [[host_name("attend_merge_128")]] [[kernel]] decltype(attend_merge<128>) attend_merge<128>;
template [[host_name("attend_merge_256")]] [[kernel]] decltype(attend_merge<256>) attend_merge<256>;
template [[host_name("attend_merge_512")]] [[kernel]] decltype(attend_merge<512>) attend_merge<512>;
