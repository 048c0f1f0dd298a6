// add_bias: out[r] = x[r] + bias, or the bias of row r's expert; add: x[r] + bias[r]. f32, f16 or bf16 in and out.
//
// x and out are [rows, dim]; bias is [biases, dim], with ids [rows] of experts. A row whose expert does not exist gets
// zeros. One thread per four elements: x counts the fours of a row, y the rows. `out` may be `x`, and in add `bias`.
#include "vectors.h"

struct AddBiasParams {
    uint rows;
    uint dim;
    uint biases;
};

constant uint X_DTYPE [[function_constant(0)]];
constant uint BIAS_DTYPE [[function_constant(1)]];
constant uint OUT_DTYPE [[function_constant(2)]];
constant bool OF_EXPERTS [[function_constant(3)]];
constant bool OWN_ROW [[function_constant(4)]];
constant bool ALIGNED [[function_constant(5)]];

kernel void add_bias(device const uchar *x [[buffer(0)]],
                     device const uchar *bias [[buffer(1)]],
                     device const uint *ids [[buffer(2), function_constant(OF_EXPERTS)]],
                     device uchar *out [[buffer(3)]],
                     constant AddBiasParams &p [[buffer(4)]],
                     uint2 at [[thread_position_in_grid]]) {
    const uint i = at.x * 4;
    if (i >= p.dim || at.y >= p.rows) {
        return;
    }
    const uint count = p.dim - i;
    const ulong from = ulong(at.y) * p.dim + i;
    const uint bias_row = OF_EXPERTS ? ids[at.y] : OWN_ROW ? at.y : 0;
    float4 sum = float4(0);
    if (bias_row < p.biases) {
        sum = load4(x, from, count, X_DTYPE, ALIGNED) + load4(bias, ulong(bias_row) * p.dim + i, count, BIAS_DTYPE, ALIGNED);
    }
    store4(out, from, count, sum, OUT_DTYPE, ALIGNED);
}
