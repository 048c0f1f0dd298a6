// all_reduce on a single device: out = x, f32, f16 or bf16 in and out.
//
// One thread per element. `out` may be `x`.
#include "elements.h"

struct AllReduceParams {
    uint elements;
};

constant uint X_DTYPE [[function_constant(0)]];
constant uint OUT_DTYPE [[function_constant(1)]];

kernel void all_reduce(device const uchar *x [[buffer(0)]],
                       device uchar *out [[buffer(1)]],
                       constant AllReduceParams &p [[buffer(2)]],
                       uint i [[thread_position_in_grid]]) {
    if (i < p.elements) {
        store(out, i, load(x, i, X_DTYPE), OUT_DTYPE);
    }
}
