// simdgroup_matrix: 8x8, two neighbouring elements of a row per lane. Lane l holds row ((l / 4) & 4) + (l / 2) % 4 and
// the two columns from ((l / 4) & 2) * 2 + (l % 2) * 2, the map that kernels using thread_elements() rely on.
#pragma once
#pragma clang system_header
#include "sync.h"

namespace metal {

inline unsigned __matrix_row(unsigned lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
inline unsigned __matrix_column(unsigned lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }

template <class T, int Cols, int Rows = Cols> struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  vec<T, 2> elements;
  simdgroup_matrix() : elements(__poison<vec<T, 2>>()) {}
  // As in MSL: the value is on the diagonal, the other elements are zero.
  explicit simdgroup_matrix(T diagonal) : elements(__diagonal(diagonal)) {}
  MSL_UNCOUNTED static vec<T, 2> __diagonal(T diagonal) {
    vec<T, 2> elements;
    unsigned lane = __msl_lane(), row = __matrix_row(lane), column = __matrix_column(lane);
    for (unsigned k = 0; k < 2; k++) elements[k] = row == column + k ? diagonal : (T)0;
    return elements;
  }
  vec<T, 2> &thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Cols, int Rows = Cols> inline simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.elements = (vec<T, 2>)value;
  return m;
}

// The address of element (row, column): [row + origin.y][column + origin.x], or the other way round if transposed.
template <class P> inline auto __matrix_at(P p, ulong stride, ulong2 origin, bool transpose, unsigned row, unsigned column) {
  return transpose ? p + (column + origin.x) * stride + (row + origin.y) : p + (row + origin.y) * stride + (column + origin.x);
}
// Functions that wait pass elements by value: a matrix whose address they had would not be in registers.
#ifdef MSL_COUNT
#define MSL_TELL(p, write) \
  transpose ? (__msl_library_access(p(0), sizeof *p(0), write, site), __msl_library_access(p(1), sizeof *p(1), write, site)) \
            : __msl_library_access(p(0), 2 * sizeof *p(0), write, site)
#else
#define MSL_TELL(p, write) (void)0
#endif
template <class T, class P> MSL_INLINE vec<T, 2> __matrix_load(P source, ulong stride, ulong2 origin, bool transpose, MSL_SITE) {
  unsigned lane = __msl_simd(nullptr, 0, __op_matrix, nullptr, site).lane, row = __matrix_row(lane), column = __matrix_column(lane);
  auto at = [&](unsigned k) { return __matrix_at(source, stride, origin, transpose, row, column + k); };
  MSL_TELL(at, 0);
  return vec<T, 2>{*at(0), *at(1)};
}
template <class T, class P> MSL_INLINE void __matrix_store(vec<T, 2> elements, P target, ulong stride, ulong2 origin, bool transpose, MSL_SITE) {
  unsigned lane = __msl_simd(nullptr, 0, __op_matrix + 1, nullptr, site).lane, row = __matrix_row(lane), column = __matrix_column(lane);
  auto at = [&](unsigned k) { return __matrix_at(target, stride, origin, transpose, row, column + k); };
  MSL_TELL(at, 1);
  for (unsigned k = 0; k < 2; k++) *at(k) = elements[k];
}
#undef MSL_TELL
template <class D, class A, class B, class C>
MSL_INLINE vec<D, 2> __matrix_product(vec<A, 2> a, vec<B, 2> b, vec<C, 2> c, MSL_SITE) {
  float mine[4] = {(float)a[0], (float)a[1], (float)b[0], (float)b[1]};
  MslMeeting met = __msl_simd(mine, sizeof mine, __op_matrix + 2, nullptr, site);
  unsigned lane = met.lane, row = __matrix_row(lane), column = __matrix_column(lane);
  float sum[2] = {(float)c[0], (float)c[1]};
  bool backwards = __msl_sum_order() != 0;
  for (unsigned n = 0; n < 4; n++) {  // the lanes of a row of `a`, in the order of its columns
    unsigned pair = backwards ? 3 - n : n, from = (row & 4) * 4 + (row & 3) * 2 + (pair & 2) * 4 + (pair & 1);
    float4 left = __slot<float4>(met.slots, from);
    for (unsigned k = 0; k < 2; k++) {
      unsigned inner = __matrix_column(from) + k, holder = (inner & 4) * 4 + (inner & 3) * 2 + (column & 4) * 2 + (column & 2) / 2;
      float4 right = __slot<float4>(met.slots, holder);
      for (unsigned j = 0; j < 2; j++) sum[j] = __builtin_fmaf(left[k], right[2 + j], sum[j]);
    }
  }
  return vec<D, 2>{(D)sum[0], (D)sum[1]};
}

#define MSL_WRAP MSL_CONVERGENT __attribute__((always_inline)) inline
template <class T, class P>
MSL_WRAP void simdgroup_load(thread simdgroup_matrix<T, 8, 8> &m, P source, ulong elements_per_row = 8, ulong2 origin = ulong2{0, 0}, bool transpose = false, MSL_SITE) {
  static_assert(sizeof(*source) == sizeof(T), "simdgroup_load reads the matrix's own element type");
  m.elements = __matrix_load<T>(source, elements_per_row, origin, transpose, site);
}
template <class T, class P>
MSL_WRAP void simdgroup_store(simdgroup_matrix<T, 8, 8> m, P target, ulong elements_per_row = 8, ulong2 origin = ulong2{0, 0}, bool transpose = false, MSL_SITE) {
  static_assert(sizeof(*target) == sizeof(T), "simdgroup_store writes the matrix's own element type");
  __matrix_store<T>(m.elements, target, elements_per_row, origin, transpose, site);
}

// d = a * b + c. Products and sums in float whatever the types, in order of the inner index, and one rounding at the
// end.
template <class D, class A, class B, class C>
MSL_WRAP void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8> &d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, MSL_SITE) {
  d.elements = __matrix_product<D, A, B, C>(a.elements, b.elements, c.elements, site);
}
template <class D, class A, class B>
MSL_WRAP void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8> &d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b, MSL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>((D)0), site);
}
template <class T> MSL_WRAP simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}
#undef MSL_WRAP

}  // namespace metal
