// Atomics. All fibers share one OS thread, so a plain read-modify-write is atomic. Each one is reported to the checker:
// atomics do not race with each other, but an atomic and a plain access of one byte do.
#pragma once
#pragma clang system_header
#include "sync.h"

// The orders make no difference, because one thread runs at a time.
enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

namespace metal {

using ::memory_order;
using ::memory_order_relaxed;
using ::memory_order_acquire;
using ::memory_order_release;
using ::memory_order_acq_rel;
using ::memory_order_seq_cst;
using ::thread_scope;
using ::thread_scope_thread;
using ::thread_scope_simdgroup;
using ::thread_scope_threadgroup;
using ::thread_scope_device;

inline void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}

template <class T> struct atomic { T value; };
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

// Not instrumented: __msl_atomic has already reported the access to the checker. The value's type comes from the
// atomic, so that atomic_fetch_add_explicit(a, 1, ...) converts 1.
#define MSL_ATOMIC __attribute__((no_sanitize("thread", "alignment"), noinline))
#ifdef MSL_CHECK
#define MSL_TELL(kind) __msl_atomic((const void *)p, sizeof p->value, kind)
#else
#define MSL_TELL(kind) (void)0
#endif
template <class T> struct __plain { using type = T; };
template <class T> struct __plain<const T> { using type = T; };
template <class T> struct __plain<T &> : __plain<T> {};
template <class T> struct __plain<volatile T> { using type = T; };
template <class T> struct __plain<T __attribute__((address_space(1)))> { using type = T; };
template <class T> struct __plain<T __attribute__((address_space(3)))> { using type = T; };
#define MSL_ATOMIC_T typename __plain<decltype(P{}->value)>::type

#define MSL_FETCH(name, expr)                                                            \
  template <class P> MSL_ATOMIC auto name(P p, MSL_ATOMIC_T x, memory_order) {           \
    MSL_TELL(2);                                                                         \
    auto old = p->value;                                                                 \
    p->value = (expr);                                                                   \
    return old;                                                                          \
  }
MSL_FETCH(atomic_fetch_add_explicit, old + x)
MSL_FETCH(atomic_fetch_sub_explicit, old - x)
MSL_FETCH(atomic_fetch_max_explicit, max(old, x))
MSL_FETCH(atomic_fetch_min_explicit, min(old, x))
MSL_FETCH(atomic_fetch_or_explicit, old | x)
MSL_FETCH(atomic_fetch_and_explicit, old & x)
MSL_FETCH(atomic_fetch_xor_explicit, old ^ x)
MSL_FETCH(atomic_exchange_explicit, x)
#undef MSL_FETCH
template <class P> MSL_ATOMIC void atomic_store_explicit(P p, MSL_ATOMIC_T x, memory_order) {
  MSL_TELL(1);
  p->value = x;
}
template <class P> MSL_ATOMIC auto atomic_load_explicit(P p, memory_order) {
  MSL_TELL(0);
  auto v = p->value;
  return v;
}
// Never fails spuriously here; portable kernels must loop nevertheless.
template <class P, class E> MSL_ATOMIC bool atomic_compare_exchange_weak_explicit(P p, E expected, MSL_ATOMIC_T x, memory_order, memory_order) {
  MSL_TELL(2);
  if (p->value == *expected) {
    p->value = x;
    return true;
  }
  *expected = p->value;
  return false;
}
#undef MSL_TELL
#undef MSL_ATOMIC

}  // namespace metal
