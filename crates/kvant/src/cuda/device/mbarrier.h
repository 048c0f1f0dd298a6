// Barriers in shared memory (mbarrier), for threads that pass buffers to each other, and bulk copies.
#ifndef KVANT_CUDA_DEVICE_MBARRIER_H
#define KVANT_CUDA_DEVICE_MBARRIER_H
#include "device/convert.h"

// A barrier is 8 bytes at `at`; its phase ends when `count` threads have arrived.
inline void barrier_init(uint at, uint count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

// Every thread arrives itself if ordinary instructions read and overwrite a buffer. If one lane arrived for its warp
// after __syncwarp, racecheck of compute-sanitizer would report false hazards (tools/h200/named_barriers.cu). On Hopper
// both are equally fast.
inline void barrier_arrive(uint at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// As barrier_arrive, for all lanes of a warp: WARP_ARRIVALS of them arrive. Before Hopper, arrivals of lanes are atomic
// operations on one address, one after the other.
#if __CUDA_ARCH__ >= 900
constexpr uint WARP_ARRIVALS = 32;
#else
constexpr uint WARP_ARRIVALS = 1;
#endif
inline void barrier_arrive_warp(uint at) {
    if (WARP_ARRIVALS == 1) {
        __syncwarp();
    }
    if (threadIdx.x % 32 < WARP_ARRIVALS) {
        barrier_arrive(at);
    }
}

// Later bulk copies may use the barriers initialised before.
inline void show_barriers_to_copies() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Later bulk copies are ordered after earlier stores to shared memory.
inline void show_to_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and adds `bytes` of copies that the phase waits for.
inline void barrier_expect(uint at, uint bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// Arrives when all cp.async copies of this thread have completed.
inline void barrier_arrive_behind_copies(uint at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}

// True in one lane of a warp, in a form that the compiler recognises. In another form, it compiles bulk copies to a
// loop over lanes. All lanes call it.
inline bool elected() {
    uint is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is));
    return is != 0;
}

// Copies `bytes` to shared memory asynchronously, and signals the barrier. Size and addresses are multiples of 16.
inline void copy_bulk(uint to, const uchar *from, uint bytes, uint barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Copies `bytes` from shared memory asynchronously. Size and addresses are multiples of 16.
inline void store_bulk(uchar *to, uint from, uint bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}

// Waits until the thread's bulk stores have read shared memory.
inline void stores_wait() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Prefetches `bytes` to L2. Size and address are multiples of 16.
inline void prefetch_bulk(const uchar *from, uint bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Waits for the end of a phase. The first phase has parity 0; waiting for parity 1 before its end returns at once.
inline void barrier_wait(uint at, uint parity) {
#if __CUDA_ARCH__ >= 900
#define WAIT "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define WAIT "mbarrier.test_wait.parity.shared::cta.b64"
#endif
    asm volatile("{\n.reg .pred over;\nagain:\n" WAIT " over, [%0], %1;\n@!over bra again;\n}" ::"r"(at), "r"(parity) : "memory");
#undef WAIT
}

// Whether the phase has ended.
inline bool barrier_is_over(uint at, uint parity) {
    uint is;
    asm volatile("{\n.reg .pred over;\nmbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\nselp.u32 %0, 1, 0, over;\n}"
                 : "=r"(is)
                 : "r"(at), "r"(parity)
                 : "memory");
    return is != 0;
}

#endif
