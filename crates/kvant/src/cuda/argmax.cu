// argmax: the index of the largest element of each row, the lowest among equals; NaN never, but 0 for a row of nothing else.
//
// x is [rows, dim], f32, f16 or bf16; out is [rows]. One block per row; each thread keeps the best of every so many elements.
#include "vectors.h"
#include "ordered.h"
#include "team.h"
#include "ahead.h"

struct ArgmaxParams {
    uint dim;
};

extern "C" __global__ void argmax(const uchar *x, uint *out, const ArgmaxParams p) {
    take_turn();
    __shared__ uint room[2 * EXCHANGE];
    const Team team = whole_block();
    const ulong start = ulong(blockIdx.x) * p.dim;
    // 0, the key of NaN, is never exceeded by NaN.
    uint key = 0;
    uint index = 0;
    for (uint i = team.index * 4; i < p.dim; i += team.size * 4) {
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
    if (team.index == 0) {
        out[blockIdx.x] = lowest;
    }
}
