// Math, integer, relational and geometric functions. One overload per type, so that calls with mixed types are
// ambiguous, as in MSL. half functions compute in float and round once. bfloat has no functions in Metal, and converts
// to float. fast:: and precise:: are the same functions.
#pragma once
#pragma clang system_header
#include "types.h"

namespace metal {

#define MSL_UNARY(name, expr)                                                        \
  inline float name(float x) { return expr; }                                        \
  inline half name(half h_) { float x = (float)h_; return (half)(expr); }            \
  template <class T, int N> inline vec<T, N> name(vec<T, N> v) {                     \
    vec<T, N> r;                                                                     \
    for (int i = 0; i < N; i++) r[i] = name(v[i]);                                   \
    return r;                                                                        \
  }
MSL_UNARY(exp, __builtin_expf(x))
MSL_UNARY(exp2, __builtin_exp2f(x))
MSL_UNARY(exp10, __builtin_powf(10.0f, x))
MSL_UNARY(log, __builtin_logf(x))
MSL_UNARY(log2, __builtin_log2f(x))
MSL_UNARY(log10, __builtin_log10f(x))
MSL_UNARY(sqrt, __builtin_sqrtf(x))
MSL_UNARY(rsqrt, (float)(1.0 / __builtin_sqrt((double)x)))
MSL_UNARY(sin, __builtin_sinf(x))
MSL_UNARY(cos, __builtin_cosf(x))
MSL_UNARY(tan, __builtin_tanf(x))
MSL_UNARY(sinpi, (float)__builtin_sin((double)3.14159265358979323846l * (double)x))
MSL_UNARY(cospi, (float)__builtin_cos((double)3.14159265358979323846l * (double)x))
MSL_UNARY(tanpi, (float)__builtin_tan((double)3.14159265358979323846l * (double)x))
MSL_UNARY(asin, __builtin_asinf(x))
MSL_UNARY(acos, __builtin_acosf(x))
MSL_UNARY(atan, __builtin_atanf(x))
MSL_UNARY(sinh, __builtin_sinhf(x))
MSL_UNARY(cosh, __builtin_coshf(x))
MSL_UNARY(tanh, __builtin_tanhf(x))
MSL_UNARY(asinh, __builtin_asinhf(x))
MSL_UNARY(acosh, __builtin_acoshf(x))
MSL_UNARY(atanh, __builtin_atanhf(x))
MSL_UNARY(fabs, __builtin_fabsf(x))
MSL_UNARY(floor, __builtin_floorf(x))
MSL_UNARY(ceil, __builtin_ceilf(x))
MSL_UNARY(trunc, __builtin_truncf(x))
MSL_UNARY(rint, __builtin_rintf(x))
MSL_UNARY(round, __builtin_roundf(x))
MSL_UNARY(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f))
MSL_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
MSL_UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
#undef MSL_UNARY

#define MSL_BINARY(name, expr)                                                                                        \
  inline float name(float x, float y) { return expr; }                                                                \
  inline half name(half a_, half b_) { float x = (float)a_, y = (float)b_; return (half)(expr); }                     \
  template <class T, int N> inline vec<T, N> name(vec<T, N> a, vec<T, N> b) {                                         \
    vec<T, N> r;                                                                                                      \
    for (int i = 0; i < N; i++) r[i] = name(a[i], b[i]);                                                              \
    return r;                                                                                                         \
  }                                                                                                                   \
  template <class T, int N> inline vec<T, N> name(vec<T, N> a, typename __vector<vec<T, N>>::Element b) { return name(a, (vec<T, N>)b); } \
  template <class T, int N> inline vec<T, N> name(typename __vector<vec<T, N>>::Element a, vec<T, N> b) { return name((vec<T, N>)a, b); }
MSL_BINARY(pow, __builtin_powf(x, y))
MSL_BINARY(powr, __builtin_powf(x, y))
MSL_BINARY(fmod, __builtin_fmodf(x, y))
MSL_BINARY(copysign, __builtin_copysignf(x, y))
MSL_BINARY(atan2, __builtin_atan2f(x, y))
MSL_BINARY(fdim, __builtin_fdimf(x, y))
MSL_BINARY(divide, x / y)
MSL_BINARY(step, y < x ? 0.0f : 1.0f)
MSL_BINARY(fmin, __builtin_fminf(x, y))
MSL_BINARY(fmax, __builtin_fmaxf(x, y))
MSL_BINARY(min, __builtin_fminf(x, y))
MSL_BINARY(max, __builtin_fmaxf(x, y))
#undef MSL_BINARY

#define MSL_INTEGER(T, U, BITS)                                                                       \
  inline T min(T a, T b) { return b < a ? b : a; }                                                    \
  inline T max(T a, T b) { return a < b ? b : a; }                                                    \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }                               \
  inline U absdiff(T a, T b) { return a < b ? (U)b - (U)a : (U)a - (U)b; }                            \
  inline T popcount(T x) { return (T)__builtin_popcountl((ulong)(U)x); }                              \
  inline T clz(T x) { return (T)(x ? __builtin_clzl((ulong)(U)x) - (64 - BITS) : BITS); }             \
  inline T ctz(T x) { return (T)(x ? __builtin_ctzl((ulong)(U)x) : BITS); }                           \
  inline T rotate(T x, T by) {                                                                        \
    uint k = (uint)by & (BITS - 1);                                                                   \
    return k == 0 ? x : (T)((U)((U)x << k) | (U)((U)x >> (BITS - k)));                                \
  }                                                                                                   \
  inline T reverse_bits(T x) { return (T)(U)(__builtin_bitreverse64((ulong)(U)x) >> (64 - BITS)); }   \
  inline T extract_bits(T x, uint offset, uint bits) {                                                \
    return bits == 0 ? (T)0 : (T)((T)((U)x << (BITS - bits - offset)) >> (BITS - bits));              \
  }                                                                                                   \
  inline T insert_bits(T base, T insert, uint offset, uint bits) {                                    \
    U mask = bits == 0 ? (U)0 : (U)((U)((U) ~(U)0 >> (BITS - bits)) << offset);                       \
    return (T)((U)((U)base & (U)~mask) | (U)((U)((U)insert << offset) & mask));                       \
  }
MSL_INTEGER(char, uchar, 8)
MSL_INTEGER(uchar, uchar, 8)
MSL_INTEGER(short, ushort, 16)
MSL_INTEGER(ushort, ushort, 16)
MSL_INTEGER(int, uint, 32)
MSL_INTEGER(uint, uint, 32)
MSL_INTEGER(long, ulong, 64)
MSL_INTEGER(ulong, ulong, 64)
#undef MSL_INTEGER
inline int mulhi(int a, int b) { return (int)(((long)a * (long)b) >> 32); }
inline uint mulhi(uint a, uint b) { return (uint)(((ulong)a * (ulong)b) >> 32); }

inline char abs(char x) { return (char)(x < 0 ? -x : x); }
inline short abs(short x) { return (short)(x < 0 ? -x : x); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return fabs(x); }
inline half abs(half x) { return fabs(x); }
template <class T, int N> inline vec<T, N> abs(vec<T, N> v) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = abs(v[i]);
  return r;
}

inline float clamp(float x, float low, float high) { return min(max(x, low), high); }
inline half clamp(half x, half low, half high) { return min(max(x, low), high); }
template <class T, int N> inline vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) { return min(max(x, low), high); }
template <class T, int N> inline vec<T, N> clamp(vec<T, N> x, typename __vector<vec<T, N>>::Element low, typename __vector<vec<T, N>>::Element high) {
  return min(max(x, (vec<T, N>)low), (vec<T, N>)high);
}

template <class T> inline T min3(T a, T b, T c) { return min(min(a, b), c); }
template <class T> inline T max3(T a, T b, T c) { return max(max(a, b), c); }
template <class T> inline T median3(T a, T b, T c) { return max(min(a, b), min(max(a, b), c)); }

// The product of two halves is exact in double, and nearly every sum is; the same holds for bfloats.
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return (half)__builtin_fma((double)a, (double)b, (double)c); }
template <class T, int N> inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = fma(a[i], b[i], c[i]);
  return r;
}
template <class T, int N> inline T dot(vec<T, N> a, vec<T, N> b) {
  T s = a[0] * b[0];
  for (int i = 1; i < N; i++) s += a[i] * b[i];
  return s;
}
template <class T, int N> inline T length_squared(vec<T, N> v) { return dot(v, v); }
template <class T, int N> inline T length(vec<T, N> v) { return sqrt(dot(v, v)); }
template <class T, int N> inline T distance(vec<T, N> a, vec<T, N> b) { return length(a - b); }
template <class T, int N> inline vec<T, N> normalize(vec<T, N> v) { return v * rsqrt(dot(v, v)); }
template <class T> inline vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) { return a.yzx * b.zxy - a.zxy * b.yzx; }
template <class T> inline T mix(T a, T b, T t) { return a + (b - a) * t; }
inline float smoothstep(float low, float high, float x) {
  float t = saturate((x - low) / (high - low));
  return t * t * (3.0f - 2.0f * t);
}
inline float ldexp(float x, int by) { return __builtin_ldexpf(x, by); }
inline half ldexp(half x, int by) { return (half)__builtin_ldexpf((float)x, by); }
inline float frexp(float x, thread int &exponent) { return __builtin_frexpf(x, &exponent); }
inline float modf(float x, thread float &whole) { return __builtin_modff(x, &whole); }
inline float sincos(float x, thread float &cosine) {
  cosine = __builtin_cosf(x);
  return __builtin_sinf(x);
}

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isnormal(float x) { return __builtin_isnormal(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool isnan(half x) { return __builtin_isnan((float)x); }
inline bool isinf(half x) { return __builtin_isinf((float)x); }
inline bool isfinite(half x) { return __builtin_isfinite((float)x); }

// A comparison of vectors gives clang's vector of integers, all ones for true.
template <class T> inline T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N, class M> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<M, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <class T, int N> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, __bools<N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
inline bool any(bool b) { return b; }
inline bool all(bool b) { return b; }
template <class T, int N> inline bool any(vec<T, N> v) {
  for (int i = 0; i < N; i++) if (v[i]) return true;
  return false;
}
template <class T, int N> inline bool all(vec<T, N> v) {
  for (int i = 0; i < N; i++) if (!v[i]) return false;
  return true;
}
template <int N> inline bool any(__bools<N> v) {
  for (int i = 0; i < N; i++) if (v[i]) return true;
  return false;
}
template <int N> inline bool all(__bools<N> v) {
  for (int i = 0; i < N; i++) if (!v[i]) return false;
  return true;
}

#define MSL_USING(X) \
  X(exp) X(exp2) X(exp10) X(log) X(log2) X(log10) X(sqrt) X(rsqrt) X(sin) X(cos) X(tan) X(sinpi) X(cospi) X(tanpi) X(asin) X(acos) X(atan) X(atan2) X(sinh) X(cosh) X(tanh) X(asinh) X(acosh) X(atanh) \
  X(fabs) X(abs) X(floor) X(ceil) X(trunc) X(rint) X(round) X(fract) X(saturate) X(sign) X(pow) X(powr) X(fmod) X(fmin) X(fmax) X(min) X(max) X(clamp) \
  X(divide) X(fma) X(dot) X(length) X(distance) X(normalize) X(sincos) X(isnan) X(isinf) X(isfinite) \
  X(copysign) X(fdim) X(min3) X(max3) X(ldexp) X(frexp) X(modf)
#define MSL_ONE(name) using metal::name;
namespace precise { MSL_USING(MSL_ONE) }
namespace fast { MSL_USING(MSL_ONE) }
#undef MSL_ONE
#undef MSL_USING

}  // namespace metal
