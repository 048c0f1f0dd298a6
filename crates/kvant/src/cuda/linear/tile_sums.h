// Sums of a tile of 16 outputs whose inputs are divided among the warps of a block, and among blocks. Used by
// linear_skinny_affine4_tma.cu and linear_skinny_dense_tma.cu, which define STAGES, WARPS and SPLITS.
#ifndef KVANT_CUDA_LINEAR_TILE_SUMS_H
#define KVANT_CUDA_LINEAR_TILE_SUMS_H
#include "device/mbarrier.h"
#include "device/vectors.h"

// Maximum tiles whose sums are in shared memory.
constexpr uint SLOTS = 2;

// Barriers in shared memory, from `at` on. Each of STAGES buffers of W has the barriers full and empty; the sums of
// each of SLOTS tiles have the barriers complete and read.
struct TileBarriers {
    uint at;

    uint full(uint stage) const {
        return at + stage * 8;
    }
    uint empty(uint stage) const {
        return at + (STAGES + stage) * 8;
    }
    uint summed(uint slot) const {
        return at + (2 * STAGES + slot) * 8;
    }
    uint taken(uint slot) const {
        return at + (2 * STAGES + SLOTS + slot) * 8;
    }

    // One thread fills a buffer. `multiplying` threads read it and store sums. `adding` threads read sums.
    inline void init(uint multiplying, uint adding) const {
#pragma unroll
        for (uint s = 0; s < STAGES; s++) {
            barrier_init(full(s), 1);
            barrier_init(empty(s), multiplying);
        }
#pragma unroll
        for (uint s = 0; s < SLOTS; s++) {
            barrier_init(summed(s), multiplying);
            barrier_init(taken(s), adding);
        }
        show_barriers_to_copies();
    }
};

// Adds up the sums of WARPS warps, in their order. `first` is the lane's sum of the first warp.
inline float4 sum_of_warps(const float4 *first) {
    float4 total = first[0];
#pragma unroll
    for (uint w = 1; w < WARPS; w++) {
        total = total + first[w * 32];
    }
    return total;
}

// Adds up the sums of SPLITS blocks, `apart` from each other, in their order.
inline float4 sum_of_blocks(const float4 *first, ulong apart) {
    float4 total = __ldcg(first);
#pragma unroll
    for (uint i = 1; i < SPLITS; i++) {
        total = total + __ldcg(first + i * apart);
    }
    return total;
}

#endif
