// Scalars, vectors, address spaces, constants; construction and casts.
#pragma once
#pragma clang system_header

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef __INTPTR_TYPE__ intptr_t;
typedef _Float16 half;  // rounds after every operation, by an option of the compiler (src/toolchain.rs)
typedef __bf16 bfloat;

// A vector of three occupies the space of four; its packed form does not. Packed vectors of two and four only lose the
// alignment, so the compiler treats them as the same type.
#define MSL_VECTORS(T)                                                                \
  typedef T T##2 __attribute__((ext_vector_type(2)));                                 \
  typedef T T##3 __attribute__((ext_vector_type(3)));                                 \
  typedef T T##4 __attribute__((ext_vector_type(4)));                                 \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T))));    \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));    \
  struct packed_##T##3 {                                                              \
    T x, y, z;                                                                        \
    packed_##T##3() = default;                                                        \
    packed_##T##3(T##3 v) : x(v.x), y(v.y), z(v.z) {}                                 \
    operator T##3() const { return T##3{x, y, z}; }                                   \
  };                                                                                  \
  namespace metal {                                                                   \
  using ::T##2;                                                                       \
  using ::T##3;                                                                       \
  using ::T##4;                                                                       \
  }
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
#undef MSL_VECTORS

constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator""h(unsigned long long x) { return (half)x; }
constexpr half operator""H(long double x) { return (half)x; }
constexpr bfloat operator""bf(long double x) { return (bfloat)(float)x; }
constexpr bfloat operator""bf(unsigned long long x) { return (bfloat)(float)x; }

#ifdef MSL_TYPED
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST static constant constexpr const

#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define MAXFLOAT __FLT_MAX__
#define HALF_MAX ((half)65504.0f)
#define MAXHALF ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-05f)
#define HALF_EPSILON ((half)9.765625e-04f)
#define HUGE_VALF __builtin_inff()
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define ULONG_MAX 18446744073709551615ul

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

// A vector of bools has a byte per element; clang's own has a bit. Comparisons of vectors give clang's vectors of
// integers, all ones for true, which convert to it.
template <int N> struct __bools;
#define MSL_BOOLS(N, MEMBERS)                                                                \
  template <> struct __bools<N> {                                                                  \
    bool MEMBERS;                                                                                  \
    __bools() = default;                                                                           \
    __bools(bool b) { for (int i = 0; i < N; i++) (*this)[i] = b; }                                \
    template <class T> __bools(vec<T, N> v) { for (int i = 0; i < N; i++) (*this)[i] = v[i]; } \
    bool &operator[](int i) { return (&x)[i]; }                                                    \
    bool operator[](int i) const { return (&x)[i]; }                                               \
    __bools operator!() const { __bools r; for (int i = 0; i < N; i++) r[i] = !(*this)[i]; return r; }           \
    __bools operator&(__bools b) const { for (int i = 0; i < N; i++) b[i] = b[i] && (*this)[i]; return b; }      \
    __bools operator|(__bools b) const { for (int i = 0; i < N; i++) b[i] = b[i] || (*this)[i]; return b; }      \
    __bools operator&&(__bools b) const { return *this & b; }                                      \
    __bools operator||(__bools b) const { return *this | b; }                                      \
    __bools operator==(__bools b) const { for (int i = 0; i < N; i++) b[i] = b[i] == (*this)[i]; return b; }     \
    __bools operator!=(__bools b) const { return !(*this == b); }                                  \
  };
#define MSL_MEMBERS2 x, y
#define MSL_MEMBERS3 x, y, z
#define MSL_MEMBERS4 x, y, z, w
MSL_BOOLS(2, MSL_MEMBERS2)
MSL_BOOLS(3, MSL_MEMBERS3)
MSL_BOOLS(4, MSL_MEMBERS4)
#undef MSL_BOOLS
typedef __bools<2> bool2;
typedef __bools<3> bool3;
typedef __bools<4> bool4;

// Type traits, implemented with clang's builtins.
template <class V> struct __vector { static constexpr int count = 1; using Element = V; };
template <class T, int N> struct __vector<T __attribute__((ext_vector_type(N)))> { static constexpr int count = N; using Element = T; };
template <int N> struct __vector<__bools<N>> { static constexpr int count = N; using Element = bool; };
template <class T, T V> struct integral_constant {
  static constexpr T value = V;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return V; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;

#define MSL_TRANSFORM(name, from, to)                                        \
  template <class T> struct name { using type = T; };                        \
  template <class T> struct name<from> { using type = to; };                 \
  template <class T> using name##_t = typename name<T>::type;
MSL_TRANSFORM(remove_const, const T, T)
MSL_TRANSFORM(remove_volatile, volatile T, T)
MSL_TRANSFORM(remove_pointer, T *, T)
#undef MSL_TRANSFORM
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T &> { using type = T; };
template <class T> struct remove_reference<T &&> { using type = T; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> struct remove_cv { using type = remove_volatile_t<remove_const_t<T>>; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct remove_addrspace { using type = T; };
template <class T> struct remove_addrspace<T __attribute__((address_space(1)))> { using type = T; };
template <class T> struct remove_addrspace<T __attribute__((address_space(2)))> { using type = T; };
template <class T> struct remove_addrspace<T __attribute__((address_space(3)))> { using type = T; };
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T> struct decay { using type = __decay(T); };
template <class T> using decay_t = typename decay<T>::type;
template <class T> struct make_signed { using type = __make_signed(T); };
template <class T> using make_signed_t = typename make_signed<T>::type;
template <class T> struct make_unsigned { using type = __make_unsigned(T); };
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> struct underlying_type { using type = __underlying_type(T); };
template <class T> using underlying_type_t = typename underlying_type<T>::type;

#define MSL_TRAIT(name, expr)                                                \
  template <class T> struct name : bool_constant<(expr)> {};                 \
  template <class T> constexpr bool name##_v = (expr);
#define MSL_TRAIT2(name, expr)                                               \
  template <class A, class B> struct name : bool_constant<(expr)> {};        \
  template <class A, class B> constexpr bool name##_v = (expr);
template <class T> constexpr bool __is_small_float = __is_same(remove_cv_t<T>, half) || __is_same(remove_cv_t<T>, bfloat);
MSL_TRAIT(is_void, __is_void(T))
MSL_TRAIT(is_integral, __is_integral(T))
MSL_TRAIT(is_floating_point, __is_floating_point(T) || __is_small_float<T>)
MSL_TRAIT(is_arithmetic, __is_arithmetic(T) || __is_small_float<T>)
MSL_TRAIT(is_scalar, __is_scalar(T) || __is_small_float<T>)
MSL_TRAIT(is_signed, __is_signed(T) || __is_small_float<T>)
MSL_TRAIT(is_unsigned, __is_unsigned(T))
MSL_TRAIT(is_pointer, __is_pointer(T))
MSL_TRAIT(is_reference, __is_reference(T))
MSL_TRAIT(is_array, __is_array(T))
MSL_TRAIT(is_const, __is_const(T))
MSL_TRAIT(is_enum, __is_enum(T))
MSL_TRAIT(is_class, __is_class(T))
MSL_TRAIT(is_union, __is_union(T))
MSL_TRAIT(is_trivial, __is_trivial(T))
MSL_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
MSL_TRAIT(is_standard_layout, __is_standard_layout(T))
MSL_TRAIT2(is_same, __is_same(A, B))
MSL_TRAIT2(is_base_of, __is_base_of(A, B))
MSL_TRAIT2(is_convertible, __is_convertible(A, B))
MSL_TRAIT2(is_assignable, __is_assignable(A, B))
template <class T, class... A> struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <class T, class... A> constexpr bool is_constructible_v = __is_constructible(T, A...);
#undef MSL_TRAIT
#undef MSL_TRAIT2

template <class T> struct numeric_limits;
#define MSL_LIMITS(T, LOWEST, MIN, MAX)                    \
  template <> struct numeric_limits<T> {                   \
    static constexpr T lowest() { return LOWEST; }         \
    static constexpr T min() { return MIN; }               \
    static constexpr T max() { return MAX; }               \
    static constexpr T infinity() { return (T)(__is_integral(T) ? 0.0f : __builtin_inff()); } \
    static constexpr T quiet_NaN() { return (T)(__is_integral(T) ? 0.0f : __builtin_nanf("")); } \
  };
MSL_LIMITS(float, -FLT_MAX, FLT_MIN, FLT_MAX)
MSL_LIMITS(half, (half)-65504.0f, HALF_MIN, HALF_MAX)
MSL_LIMITS(bfloat, (bfloat)-3.38953139e38f, (bfloat)1.17549435e-38f, (bfloat)3.38953139e38f)
MSL_LIMITS(char, CHAR_MIN, CHAR_MIN, CHAR_MAX)
MSL_LIMITS(uchar, 0, 0, UCHAR_MAX)
MSL_LIMITS(short, SHRT_MIN, SHRT_MIN, SHRT_MAX)
MSL_LIMITS(ushort, 0, 0, USHRT_MAX)
MSL_LIMITS(int, INT_MIN, INT_MIN, INT_MAX)
MSL_LIMITS(uint, 0, 0, UINT_MAX)
MSL_LIMITS(long, -LONG_MAX - 1, -LONG_MAX - 1, LONG_MAX)
MSL_LIMITS(ulong, 0, 0, ULONG_MAX)
#undef MSL_LIMITS

// Converts a scalar; clang has no conversion between half and bfloat.
template <class V, class A> constexpr V __convert(A a) {
  if constexpr (__is_small_float<V> && __is_small_float<A>) return (V)(float)a;
  else return (V)a;
}
// Element by element: clang 19 fails on some vectors of bfloat.
template <class V, class A> constexpr V __convert_vector(A a) {
  V v{};
  for (int i = 0; i < __vector<V>::count; i++) v[i] = __convert<typename __vector<V>::Element>(a[i]);
  return v;
}

// Construction: float4(a, b, c, d), float4(s), float4(half4), float4(float2, float2), ...
template <class V, class A> inline void __append(V &v, int &at, A a) {
  if constexpr (__vector<A>::count == 1) v[at++] = __convert<typename __vector<V>::Element>(a);
  else
    for (int i = 0; i < __vector<A>::count; i++) v[at++] = __convert<typename __vector<V>::Element>(a[i]);
}
template <class V> constexpr V __make() { return V{}; }
template <class V, class A> constexpr V __make(A a) {
  using E = typename __vector<V>::Element;
  if constexpr (__vector<V>::count == 1) return __convert<V>(a);
  else if constexpr (__vector<A>::count == 1) return (V)__convert<E>(a);
  else {
    static_assert(__vector<A>::count == __vector<V>::count, "a vector constructor needs as many elements as the vector has");
    if constexpr (__is_same(V, A)) return a;
    else if constexpr (__is_same(E, bfloat) || __is_same(typename __vector<A>::Element, bfloat) || __is_class(V) || __is_class(A))
      return __convert_vector<V>(a);
    else return __builtin_convertvector(a, V);
  }
}
template <class V, class A, class B, class... R> constexpr V __make(A a, B b, R... rest) {
  if constexpr (__vector<V>::count == 1) return V(a, b, rest...);
  else {
    static_assert(__vector<A>::count + __vector<B>::count + (0 + ... + __vector<R>::count) == __vector<V>::count,
                  "a vector constructor needs as many elements as the vector has");
    V v;
    int at = 0;
    __append(v, at, a);
    __append(v, at, b);
    (__append(v, at, rest), ...);
    return v;
  }
}

// Casts: (float4)x is rewritten to __cast<float4>(x).
template <class V, class A> constexpr V __cast(A a) { return __make<V>(a); }

template <class T> struct __space { static constexpr int value = 0; };
template <class T> struct __space<T __attribute__((address_space(1)))> { static constexpr int value = 1; };
template <class T> struct __space<T __attribute__((address_space(2)))> { static constexpr int value = 2; };
template <class T> struct __space<T __attribute__((address_space(3)))> { static constexpr int value = 3; };
template <class T> struct __pointee { static constexpr bool pointer = false; };
template <class T> struct __pointee<T *> { static constexpr bool pointer = true; using type = T; };
// (device float4 *)p is rewritten to __pointer_cast<device float4 *>(p): clang's own cast would silently change the
// address space.
template <class P, class A> inline P __pointer_cast(A a) {
  if constexpr (__pointee<A>::pointer)
    static_assert(__space<typename __pointee<P>::type>::value == __space<typename __pointee<A>::type>::value,
                  "this cast changes the address space of a pointer");
  return (P)a;
}

template <class To, class From> inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, from);
}

// A value that is uniform over all threads in MSL. Here it is an ordinary value.
template <class T> using uniform = T;
template <class T> constexpr T make_uniform(T x) { return x; }

template <class T, size_t N> struct array {
  T __elements[N];
  constexpr T &operator[](size_t i) { return __elements[i]; }
  constexpr const T &operator[](size_t i) const { return __elements[i]; }
  constexpr size_t size() const { return N; }
  T *data() { return __elements; }
  const T *data() const { return __elements; }
};

}  // namespace metal
