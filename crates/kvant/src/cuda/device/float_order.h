// Floats as numbers that compare as the floats do.
#ifndef KVANT_CUDA_DEVICE_FLOAT_ORDER_H
#define KVANT_CUDA_DEVICE_FLOAT_ORDER_H
#include "device/convert.h"

// Larger floats have larger keys, -0 has that of 0, and NaN has 0, below all others.
inline uint ordered(float x) {
    const uint bits = __float_as_uint(x);
    const uint magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) {
        return 0;
    }
    return bits >> 31 && magnitude != 0 ? ~bits : magnitude | 0x80000000;
}

// A float with that key.
inline float from_ordered(uint key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFF : ~key);
}

#endif
