// Floats as numbers that compare as the floats do.
#ifndef KVANT_CUDA_DEVICE_FLOAT_ORDER_H
#define KVANT_CUDA_DEVICE_FLOAT_ORDER_H
#include "device/convert.h"

// Larger floats have larger keys. -0 has the key of 0. NaN has the key 0, below all others.
inline uint ordered(float x) {
    const uint bits = __float_as_uint(x);
    const uint magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) {
        return 0;
    }
    return bits >> 31 && magnitude != 0 ? ~bits : magnitude | 0x80000000;
}

// The float of a key.
inline float from_ordered(uint key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFF : ~key);
}

#endif
