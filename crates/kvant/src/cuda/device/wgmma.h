// Products of a warpgroup (wgmma): 128 threads multiply 64 rows by N columns over k = 16, asynchronously. The right
// side is in shared memory, the left side there or in registers.
//
// Thread 32 w + 4 g + t of the warpgroup holds rows 16 w + g (d[4 j], d[4 j + 1]) and 16 w + g + 8 (d[4 j + 2], d[4 j +
// 3]) of the result, at columns 8 j + 2 t and 8 j + 2 t + 1. A left side in registers has the layout of fragments.h.
//
// Matrices in shared memory are divided into blocks of 64 columns. A block is consecutive rows of 128 bytes and begins
// at a multiple of 1024 bytes. In row r, unit i of 16 bytes is stored at place (i xor r) modulo 8.
#ifndef KVANT_CUDA_DEVICE_WGMMA_H
#define KVANT_CUDA_DEVICE_WGMMA_H
#include "device/convert.h"

// The descriptor of a matrix that begins at `address`. `block`: bytes between blocks of columns if one product goes
// through several.
inline ulong matrix(uint address, uint block) {
    return ulong(address >> 4 & 0x3FFF) | ulong(block >> 4) << 16 | ulong(1024 >> 4) << 32 | 1ull << 62;
}

// The matrix that begins `bytes` later.
inline ulong matrix_after(ulong matrix, uint bytes) {
    return matrix + bytes / 16;
}

inline void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of products begun since the last one was closed.
inline void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the last PENDING groups are done.
template <uint PENDING>
inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler moves no computation on d across it: later computations stay behind the preceding waits.
template <uint N>
inline void hold(float (&d)[N]) {
#pragma unroll
    for (uint i = 0; i < N; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}
template <uint N>
inline void hold(uint (&a)[N][4]) {
#pragma unroll
    for (uint i = 0; i < N; i++) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            asm volatile("" : "+r"(a[i][j])::"memory");
        }
    }
}

#define WGMMA_EIGHT(d, i)                                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define WGMMA_4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_8(d) WGMMA_EIGHT(d, 0)
#define WGMMA_16(d) WGMMA_EIGHT(d, 0), WGMMA_EIGHT(d, 8)
#define WGMMA_32(d) WGMMA_EIGHT(d, 0), WGMMA_EIGHT(d, 8), WGMMA_EIGHT(d, 16), WGMMA_EIGHT(d, 24)
#define WGMMA_64(d) WGMMA_32(d), WGMMA_EIGHT(d, 32), WGMMA_EIGHT(d, 40), WGMMA_EIGHT(d, 48), WGMMA_EIGHT(d, 56)
#define WGMMA_NAMES_4 "%0, %1, %2, %3"
#define WGMMA_NAMES_8 WGMMA_NAMES_4 ", %4, %5, %6, %7"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32                                                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_64                                                                                                 \
    WGMMA_NAMES_32                                                                                                     \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
    "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Both sides are in shared memory; columns of the right side are rows there. If `add` is false, the former d is
// ignored.
#define WGMMA_OF_SHARED(N, COUNT, A, B, ADD, TYPE)                                                                     \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N              \
                 "k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_##COUNT "}, " A ", " B ", add, 1, 1, 0, 0;\n}"              \
                 : WGMMA_##COUNT(d)                                                                                    \
                 : "l"(a), "l"(b), "r"(uint(add)))
// The left side is in registers. Columns of the right side are rows of shared memory, or, if TRANSPOSED, its rows are.
#define WGMMA_OF_REGISTERS(N, COUNT, A, B, ADD, TRANSPOSED, TYPE)                                                      \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N              \
                 "k16.f32." TYPE "." TYPE " {" WGMMA_NAMES_##COUNT "}, " A ", " B ", add, 1, 1, " TRANSPOSED ";\n}"    \
                 : WGMMA_##COUNT(d)                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(uint(add)))
#define WGMMA_TYPED(FORM, ...)                                                                                         \
    if constexpr (HALF) {                                                                                              \
        FORM(__VA_ARGS__, "f16");                                                                                      \
    } else {                                                                                                           \
        FORM(__VA_ARGS__, "bf16");                                                                                     \
    }

// d = a * b, or d += a * b if `add`, for 32, 64 or 128 columns.
template <bool HALF>
inline void multiply(float (&d)[16], ulong a, ulong b, bool add) {
    WGMMA_TYPED(WGMMA_OF_SHARED, 32, 16, "%16", "%17", "%18")
}
template <bool HALF>
inline void multiply(float (&d)[32], ulong a, ulong b, bool add) {
    WGMMA_TYPED(WGMMA_OF_SHARED, 64, 32, "%32", "%33", "%34")
}
template <bool HALF>
inline void multiply(float (&d)[64], ulong a, ulong b, bool add) {
    WGMMA_TYPED(WGMMA_OF_SHARED, 128, 64, "%64", "%65", "%66")
}
template <bool HALF>
inline void multiply(float (&d)[32], const uint (&a)[4], ulong b, bool add) {
    WGMMA_TYPED(WGMMA_OF_REGISTERS, 64, 32, "{%32, %33, %34, %35}", "%36", "%37", "0")
}
template <bool HALF>
inline void multiply(float (&d)[64], const uint (&a)[4], ulong b, bool add) {
    WGMMA_TYPED(WGMMA_OF_REGISTERS, 128, 64, "{%64, %65, %66, %67}", "%68", "%69", "0")
}
// As above, for 8, 16 and 32 columns, with the left side in registers.
template <bool HALF>
inline void multiply(float (&d)[4], const uint (&a)[4], ulong b, bool add) {
    WGMMA_TYPED(WGMMA_OF_REGISTERS, 8, 4, "{%4, %5, %6, %7}", "%8", "%9", "0")
}
template <bool HALF>
inline void multiply(float (&d)[8], const uint (&a)[4], ulong b, bool add) {
    WGMMA_TYPED(WGMMA_OF_REGISTERS, 16, 8, "{%8, %9, %10, %11}", "%12", "%13", "0")
}
template <bool HALF>
inline void multiply(float (&d)[16], const uint (&a)[4], ulong b, bool add) {
    WGMMA_TYPED(WGMMA_OF_REGISTERS, 32, 16, "{%16, %17, %18, %19}", "%20", "%21", "0")
}
// d += a * b, where b's rows are rows in shared memory.
template <bool HALF>
inline void multiply_rows(float (&d)[32], const uint (&a)[4], ulong b) {
    constexpr bool add = true;
    WGMMA_TYPED(WGMMA_OF_REGISTERS, 64, 32, "{%32, %33, %34, %35}", "%36", "%37", "1")
}
template <bool HALF>
inline void multiply_rows(float (&d)[64], const uint (&a)[4], ulong b) {
    constexpr bool add = true;
    WGMMA_TYPED(WGMMA_OF_REGISTERS, 128, 64, "{%64, %65, %66, %67}", "%68", "%69", "1")
}

#endif
