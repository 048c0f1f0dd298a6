// hadamard: the randomised Hadamard rotation of rows x [rows, D], or its inverse; f32, f16 or bf16 in and out.
//
// A block takes p.group_rows rows: one row of at least 1024 elements, or rows with 1024 elements together. They are
// rotated in shared memory (p.group_rows * D floats). `out` may be `x`.
#include "codec/rotate_block.h"
#include "device/dependent_launch.h"
#include "device/elements.h"

struct HadamardParams {
    ulong rows;
    uint dim;
    uint group_rows;
};

extern "C" __global__ void KVANT_KERNEL(const uchar *x, uchar *out, const HadamardParams p) {
    take_turn();
    extern __shared__ float tile[];
    const ulong first = ulong(blockIdx.x) * p.group_rows;
    const uint rows = uint(min(ulong(p.group_rows), p.rows - first));
    const ulong start = first * p.dim;
    for (uint i = threadIdx.x; i < rows * p.dim; i += blockDim.x) {
        tile[i] = load(x, start + i, X_DTYPE);
    }
    rotate(tile, rows, p.dim, INVERSE, threadIdx.x, blockDim.x);
    for (uint i = threadIdx.x; i < rows * p.dim; i += blockDim.x) {
        store(out, start + i, tile[i], OUT_DTYPE);
    }
}
