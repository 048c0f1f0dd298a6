// A place in a ring of COUNT buffers in shared memory, each of which has barriers (mbarrier.h).
#ifndef KVANT_CUDA_DEVICE_RING_CURSOR_H
#define KVANT_CUDA_DEVICE_RING_CURSOR_H
#include "device/convert.h"

template <uint COUNT> struct RingCursor {
    uint stage = 0;
    // Of the phase of the stage's barriers.
    uint parity = 0;

    inline void next() {
        stage = stage + 1 == COUNT ? 0 : stage + 1;
        parity ^= stage == 0 ? 1 : 0;
    }
    // The same, as numbers of one lane, which are the warp's: the compiler computes with them once, not in each lane.
    inline RingCursor of_warp() const {
        return {__shfl_sync(0xFFFFFFFF, stage, 0), __shfl_sync(0xFFFFFFFF, parity, 0)};
    }
    // The stage before this one.
    inline uint before() const {
        return stage == 0 ? COUNT - 1 : stage - 1;
    }
};

#endif
