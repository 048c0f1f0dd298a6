// Elements of tensors. Every kernel computes in float, for any dtypes of its inputs and outputs.
#ifndef KVANT_ELEMENTS_H
#define KVANT_ELEMENTS_H
#include <metal_stdlib>
using namespace metal;

// The numbers of dtypes, as in gpu/launch.rs.
constant constexpr uint F32 = 0;
constant constexpr uint F16 = 1;
constant constexpr uint BF16 = 2;

// bf16 from its bits: the type bfloat requires Metal 3.1, which these kernels do not.
inline float bf16_to_float(ushort bits) {
    return as_type<float>(uint(bits) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline ushort float_to_bf16(float x) {
    uint bits = as_type<uint>(x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) {
        return ushort(bits >> 16 | 0x40);
    }
    return ushort((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Element i of a tensor. `dtype` is a function constant, so that the compiler keeps one case.
inline float load(device const uchar *x, ulong i, uint dtype) {
    switch (dtype) {
    case F32: return reinterpret_cast<device const float *>(x)[i];
    case F16: return float(reinterpret_cast<device const half *>(x)[i]);
    default: return bf16_to_float(reinterpret_cast<device const ushort *>(x)[i]);
    }
}

// Tests the bits, which a compiler that assumes finite numbers may not fold.
inline bool is_nan(float x) {
    return (as_type<uint>(x) & 0x7FFFFFFF) > 0x7F800000;
}

inline bool is_finite(float x) {
    return (as_type<uint>(x) & 0x7F800000) != 0x7F800000;
}

// The power of two, from 2^-126 to 2^126, that scales x, at least 0, to about 1.
inline float unit_of(float x) {
    const int exponent = int(as_type<uint>(x) >> 23) - 127;
    return as_type<float>(uint(127 - clamp(exponent, -126, 126)) << 23);
}

constant constexpr uint NAN_BITS = 0x7FC00000;

// Stores every NaN with the same bits: which of two NaNs an addition keeps depends on the compiler.
inline void store(device uchar *x, ulong i, float value, uint dtype) {
    value = is_nan(value) ? as_type<float>(NAN_BITS) : value;
    switch (dtype) {
    case F32: reinterpret_cast<device float *>(x)[i] = value; break;
    case F16: reinterpret_cast<device half *>(x)[i] = half(value); break;
    default: reinterpret_cast<device ushort *>(x)[i] = float_to_bf16(value); break;
    }
}

#endif
