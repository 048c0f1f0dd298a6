// The functions of wgmma.h for GPUs without wgmma: the same products and layouts, by instructions of warps (mma.sync).
// A warpgroup's warps have 16 rows of the result each. Products are done when a function returns, so the waits do
// nothing.
#ifndef KVANT_CUDA_DEVICE_WARP_PRODUCTS_H
#define KVANT_CUDA_DEVICE_WARP_PRODUCTS_H
#include "device/fragments.h"

// Names a matrix that begins at `address`, with `block` bytes between blocks of columns.
inline ulong matrix(uint address, uint block) {
    return ulong(address) | ulong(block) << 32;
}

inline ulong matrix_after(ulong matrix, uint bytes) {
    return matrix + bytes;
}

inline void products_begin() {}
inline void products_commit() {}
template <uint PENDING>
inline void products_wait() {}
template <uint N>
inline void hold(float (&)[N]) {}
template <uint N>
inline void hold(uint (&)[N][4]) {}

// The address of a unit of 16 bytes in row `r`; that of row 0 is at `first`, which is not yet swizzled.
inline uint unit_of_row(uint first, uint r) {
    return (first ^ r % 8 * 16) + r * 128;
}

// Columns 8 j to 8 j + 7 of d, which has N / 4 groups of eight.
template <uint N>
inline float (&eight_columns(float (&d)[N], uint j))[4] {
    return reinterpret_cast<float(&)[4]>(d[4 * j]);
}

// d = a * b, or d += a * b if `add`. Columns of b are rows in shared memory; there are 2 N.
template <bool HALF, uint N>
inline void multiply(float (&d)[N], const uint (&a)[4], ulong b, bool add) {
    static_assert(N == 4 || N % 8 == 0, "products: 8 columns, or 16 at a time");
    const uint lane = threadIdx.x % 32;
    if (!add) {
#pragma unroll
        for (uint i = 0; i < N; i++) {
            d[i] = 0;
        }
    }
    const uint from = unit_of_row(uint(b) + lane / 8 % 2 * 16, lane / 16 * 8 + lane % 8);
    if constexpr (N == 4) {
        mma<HALF>(d, a, load_two_matrices(from));
    } else {
#pragma unroll
        for (uint j = 0; j < N / 4; j += 2) {
            const uint4 w = load_matrices(from + j * 1024);
            mma<HALF>(eight_columns(d, j), a, make_uint2(w.x, w.y));
            mma<HALF>(eight_columns(d, j + 1), a, make_uint2(w.z, w.w));
        }
    }
}
// As the previous function, with the warpgroup's 64 rows of a in shared memory.
template <bool HALF, uint N>
inline void multiply(float (&d)[N], ulong a, ulong b, bool add) {
    const uint lane = threadIdx.x % 32;
    const uint4 w = load_matrices(unit_of_row(uint(a) + lane / 16 * 16, threadIdx.x / 32 % 4 * 16 + lane % 16));
    const uint rows[4] = {w.x, w.y, w.z, w.w};
    multiply<HALF>(d, rows, b, add);
}
// d += a * b, where b's rows are rows in shared memory.
template <bool HALF, uint N>
inline void multiply_rows(float (&d)[N], const uint (&a)[4], ulong b) {
    static_assert(N % 8 == 0, "products: 16 columns at a time");
    const uint lane = threadIdx.x % 32, block = uint(b >> 32);
#pragma unroll
    for (uint j = 0; j < N / 4; j += 2) {
        const uint unit = j % 8 + lane / 16;
        const uint4 w = load_matrices_transposed(unit_of_row(uint(b) + unit * 16, lane % 16) + j / 8 * block);
        mma<HALF>(eight_columns(d, j), a, make_uint2(w.x, w.y));
        mma<HALF>(eight_columns(d, j + 1), a, make_uint2(w.z, w.w));
    }
}

#endif
