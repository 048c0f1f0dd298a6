// norm_rope: RMS norm and rotary embedding of the heads of x [T, H, D], to out [T, H, D] or [H, T, D], with an optional
// Hadamard rotation of the result; f32, f16 or bf16 in and out.
//
// A block takes one head, blockIdx.y, of one token, blockIdx.x: all of it is read before anything is written, so that
// `out` may be `x`. A token whose position is beyond the tables is skipped.
//
// Weights and angles are read before the previous kernel has ended (device/dependent_launch.h).
#include "codec/rotate_block.h"
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "norm_rope/head.h"

struct NormRopeParams {
    RopeParams rope;
    uint tokens;
    uint heads;
    uint head_dim;
    float eps;
};

constexpr bool HAS_TABLES = ANGLES == TABLES;

extern "C" __global__ void KVANT_KERNEL(const uchar *x, const uint *positions, const uchar *weight, const float *cos,
                                     const float *sin, const float *factors, uchar *out,
                                     const __grid_constant__ NormRopeParams p) {
    extern __shared__ float row[];
    const uint token = blockIdx.x, head = blockIdx.y, dim = p.head_dim;
    const uint position = positions[token];
    const Team team = whole_block();
    const Norm norm = {NORM, weight, WEIGHT_DTYPE, p.eps};
    const Rope rope = {ANGLES, LAYOUT, cos, sin, factors};
    const bool known = !HAS_TABLES || position < p.rope.table_rows;
    Needed n;
    if (known) {
        n = needed(dim, norm, rope, p.rope, position, team);
    }
    take_turn_early();
    if (!known) {
        return;
    }
    const ulong from = (ulong(token) * p.heads + head) * dim;
    const float squares = load_head(row, x, from, X_DTYPE, dim, team);
    norm_rope_head(row, row + dim, squares, dim, norm, rope, p.rope, position, n, team);
    if (ROTATE) {
        rotate(row, 1, dim, false, threadIdx.x, blockDim.x);
    }
    const ulong to = HEAD_MAJOR ? (ulong(head) * p.tokens + token) * dim : from;
    for (uint j = threadIdx.x; j < dim; j += blockDim.x) {
        store(out, to + j, row[j], OUT_DTYPE);
    }
}
