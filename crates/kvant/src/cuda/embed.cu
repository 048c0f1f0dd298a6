// embed: out[t] = scale * table[ids[t]]; zeros if the id is beyond the table.
//
// The table is [vocab, dim], f32, f16 or bf16, or MLX's affine codes [vocab, dim * bits / 32] with scales and biases
// [vocab, dim / group]. ids is [tokens]; out is [tokens, dim], f32, f16 or bf16. BITS is not 0 for an affine table,
// FORMAT is not 0 for a table in blocks (device/blocks.h). One thread per four elements of a row of a dense table, and
// per 16 elements of the other tables. TABLE_DTYPE is the dtype of a dense table, or of the scales and biases of an
// affine one.
#include "device/affine.h"
#include "device/blocks.h"
#include "device/dependent_launch.h"
#include "device/vectors.h"

struct EmbedParams {
    uint vocab;
    uint dim;
    uint tokens;
    float scale;
};

extern "C" __global__ void KVANT_KERNEL(const uchar *table, const uchar *scales, const uchar *biases, const uint *ids, uchar *out,
                                 const EmbedParams p) {
    take_turn();
    const uint2 at = row_and_four();
    const uint i = at.y * (BITS != 0 || FORMAT != 0 ? 16 : 4);
    if (i >= p.dim || at.x >= p.tokens) {
        return;
    }
    const ulong to = ulong(at.x) * p.dim + i;
    const ulong row = ids[at.x];
    const bool known = row < p.vocab;
    if (FORMAT != 0) {
        uint words[4] = {};
        float scale = 0, bias = 0;
        if (known) {
            load_block_codes(table, scales, FORMAT, BLOCK_ALIGNMENT, row, i / 16, p.dim, words, scale, bias);
        }
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const float4 q = numbers_of_codes(words[j], FORMAT);
            store4(out, to + j * 4, 4, p.scale * (scale * q + all4(bias)), OUT_DTYPE, OUT_ALIGNED);
        }
    } else if (BITS != 0) {
        uint4 words = make_uint4(0, 0, 0, 0);
        float scale = 0, bias = 0;
        if (known) {
            words = load_words(reinterpret_cast<const uint *>(table) + row * (p.dim / 32 * BITS), i / 16, BITS, ALIGNED);
            const ulong group = row * (p.dim / GROUP) + i / GROUP;
            scale = p.scale * load(scales, group, TABLE_DTYPE);
            bias = p.scale * load(biases, group, TABLE_DTYPE);
        }
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            store4(out, to + j * 4, 4, scale * codes_of(words, j, BITS) + all4(bias), OUT_DTYPE, OUT_ALIGNED);
        }
    } else {
        const uint count = p.dim - i;
        float4 values = all4(0);
        if (known) {
            values = p.scale * load4(table, row * p.dim + i, count, TABLE_DTYPE, ALIGNED);
        }
        store4(out, to, count, values, OUT_DTYPE, OUT_ALIGNED);
    }
}
