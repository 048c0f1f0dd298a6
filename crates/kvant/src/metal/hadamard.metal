// hadamard: the randomised Hadamard rotation of rows x [rows, D], or its inverse; f32, f16 or bf16 in and out.
//
// A threadgroup takes p.group_rows rows: one row of 1024 elements or more, or several with 1024 together. They are
// rotated in threadgroup memory (p.group_rows * D floats). `out` may be `x`.
#include "rotate.h"
#include "rows.h"

struct HadamardParams {
    ulong rows;
    uint dim;
    uint group_rows;
};

constant uint X_DTYPE [[function_constant(0)]];
constant uint OUT_DTYPE [[function_constant(1)]];
constant bool INVERSE [[function_constant(2)]];
constant bool ALIGNED [[function_constant(3)]];

kernel void hadamard(device const uchar *x [[buffer(0)]],
                     device uchar *out [[buffer(1)]],
                     constant HadamardParams &p [[buffer(2)]],
                     threadgroup float *tile [[threadgroup(0)]],
                     uint group [[threadgroup_position_in_grid]],
                     uint index [[thread_index_in_threadgroup]],
                     uint threads [[threads_per_threadgroup]]) {
    const ulong first = ulong(group) * p.group_rows;
    const uint rows = uint(min(ulong(p.group_rows), p.rows - first));
    const ulong start = first * p.dim;
    load_row(tile, x, start, rows * p.dim, X_DTYPE, ALIGNED, index, threads);
    rotate(tile, rows, p.dim, INVERSE, index, threads);
    store_row(out, start, tile, rows * p.dim, OUT_DTYPE, ALIGNED, index, threads);
}
