// Chunks of x, which linear_gemm_affine_wgmma_arrange.cu makes for linear_gemm_affine_wgmma.cu.
#ifndef KVANT_CUDA_LINEAR_BATCH_CHUNK_H
#define KVANT_CUDA_LINEAR_BATCH_CHUNK_H
#include "device/elements.h"
#include "linear/out_parts.h"
#include "linear/params.h"

// The parameters of both kernels.
struct GemmAffineWgmmaParams {
    LinearParams linear;
    // Tiles of rows (with experts, the maximum), and tiles of outputs.
    uint row_tiles;
    uint output_tiles;
    OutParts parts;
};

constexpr uint NONE = 0xFFFFFFFF;
constexpr uint BLOCK = 64;
// Inputs of a chunk, and the bytes of x in it and of its sums.
constexpr uint INPUTS = DEPTH * BLOCK;
constexpr uint X_BLOCK = ROWS * BLOCK * 2;
constexpr uint X_BYTES = DEPTH * X_BLOCK;
constexpr bool FOLDED = ROWS > 32;
constexpr uint SUMS_BYTES = FOLDED ? 0 : DEPTH * ROWS * 4;

inline uint chunks_of(uint inputs) {
    return (inputs + INPUTS - 1) / INPUTS;
}

// The order of a lane's 16 codes: pair i are inputs 8 (i % 2) + 2 t and the next one of product i / 2.
constexpr uint code_of(uint pair, uint which) {
    return BITS == 4   ? pair / 4 * 8 + pair % 4 + which * 4
           : BITS == 6 ? pair / 2 * 4 + pair % 2 + which * 2
                       : pair * 2 + which;
}

#endif
