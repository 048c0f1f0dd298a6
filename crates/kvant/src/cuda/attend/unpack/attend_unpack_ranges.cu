// attend_unpack_ranges: finds the positions that the tokens of a call see, by sequence.
//
// ranges [S, 3]: for each sequence its slot, the first position that one of its tokens sees, and the end of these
// positions. Sequences whose tokens see a position have slots from 0 on, in their order; others have NONE. One block;
// its threads share the tokens, then the sequences.
#include "attend/work.h"

extern "C" __global__ void __launch_bounds__(THREADS)
    KVANT_KERNEL(const uint *positions, const uint *sequence, const uint *lens, uint *ranges, const AttendParams p) {
    for (uint s = threadIdx.x; s < p.sequences; s += THREADS) {
        ranges[3 * s + 1] = NONE;
        ranges[3 * s + 2] = 0;
    }
    __syncthreads();
    for (uint first = 0; first < p.tokens; first += THREADS) {
        const uint token = first + threadIdx.x;
        Token of = {0, NONE, 0};
        if (token < p.tokens) {
            of = load_token(p, positions, sequence, lens, token);
        }
        const Range seen = of.sequence == NONE ? Range{0, 0} : visible(p, of);
        const bool any = seen.first < seen.end;
        // Neighbours are mostly of one sequence: one lane then writes for the warp.
        const uint common = __shfl_sync(0xFFFFFFFF, of.sequence, 0);
        const bool alike = __all_sync(0xFFFFFFFF, any && of.sequence == common);
        const uint lowest = __reduce_min_sync(0xFFFFFFFF, any ? seen.first : NONE);
        const uint highest = __reduce_max_sync(0xFFFFFFFF, any ? seen.end : 0);
        if (alike ? threadIdx.x % 32 == 0 : any) {
            atomicMin(&ranges[3 * of.sequence + 1], alike ? lowest : seen.first);
            atomicMax(&ranges[3 * of.sequence + 2], alike ? highest : seen.end);
        }
    }
    __syncthreads();
    for (uint s = threadIdx.x; s < p.sequences; s += THREADS) {
        uint slot = 0;
        for (uint before = 0; before < s; before++) {
            slot += __ldcg(ranges + 3 * before + 2) > 0;
        }
        ranges[3 * s] = __ldcg(ranges + 3 * s + 2) > 0 ? slot : NONE;
    }
}
