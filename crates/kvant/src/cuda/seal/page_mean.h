// The mean of a page's rotated vectors. The warps of a block share the vectors.
#ifndef KVANT_CUDA_SEAL_PAGE_MEAN_H
#define KVANT_CUDA_SEAL_PAGE_MEAN_H
#include "codec/encode_rows.h"
#include "device/reduce.h"
#include "device/vectors.h"

constexpr uint WARPS = THREADS / 32;

// The largest code of a mean.
constexpr float MEAN_LEVELS = 127;

// Stored in shared memory. Pages alternate between its two halves, so that no warp waits for warps that still read.
struct __align__(16) PageSums {
    // The sums of each warp's vectors.
    float sums[2][WARPS][HEAD_DIM];
    // Each warp's decoded copy of the stored mean.
    float means[WARPS][HEAD_DIM];
    // The number of vectors that each warp has summed.
    uint found[2][WARPS];
};

// to[j] ← the sum of x[j] over the lanes that differ in the bits from FROM to below TO. Each lane stores a part.
template <uint FROM, uint TO, uint N> inline void store_lane_sums(const float (&x)[N], float *to, bool stores = true) {
    if constexpr (FROM == TO) {
#pragma unroll
        for (uint j = 0; j < N; j++) {
            if (stores) {
                to[j] = x[j];
            }
        }
    } else {
        const bool upper = (threadIdx.x & FROM) != 0;
        constexpr uint HALF = N > 1 ? N / 2 : 1, OTHER = N > 1 ? HALF : 0;
        float half[HALF];
#pragma unroll
        for (uint j = 0; j < HALF; j++) {
            const float other = __shfl_xor_sync(ALL, upper ? x[j] : x[j + OTHER], FROM);
            half[j] = (upper ? x[j + OTHER] : x[j]) + other;
        }
        store_lane_sums<2 * FROM, TO>(half, to + (upper ? OTHER : 0), stores && (N > 1 || !upper));
    }
}

// The mean of the sums in its stored form; each warp computes it. The first warp stores it at `to`. Begins with a
// barrier.
inline const float *mean_of_sums(PageSums &room, uint turn, uchar *to) {
    constexpr uint QUADS = (HEAD_DIM / 4 + 31) / 32;
    const uint lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    uint found = 0;
#pragma unroll
    for (uint w = 0; w < WARPS; w++) {
        found += room.found[turn][w];
    }
    const float inverse = 1 / float(max(found, 1u));
    float4 mean[QUADS];
    float largest = 0;
#pragma unroll
    for (uint k = 0; k < QUADS; k++) {
        const uint j = 4 * (lane + 32 * k);
        mean[k] = all4(0);
        if (j < HEAD_DIM) {
#pragma unroll
            for (uint w = 0; w < WARPS; w++) {
                mean[k] = mean[k] + *reinterpret_cast<const float4 *>(&room.sums[turn][w][j]);
            }
        }
        mean[k] = inverse * mean[k];
        largest = fmaxf(fmaxf(fmaxf(largest, fabsf(mean[k].x)), fmaxf(fabsf(mean[k].y), fabsf(mean[k].z))),
                        fabsf(mean[k].w));
    }
    largest = over_warp<Max>(largest);
    const float scale = largest * (1 / MEAN_LEVELS);
    // Codes are at most MEAN_LEVELS, and the inverse is finite.
    const float unit = largest > 1e-30f ? MEAN_LEVELS / largest : 0;
    float *own = room.means[warp];
    __syncwarp();
#pragma unroll
    for (uint k = 0; k < QUADS; k++) {
        const uint j = 4 * (lane + 32 * k);
        // Rounded to nearest, ties to even, in the lowest bits.
        constexpr float ROUND = 12582912;
        const float4 codes = make_float4(fmaf(mean[k].x, unit, ROUND), fmaf(mean[k].y, unit, ROUND),
                                         fmaf(mean[k].z, unit, ROUND), fmaf(mean[k].w, unit, ROUND));
        if (j < HEAD_DIM) {
            *reinterpret_cast<float4 *>(own + j) = scale * (codes + all4(-ROUND));
            if (warp == 0) {
                const uint low = __byte_perm(__float_as_uint(codes.x), __float_as_uint(codes.y), 0x0040);
                const uint high = __byte_perm(__float_as_uint(codes.z), __float_as_uint(codes.w), 0x0040);
                *reinterpret_cast<uint *>(to + j) = __byte_perm(low, high, 0x5410);
            }
        }
    }
    if (threadIdx.x == 0) {
        *reinterpret_cast<float *>(to + HEAD_DIM) = scale;
    }
    __syncwarp();
    return own;
}

#endif
