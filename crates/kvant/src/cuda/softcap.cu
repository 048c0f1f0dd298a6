// softcap: out = cap * tanh(x / cap), element by element, f32, f16 or bf16 in and out.
//
// One thread per element. `out` may be `x`.
#include "device/dependent_launch.h"
#include "device/elements.h"

struct SoftcapParams {
    uint elements;
    float cap;
};

extern "C" __global__ void KVANT_KERNEL(const uchar *x, uchar *out, const SoftcapParams p) {
    take_turn_early();
    const uint i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.elements) {
        store(out, i, p.cap * tanhf(load(x, i, X_DTYPE) / p.cap), OUT_DTYPE);
    }
}
