// Tensor-core products, and their operands and results as 16-bit pairs.
//
// A warp multiplies A (16 x 16) by B (16 x 8) and adds to C (16 x 8, float). Lane 4g + t holds rows g and g + 8 of A,
// column g of B, and rows g and g + 8 of C at columns 2t and 2t + 1:
//   a[0]: row g, k 2t, 2t+1   a[1]: row g+8, the same k   a[2]: row g, k 2t+8, 2t+9   a[3]: row g+8, the same k
//   b.x: k 2t, 2t+1           b.y: k 2t+8, 2t+9
//   c[0], c[1]: row g         c[2], c[3]: row g+8
// The order of k is free as long as A and B agree on it.
#ifndef KVANT_CUDA_DEVICE_FRAGMENTS_H
#define KVANT_CUDA_DEVICE_FRAGMENTS_H
#include "device/convert.h"

// c += a * b over f16 (HALF) or bf16 operands.
template <bool HALF>
inline void mma(float (&c)[4], const uint (&a)[4], uint2 b) {
    if constexpr (HALF) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
                     "%9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
    }
}

// d = a * b.
template <bool HALF>
inline void mma_alone(float (&d)[4], const uint (&a)[4], uint2 b) {
    if constexpr (HALF) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%10, %10, %10, %10};"
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(0.0f));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
                     "%9}, {%10, %10, %10, %10};"
                     : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(0.0f));
    }
}

// c += a * b in tf32, of 16 x 8 by 8 x 8: a[0] and a[1] are rows g and g + 8 at k = t, a[2] and a[3] at k = t + 4; b.x
// and b.y are column g at k = t and k = t + 4.
inline void mma_tf32(float (&c)[4], const uint (&a)[4], uint2 b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// A float rounded to tf32.
inline uint tf32(float x) {
    uint bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}

// Two floats as a pair, the first in the low half.
template <bool HALF>
inline uint pack(float low, float high) {
    uint pair;
    if constexpr (HALF) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
}

template <bool HALF>
inline float2 unpack(uint pair) {
    if constexpr (HALF) {
        return make_float2(half_to_float(ushort(pair)), half_to_float(ushort(pair >> 16)));
    } else {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
    }
}

// The pairs (a - c, b - c), and (a f, b f), of (a, b).
template <bool HALF>
inline uint minus(uint pair, uint constant) {
    uint out;
    if constexpr (HALF) {
        asm("sub.f16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(constant));
    } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(constant), "r"(0xBF80BF80), "r"(pair));
    }
    return out;
}

template <bool HALF>
inline uint times(uint pair, uint factor) {
    uint out;
    if constexpr (HALF) {
        asm("mul.f16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(factor));
    } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(factor), "r"(pair), "r"(0x80008000));
    }
    return out;
}

// Makes each of a pair of sums NaN, infinite or large if the corresponding number of `pair` is. Adds the square of a
// bf16; for an f16, whose square is finite in float, adds 0 times the number.
template <bool HALF>
inline uint add_finite(uint sums, uint pair) {
    uint out;
    if constexpr (HALF) {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(0), "r"(sums));
    } else {
        asm("fma.rn.bf16x2 %0, %1, %1, %2;" : "=r"(out) : "r"(pair), "r"(sums));
    }
    return out;
}

// Two floats as a sum of TERMS pairs. Each term is the rounded difference to the sum of the previous terms: an f16 term
// adds 11 bits, a bf16 term 8.
template <bool HALF, uint TERMS>
inline void split(float x, float y, uint (&terms)[TERMS]) {
#pragma unroll
    for (uint i = 0; i < TERMS; i++) {
        terms[i] = pack<HALF>(x, y);
        const float2 taken = unpack<HALF>(terms[i]);
        // If the first term is infinite or NaN, later terms are 0; they would be NaN.
        x = isfinite(taken.x) ? x - taken.x : 0;
        y = isfinite(taken.y) ? y - taken.y : 0;
    }
}

// The transpose of an 8 x 8 matrix of 16-bit elements: lane 4g + t holds row g, columns 2t and 2t + 1.
inline uint transpose8(uint pair) {
    uint out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// Loads four matrices of 8 rows of 16 bytes: lane 4g + t gets word t of row g. Lane i has the address of row i % 8 of
// matrix i / 8.
inline uint4 load_matrices(uint from) {
    uint4 w;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "r"(from)
                 : "memory");
    return w;
}

// As load_matrices, for two matrices. Lanes 0 to 15 have the addresses of rows.
inline uint2 load_two_matrices(uint from) {
    uint2 w;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(w.x), "=r"(w.y)
                 : "r"(from)
                 : "memory");
    return w;
}

// As load_matrices, each matrix transposed: lane 4g + t gets column g of rows 2t and 2t + 1.
inline uint4 load_matrices_transposed(uint from) {
    uint4 w;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "r"(from)
                 : "memory");
    return w;
}

// The inverse of load_matrices_transposed, on Hopper.
inline void store_matrices_transposed(uint to, const uint (&w)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]),
                 "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
}

// Copies BYTES (4, 8 or 16) to shared memory asynchronously: reads `bytes`, and writes zeros for the rest.
template <uint BYTES>
inline void copy_async_part(uint to, const uchar *from, uint bytes) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(bytes), "n"(BYTES)
                     : "memory");
    }
}

// As copy_async; copies zeros if `there` is false.
template <uint BYTES>
inline void copy_async(uint to, const uchar *from, bool there) {
    copy_async_part<BYTES>(to, from, there ? BYTES : 0);
}

// Closes the group of copies begun since the last one was closed.
inline void copies_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all groups of this thread except the last PENDING have completed.
template <uint PENDING>
inline void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

inline uint shared_address(const void *p) {
    return uint(__cvta_generic_to_shared(p));
}

#endif
