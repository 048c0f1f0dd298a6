// add_bias: out[r] = x[r] + bias, or the bias of row r's expert; add: x[r] + bias[r]. f32, f16 or bf16 in and out.
//
// x and out are [rows, dim]; bias is [biases, dim], with ids [rows] of experts. A row whose expert does not exist gets
// zeros. One thread per four elements of a row. `out` may be `x`, and in add `bias`.
#include "device/dependent_launch.h"
#include "device/vectors.h"

struct AddBiasParams {
    uint rows;
    uint dim;
    uint biases;
};

extern "C" __global__ void KVANT_KERNEL(const uchar *x, const uchar *bias, const uint *ids, uchar *out,
                                        const AddBiasParams p) {
    take_turn_early();
    const uint2 at = row_and_four();
    const uint i = at.y * 4;
    if (i >= p.dim || at.x >= p.rows) {
        return;
    }
    const uint count = p.dim - i;
    const ulong from = ulong(at.x) * p.dim + i;
    const uint bias_row = OF_EXPERTS ? ids[at.x] : OWN_ROW ? at.x : 0;
    float4 sum = all4(0);
    if (bias_row < p.biases) {
        sum = load4(x, from, count, X_DTYPE, ALIGNED) + load4(bias, ulong(bias_row) * p.dim + i, count, BIAS_DTYPE, ALIGNED);
    }
    store4(out, from, count, sum, OUT_DTYPE, ALIGNED);
}
