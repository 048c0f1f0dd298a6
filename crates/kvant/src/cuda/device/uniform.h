// Numbers that all lanes of a warp have, as the compiler knows.
#ifndef KVANT_CUDA_DEVICE_UNIFORM_H
#define KVANT_CUDA_DEVICE_UNIFORM_H
#include "device/convert.h"

// A number of one lane, which is the warp's: the compiler computes with it once, not in each lane.
inline uint of_warp(uint x) {
    return __shfl_sync(0xFFFFFFFF, x, 0);
}

#endif
