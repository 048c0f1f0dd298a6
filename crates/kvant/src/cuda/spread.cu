// spread: out[t, v] = the value of the place of v among the groups of row t, or the fill.
//
// x is [tokens * chosen, width], places is [outputs], groups is [tokens, chosen], out is [tokens, outputs]; x and out
// are f32, f16 or bf16. Place p is column p % width of group p / width. Without groups, each token has group 0. One
// thread per output.
#include "device/dependent_launch.h"
#include "device/vectors.h"

struct SpreadParams {
    uint elements;
    uint outputs;
    uint chosen;
    uint width;
    float fill;
};

extern "C" __global__ void KVANT_KERNEL(const uchar *x, const uint *places, uchar *out, const SpreadParams p,
                                        const uint *groups) {
    take_turn();
    const uint i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.elements) {
        return;
    }
    const uint token = i / p.outputs;
    const uint place = places[i % p.outputs];
    const uint group = place / p.width;
    uint row = p.chosen;
    if (GROUPED) {
        for (uint j = 0; j < p.chosen && row == p.chosen; j++) {
            row = groups[ulong(token) * p.chosen + j] == group ? j : row;
        }
    } else if (group == 0) {
        row = 0;
    }
    float value = p.fill;
    if (row < p.chosen) {
        value = load(x, (ulong(token) * p.chosen + row) * p.width + place % p.width, X_DTYPE);
    }
    store(out, i, value, OUT_DTYPE);
}
