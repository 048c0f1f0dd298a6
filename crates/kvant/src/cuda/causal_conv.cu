// causal_conv: a depthwise convolution over the last TAPS positions of each sequence; f32, f16 or bf16 in and out.
//
// x and out are [rows, channels], weight is [channels, TAPS], bias [channels], state [TAPS - 1, channels] in each slot.
// Run z has the rows starts[z] .. starts[z + 1], continues the state slots[z], and writes the state after row t to the
// slot after[t]; rows and states out of range are skipped. A thread has one channel and every gridDim.y-th part of ROWS
// rows of a run, with the last inputs in registers. Only the thread of the first part reads and writes states.
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
constexpr uint MAX_KEPT = 16; // rows of a run that writes states after each: StateRuns::MAX_KEPT
constexpr uint AHEAD = 4;     // rows that are loaded together
constexpr uint OLD = TAPS - 1; // inputs before a row

// One channel of a run: inputs are counted from the oldest of the state.
struct Channel {
    const uchar *x;
    uchar *state;
    ulong x_at, state_at; // elements of the first row and of the oldest input in slot 0
    uint stride;
    bool is_fresh;
};

inline float row_input(const Channel &c, uint row) {
    return load(c.x, c.x_at + ulong(row) * c.stride, X_DTYPE);
}

inline float input(const Channel &c, uint index, ulong slot_at) {
    if (index >= OLD) {
        return row_input(c, index - OLD);
    }
    return c.is_fresh ? 0.0f : load(c.state, c.state_at + slot_at + ulong(index) * c.stride, STATE_DTYPE);
}

// Writes the last inputs as a state.
inline void store_state(const Channel &c, ulong slot_at, const float *last) {
#pragma unroll
    for (uint index = 0; index < OLD; index++) {
        store(c.state, c.state_at + slot_at + ulong(index) * c.stride, last[index], STATE_DTYPE);
    }
}

// Rows first .. end of the run that continues the state at `slot_at`. Writes the state after each row from `first_kept`
// on that has a slot; `after` is that of the run.
inline void convolve(const Channel &c, uint first, uint end, const float *weight, float bias, uchar *out, ulong slot_at,
                     const uint *after, uint first_kept, const CausalConvParams &p) {
    float last[TAPS];
#pragma unroll
    for (uint tap = 1; tap < TAPS; tap++) {
        last[tap] = input(c, first + tap - 1, slot_at);
    }
    for (uint group = first; group < end; group += AHEAD) {
        float x[AHEAD];
#pragma unroll
        for (uint i = 0; i < AHEAD; i++) {
            x[i] = group + i < end ? row_input(c, group + i) : 0.0f;
        }
#pragma unroll
        for (uint i = 0; i < AHEAD; i++) {
            const uint row = group + i;
            if (row >= end) {
                break;
            }
            float sum = bias;
#pragma unroll
            for (uint tap = 0; tap < OLD; tap++) {
                last[tap] = last[tap + 1];
                sum = fmaf(weight[tap], last[tap], sum);
            }
            last[OLD] = x[i];
            sum = fmaf(weight[OLD], last[OLD], sum);
            store(out, c.x_at + ulong(row) * c.stride, SILU ? sum / (1.0f + expf(-sum)) : sum, OUT_DTYPE);
            if (row >= first_kept && after[row] < p.states) {
                store_state(c, ulong(after[row]) * p.stride, last + 1);
            }
        }
    }
}

extern "C" __global__ void KVANT_KERNEL(const uchar *x, const uchar *weights, const uchar *biases, const uint *starts,
                                        const uint *slots, const uint *past, const uint *after, uchar *state,
                                        uchar *out, const CausalConvParams p) {
    take_turn();
    const uint channel = blockIdx.x * blockDim.x + threadIdx.x, run = blockIdx.z;
    const uint slot = slots[run], start = starts[run], end = min(starts[run + 1], p.rows);
    if (channel >= p.channels || slot >= p.states || start >= end || after[end - 1] >= p.states) {
        return;
    }
    const Channel c = {x, state, ulong(start) * p.channels + channel, channel, p.channels, past[run] == 0};
    const ulong slot_at = ulong(slot) * p.stride;
    float weight[TAPS];
#pragma unroll
    for (uint tap = 0; tap < TAPS; tap++) {
        weight[tap] = load(weights, ulong(channel) * TAPS + tap, WEIGHT_DTYPE);
    }
    const float bias = HAS_BIAS ? load(biases, channel, BIAS_DTYPE) : 0.0f;
    const uint rows = end - start, first_kept = rows <= MAX_KEPT ? 0 : rows;
    for (uint first = blockIdx.y * ROWS; first < rows; first += gridDim.y * ROWS) {
        convolve(c, first, min(first + ROWS, rows), weight, bias, out, slot_at, after + start, first_kept, p);
    }
    // Another thread may have the last rows, which have all inputs of the state.
    if (blockIdx.y == 0 && first_kept == rows) {
        float last[OLD];
#pragma unroll
        for (uint index = 0; index < OLD; index++) {
            last[index] = row_input(c, rows - OLD + index);
        }
        store_state(c, ulong(after[end - 1]) * p.stride, last);
    }
}
