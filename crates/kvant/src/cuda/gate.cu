// gate: out = activation(gate) * up, element by element; f32, f16 or bf16 in and out.
//
// out is [rows, dim]; gate and up are columns of tensors with rows of gate_width and up_width elements, from gate_start
// and up_start on. One thread per four elements of a row. `out` may be the gate's tensor.
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

// gpu/gate.rs; GELU is the one by tanh.
constexpr uint GELU = 0;
constexpr uint CLAMPED_SWISH = 2;

// All are x / (1 + e^-z): SiLU with z = x; the clamped one with z = 1.702 x; GELU because (1 + tanh u) / 2 = 1 / (1 +
// e^-2u).
inline float activate(float x) {
    if (ACTIVATION == CLAMPED_SWISH) {
        // Not fminf(), which drops a NaN.
        x = x > 7.0f ? 7.0f : x;
        return x / (1.0f + expf(-1.702f * x));
    }
    // 2 sqrt(2 / pi), and 0.044715 of it.
    const float z = ACTIVATION == GELU ? x * (1.5957691216f + 0.0713548163f * x * x) : x;
    return x / (1.0f + expf(-z));
}

inline float factor_of(float up) {
    if (ACTIVATION == CLAMPED_SWISH) {
        return (up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up) + 1.0f;
    }
    return up;
}

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
    const float4 activated = make_float4(activate(x.x), activate(x.y), activate(x.z), activate(x.w));
    const float4 factors = make_float4(factor_of(y.x), factor_of(y.y), factor_of(y.z), factor_of(y.w));
    store4(out, row * p.dim + i, count, activated * factors, OUT_DTYPE, ALIGNED);
}
