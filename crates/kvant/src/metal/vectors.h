// Four neighbouring elements of a tensor at a time.
#ifndef KVANT_VECTORS_H
#define KVANT_VECTORS_H
#include "elements.h"

// Elements i .. i+3. The first `count` exist; the others are zero. `aligned`, a function constant: all exist, and the
// first is aligned to four elements.
inline float4 load4(device const uchar *x, ulong i, uint count, uint dtype, bool aligned) {
    if (aligned) {
        switch (dtype) {
        case F32: return *reinterpret_cast<device const float4 *>(x + i * 4);
        case F16: return float4(*reinterpret_cast<device const half4 *>(x + i * 2));
        default: return as_type<float4>(uint4(*reinterpret_cast<device const ushort4 *>(x + i * 2)) << 16);
        }
    }
    float4 values = 0;
    for (uint j = 0; j < min(count, 4u); j++) {
        values[j] = load(x, i + j, dtype);
    }
    return values;
}

inline void store4(device uchar *x, ulong i, uint count, float4 values, uint dtype, bool aligned) {
    if (aligned) {
        // Every NaN gets the same bits, as in store.
        const uint4 bits = as_type<uint4>(values);
        values = as_type<float4>(select(bits, uint4(NAN_BITS), (bits & 0x7FFFFFFF) > 0x7F800000));
        switch (dtype) {
        case F32: *reinterpret_cast<device float4 *>(x + i * 4) = values; break;
        case F16: *reinterpret_cast<device half4 *>(x + i * 2) = half4(values); break;
        default:
            *reinterpret_cast<device ushort4 *>(x + i * 2) =
                ushort4(float_to_bf16(values.x), float_to_bf16(values.y), float_to_bf16(values.z), float_to_bf16(values.w));
        }
        return;
    }
    for (uint j = 0; j < min(count, 4u); j++) {
        store(x, i + j, values[j], dtype);
    }
}

// Moves the bits of four elements.
inline void copy4(device const uchar *from, ulong i, device uchar *to, ulong j, uint count, uint dtype, bool aligned) {
    if (dtype == F32) {
        if (aligned) {
            *reinterpret_cast<device uint4 *>(to + j * 4) = *reinterpret_cast<device const uint4 *>(from + i * 4);
            return;
        }
        for (uint k = 0; k < min(count, 4u); k++) {
            reinterpret_cast<device uint *>(to)[j + k] = reinterpret_cast<device const uint *>(from)[i + k];
        }
    } else {
        if (aligned) {
            *reinterpret_cast<device ushort4 *>(to + j * 2) = *reinterpret_cast<device const ushort4 *>(from + i * 2);
            return;
        }
        for (uint k = 0; k < min(count, 4u); k++) {
            reinterpret_cast<device ushort *>(to)[j + k] = reinterpret_cast<device const ushort *>(from)[i + k];
        }
    }
}

#endif
