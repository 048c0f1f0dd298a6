// argmax: the index of the largest element of each row; the lowest index among equals. NaN never wins: a row of NaN
// gives 0xFFFFFFFF.
//
// x is [rows, dim], f32, f16 or bf16; out is [rows]. One threadgroup per row; each thread keeps its best element, and
// strides by the number of threads.
#include "vectors.h"
#include "ordered.h"
#include "reduce.h"

struct ArgmaxParams {
    uint dim;
};

constant uint X_DTYPE [[function_constant(0)]];
constant bool ALIGNED [[function_constant(1)]];

kernel void argmax(device const uchar *x [[buffer(0)]],
                   device uint *out [[buffer(1)]],
                   constant ArgmaxParams &p [[buffer(2)]],
                   uint row [[threadgroup_position_in_grid]],
                   uint thread_index [[thread_index_in_threadgroup]],
                   uint threads [[threads_per_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup uint shared[32];
    const Place place = {lane, simdgroup, simdgroups};
    const ulong start = ulong(row) * p.dim;
    // NaN never exceeds 0, the key of NaN.
    uint key = 0;
    uint index = 0xFFFFFFFF;
    for (uint i = thread_index * 4; i < p.dim; i += threads * 4) {
        const uint count = min(4u, p.dim - i);
        const float4 values = load4(x, start + i, count, X_DTYPE, ALIGNED);
        for (uint j = 0; j < count; j++) {
            const uint other = ordered(values[j]);
            if (other > key) {
                key = other;
                index = i + j;
            }
        }
    }
    const uint largest = reduce<Max>(key, shared, place);
    const uint lowest = reduce<Min>(key == largest ? index : Min::none, shared, place);
    if (thread_index == 0) {
        out[row] = lowest;
    }
}
