// softcap: out = cap * tanh(x / cap), elementwise, f32, f16 or bf16 in and out.
//
// One thread per four neighbouring elements; the last thread may have fewer. `out` may be `x`.
#include "device/dependent_launch.h"
#include "device/vectors.h"

struct SoftcapParams {
    uint elements;
    float cap;
};

extern "C" __global__ void KVANT_KERNEL(const uchar *x, uchar *out, const SoftcapParams p) {
    take_turn_early();
    const uint i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= p.elements) {
        return;
    }
    const uint count = p.elements - i;
    const auto capped = [&](float y) { return p.cap * tanhf(y / p.cap); };
    const float4 y = load4(x, i, count, X_DTYPE, ALIGNED);
    store4(out, i, count, make_float4(capped(y.x), capped(y.y), capped(y.z), capped(y.w)), OUT_DTYPE, ALIGNED);
}
