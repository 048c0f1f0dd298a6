// Barriers in shared memory, for threads that hand buffers to one another.
#ifndef KVANT_MBARRIER_H
#define KVANT_MBARRIER_H
#include "convert.h"

// A barrier is 8 bytes at `at`; its phase ends when `count` threads have come.
inline void barrier_init(uint at, uint count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

inline void barrier_arrive(uint at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Waits for the end of a phase, the first of which has parity 0. That of the phase before the first has parity 1, and is over.
inline void barrier_wait(uint at, uint parity) {
    asm volatile("{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n@!over bra again;\n}" ::"r"(
                     at),
                 "r"(parity)
                 : "memory");
}

#endif
