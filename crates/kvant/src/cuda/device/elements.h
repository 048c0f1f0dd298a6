// Elements of tensors. Every kernel computes in float, whatever the dtypes of its tensors are.
#ifndef KVANT_CUDA_DEVICE_ELEMENTS_H
#define KVANT_CUDA_DEVICE_ELEMENTS_H
#include "device/convert.h"

// The numbers of dtypes, as gpu/launch.rs has them.
constexpr uint F32 = 0;
constexpr uint F16 = 1;
constexpr uint BF16 = 2;

inline constexpr uint size_of(uint dtype) {
    return dtype == F32 ? 4 : 2;
}

// Element i of a tensor. `dtype` is a constant, so that the compiler keeps one case.
inline float load(const uchar *x, ulong i, uint dtype) {
    switch (dtype) {
    case F32: return reinterpret_cast<const float *>(x)[i];
    case F16: return half_to_float(reinterpret_cast<const ushort *>(x)[i]);
    default: return bf16_to_float(reinterpret_cast<const ushort *>(x)[i]);
    }
}

inline void store(uchar *x, ulong i, float value, uint dtype) {
    switch (dtype) {
    case F32: reinterpret_cast<float *>(x)[i] = value; break;
    case F16: reinterpret_cast<ushort *>(x)[i] = float_to_half(value); break;
    default: reinterpret_cast<ushort *>(x)[i] = float_to_bf16(value); break;
    }
}

// The value after rounding to `dtype`.
inline float rounded(float value, uint dtype) {
    switch (dtype) {
    case F32: return value;
    case F16: return half_to_float(float_to_half(value));
    default: return bf16_to_float(float_to_bf16(value));
    }
}

// An element's bits, NaN payloads included.
inline void copy_element(const uchar *from, ulong i, uchar *to, ulong j, uint dtype) {
    if (dtype == F32) {
        reinterpret_cast<uint *>(to)[j] = reinterpret_cast<const uint *>(from)[i];
    } else {
        reinterpret_cast<ushort *>(to)[j] = reinterpret_cast<const ushort *>(from)[i];
    }
}

// Elements i .. i+3. Their address is a multiple of the bytes of four elements.
inline float4 load4(const uchar *x, ulong i, uint dtype) {
    if (dtype == F32) {
        return *reinterpret_cast<const float4 *>(x + i * 4);
    }
    const uint2 bits = *reinterpret_cast<const uint2 *>(x + i * 2);
    const ushort a = ushort(bits.x), b = ushort(bits.x >> 16), c = ushort(bits.y), d = ushort(bits.y >> 16);
    if (dtype == F16) {
        return make_float4(half_to_float(a), half_to_float(b), half_to_float(c), half_to_float(d));
    }
    return make_float4(bf16_to_float(a), bf16_to_float(b), bf16_to_float(c), bf16_to_float(d));
}

inline void store4(uchar *x, ulong i, float4 v, uint dtype) {
    if (dtype == F32) {
        *reinterpret_cast<float4 *>(x + i * 4) = v;
        return;
    }
    const bool half = dtype == F16;
    const uint a = half ? float_to_half(v.x) : float_to_bf16(v.x), b = half ? float_to_half(v.y) : float_to_bf16(v.y);
    const uint c = half ? float_to_half(v.z) : float_to_bf16(v.z), d = half ? float_to_half(v.w) : float_to_bf16(v.w);
    *reinterpret_cast<uint2 *>(x + i * 2) = make_uint2(a | b << 16, c | d << 16);
}

#endif
