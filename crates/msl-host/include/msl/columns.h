// matrix<T, C, R>: C columns of R elements, as float4x4 and half2x4. m[c] is a column, m[c][r] an element.
#pragma once
#pragma clang system_header
#include "math.h"

namespace metal {

template <class T, int C, int R> struct matrix {
  vec<T, R> columns[C];

  matrix() = default;
  // The value is on the diagonal, the other elements are zero.
  explicit matrix(T diagonal) {
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++) columns[c][r] = r == c ? diagonal : (T)0;
  }
  template <class U> explicit matrix(matrix<U, C, R> m) {
    for (int c = 0; c < C; c++) columns[c] = __make<vec<T, R>>(m.columns[c]);
  }
  // From columns, or from elements, column by column.
  template <class A, class B, class... More> matrix(A a, B b, More... more) {
    if constexpr (__vector<A>::count == 1) {
      static_assert(2 + sizeof...(More) == C * R, "a matrix constructor needs as many elements as the matrix has");
      T all[C * R] = {(T)a, (T)b, (T)more...};
      for (int i = 0; i < C * R; i++) columns[i / R][i % R] = all[i];
    } else {
      static_assert(2 + sizeof...(More) == C, "a matrix constructor needs as many columns as the matrix has");
      vec<T, R> all[C] = {a, b, more...};
      for (int c = 0; c < C; c++) columns[c] = all[c];
    }
  }
  vec<T, R> &operator[](int c) { return columns[c]; }
  const vec<T, R> &operator[](int c) const { return columns[c]; }
};

#define MSL_EACH_COLUMN(expr)                  \
  matrix<T, C, R> r;                           \
  for (int i = 0; i < C; i++) r[i] = (expr);   \
  return r
template <class T, int C, int R> inline matrix<T, C, R> operator+(matrix<T, C, R> a, matrix<T, C, R> b) { MSL_EACH_COLUMN(a[i] + b[i]); }
template <class T, int C, int R> inline matrix<T, C, R> operator-(matrix<T, C, R> a, matrix<T, C, R> b) { MSL_EACH_COLUMN(a[i] - b[i]); }
template <class T, int C, int R> inline matrix<T, C, R> operator-(matrix<T, C, R> a) { MSL_EACH_COLUMN(-a[i]); }
template <class T, int C, int R> inline matrix<T, C, R> operator*(matrix<T, C, R> a, typename remove_cv<T>::type b) { MSL_EACH_COLUMN(a[i] * b); }
template <class T, int C, int R> inline matrix<T, C, R> operator*(typename remove_cv<T>::type b, matrix<T, C, R> a) { MSL_EACH_COLUMN(a[i] * b); }
#undef MSL_EACH_COLUMN
template <class T, int C, int R> inline matrix<T, C, R> &operator+=(thread matrix<T, C, R> &a, matrix<T, C, R> b) { return a = a + b; }
template <class T, int C, int R> inline matrix<T, C, R> &operator-=(thread matrix<T, C, R> &a, matrix<T, C, R> b) { return a = a - b; }
template <class T, int C, int R> inline matrix<T, C, R> &operator*=(thread matrix<T, C, R> &a, typename remove_cv<T>::type b) { return a = a * b; }
template <class T, int C, int R> inline vec<T, R> operator*(matrix<T, C, R> m, vec<T, C> v) {
  vec<T, R> r = m[0] * v[0];
  for (int c = 1; c < C; c++) r += m[c] * v[c];
  return r;
}
template <class T, int C, int R> inline vec<T, C> operator*(vec<T, R> v, matrix<T, C, R> m) {
  vec<T, C> r;
  for (int c = 0; c < C; c++) r[c] = dot(v, m[c]);
  return r;
}
template <class T, int C, int R, int K> inline matrix<T, C, R> operator*(matrix<T, K, R> a, matrix<T, C, K> b) {
  matrix<T, C, R> r;
  for (int c = 0; c < C; c++) r[c] = a * b[c];
  return r;
}
template <class T, int C, int R> inline matrix<T, R, C> transpose(matrix<T, C, R> m) {
  matrix<T, R, C> r;
  for (int c = 0; c < C; c++)
    for (int k = 0; k < R; k++) r[k][c] = m[c][k];
  return r;
}
template <class T> inline T determinant(matrix<T, 2, 2> m) { return m[0][0] * m[1][1] - m[1][0] * m[0][1]; }
template <class T> inline T determinant(matrix<T, 3, 3> m) { return dot(m[0], cross(m[1], m[2])); }

#define MSL_MATRICES(T)                                                          \
  typedef matrix<T, 2, 2> T##2x2;                                                \
  typedef matrix<T, 2, 3> T##2x3;                                                \
  typedef matrix<T, 2, 4> T##2x4;                                                \
  typedef matrix<T, 3, 2> T##3x2;                                                \
  typedef matrix<T, 3, 3> T##3x3;                                                \
  typedef matrix<T, 3, 4> T##3x4;                                                \
  typedef matrix<T, 4, 2> T##4x2;                                                \
  typedef matrix<T, 4, 3> T##4x3;                                                \
  typedef matrix<T, 4, 4> T##4x4;
MSL_MATRICES(float)
MSL_MATRICES(half)
#undef MSL_MATRICES

}  // namespace metal
