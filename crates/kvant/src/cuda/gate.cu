// gate: out = activation(gate) * up, element by element; f32, f16 or bf16 in and out.
//
// out is [rows, dim]; gate and up are columns of tensors with rows of gate_width and up_width elements, from gate_start
// and up_start on. One thread per four elements of a row. `out` may be the gate's tensor.
#include "device/activation.h"
#include "device/dependent_launch.h"
#include "device/vectors.h"

struct GateParams {
    uint rows;
    uint dim;
    uint gate_start;
    uint gate_width;
    uint up_start;
    uint up_width;
};

extern "C" __global__ void KVANT_KERNEL(const uchar *gate, const uchar *up, uchar *out, const GateParams p) {
    take_turn_early();
    const uint2 at = row_and_four();
    const uint i = at.y * 4;
    if (i >= p.dim || at.x >= p.rows) {
        return;
    }
    const uint count = p.dim - i;
    const ulong row = at.x;
    const float4 x = load4(gate, row * p.gate_width + p.gate_start + i, count, GATE_DTYPE, ALIGNED);
    const float4 y = load4(up, row * p.up_width + p.up_start + i, count, UP_DTYPE, ALIGNED);
    const float4 activated = make_float4(activate(x.x, ACTIVATION), activate(x.y, ACTIVATION), activate(x.z, ACTIVATION),
                                         activate(x.w, ACTIVATION));
    const float4 factors = make_float4(factor_of(y.x, ACTIVATION), factor_of(y.y, ACTIVATION), factor_of(y.z, ACTIVATION),
                                       factor_of(y.w, ACTIVATION));
    store4(out, row * p.dim + i, count, activated * factors, OUT_DTYPE, ALIGNED);
}
