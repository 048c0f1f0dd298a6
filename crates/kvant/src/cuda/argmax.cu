// argmax: the index of the largest element of each row; the lowest index among equals. NaN never wins: a row of NaN
// gives 0xFFFFFFFF.
//
// x is [rows, dim], f32, f16 or bf16; out is [rows]. BLOCKS blocks share a row. A thread has groups of four elements at
// a constant distance: it loads AHEAD groups, then compares the largest of each with the best. If a row has several
// blocks, each writes its best to `parts`, [rows][1 + BLOCKS] of 64 bits, and the last block to arrive selects the best
// of all.
#include "device/dependent_launch.h"
#include "device/float_order.h"
#include "device/reduce.h"
#include "device/vectors.h"

// Groups of four elements that a thread loads before it compares them.
constexpr uint AHEAD = 4;

struct ArgmaxParams {
    uint dim;
};

// A thread's best group of four elements: the first with the largest key. The element within the group is determined at
// the end. The key of NaN is 0, the initial key, so a NaN never becomes the best.
struct Best {
    uint key = 0;
    uint index = 0xFFFFFFFF;
    float4 four = all4(0);

    // Considers the four elements from i on.
    inline void consider(float4 values, ulong i) {
        // fmaxf ignores a NaN unless both operands are NaN.
        const uint other = ordered(fmaxf(fmaxf(values.x, values.y), fmaxf(values.z, values.w)));
        if (other > key) {
            key = other;
            index = uint(i);
            four = values;
        }
    }
};

// The best of a thread's groups, from element `at` of the row on, `stride` elements apart.
inline Best best_of(const uchar *x, ulong start, ulong at, ulong stride, uint dim) {
    Best best;
    // Whole groups: no load depends on a comparison, so that all loads are in flight together.
    for (; at + (AHEAD - 1) * stride + 4 <= dim; at += AHEAD * stride) {
        float4 values[AHEAD];
#pragma unroll
        for (uint k = 0; k < AHEAD; k++) {
            values[k] = load4(x, start + at + k * stride, 4, X_DTYPE, ALIGNED);
        }
#pragma unroll
        for (uint k = 0; k < AHEAD; k++) {
            best.consider(values[k], at + k * stride);
        }
    }
    for (; at < dim; at += stride) {
        const uint count = min(4u, uint(dim - at));
        float4 values = load4(x, start + at, count, X_DTYPE, ALIGNED);
        const float nan = __uint_as_float(0x7FC00000);
        values.y = count > 1 ? values.y : nan;
        values.z = count > 2 ? values.z : nan;
        values.w = count > 3 ? values.w : nan;
        best.consider(values, at);
    }
    if (best.key > 0) {
        const float4 four = best.four;
        best.index += ordered(four.x) == best.key ? 0 : ordered(four.y) == best.key ? 1 : ordered(four.z) == best.key ? 2 : 3;
    }
    return best;
}

// With several blocks, a warp takes the best of all `parts`.
inline void take_best(const ulong *parts, uint *out, uint lane) {
    __threadfence();
    ulong best = 0;
    for (uint i = lane; i < BLOCKS; i += 32) {
        best = max(best, __ldcg(parts + i));
    }
#pragma unroll
    for (uint distance = 16; distance > 0; distance /= 2) {
        best = max(best, __shfl_xor_sync(ALL, best, distance));
    }
    if (lane == 0) {
        *out = 0xFFFFFFFFu - uint(best);
    }
}

// One block of 1024 threads on a multiprocessor is enough. For two, the compiler would save registers, and load a group
// only after the comparison of another.
extern "C" __global__ void __launch_bounds__(1024, 1)
    KVANT_KERNEL(const uchar *x, uint *out, const ArgmaxParams p, ulong *parts) {
    take_turn();
    __shared__ uint room[2 * EXCHANGE];
    __shared__ bool last;
    const Team team = whole_block();
    const uint row = blockIdx.x / BLOCKS, part_index = blockIdx.x % BLOCKS;
    const ulong first = (part_index * team.size + team.index) * 4;
    const Best best = best_of(x, ulong(row) * p.dim, first, BLOCKS * team.size * 4, p.dim);
    const uint largest = over_team<Max>(best.key, room, team);
    const uint lowest = over_team<Min>(best.key == largest ? best.index : Min::none, room + EXCHANGE, team);
    if (BLOCKS == 1) {
        if (team.index == 0) {
            out[row] = lowest;
        }
        return;
    }
    ulong *mine = parts + ulong(row) * (1 + BLOCKS);
    if (team.index == 0) {
        __stcg(mine + 1 + part_index, ulong(largest) << 32 | (0xFFFFFFFFu - lowest));
        __threadfence();
        // The last arrival resets the count to 0, for the next replay.
        last = atomicInc(reinterpret_cast<uint *>(mine), BLOCKS - 1) == BLOCKS - 1;
    }
    __syncthreads();
    if (last && team.index < 32) {
        take_best(mine + 1, out + row, team.index);
    }
}
