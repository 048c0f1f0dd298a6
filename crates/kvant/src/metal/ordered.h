// Maps floats to integers that compare as the floats do.
#ifndef KVANT_ORDERED_H
#define KVANT_ORDERED_H
#include <metal_stdlib>
using namespace metal;

// Larger floats have larger keys, -0 has the key of 0, and NaN has 0, below all others.
inline uint ordered(float x) {
    const uint bits = as_type<uint>(x);
    const uint magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) {
        return 0;
    }
    return bits >> 31 && magnitude != 0 ? ~bits : magnitude | 0x80000000;
}

// A float with this key.
inline float from_ordered(uint key) {
    return as_type<float>(key >> 31 ? key & 0x7FFFFFFF : ~key);
}

#endif
