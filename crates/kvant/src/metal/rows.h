// Rows between device and threadgroup memory, shared by the threads of a threadgroup, four elements at a time.
//
// `aligned`, a function constant: rows are multiples of four elements, and are aligned to four elements.
#ifndef KVANT_ROWS_H
#define KVANT_ROWS_H
#include "vectors.h"

inline float4 get4(threadgroup const float *row, uint j, uint count, bool aligned) {
    if (aligned) {
        return *reinterpret_cast<threadgroup const float4 *>(row + j);
    }
    float4 values = 0;
    for (uint i = 0; i < min(count, 4u); i++) {
        values[i] = row[j + i];
    }
    return values;
}

inline void put4(threadgroup float *row, uint j, uint count, float4 values, bool aligned) {
    if (aligned) {
        *reinterpret_cast<threadgroup float4 *>(row + j) = values;
        return;
    }
    for (uint i = 0; i < min(count, 4u); i++) {
        row[j + i] = values[i];
    }
}

// row ← the dim elements of x from `start` on. Thread `index` of `threads`.
inline void load_row(threadgroup float *row, device const uchar *x, ulong start, uint dim, uint dtype, bool aligned,
                     uint index, uint threads) {
    for (uint j = 4 * index; j < dim; j += 4 * threads) {
        put4(row, j, dim - j, load4(x, start + j, dim - j, dtype, aligned), aligned);
    }
}

// The dim elements of x from `start` on ← row.
inline void store_row(device uchar *x, ulong start, threadgroup const float *row, uint dim, uint dtype, bool aligned,
                      uint index, uint threads) {
    for (uint j = 4 * index; j < dim; j += 4 * threads) {
        store4(x, start + j, dim - j, get4(row, j, dim - j, aligned), dtype, aligned);
    }
}

// Moves dim elements. If the dtypes agree, it moves their bits, including those of a NaN, which arithmetic may change.
inline void move_row(device const uchar *from, ulong i, uint from_dtype, device uchar *to, ulong j, uint to_dtype,
                     uint dim, bool aligned, uint index, uint threads) {
    for (uint k = 4 * index; k < dim; k += 4 * threads) {
        if (from_dtype == to_dtype) {
            copy4(from, i + k, to, j + k, dim - k, to_dtype, aligned);
        } else {
            store4(to, j + k, dim - k, load4(from, i + k, dim - k, from_dtype, aligned), to_dtype, aligned);
        }
    }
}

#endif
