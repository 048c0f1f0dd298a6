// softcap: out = cap * tanh(x / cap), element by element, f32, f16 or bf16 in and out.
//
// One thread per element. `out` may be `x`.
#include "elements.h"

struct SoftcapParams {
    uint elements;
    float cap;
};

constant uint X_DTYPE [[function_constant(0)]];
constant uint OUT_DTYPE [[function_constant(1)]];

kernel void softcap(device const uchar *x [[buffer(0)]],
                    device uchar *out [[buffer(1)]],
                    constant SoftcapParams &p [[buffer(2)]],
                    uint i [[thread_position_in_grid]]) {
    if (i < p.elements) {
        store(out, i, p.cap * precise::tanh(load(x, i, X_DTYPE) / p.cap), OUT_DTYPE);
    }
}
