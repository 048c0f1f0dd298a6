// argmax: the index of the largest element of each row, the lowest among equals; NaN never: a row of nothing else gives
// 0xFFFFFFFF.
//
// x is [rows, dim], f32, f16 or bf16; out is [rows]. BLOCKS blocks share a row; each thread keeps the best of every so
// many elements. Where there are several, each leaves its best in `parts`, [rows][1 + BLOCKS] of 64 bits, and the last
// one to come, whichever it is, takes the best of all.
#include "device/dependent_launch.h"
#include "device/float_order.h"
#include "device/reduce.h"
#include "device/vectors.h"

struct ArgmaxParams {
    uint dim;
};

extern "C" __global__ void KVANT_KERNEL(const uchar *x, uint *out, const ArgmaxParams p, ulong *parts) {
    take_turn();
    __shared__ uint room[2 * EXCHANGE];
    __shared__ bool last;
    const Team team = whole_block();
    const uint row = blockIdx.x / BLOCKS, part_index = blockIdx.x % BLOCKS;
    const ulong start = ulong(row) * p.dim;
    // 0, the key of NaN, is never exceeded by NaN.
    uint key = 0;
    uint index = 0xFFFFFFFF;
#pragma unroll 4
    for (ulong at = (part_index * team.size + team.index) * 4; at < p.dim; at += BLOCKS * team.size * 4) {
        const uint i = uint(at);
        const uint count = min(4u, p.dim - i);
        const float4 values = load4(x, start + i, count, X_DTYPE, ALIGNED);
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const uint other = j < count ? ordered(part(values, j)) : 0;
            if (other > key) {
                key = other;
                index = i + j;
            }
        }
    }
    const uint largest = over_team<Max>(key, room, team);
    const uint lowest = over_team<Min>(key == largest ? index : Min::none, room + EXCHANGE, team);
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
        // Back to 0 with the last one, for the next replay.
        last = atomicInc(reinterpret_cast<uint *>(mine), BLOCKS - 1) == BLOCKS - 1;
    }
    __syncthreads();
    if (last && team.index < 32) {
        __threadfence();
        ulong best = 0;
        for (uint i = team.index; i < BLOCKS; i += 32) {
            best = max(best, __ldcg(mine + 1 + i));
        }
#pragma unroll
        for (uint distance = 16; distance > 0; distance /= 2) {
            best = max(best, __shfl_xor_sync(ALL, best, distance));
        }
        if (team.index == 0) {
            out[row] = 0xFFFFFFFFu - uint(best);
        }
    }
}
