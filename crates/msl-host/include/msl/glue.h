// Calls a kernel from its entry point: the front end lists the attributes of the parameters, the compiler knows their
// types.
#pragma once
#pragma clang system_header
#include "sync.h"

namespace metal {

template <class T> struct __referent { static constexpr bool reference = false; using type = T; };
template <class T> struct __referent<T &> { static constexpr bool reference = true; using type = T; };
template <class T> struct __mutable { using type = T; };
template <class T> struct __mutable<const T> { using type = T; };

template <int N> struct __at_buffer {
  template <class A> static A get(const MslContext *c) {
    (void)c;
#ifdef MSL_COUNT
    if constexpr (__referent<A>::reference) return *(typename __referent<A>::type *)__msl_buffer_argument(N);
    else return (A)__msl_buffer_argument(N);
#else
    if constexpr (__referent<A>::reference) {
      using T = typename __referent<A>::type;
      // The parameter does not exist, but the compiler may read it before the kernel checks.
      if (!c->buffer[N]) return *(T *)__msl_absent(sizeof(T));
      if (c->buffer_bytes[N] < sizeof(T)) __msl_short_buffer(N, c->buffer_bytes[N], sizeof(T));
      return *(T *)(uintptr_t)c->buffer[N];
    } else return (A)(uintptr_t)c->buffer[N];
#endif
  }
};
template <int N> struct __at_threadgroup {
  template <class A> static A get(const MslContext *c) {
#ifdef MSL_COUNT
    (void)c;
    void *memory = __msl_threadgroup_argument(N);
#else
    char *memory = c->threadgroup_memory[N];
#endif
    if constexpr (__referent<A>::reference) return *(typename __referent<A>::type *)(uintptr_t)memory;
    else return (A)(uintptr_t)memory;
  }
};
template <class A> inline A __position(const uint *p) {
  using V = typename __mutable<A>::type;
  V v;
  if constexpr (__vector<V>::count == 1) v = (V)p[0];
  else
    for (int i = 0; i < __vector<V>::count; i++) v[i] = (typename __vector<V>::Element)p[i];
  return v;
}
#define MSL_AT_VECTOR(name) \
  struct __at_##name { template <class A> static A get(const MslContext *c) { return __position<A>(c->name); } };
#define MSL_AT_SCALAR(name, value) \
  struct __at_##name { template <class A> static A get(const MslContext *c) { (void)c; return (A)(value); } };
MSL_AT_VECTOR(thread_position_in_grid)
MSL_AT_VECTOR(threadgroup_position_in_grid)
MSL_AT_VECTOR(thread_position_in_threadgroup)
MSL_AT_VECTOR(threads_per_threadgroup)
MSL_AT_VECTOR(dispatch_threads_per_threadgroup)
MSL_AT_VECTOR(threads_per_grid)
MSL_AT_VECTOR(threadgroups_per_grid)
MSL_AT_SCALAR(thread_index_in_threadgroup, c->thread_index_in_threadgroup)
MSL_AT_SCALAR(thread_index_in_simdgroup, c->thread_index_in_simdgroup)
MSL_AT_SCALAR(simdgroup_index_in_threadgroup, c->simdgroup_index_in_threadgroup)
MSL_AT_SCALAR(simdgroups_per_threadgroup, c->simdgroups_per_threadgroup)
MSL_AT_SCALAR(threads_per_simdgroup, 32)
MSL_AT_SCALAR(thread_execution_width, 32)
MSL_AT_SCALAR(thread_index_in_quadgroup, c->thread_index_in_threadgroup & 3)
MSL_AT_SCALAR(quadgroup_index_in_threadgroup, c->thread_index_in_threadgroup / 4)
#undef MSL_AT_VECTOR
#undef MSL_AT_SCALAR

#ifdef MSL_COUNT
// Apple's compiler reads a constant reference before the kernel starts, into registers that all threads share.
template <class A, class P> struct __argument { static A of(const MslContext *c) { return P::template get<A>(c); } };
template <class T, class P> struct __argument<const T &, P> { static T of(const MslContext *c) { return P::template get<const T &>(c); } };
#else
template <class A, class P> struct __argument { static A of(const MslContext *c) { return P::template get<A>(c); } };
#endif
template <class... A, class... B> inline void __call(void (*kernel_function)(A...), const MslContext *c, B...) {
  static_assert(sizeof...(A) == sizeof...(B), "one attribute per parameter");
  kernel_function(__argument<A, B>::of(c)...);
}

}  // namespace metal

// A threadgroup variable of a kernel: a reference to memory of the runtime, one object per instantiation of the kernel.
#define __MSL_THREADGROUP_VARIABLE(T, name)                                                                     \
  static const char __msl_key_##name = 0;                                                                       \
  threadgroup T &name = *(threadgroup T *)(uintptr_t)__msl_threadgroup_variable(&__msl_key_##name, sizeof(T), #name)

// Function constants are in thread-local storage, set before each dispatch. One compiled library thereby serves every
// specialisation, and two dispatches with different values may run at once. Nothing may write them, which the typed
// pass ensures.
#define is_function_constant_defined(name) (__msl_defined_##name)
#ifdef MSL_COUNT
// Specialised, like a pipeline.
#define __MSL_FUNCTION_CONSTANT(T, name) \
  static const T name = (T)__msl_value_##name; \
  static const bool __msl_defined_##name = __msl_given_##name;
#define __MSL_DERIVED_CONSTANT(T, name, ...) static const T name = (__VA_ARGS__)
#elif defined(MSL_TYPED)
// Without a value, so that the typed pass does not fold one.
#define __MSL_FUNCTION_CONSTANT(T, name) \
  extern constant T name;                \
  extern constant bool __msl_defined_##name;
#define __MSL_DERIVED_CONSTANT(T, name, ...) constant T name = __VA_ARGS__
#else
#define __MSL_FUNCTION_CONSTANT(T, name) \
  static __thread T name;                \
  static __thread bool __msl_defined_##name;
#define __MSL_DERIVED_CONSTANT(T, name, ...) \
  static __thread T name;                    \
  static void __msl_derive_##name() { name = (__VA_ARGS__); } static_assert(true)
#endif
