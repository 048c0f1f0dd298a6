// linear_gemm_affine_wgmma_arrange: arranges x [rows, inputs] in chunks, one for every tile of ROWS rows and DEPTH
// blocks of inputs. A chunk is matrices of BLOCK inputs in the layout of wgmma.h, then, unless FOLDED, the sums of the
// blocks, [DEPTH][ROWS] floats. The padding is zeros. A thread has 16 bytes of a row. The kernel also sets the counters
// of linear_gemm_affine_wgmma to 0.
#include "device/dependent_launch.h"
#include "device/elements.h"
#include "linear/gemm_affine_wgmma/chunk.h"

// The grid: x counts blocks of inputs, padded to whole chunks; a CUDA block has several of them if it has enough
// threads. y counts tiles of at most 32 rows.
extern "C" __global__ void __launch_bounds__(256)
    KVANT_KERNEL(const uchar *x, uchar *out, uint *counters, const GemmAffineWgmmaParams p, const uint *experts, const uint *order) {
    take_turn();
    if (blockIdx.x == 0 && blockIdx.y == 0) {
        for (uint i = threadIdx.x; i < p.row_tiles * p.output_tiles; i += 256) {
            counters[i] = 0;
        }
    }
    constexpr uint TOGETHER = ROWS < 32 ? ROWS : 32;
    const uint place = blockIdx.y * TOGETHER + threadIdx.x / 8 % TOGETHER, tile = place / ROWS, r = place % ROWS;
    if (EXPERTS && experts[tile] == NONE) {
        return;
    }
    const uint block = blockIdx.x * (32 / TOGETHER) + threadIdx.x / 8 / TOGETHER, chunks = chunks_of(p.linear.inputs);
    const uint piece = threadIdx.x % 8, row = EXPERTS ? order[place] : place;
    const bool there = row < p.linear.rows && block < p.linear.inputs / BLOCK;
    const ushort *from = reinterpret_cast<const ushort *>(x) + (there ? ulong(row / p.linear.rows_per_input) * p.linear.inputs + block * BLOCK : 0);
    uint words[4];
    float sum = 0;
#pragma unroll
    for (uint i = 0; i < 4; i++) {
        const ushort low = there ? from[i * 16 + code_of(piece, 0)] : 0, high = there ? from[i * 16 + code_of(piece, 1)] : 0;
        words[i] = low | uint(high) << 16;
        sum += bf16_to_float(low) + bf16_to_float(high);
    }
#pragma unroll
    for (uint step = 1; step < 8; step *= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    }
    if (block >= chunks * DEPTH) {
        return;
    }
    uchar *chunk = out + (ulong(tile) * chunks + block / DEPTH) * (X_BYTES + SUMS_BYTES);
    *reinterpret_cast<uint4 *>(chunk + block % DEPTH * X_BLOCK + r * 128 + (piece ^ r % 8) * 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (!FOLDED && piece == 0) {
        reinterpret_cast<float *>(chunk + X_BYTES)[block % DEPTH * ROWS + r] = sum;
    }
}
