// Numbers that are known to be equal in all lanes of a warp.
#ifndef KVANT_CUDA_DEVICE_UNIFORM_H
#define KVANT_CUDA_DEVICE_UNIFORM_H
#include "device/convert.h"

// A number that is equal in all lanes. The compiler then computes with it once per warp, not in each lane.
inline uint of_warp(uint x) {
    return __shfl_sync(0xFFFFFFFF, x, 0);
}

#endif
