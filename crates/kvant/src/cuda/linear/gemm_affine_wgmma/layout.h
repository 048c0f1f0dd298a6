// The shared memory of linear_gemm_affine_wgmma.cu, and the division of its work among blocks.
#ifndef KVANT_CUDA_LINEAR_BATCH_LAYOUT_H
#define KVANT_CUDA_LINEAR_BATCH_LAYOUT_H
#include "linear/gemm_affine_wgmma/chunk.h"

constexpr uint OUTPUTS = 256 / HALVES;
constexpr uint PRODUCERS = 128;
// Tiles of 64 outputs that a warpgroup multiplies. With many rows there are fewer warpgroups, so that each has
// registers for the sums of two tiles.
constexpr uint TILES = ROWS <= 64 ? 1 : 2;
constexpr uint CONSUMERS = 512 / TILES;
constexpr uint THREADS = PRODUCERS + CONSUMERS;
// Threads whose sums are of different outputs. Blocks of a chunk that a thread multiplies.
constexpr uint WRITERS = CONSUMERS / HALVES;
constexpr uint OWN_BLOCKS = DEPTH / HALVES;
static_assert(HALVES == 1 || !FOLDED, "linear: halves of chunks are for few rows");
// Bytes of a row of codes, and the distance of rows, chosen against bank conflicts of a load. If rows are not padded,
// their units of 16 bytes are permuted (swizzled).
constexpr uint CODES = INPUTS / 8 * BITS;
constexpr uint PITCH = BITS == 4 ? CODES : BITS == 8 ? CODES + 64 : CODES + 16;
// Lanes that copy a row, 16 bytes at a time.
constexpr uint ROW_LANES = CODES / 16 % 8 == 0 ? 8 : CODES / 16 % 4 == 0 ? 4 : 2;
// A stage: x, codes, sums of x.
constexpr uint AT_CODES = X_BYTES;
constexpr uint AT_SUMS = AT_CODES + OUTPUTS * PITCH;
constexpr uint STAGE = (AT_SUMS + SUMS_BYTES + 1023) / 1024 * 1024;
// Chunks of a span: the scales and biases of its SPAN inputs are copied together. Scales of a thread in a chunk; bytes
// of an output's scales, and the distance of outputs. Copies have pieces of 8 bytes or, if these are not aligned,
// words. The first scale (or bias) of the tensor may be in the middle of a word (SCALES_ODD, BIASES_ODD: 0 or 1), and
// so may the first scale of any output.
constexpr uint SPAN_CHUNKS = SPAN / INPUTS;
constexpr uint FACTORS = INPUTS / GROUP / HALVES;
constexpr uint SPAN_BYTES = SPAN / GROUP * 2;
constexpr uint FACTOR_PITCH = SPAN_BYTES + 8;
constexpr uint FACTOR_PIECES = SPAN_BYTES / 8;
constexpr uint SIDE = OUTPUTS * FACTOR_PITCH;
constexpr uint SLOTS = 2;
// The ring begins behind the barriers, at a multiple of 1024 bytes.
constexpr uint AT_RING = 1024;
constexpr uint AT_SLOTS = AT_RING + STAGES * STAGE;
// The sums over the second halves; two tiles alternate.
constexpr uint AT_HALVES = AT_SLOTS + SLOTS * 2 * SIDE;
constexpr uint HALF_BYTES = HALVES == 1 ? 0 : OUTPUTS * ROWS * 4;
static_assert(1024 + AT_HALVES + 2 * HALF_BYTES == SHARED_BYTES, "linear: the shared memory that Rust asks for");
static_assert(CLUSTER == 1 || STAGES * STAGE >= OUTPUTS * ROWS * 4, "linear: the sums of a tile take the place of the ring");
static_assert(CLUSTER == 1 || !EXPERTS, "linear: how many tiles of experts there are is not known before");
static_assert(INPUTS / HALVES % GROUP == 0 && SPAN % INPUTS == 0 && GROUP % BLOCK == 0, "linear: whole groups in a chunk, whole blocks in a group");
static_assert(X_DTYPE == BF16 && (OUT_DTYPE == BF16 || OUT_DTYPE == F32 && !FOLDED), "linear: the dtypes of rows");
static_assert(W_DTYPE == BF16 || W_DTYPE == F16 && !FOLDED, "linear: the dtype of scales");

// The shares of the blocks. Each has `each` chunks of all tiles (in a cluster, of its tile); the first `longer` blocks
// have one more.
struct Shares {
    uint each;
    uint longer;

    uint begin(uint block) const {
        return block * each + min(block, longer);
    }
    uint block_of(uint unit) const {
        const uint of_longer = longer * (each + 1);
        return unit < of_longer ? unit / (each + 1) : longer + (unit - of_longer) / each;
    }
};

// The chunks of one tile that a block has.
struct Segment {
    uint tile;
    uint from;
    uint to;
};

inline Segment segment_at(uint unit, uint end, uint chunks) {
    const uint tile = unit / chunks, from = unit % chunks;
    return {tile, from, min(chunks, from + (end - unit))};
}

#endif
