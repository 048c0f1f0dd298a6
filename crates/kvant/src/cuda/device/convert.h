// Types and conversions of all kernels. NVRTC has no headers for halves, so they are bits here.
#ifndef KVANT_CUDA_DEVICE_CONVERT_H
#define KVANT_CUDA_DEVICE_CONVERT_H

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long ulong;

inline float half_to_float(ushort bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// Rounds to nearest, ties to even; infinite beyond the range.
inline ushort float_to_half(float x) {
    ushort bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

inline float bf16_to_float(ushort bits) {
    return __uint_as_float(uint(bits) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline ushort float_to_bf16(float x) {
#if __CUDA_ARCH__ >= 800
    ushort bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    const uint bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) {
        return ushort(bits >> 16 | 0x40);
    }
    return ushort((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
#endif
}

#endif
