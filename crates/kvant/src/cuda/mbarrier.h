// Barriers in shared memory, for threads that hand buffers to one another.
#ifndef KVANT_MBARRIER_H
#define KVANT_MBARRIER_H
#include "convert.h"

// A barrier is 8 bytes at `at`; its phase ends when `count` threads have come.
inline void barrier_init(uint at, uint count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

// Where ordinary instructions read and overwrite, every thread comes for itself: racecheck of compute-sanitizer does not count one lane
// for its warp, __syncwarp before it, and reports hazards that there are not (tools/h200/named_barriers.cu). It takes no longer.
inline void barrier_arrive(uint at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Bulk copies after it may use barriers that were made before.
inline void show_barriers_to_copies() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Bulk copies after it come after what was stored to shared memory before.
inline void show_to_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Comes, and says that `bytes` of copies come before the phase ends.
inline void barrier_expect(uint at, uint bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// Comes when all that this thread has begun to copy with cp.async is there.
inline void barrier_arrive_behind_copies(uint at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}

// One lane of a warp, in a way that the compiler sees: it makes a loop over lanes of bulk copies elsewhere. All lanes call it.
inline bool elected() {
    uint is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is));
    return is != 0;
}

// Copies `bytes`, a multiple of 16, between multiples of 16 to shared memory behind the thread's back, and tells the barrier.
inline void copy_bulk(uint to, const uchar *from, uint bytes, uint barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Asks L2 for `bytes`, a multiple of 16, from a multiple of 16 on.
inline void prefetch_bulk(const uchar *from, uint bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Waits for the end of a phase, the first of which has parity 0. That of the phase before the first has parity 1, and is over.
inline void barrier_wait(uint at, uint parity) {
#if __CUDA_ARCH__ >= 900
#define WAIT "mbarrier.try_wait.parity.shared::cta.b64"
#else
#define WAIT "mbarrier.test_wait.parity.shared::cta.b64"
#endif
    asm volatile("{\n.reg .pred over;\nagain:\n" WAIT " over, [%0], %1;\n@!over bra again;\n}" ::"r"(at), "r"(parity) : "memory");
#undef WAIT
}

#endif
