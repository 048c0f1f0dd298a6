// Dense matrices for a product with an affine W, where there are enough rows to pay for them.
//
// linear_dequantise: W [outputs, inputs] -> [outputs, 2 * inputs] of bf16, two matrices side by side: each weight
// rounded, and the rest of it; together they have 16 bits of the weight. One thread per 16 codes.
//
// linear_repeat_inputs: x [rows, inputs] of bf16 -> [rows, 2 * inputs], twice side by side, so that one product adds
// both parts of a weight. One thread per 8 inputs.
#include "device/affine.h"
#include "device/dependent_launch.h"
#include "device/vectors.h"

struct DequantiseParams {
    uint rows;
    uint inputs;
};

#if KERNEL_linear_dequantise

extern "C" __global__ void KVANT_KERNEL(const uint *codes, const uchar *scales, const uchar *biases, uchar *out,
                                      const DequantiseParams p) {
    take_turn();
    const uint row = blockIdx.x, c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c * 16 >= p.inputs) {
        return;
    }
    const uint4 words = load_words(codes + ulong(row) * (p.inputs / 32 * BITS), c, BITS, ALIGNED);
    const ulong group = ulong(row) * (p.inputs / GROUP) + c * 16 / GROUP;
    const float scale = load(scales, group, W_DTYPE), bias = load(biases, group, W_DTYPE);
    const ulong to = ulong(row) * 2 * p.inputs + c * 16;
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        const float4 w = scale * codes_of(words, i, BITS) + all4(bias);
        const float4 upper = make_float4(bf16_to_float(float_to_bf16(w.x)), bf16_to_float(float_to_bf16(w.y)),
                                         bf16_to_float(float_to_bf16(w.z)), bf16_to_float(float_to_bf16(w.w)));
        store4(out, to + i * 4, upper, BF16);
        store4(out, to + p.inputs + i * 4, w + -1.0f * upper, BF16);
    }
}

#else

extern "C" __global__ void KVANT_KERNEL(const uchar *x, uchar *out, const DequantiseParams p) {
    take_turn();
    const uint row = blockIdx.x, i = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (i >= p.inputs) {
        return;
    }
    const uint4 eight = *reinterpret_cast<const uint4 *>(x + (ulong(row) * p.inputs + i) * 2);
    uchar *to = out + (ulong(row) * 2 * p.inputs + i) * 2;
    *reinterpret_cast<uint4 *>(to) = eight;
    *reinterpret_cast<uint4 *>(to + ulong(p.inputs) * 2) = eight;
}

#endif
