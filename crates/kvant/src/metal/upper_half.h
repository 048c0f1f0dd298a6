// The upper half of a product of 128 bits.
#ifndef KVANT_UPPER_HALF_H
#define KVANT_UPPER_HALF_H
#include <metal_stdlib>
using namespace metal;

// The upper half of a · b.
inline ulong upper_half(ulong a, ulong b) {
    const ulong a1 = a >> 32, a0 = a & 0xFFFFFFFF, b1 = b >> 32, b0 = b & 0xFFFFFFFF;
    const ulong middle = a1 * b0 + (a0 * b0 >> 32);
    const ulong other = a0 * b1 + (middle & 0xFFFFFFFF);
    return a1 * b1 + (middle >> 32) + (other >> 32);
}

#endif
