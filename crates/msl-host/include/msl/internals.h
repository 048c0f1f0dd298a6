// Names of Apple's headers that foreign kernels use although no specification has them: MLX uses them to define the
// functions of bfloat, which Metal lacks. The last argument of a math function selects fast or precise.
#pragma once
#pragma clang system_header
#include "sync.h"

#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 2

#define MSL_INTERNAL1(name) inline float __metal_##name(float x, int) { return metal::name(x); }
#define MSL_INTERNAL2(name) inline float __metal_##name(float x, float y, int) { return metal::name(x, y); }
MSL_INTERNAL1(fabs) MSL_INTERNAL1(acos) MSL_INTERNAL1(acosh) MSL_INTERNAL1(asin) MSL_INTERNAL1(asinh) MSL_INTERNAL1(atan)
MSL_INTERNAL1(atanh) MSL_INTERNAL1(ceil) MSL_INTERNAL1(cos) MSL_INTERNAL1(cosh) MSL_INTERNAL1(cospi) MSL_INTERNAL1(exp)
MSL_INTERNAL1(exp10) MSL_INTERNAL1(exp2) MSL_INTERNAL1(floor) MSL_INTERNAL1(fract) MSL_INTERNAL1(log) MSL_INTERNAL1(log10)
MSL_INTERNAL1(log2) MSL_INTERNAL1(rint) MSL_INTERNAL1(round) MSL_INTERNAL1(rsqrt) MSL_INTERNAL1(sin) MSL_INTERNAL1(sinh)
MSL_INTERNAL1(sinpi) MSL_INTERNAL1(sqrt) MSL_INTERNAL1(tan) MSL_INTERNAL1(tanh) MSL_INTERNAL1(tanpi) MSL_INTERNAL1(trunc)
MSL_INTERNAL2(atan2) MSL_INTERNAL2(divide) MSL_INTERNAL2(fmax) MSL_INTERNAL2(fmin) MSL_INTERNAL2(fmod) MSL_INTERNAL2(pow)
MSL_INTERNAL2(powr)
#undef MSL_INTERNAL1
#undef MSL_INTERNAL2
inline float __metal_nextafter(float x, float y) { return __builtin_nextafterf(x, y); }
inline float __metal_fma(float a, float b, float c) { return metal::fma(a, b, c); }
inline float __metal_fmax3(float a, float b, float c, int) { return metal::max3(a, b, c); }
inline float __metal_fmin3(float a, float b, float c, int) { return metal::min3(a, b, c); }
inline float __metal_fmedian3(float a, float b, float c, int) { return metal::median3(a, b, c); }
inline float __metal_frexp(float x, thread int *exponent) { return __builtin_frexpf(x, exponent); }
inline float __metal_ldexp(float x, int by, int) { return __builtin_ldexpf(x, by); }
inline ushort __metal_get_simdgroup_size(ushort) { return 32; }
inline ushort __metal_get_thread_index_in_simdgroup(ushort) { return (ushort)__msl_lane(); }

#define MSL_INTERNAL1(name) template <class T> MSL_INLINE T __metal_##name(T v, MSL_SITE) { return metal::name(v, site); }
#define MSL_INTERNAL2(name) template <class T> MSL_INLINE T __metal_##name(T v, ushort by, MSL_SITE) { return metal::name(v, by, site); }
#define MSL_INTERNAL4(name) \
  template <class T> MSL_INLINE T __metal_##name(T v, T fill, ushort by, ushort modulo, MSL_SITE) { return metal::name(v, fill, by, modulo, site); }
MSL_INTERNAL1(simd_max) MSL_INTERNAL1(simd_min) MSL_INTERNAL1(simd_sum) MSL_INTERNAL1(simd_product)
MSL_INTERNAL1(simd_prefix_exclusive_product) MSL_INTERNAL1(simd_prefix_exclusive_sum)
MSL_INTERNAL1(simd_prefix_inclusive_product) MSL_INTERNAL1(simd_prefix_inclusive_sum)
MSL_INTERNAL2(simd_broadcast) MSL_INTERNAL2(simd_shuffle) MSL_INTERNAL2(simd_shuffle_down) MSL_INTERNAL2(simd_shuffle_up)
MSL_INTERNAL2(simd_shuffle_xor) MSL_INTERNAL2(simd_shuffle_rotate_down) MSL_INTERNAL2(simd_shuffle_rotate_up)
MSL_INTERNAL4(simd_shuffle_and_fill_down) MSL_INTERNAL4(simd_shuffle_and_fill_up)
#undef MSL_INTERNAL1
#undef MSL_INTERNAL2
#undef MSL_INTERNAL4
// MLX declares it for bfloat, through float, and never calls it.
template <class T> MSL_INLINE T __metal_simd_xor(T v, MSL_SITE) { return metal::as_type<T>(metal::simd_xor(metal::as_type<uint>(v), site)); }
