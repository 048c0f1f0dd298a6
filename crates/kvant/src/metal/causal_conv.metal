// causal_conv: a depthwise convolution over the last TAPS positions of each sequence; f32, f16 or bf16 in and out.
//
// x and out are [rows, channels], weight is [channels, TAPS], bias [channels], state [TAPS - 1, channels] in each slot.
// Run z has the rows starts[z] .. starts[z + 1], continues the state slots[z], and writes the state after row t to
// slot after[t]; rows and states out of range are skipped. A thread has one channel and every parts-th part of ROWS
// rows of a run, with the last inputs in registers. Only the thread of the first part reads and writes states.
#include "elements.h"

struct CausalConvParams {
    uint rows;
    uint channels;
    uint runs;
    uint states;
    uint stride; // elements between states
};

constant uint X_DTYPE [[function_constant(0)]];
constant uint WEIGHT_DTYPE [[function_constant(1)]];
constant uint BIAS_DTYPE [[function_constant(2)]];
constant uint STATE_DTYPE [[function_constant(3)]];
constant uint OUT_DTYPE [[function_constant(4)]];
constant uint TAPS [[function_constant(5)]];
constant bool HAS_BIAS [[function_constant(6)]];
constant bool SILU [[function_constant(7)]];

constant constexpr uint ROWS = 32;
constant constexpr uint MAX_TAPS = 8;
constant constexpr uint MAX_KEPT = 16; // rows of a run that writes states after each: StateRuns::MAX_KEPT

// One channel of a run: inputs are counted from the oldest of the state.
struct Channel {
    device const uchar *x;
    device const uchar *state;
    ulong x_at, state_at; // elements of the first row and of the oldest input
    uint stride;
    bool is_fresh;
};

inline float input(Channel c, uint index) {
    const uint old = TAPS - 1;
    if (index >= old) {
        return load(c.x, c.x_at + ulong(index - old) * c.stride, X_DTYPE);
    }
    return c.is_fresh ? 0.0f : load(c.state, c.state_at + ulong(index) * c.stride, STATE_DTYPE);
}

kernel void causal_conv(device const uchar *x [[buffer(0)]],
                        device const uchar *weights [[buffer(1)]],
                        device const uchar *biases [[buffer(2), function_constant(HAS_BIAS)]],
                        device const uint *starts [[buffer(3)]],
                        device const uint *slots [[buffer(4)]],
                        device const uint *past [[buffer(5)]],
                        device const uint *after [[buffer(6)]],
                        device uchar *state [[buffer(7)]],
                        device uchar *out [[buffer(8)]],
                        constant CausalConvParams &p [[buffer(9)]],
                        uint3 at [[thread_position_in_grid]],
                        uint3 groups [[threadgroups_per_grid]]) {
    const uint channel = at.x, run = at.z, old = TAPS - 1;
    const uint slot = slots[run], start = starts[run], end = min(starts[run + 1], p.rows);
    if (channel >= p.channels || slot >= p.states || start >= end) {
        return;
    }
    if (after[end - 1] >= p.states) {
        return;
    }
    const Channel c = {x, state, ulong(start) * p.channels + channel, ulong(slot) * p.stride + channel, p.channels,
                       past[run] == 0};
    float weight[MAX_TAPS], last[MAX_TAPS];
    for (uint tap = 0; tap < TAPS; tap++) {
        weight[tap] = load(weights, ulong(channel) * TAPS + tap, WEIGHT_DTYPE);
    }
    const float bias = HAS_BIAS ? load(biases, channel, BIAS_DTYPE) : 0.0f;
    const uint rows = end - start, first_kept = rows <= MAX_KEPT ? 0 : rows;
    for (uint first = at.y * ROWS; first < rows; first += groups.y * ROWS) {
        for (uint tap = 1; tap < TAPS; tap++) {
            last[tap] = input(c, first + tap - 1);
        }
        for (uint row = first; row < min(first + ROWS, rows); row++) {
            float sum = bias;
            for (uint tap = 0; tap < old; tap++) {
                last[tap] = last[tap + 1];
                sum = fma(weight[tap], last[tap], sum);
            }
            last[old] = input(c, row + old);
            sum = fma(weight[old], last[old], sum);
            store(out, c.x_at + ulong(row) * c.stride, SILU ? sum / (1.0f + exp(-sum)) : sum, OUT_DTYPE);
            if (row >= first_kept && after[start + row] < p.states) {
                const ulong to = ulong(after[start + row]) * p.stride + channel;
                for (uint index = 0; index < old; index++) {
                    store(state, to + ulong(index) * p.channels, last[index + 1], STATE_DTYPE);
                }
            }
        }
    }
    // Another thread may have the last rows, which have all inputs of the state.
    if (at.y == 0 && first_kept == rows) {
        const ulong to = ulong(after[end - 1]) * p.stride + channel;
        for (uint index = 0; index < old; index++) {
            store(state, to + ulong(index) * p.channels, input(c, rows + index), STATE_DTYPE);
        }
    }
}
