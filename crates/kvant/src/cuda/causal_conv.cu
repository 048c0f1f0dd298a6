// causal_conv: a depthwise convolution over the last TAPS positions of each sequence; f32, f16 or bf16 in and out.
//
// x and out are [rows, channels], weight is [channels, TAPS], bias [channels], state [TAPS - 1, channels] in each slot.
// Run z has the rows starts[z] .. starts[z + 1] and the state slots[z]; rows and states out of range are skipped. A
// thread has one channel and every gridDim.y-th part of ROWS rows of a run, with the last inputs in registers. Only the
// thread of the first part reads the state, and it writes the new state.
#include "device/dependent_launch.h"
#include "device/elements.h"

struct CausalConvParams {
    uint rows;
    uint channels;
    uint runs;
    uint states;
    uint stride; // elements between states
};

constexpr uint ROWS = 32;
constexpr uint OLD = TAPS - 1; // inputs before a row

// One channel of a run: inputs are counted from the oldest of the state.
struct Channel {
    const uchar *x;
    const uchar *state;
    ulong x_at, state_at; // elements of the first row and of the oldest input
    uint stride;
    bool is_fresh;
};

inline float input(const Channel &c, uint index) {
    if (index >= OLD) {
        return load(c.x, c.x_at + ulong(index - OLD) * c.stride, X_DTYPE);
    }
    return c.is_fresh ? 0.0f : load(c.state, c.state_at + ulong(index) * c.stride, STATE_DTYPE);
}

// Rows first .. end of the run.
inline void convolve(const Channel &c, uint first, uint end, const float *weight, float bias, uchar *out) {
    float last[TAPS];
#pragma unroll
    for (uint tap = 1; tap < TAPS; tap++) {
        last[tap] = input(c, first + tap - 1);
    }
    for (uint row = first; row < end; row++) {
        float sum = bias;
#pragma unroll
        for (uint tap = 0; tap < OLD; tap++) {
            last[tap] = last[tap + 1];
            sum = fmaf(weight[tap], last[tap], sum);
        }
        last[OLD] = input(c, row + OLD);
        sum = fmaf(weight[OLD], last[OLD], sum);
        store(out, c.x_at + ulong(row) * c.stride, SILU ? sum / (1.0f + expf(-sum)) : sum, OUT_DTYPE);
    }
}

extern "C" __global__ void KVANT_KERNEL(const uchar *x, const uchar *weights, const uchar *biases, const uint *starts,
                                        const uint *slots, const uint *past, uchar *state, uchar *out,
                                        const CausalConvParams p) {
    take_turn();
    const uint channel = blockIdx.x * blockDim.x + threadIdx.x, run = blockIdx.z;
    const uint slot = slots[run], start = starts[run], end = min(starts[run + 1], p.rows);
    if (channel >= p.channels || slot >= p.states || start >= end) {
        return;
    }
    const Channel c = {x,          state,          ulong(start) * p.channels + channel, ulong(slot) * p.stride + channel,
                       p.channels, past[run] == 0};
    float weight[TAPS];
#pragma unroll
    for (uint tap = 0; tap < TAPS; tap++) {
        weight[tap] = load(weights, ulong(channel) * TAPS + tap, WEIGHT_DTYPE);
    }
    const float bias = HAS_BIAS ? load(biases, channel, BIAS_DTYPE) : 0.0f;
    const uint rows = end - start;
    for (uint first = blockIdx.y * ROWS; first < rows; first += gridDim.y * ROWS) {
        convolve(c, first, min(first + ROWS, rows), weight, bias, out);
    }
    if (blockIdx.y == 0) {
        // Each input moves to an older place. In rising order, every place is read before it is overwritten.
        for (uint index = 0; index < OLD; index++) {
            store(state, c.state_at + ulong(index) * c.stride, input(c, rows + index), STATE_DTYPE);
        }
    }
}
