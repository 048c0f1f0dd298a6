//! Every operation on every device against the f64 reference.

mod add;
mod add_bias;
mod attend;
mod causal_conv;
mod codec;
mod collectives;
mod delta_rule;
mod gate;
mod gated;
mod hadamard;
mod kv;
mod linear;
mod moe;
mod norm_rope;
mod rms_norm;
mod sample;
mod softcap;

/// Rows and columns of element-wise operations: none, one, not a multiple of a vector, more than a threadgroup.
const SIZES: [(usize, usize); 8] = [(0, 5), (1, 1), (1, 256), (3, 7), (5, 65), (2, 1023), (2, 1028), (33, 64)];
