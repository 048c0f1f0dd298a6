// Barriers, SIMD-group and quad functions. Each is a rendezvous of the runtime: the lanes deposit a value, the last to
// arrive combines them, and every lane reads its result from the common slots.
#pragma once
#pragma clang system_header
#include "math.h"

namespace metal {

enum class mem_flags : unsigned { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(unsigned(a) | unsigned(b)); }

// The position of a call in the source; a default argument is evaluated at the caller.
#define MSL_SITE unsigned site = ((unsigned)__builtin_LINE() << 10 | ((unsigned)__builtin_COLUMN() & 1023u))
#ifdef MSL_COUNT
// One instruction of a GPU: its implementation here is not counted.
#define MSL_INLINE MSL_CONVERGENT __attribute__((noinline, section(".msl.library"))) inline
#else
#define MSL_INLINE MSL_CONVERGENT __attribute__((always_inline)) inline
#endif

MSL_INLINE void threadgroup_barrier(mem_flags flags, MSL_SITE) { __msl_threadgroup_barrier((unsigned)flags, site); }
MSL_INLINE void simdgroup_barrier(mem_flags flags, MSL_SITE) { __msl_simdgroup_barrier((unsigned)flags, site); }

template <class T> inline T __slot(const char *slots, unsigned lane) {
  T v;
  __builtin_memcpy(&v, slots + 16 * lane, sizeof(T));
  return v;
}
template <class T> inline void __store_slot(char *slots, unsigned lane, T v) { __builtin_memcpy(slots + 16 * lane, &v, sizeof(T)); }
template <class T> inline T __poison() {
  T v;
  __builtin_memset(&v, 0xFF, sizeof v);
  return v;
}

struct __sum { template <class T> static T of(T a, T b) { return a + b; } static constexpr int neutral = 0; };
struct __product { template <class T> static T of(T a, T b) { return a * b; } static constexpr int neutral = 1; };
struct __max { template <class T> static T of(T a, T b) { return max(a, b); } };
struct __min { template <class T> static T of(T a, T b) { return min(a, b); } };
struct __and { template <class T> static T of(T a, T b) { return a & b; } };
struct __or { template <class T> static T of(T a, T b) { return a | b; } };
struct __xor { template <class T> static T of(T a, T b) { return a ^ b; } };

// Reduces over the active lanes. A full SIMD-group reduces as a butterfly, halves first, unless the launch requests
// another order.
template <class T, class Op> MSL_UNCOUNTED void __reduce(char *slots, unsigned lanes, unsigned active) {
  T v[32];
  unsigned n = 0;
  for (unsigned i = 0; i < lanes; i++)
    if (active >> i & 1) v[n++] = __slot<T>(slots, i);
  unsigned order = __msl_sum_order();
  if (n == 32 && order == 2) {
    for (unsigned step = 1; step < 32; step *= 2)
      for (unsigned i = 0; i < 32; i += 2 * step) v[i] = Op::of(v[i], v[i + step]);
  } else if (n == 32 && order == 0) {
    for (unsigned half = 16; half; half >>= 1)
      for (unsigned i = 0; i < half; i++) v[i] = Op::of(v[i], v[i + half]);
  } else {
    for (unsigned i = 1; i < n; i++) v[0] = Op::of(v[0], v[i]);
  }
  __store_slot<T>(slots, 32, v[0]);
}
template <class T, class Op, bool INCLUSIVE> MSL_UNCOUNTED void __scan(char *slots, unsigned lanes, unsigned active) {
  T total = (T)Op::neutral;
  for (unsigned i = 0; i < lanes; i++) {
    if (!(active >> i & 1)) continue;
    T x = __slot<T>(slots, i), next = Op::of(total, x);
    __store_slot<T>(slots, i, INCLUSIVE ? next : total);
    total = next;
  }
}

enum : unsigned { __op_reduce = 1, __op_scan = 20, __op_shuffle = 40, __op_quad = 60, __op_matrix = 80, __op_ballot = 90 };

#define MSL_VALUE static_assert(sizeof(T) <= 16, "SIMD-group functions take values of at most 16 bytes")
#define MSL_REDUCE(name, Op, id)                                                                                   \
  template <class T> MSL_INLINE T name(T v, MSL_SITE) {                                                            \
    MSL_VALUE;                                                                                                     \
    return __slot<T>(__msl_simd(&v, sizeof v, __op_reduce + id, &__reduce<T, Op>, site).slots, 32);                \
  }
MSL_REDUCE(simd_sum, __sum, 0)
MSL_REDUCE(simd_product, __product, 1)
MSL_REDUCE(simd_max, __max, 2)
MSL_REDUCE(simd_min, __min, 3)
MSL_REDUCE(simd_and, __and, 4)
MSL_REDUCE(simd_or, __or, 5)
MSL_REDUCE(simd_xor, __xor, 6)
#undef MSL_REDUCE

#define MSL_SCAN(name, Op, inclusive, id)                                                                          \
  template <class T> MSL_INLINE T name(T v, MSL_SITE) {                                                            \
    MSL_VALUE;                                                                                                     \
    MslMeeting met = __msl_simd(&v, sizeof v, __op_scan + id, &__scan<T, Op, inclusive>, site);                    \
    return __slot<T>(met.slots, met.lane);                                                                         \
  }
MSL_SCAN(simd_prefix_inclusive_sum, __sum, true, 0)
MSL_SCAN(simd_prefix_exclusive_sum, __sum, false, 1)
MSL_SCAN(simd_prefix_inclusive_product, __product, true, 2)
MSL_SCAN(simd_prefix_exclusive_product, __product, false, 3)
#undef MSL_SCAN

// The value of a lane that takes no part, or that is not among the 32, is poison.
template <class T> inline T __from(MslMeeting met, unsigned lane) { return lane < 32 && (met.active >> lane & 1) ? __slot<T>(met.slots, lane) : __poison<T>(); }
#define MSL_SHUFFLE(name, id, result)                                                                              \
  template <class T> MSL_INLINE T name(T v, ushort by, MSL_SITE) {                                                 \
    MSL_VALUE;                                                                                                     \
    MslMeeting met = __msl_simd(&v, sizeof v, __op_shuffle + id, nullptr, site);                                   \
    unsigned lane = met.lane;                                                                                      \
    (void)lane;                                                                                                    \
    return result;                                                                                                 \
  }
MSL_SHUFFLE(simd_shuffle, 0, __from<T>(met, by))
MSL_SHUFFLE(simd_broadcast, 1, __from<T>(met, by))
MSL_SHUFFLE(simd_shuffle_xor, 2, __from<T>(met, lane ^ by))
MSL_SHUFFLE(simd_shuffle_down, 3, lane + by < 32 ? __from<T>(met, lane + by) : v)  // no wrap: the last lanes keep their values
MSL_SHUFFLE(simd_shuffle_up, 4, lane >= by ? __from<T>(met, lane - by) : v)
MSL_SHUFFLE(simd_shuffle_rotate_down, 5, __from<T>(met, (lane + by) & 31u))
MSL_SHUFFLE(simd_shuffle_rotate_up, 6, __from<T>(met, (lane - by) & 31u))
MSL_SHUFFLE(quad_shuffle, 10, __from<T>(met, (lane & ~3u) + (by & 3u)))
MSL_SHUFFLE(quad_broadcast, 11, __from<T>(met, (lane & ~3u) + (by & 3u)))
MSL_SHUFFLE(quad_shuffle_xor, 12, __from<T>(met, lane ^ (by & 3u)))
MSL_SHUFFLE(quad_shuffle_down, 13, (lane & 3u) + by < 4 ? __from<T>(met, lane + by) : v)
MSL_SHUFFLE(quad_shuffle_up, 14, (lane & 3u) >= by ? __from<T>(met, lane - by) : v)
#undef MSL_SHUFFLE
// As simd_shuffle_down and _up within parts of `modulo` lanes; lanes from outside the part come from `fill`,
// cyclically.
#define MSL_FILL(name, id, from, fill_from)                                                                        \
  template <class T> MSL_INLINE T name(T v, T fill, ushort by, ushort modulo = 32, MSL_SITE) {                     \
    static_assert(sizeof(T) <= 8, "SIMD-group functions with a fill take values of at most 8 bytes");              \
    char both[16];                                                                                                 \
    __builtin_memcpy(both, &v, sizeof v);                                                                          \
    __builtin_memcpy(both + 8, &fill, sizeof v);                                                                   \
    MslMeeting met = __msl_simd(both, 16, __op_shuffle + id, nullptr, site);                                       \
    int lane = (int)(met.lane % modulo), first = (int)(met.lane - met.lane % modulo), at = from;                   \
    bool inside = at >= 0 && at < (int)modulo;                                                                     \
    unsigned source = (unsigned)(first + (inside ? at : fill_from));                                               \
    return source < 32 && (met.active >> source & 1) ? __slot<T>(met.slots + (inside ? 0 : 8), source) : __poison<T>(); \
  }
MSL_FILL(simd_shuffle_and_fill_down, 16, lane + by, at - (int)modulo)
MSL_FILL(simd_shuffle_and_fill_up, 17, lane - by, at + (int)modulo)
#undef MSL_FILL
template <class T> MSL_INLINE T simd_broadcast_first(T v, MSL_SITE) {
  MSL_VALUE;
  MslMeeting met = __msl_simd(&v, sizeof v, __op_shuffle + 7, nullptr, site);
  return __slot<T>(met.slots, __builtin_ctz(met.active));
}

// Quads: the runtime waits for the whole SIMD-group, which is stricter than a quad.
#define MSL_QUAD(name, Op, id)                                                                                     \
  template <class T> MSL_INLINE T name(T v, MSL_SITE) {                                                            \
    MSL_VALUE;                                                                                                     \
    MslMeeting met = __msl_simd(&v, sizeof v, __op_quad + id, nullptr, site);                                      \
    unsigned first = met.lane & ~3u;                                                                               \
    return Op::of(Op::of(__from<T>(met, first), __from<T>(met, first + 2)),                                        \
                  Op::of(__from<T>(met, first + 1), __from<T>(met, first + 3)));                                   \
  }
MSL_QUAD(quad_sum, __sum, 0)
MSL_QUAD(quad_product, __product, 1)
MSL_QUAD(quad_max, __max, 2)
MSL_QUAD(quad_min, __min, 3)
#undef MSL_QUAD
#undef MSL_VALUE

// Votes.
struct simd_vote {
  using vote_t = ulong;
  ulong lanes, active;
  explicit operator vote_t() const { return lanes; }
  bool all() const { return lanes == active; }
  bool any() const { return lanes != 0; }
};
MSL_INLINE bool simd_any(bool b, MSL_SITE) {
  uint v = b;
  return __slot<uint>(__msl_simd(&v, 4, __op_ballot, &__reduce<uint, __or>, site).slots, 32);
}
MSL_INLINE bool simd_all(bool b, MSL_SITE) {
  uint v = b;
  return __slot<uint>(__msl_simd(&v, 4, __op_ballot + 1, &__reduce<uint, __and>, site).slots, 32);
}
MSL_INLINE simd_vote simd_ballot(bool b, MSL_SITE) {
  uint v = b ? 1u << __msl_lane() : 0u;
  MslMeeting met = __msl_simd(&v, 4, __op_ballot + 2, &__reduce<uint, __or>, site);
  return simd_vote{__slot<uint>(met.slots, 32), met.active};
}
MSL_INLINE simd_vote simd_active_threads_mask(MSL_SITE) {
  unsigned active = __msl_simd(nullptr, 0, __op_ballot + 3, nullptr, site).active;
  return simd_vote{active, active};
}
MSL_INLINE bool simd_is_first(MSL_SITE) {
  MslMeeting met = __msl_simd(nullptr, 0, __op_ballot + 4, nullptr, site);
  return met.lane == (unsigned)__builtin_ctz(met.active);
}

}  // namespace metal
