// A place in a ring of COUNT buffers in shared memory. Each buffer has barriers (mbarrier.h).
#ifndef KVANT_CUDA_DEVICE_RING_CURSOR_H
#define KVANT_CUDA_DEVICE_RING_CURSOR_H
#include "device/uniform.h"

template <uint COUNT> struct RingCursor {
    uint stage = 0;
    // The parity of the current phase of the stage's barriers.
    uint parity = 0;

    inline void next() {
        stage = stage + 1 == COUNT ? 0 : stage + 1;
        parity ^= stage == 0 ? 1 : 0;
    }
    // The cursor, known to be equal in all lanes (uniform.h).
    inline RingCursor of_warp() const {
        return {::of_warp(stage), ::of_warp(parity)};
    }
    // The stage before this one.
    inline uint before() const {
        return stage == 0 ? COUNT - 1 : stage - 1;
    }
};

#endif
