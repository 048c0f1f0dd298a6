// linear_dequantise: converts rows of W [.., inputs], affine or in blocks, from `first_row` on to bf16, for a product
// of dense matrices. Products with many rows are faster this way. One thread per 16 codes.
#include "device/dependent_launch.h"
#include "device/fragments.h"
#include "linear/chunks.h"

struct DequantiseParams {
    uint inputs;
    uint first_row;
};

// Blocks: x counts rows of W, y the chunks of a row.
extern "C" __global__ void __launch_bounds__(256)
    KVANT_KERNEL(const uchar *values, const uchar *scales, const uchar *biases, uchar *out, const DequantiseParams p) {
    const uint row = blockIdx.x, c = blockIdx.y * blockDim.x + threadIdx.x;
    take_turn();
    if (c * CHUNK >= p.inputs) {
        return;
    }
    const Chunk chunk = load_chunk({values, scales, biases}, p.first_row + row, c, p.inputs);
    const float4 units = chunk.scale * field_units(CODE_BITS), bias = all4(chunk.bias);
    uint pairs[8];
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        const float4 w = units * fields_of(chunk, i) + bias;
        pairs[2 * i] = pack<false>(w.x, w.y);
        pairs[2 * i + 1] = pack<false>(w.z, w.w);
    }
    uint4 *to = reinterpret_cast<uint4 *>(out + (ulong(row) * p.inputs + c * CHUNK) * 2);
    to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}
