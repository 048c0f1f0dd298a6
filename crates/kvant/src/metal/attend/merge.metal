// attend, the merge of splits.
//
// attend_merge: merges the partial states of the splits in order, then an earlier result. One threadgroup per query
// row.
#include "attend/params.h"
#include "attend/softmax.h"

template <uint D>
kernel void attend_merge(device uchar *out [[buffer(1)]],
                         device const float *sinks [[buffer(11), function_constant(SINKS)]],
                         device const float *earlier_out [[buffer(12), function_constant(EARLIER)]],
                         device const float *partial_o [[buffer(13)]],
                         device const float2 *partial_states [[buffer(14)]],
                         constant MetalAttendParams &p [[buffer(15)]],
                         device const float *earlier_ends [[buffer(19), function_constant(EARLIER)]],
                         device float *ends [[buffer(20), function_constant(ENDS)]],
                         uint row [[threadgroup_position_in_grid]],
                         uint index [[thread_index_in_threadgroup]]) {
    constexpr uint MERGE_THREADS = 64;
    // Coordinates of a thread; if 64 does not divide D, some threads have one fewer.
    constexpr uint OWN = (D + MERGE_THREADS - 1) / MERGE_THREADS;
    const uint own = D % MERGE_THREADS == 0 || index < D % MERGE_THREADS ? OWN : OWN - 1;
    const ulong rows = ulong(p.tokens) * p.heads;
    State total = no_keys();
    float o[OWN];
    for (uint n = 0; n < OWN; n++) {
        o[n] = 0;
    }
    for (uint split = 0; split < p.splits; split++) {
        const ulong at = split * rows + row;
        const State part = unpacked(partial_states[at]);
        // A split without keys has not written o.
        if (part.m != -INFINITY) {
            const float2 factors = merge(total, part);
            for (uint n = 0; n < own; n++) {
                o[n] = o[n] * factors.x + partial_o[at * D + n * MERGE_THREADS + index] * factors.y;
            }
        }
    }
    if (EARLIER) {
        const float end = earlier_ends[row];
        // `ends` may be the memory of the earlier ends: all threads must have read them.
        threadgroup_barrier(mem_flags::mem_device);
        const float2 factors = with_earlier(total, end);
        for (uint n = 0; n < own; n++) {
            o[n] = o[n] * factors.x + earlier_out[ulong(row) * D + n * MERGE_THREADS + index] * factors.y;
        }
    }
    if (ENDS && index == 0) {
        ends[row] = end_of(total);
    }
    const float factor = finish(with_sink(total, SINKS ? sinks : nullptr, row, p));
    for (uint n = 0; n < own; n++) {
        store(out, ulong(row) * D + n * MERGE_THREADS + index, o[n] * factor, OUT_DTYPE);
    }
}

template [[host_name("attend_merge_64")]] [[kernel]] decltype(attend_merge<64>) attend_merge<64>;
template [[host_name("attend_merge_128")]] [[kernel]] decltype(attend_merge<128>) attend_merge<128>;
template [[host_name("attend_merge_256")]] [[kernel]] decltype(attend_merge<256>) attend_merge<256>;
template [[host_name("attend_merge_512")]] [[kernel]] decltype(attend_merge<512>) attend_merge<512>;
template [[host_name("attend_merge_80")]] [[kernel]] decltype(attend_merge<80>) attend_merge<80>;
template [[host_name("attend_merge_96")]] [[kernel]] decltype(attend_merge<96>) attend_merge<96>;
template [[host_name("attend_merge_112")]] [[kernel]] decltype(attend_merge<112>) attend_merge<112>;
template [[host_name("attend_merge_192")]] [[kernel]] decltype(attend_merge<192>) attend_merge<192>;
