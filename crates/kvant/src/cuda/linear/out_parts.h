// The results of several matrices that one product computes, one after the other (linear/out_parts.rs).
#ifndef KVANT_CUDA_LINEAR_OUT_PARTS_H
#define KVANT_CUDA_LINEAR_OUT_PARTS_H
#include "device/convert.h"

// The element of `out` that holds an output of a row. Of the kernel's parameters: the rows, the outputs of all parts,
// and those at which the second and the third part begin; `outputs` where there is none.
template <typename Params>
inline ulong place_in_parts(const Params &p, uint row, uint output) {
    const uint begin = output >= p.third ? p.third : output >= p.second ? p.second : 0;
    const uint end = output >= p.third ? p.outputs : output >= p.second ? p.third : p.second;
    return ulong(begin) * p.rows + ulong(row) * (end - begin) + (output - begin);
}

#endif
