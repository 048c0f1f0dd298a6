// Does racecheck follow barriers of a part of a block? Only mbarriers at which every thread arrives. For other barriers
// it reports ordered accesses as hazards, even after the next __syncthreads. compute-sanitizer of CUDA 13.0 on an H200,
// 2026-11-22:
//
//   for mode in 0 1 2 3 4 5; do
//       nvcc -arch=sm_90 -DMODE=$mode -o /tmp/barriers named_barriers.cu &&
//           compute-sanitizer --tool racecheck /tmp/barriers
//   done
//
// mode 0 (nothing is exchanged within teams), 3 (the whole block waits) and 4 (an mbarrier, every thread arrives): 0
// hazards; 1 (bar.sync, barrier index in a register) and 2 (index in the instruction): 4 hazards each, all of them
// where the block exchanges through b; 5 (an mbarrier, one lane arrives for its warp after __syncwarp): 5.
//
// Therefore, in kernels in which parts of a block exchange data copied by ordinary instructions, every thread arrives
// at the mbarriers.
#include <cstdio>

// The synchronisation of a team of 64 threads between writing and reading.
__device__ __forceinline__ void wait_for_team(unsigned team, unsigned round, unsigned long long *barriers) {
#if MODE == 1
    asm volatile("bar.sync %0, 64;" ::"r"(1 + team) : "memory");
#elif MODE == 2
    switch (team) {
    case 0: asm volatile("bar.sync 1, 64;" ::: "memory"); break;
    case 1: asm volatile("bar.sync 2, 64;" ::: "memory"); break;
    case 2: asm volatile("bar.sync 3, 64;" ::: "memory"); break;
    default: asm volatile("bar.sync 4, 64;" ::: "memory"); break;
    }
#elif MODE == 3
    __syncthreads();
#elif MODE == 4 || MODE == 5
    const unsigned barrier = unsigned(__cvta_generic_to_shared(barriers + team));
    __syncwarp();
    if (MODE == 4 || threadIdx.x % 32 == 0) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
    }
    asm volatile("{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n@!over bra again;\n}" ::"r"(barrier),
                 "r"(round % 2)
                 : "memory");
#endif
}

__global__ void exchange(float *out, int loops) {
    __shared__ float a[2][256], b[256];
    __shared__ unsigned long long barriers[4];
    const unsigned thread = threadIdx.x, team = thread / 64;
    if (thread < 4) {
        const unsigned count = MODE == 4 ? 64 : 2;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(unsigned(__cvta_generic_to_shared(barriers + thread))), "r"(count)
                     : "memory");
    }
    __syncthreads();
    float sum = 0;
    // Teams often run different numbers of rounds, unless all wait for all.
    const int rounds = MODE == 3 ? loops : loops + team % 2;
    for (int i = 0; i < rounds; i++) {
        a[i % 2][thread] = sum + i;
        wait_for_team(team, i, barriers);
        sum += a[i % 2][MODE == 0 ? thread : thread ^ 32];
    }
    __syncthreads();
    for (int round = 0; round < 4; round++) {
        if (round > 0) {
            __syncthreads();
        }
        b[thread] = sum + round;
        __syncthreads();
        sum += b[(thread * 7 + 64) % 256];
    }
    out[blockIdx.x * 256 + thread] = sum;
}

int main() {
    float *out;
    cudaMalloc(&out, 4 * 256 * sizeof(float));
    exchange<<<4, 256>>>(out, 5);
    printf("mode %d: %s\n", MODE, cudaGetErrorString(cudaDeviceSynchronize()));
}
