// The parameters of the kernels of linear: LinearParams of linear/mod.rs.
#ifndef KVANT_CUDA_LINEAR_PARAMS_H
#define KVANT_CUDA_LINEAR_PARAMS_H
#include "device/convert.h"

struct LinearParams {
    uint rows;
    uint outputs;
    uint inputs;
    uint experts;
    uint rows_per_input;
    float alpha;
};

#endif
