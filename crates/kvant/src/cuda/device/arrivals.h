// Blocks that share a result: the one that arrives last completes it.
#ifndef KVANT_CUDA_DEVICE_ARRIVALS_H
#define KVANT_CUDA_DEVICE_ARRIVALS_H
#include "device/convert.h"

// Counts an arrival among `all`. Returns true for the last one, which sees all earlier writes of the others.
inline bool count_arrival(uint *counter, uint all) {
    uint before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    const bool last = before == all - 1;
    if (last) {
        // Resets the count for the next launch.
        *counter = 0;
    }
    return last;
}

#endif
