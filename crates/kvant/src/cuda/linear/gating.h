// A gate (gate.cu) after a product, in one kernel. It writes the results of both, in their order.
#ifndef KVANT_CUDA_LINEAR_GATING_H
#define KVANT_CUDA_LINEAR_GATING_H
#include "device/activation.h"
#include "device/elements.h"

// Values of GATING (linear/gating.rs). 0: no gate. INPUT: the results are the gate's input. HALVES: the first half of
// the results is the input, the second half the factors.
constexpr uint INPUT = 1;
constexpr uint HALVES = 2;

// The offset of output r of a tile of 16 from the tile's first output. With HALVES, a tile has eight outputs of each
// half.
inline uint in_tile(uint r, uint outputs) {
    return GATING == HALVES ? r % 8 + r / 8 * (outputs / 2) : r;
}

// Outputs of a tile, counted in the first half with HALVES.
constexpr uint TILE_STEP = GATING == HALVES ? 8 : 16;

// Indices of elements: a result in `out`; with HALVES, the second result of the pair in `out`; the factor in `up`; the
// gate's result in `gated`.
struct Places {
    ulong result;
    ulong other;
    ulong factor;
    ulong gated;
};

// The indices for result i of a row of `outputs` results (with HALVES, of its first half). With INPUT, `row` must be 0.
inline Places places_in_row(ulong row, uint outputs, uint i) {
    const uint dim = GATING == HALVES ? outputs / 2 : outputs;
    return {row * outputs + i, row * outputs + dim + i, i, row * dim + i};
}

// Stores a result (with HALVES, both results of a pair) and the gate's result.
inline void store_result(uchar *out, const uchar *up, uchar *gated, Places at, float result, float other) {
    store(out, at.result, result, OUT_DTYPE);
    if (GATING == 0) {
        return;
    }
    float factor;
    if (GATING == HALVES) {
        store(out, at.other, other, OUT_DTYPE);
        factor = rounded(other, OUT_DTYPE);
    } else {
        factor = load(up, at.factor, UP_DTYPE);
    }
    const float activated = activate(rounded(result, OUT_DTYPE), ACTIVATION);
    store(gated, at.gated, activated * factor_of(factor, ACTIVATION), GATED_DTYPE);
}

#endif
