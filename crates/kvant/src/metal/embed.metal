// embed: out[t] = scale * table[ids[t]]; zeros if the id is beyond the table.
//
// The table is [vocab, dim], f32, f16 or bf16, or MLX's affine codes [vocab, dim * bits / 32] with scales and biases
// [vocab, dim / group], or rows of blocks (blocks.h); ids is [tokens]; out is [tokens, dim], f32, f16 or bf16. One
// thread per four elements of a row of a dense table, and per 16 elements of the other tables: x counts threads of a
// row, y counts tokens.
#include "vectors.h"
#include "affine.h"
#include "blocks.h"

struct EmbedParams {
    uint vocab;
    uint dim;
    uint tokens;
    float scale;
};

constant uint TABLE_DTYPE [[function_constant(0)]];
constant uint OUT_DTYPE [[function_constant(1)]];
// Bits of an affine code, otherwise 0. TABLE_DTYPE is the dtype of a dense table, or of the scales and biases of an
// affine one.
constant uint BITS [[function_constant(2)]];
constant uint GROUP [[function_constant(3)]];
constant bool ALIGNED [[function_constant(4)]];
constant bool OUT_ALIGNED [[function_constant(5)]];
// The format of a table in blocks, else 0; the alignment of blocks in bytes.
constant uint FORMAT [[function_constant(6)]];
constant uint BLOCK_ALIGNMENT [[function_constant(7)]];
constant bool AFFINE = BITS != 0;
constant bool DENSE = !AFFINE && FORMAT == 0;
constant bool SCALES = AFFINE || has_separate_scales(FORMAT);

kernel void embed(device const uchar *table [[buffer(0)]],
                  device const uchar *scales [[buffer(1), function_constant(SCALES)]],
                  device const uchar *biases [[buffer(2), function_constant(AFFINE)]],
                  device const uint *ids [[buffer(3)]],
                  device uchar *out [[buffer(4)]],
                  constant EmbedParams &p [[buffer(5)]],
                  uint2 at [[thread_position_in_grid]]) {
    const uint i = at.x * (DENSE ? 4 : 16);
    if (i >= p.dim || at.y >= p.tokens) {
        return;
    }
    const ulong to = ulong(at.y) * p.dim + i;
    const ulong row = ids[at.y];
    const bool known = row < p.vocab;
    if (FORMAT != 0) {
        uint words[4] = {};
        float scale = 0, bias = 0;
        if (known) {
            load_block_codes(table, SCALES ? scales : table, FORMAT, BLOCK_ALIGNMENT, row, i / 16, p.dim, words, scale, bias);
        }
        for (uint j = 0; j < 4; j++) {
            const float4 q = numbers_of_codes(words[j], FORMAT);
            store4(out, to + j * 4, 4, p.scale * (scale * q + bias), OUT_DTYPE, OUT_ALIGNED);
        }
    } else if (AFFINE) {
        float4 q[4] = {};
        float scale = 0, bias = 0;
        if (known) {
            load_codes(reinterpret_cast<device const uint *>(table) + row * (p.dim / 32 * BITS), i / 16, BITS, ALIGNED, q);
            const ulong group = row * (p.dim / GROUP) + i / GROUP;
            scale = p.scale * load(scales, group, TABLE_DTYPE);
            bias = p.scale * load(biases, group, TABLE_DTYPE);
        }
        for (uint j = 0; j < 4; j++) {
            store4(out, to + j * 4, 4, scale * q[j] + bias, OUT_DTYPE, OUT_ALIGNED);
        }
    } else {
        const uint count = p.dim - i;
        float4 values = 0;
        if (known) {
            values = p.scale * load4(table, row * p.dim + i, count, TABLE_DTYPE, ALIGNED);
        }
        store4(out, to, count, values, OUT_DTYPE, OUT_ALIGNED);
    }
}
