// What the kernels of linear are told: see linear.rs.
#ifndef KVANT_LINEAR_H
#define KVANT_LINEAR_H

struct LinearParams {
    uint rows;
    uint outputs;
    uint inputs;
    uint experts;
    uint rows_per_input;
    float alpha;
};

#endif
