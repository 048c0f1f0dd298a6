// Clusters of blocks, and distributed shared memory.
#ifndef KVANT_CUDA_DEVICE_CLUSTER_H
#define KVANT_CUDA_DEVICE_CLUSTER_H
#include "device/fragments.h"

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

inline void cluster_arrive() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// As cluster_arrive, for blocks whose only writes for other blocks are barriers that show_barriers_to_copies
// (mbarrier.h) has made visible.
inline void cluster_arrive_early() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Returns when all blocks of the cluster have arrived, and their earlier writes are visible.
inline void cluster_wait() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// This address in the shared memory of another block of the cluster.
inline uint address_in(const void *p, uint block) {
    uint address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(block));
    return address;
}

inline float4 load4_in(const void *p, uint block) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address_in(p, block))
                 : "memory");
    return x;
}

inline float2 load2_in(const void *p, uint block) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address_in(p, block)) : "memory");
    return x;
}

// Stores to another block's shared memory, and signals the bytes to a barrier there. Addresses are those of
// address_in().
inline void send(uint to, float x, uint barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(x), "r"(barrier)
                 : "memory");
}
inline void send(uint to, float2 x, uint barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(x.x),
                 "f"(x.y), "r"(barrier)
                 : "memory");
}
// Stores only if `is_so`, without a branch.
inline void send_if(bool is_so, uint to, float2 x, uint barrier) {
    asm volatile("{\n.reg .pred so;\nsetp.ne.u32 so, %4, 0;\n"
                 "@so st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];\n}" ::"r"(to),
                 "f"(x.x), "f"(x.y), "r"(barrier), "r"(uint(is_so))
                 : "memory");
}
inline void send(uint to, float4 x, uint barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
                 : "memory");
}

#endif
