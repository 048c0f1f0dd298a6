// What turns a product with an affine W into one of dense matrices, for rows enough to pay for it.
//
// dequantise: W [outputs, inputs] as two bf16 matrices side by side, [outputs, 2 * inputs]: the upper part of each weight, and
// what is left of it; together they have 16 bits of it. One thread per 16 codes. twice: x [rows, inputs] of bf16 beside itself, [rows,
// 2 * inputs], so that one product adds up both parts. One thread per 8 inputs.
#include "vectors.h"
#include "affine.h"
#include "ahead.h"

struct DequantiseParams {
    uint rows;
    uint inputs;
};

#if KERNEL_dequantise

extern "C" __global__ void dequantise(const uint *codes, const uchar *scales, const uchar *biases, uchar *out,
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

extern "C" __global__ void twice(const uchar *x, uchar *out, const DequantiseParams p) {
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
