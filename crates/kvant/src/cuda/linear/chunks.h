// Weights of every form in chunks of 16 bytes or 16 codes: f32, f16 or bf16 [outputs, inputs], or MLX's affine codes
// [outputs, inputs * bits / 32] with scales and biases [outputs, inputs / group] (BITS is not 0; W_DTYPE is the dtype
// of the scales), or rows of blocks (FORMAT is not 0: device/blocks.h).
#ifndef KVANT_CUDA_LINEAR_CHUNKS_H
#define KVANT_CUDA_LINEAR_CHUNKS_H
#include "device/affine.h"
#include "device/blocks.h"
#include "device/vectors.h"

struct Weight {
    const uchar *values;
    const uchar *scales;
    const uchar *biases;
};

// A chunk of an affine weight or of blocks is codes, a scale and a bias.
constexpr bool AFFINE = BITS != 0 || FORMAT != 0;
// The codes of blocks are unpacked to bytes.
constexpr uint CODE_BITS = FORMAT != 0 ? 8 : BITS;

// Inputs of a chunk of at most 16 bytes (8 at 4 bits, 12 at 6), and its groups of four inputs.
constexpr uint CHUNK = AFFINE ? 16 : 16 / size_of(W_DTYPE);
constexpr uint FOURS = CHUNK / 4;

// A chunk as it is stored; the weights of an affine one are scale * code + bias.
struct Chunk {
    uint4 words;
    float scale;
    float bias;
};

// Four elements of 16 bits, f16 or bf16, of two words.
inline float4 halves_of(uint a, uint b, uint dtype) {
    if (dtype == F16) {
        return make_float4(half_to_float(ushort(a)), half_to_float(ushort(a >> 16)), half_to_float(ushort(b)),
                           half_to_float(ushort(b >> 16)));
    }
    return make_float4(__uint_as_float(a << 16), __uint_as_float(a & 0xFFFF0000), __uint_as_float(b << 16),
                       __uint_as_float(b & 0xFFFF0000));
}

inline uint4 dense_words(const uchar *values, ulong i, uint count) {
    if (W_ALIGNED) {
        return *reinterpret_cast<const uint4 *>(values + i * size_of(W_DTYPE));
    }
    uint words[4] = {};
#pragma unroll
    for (uint j = 0; j < CHUNK; j++) {
        if (j < count) {
            if (W_DTYPE == F32) {
                words[j] = reinterpret_cast<const uint *>(values)[i + j];
            } else {
                words[j / 2] |= uint(reinterpret_cast<const ushort *>(values)[i + j]) << (j % 2 * 16);
            }
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Chunk c of a row; its inputs exist.
inline Chunk load_chunk(Weight w, ulong row, uint c, uint inputs) {
    if (!AFFINE) {
        return Chunk{dense_words(w.values, row * inputs + c * CHUNK, inputs - c * CHUNK), 1, 0};
    }
    if (FORMAT != 0) {
        uint words[4];
        float scale, bias;
        load_block_codes(w.values, w.scales, FORMAT, BLOCK_ALIGNMENT, row, c, inputs, words, scale, bias);
        return Chunk{make_uint4(words[0], words[1], words[2], words[3]), scale, bias};
    }
    const uint *codes = reinterpret_cast<const uint *>(w.values) + row * (inputs / 32 * BITS);
    const uint4 words = load_words(codes, c, BITS, W_ALIGNED);
    const ulong group = row * (inputs / GROUP) + c * CHUNK / GROUP;
    return Chunk{words, load(w.scales, group, W_DTYPE), load(w.biases, group, W_DTYPE)};
}

// Weights, or fields of codes, 4 i .. 4 i + 3 of a chunk.
inline float4 fields_of(const Chunk &chunk, uint i) {
    const uint4 w = chunk.words;
    if (FORMAT != 0) {
        return numbers_of_codes(i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, FORMAT);
    }
    if (AFFINE) {
        return fields_of(w, i, CODE_BITS);
    }
    if (W_DTYPE == F32) {
        return make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w));
    }
    return i == 0 ? halves_of(w.x, w.y, W_DTYPE) : halves_of(w.z, w.w, W_DTYPE);
}

#endif
