// Results of several matrices that one product computes; they are consecutive in `out` (linear/out_parts.rs).
#ifndef KVANT_CUDA_LINEAR_OUT_PARTS_H
#define KVANT_CUDA_LINEAR_OUT_PARTS_H
#include "device/convert.h"

// The outputs at which the second and the third part begin; the number of outputs if a part is missing.
struct OutParts {
    uint second;
    uint third;
};

// The results of an output: its result in a row is element `first` + row * width of `out`.
struct Column {
    ulong first;
    uint width;

    inline ulong place(uint row) const {
        return first + ulong(row) * width;
    }
};

// `p`: parameters of a kernel, with `rows` and the `outputs` of all parts.
template <typename Params>
inline Column column_in_parts(const Params &p, OutParts parts, uint output) {
    const uint begin = output >= parts.third ? parts.third : output >= parts.second ? parts.second : 0;
    const uint end = output >= parts.third ? p.outputs : output >= parts.second ? parts.third : parts.second;
    return {ulong(begin) * p.rows + (output - begin), end - begin};
}

// The element of `out` that holds an output of a row.
template <typename Params>
inline ulong place_in_parts(const Params &p, OutParts parts, uint row, uint output) {
    return column_in_parts(p, parts, output).place(row);
}

#endif
