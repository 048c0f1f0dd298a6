// gate: out = activation(gate) * up, element by element; f32, f16 or bf16 in and out.
//
// out is [rows, dim]; gate and up are columns of tensors with rows of gate_width and up_width elements, from gate_start
// and up_start on. One thread per four elements: x counts the fours of a row, y the rows. `out` may be the gate's
// tensor.
#include "vectors.h"

struct GateParams {
    uint rows;
    uint dim;
    uint gate_start;
    uint gate_width;
    uint up_start;
    uint up_width;
};

constant uint GATE_DTYPE [[function_constant(0)]];
constant uint UP_DTYPE [[function_constant(1)]];
constant uint OUT_DTYPE [[function_constant(2)]];
constant uint ACTIVATION [[function_constant(3)]];
constant bool ALIGNED [[function_constant(4)]];

// The numbers of activations, as in gpu/gate.rs. GELU is the tanh approximation.
constant constexpr uint GELU = 0;
constant constexpr uint CLAMPED_SWISH = 2;
constant constexpr uint SIGMOID = 3;
constant constexpr uint IDENTITY = 4;

// All activations except the sigmoid and the identity are x / (1 + e^-z): SiLU with z = x; clamped swish with
// z = 1.702 x; GELU because
// (1 + tanh u) / 2 = 1 / (1 + e^-2u).
inline float activate(float x) {
    if (ACTIVATION == IDENTITY) {
        return x;
    }
    if (ACTIVATION == SIGMOID) {
        return 1.0f / (1.0f + precise::exp(-x));
    }
    if (ACTIVATION == CLAMPED_SWISH) {
        // Not min(), which may drop a NaN.
        x = x > 7.0f ? 7.0f : x;
        return x / (1.0f + precise::exp(-1.702f * x));
    }
    // The coefficients are 2 sqrt(2 / pi), and 0.044715 times that.
    const float z = ACTIVATION == GELU ? x * (1.5957691216f + 0.0713548163f * x * x) : x;
    return x / (1.0f + precise::exp(-z));
}

inline float factor_of(float up) {
    if (ACTIVATION == CLAMPED_SWISH) {
        return (up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up) + 1.0f;
    }
    return up;
}

kernel void gate(device const uchar *gate [[buffer(0)]],
                 device const uchar *up [[buffer(1)]],
                 device uchar *out [[buffer(2)]],
                 constant GateParams &p [[buffer(3)]],
                 uint2 at [[thread_position_in_grid]]) {
    const uint i = at.x * 4;
    if (i >= p.dim || at.y >= p.rows) {
        return;
    }
    const uint count = p.dim - i;
    const ulong row = at.y;
    const float4 x = load4(gate, row * p.gate_width + p.gate_start + i, count, GATE_DTYPE, ALIGNED);
    const float4 y = load4(up, row * p.up_width + p.up_start + i, count, UP_DTYPE, ALIGNED);
    const float4 activated = float4(activate(x.x), activate(x.y), activate(x.z), activate(x.w));
    const float4 factors = float4(factor_of(y.x), factor_of(y.y), factor_of(y.z), factor_of(y.w));
    store4(out, row * p.dim + i, count, activated * factors, OUT_DTYPE, ALIGNED);
}
