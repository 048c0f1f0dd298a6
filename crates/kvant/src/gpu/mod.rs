//! Code that Metal and CUDA share: the [`Launch`], and the device made of an [`Executor`] that runs launches.
//!
//! For each operation `metal/NAME.rs` and `cuda/NAME.rs` turn the validated `Call` into launches: kernel, buffers,
//! parameters, grid. Their common parts are in `NAME.rs` here: parameters, constants, bindings. An executor runs
//! launches and knows no operations: the Apple runtime, the CUDA runtime, and in tests a machine that simulates the
//! GPU. All of them get the same `Launch`.
//!
//! Not part of the stable interface: it is public for such executors.

pub(crate) mod add_bias;
pub(crate) mod affine;
pub(crate) mod argmax;
pub(crate) mod attend;
pub(crate) mod causal_conv;
pub(crate) mod copy;
pub(crate) mod delta_rule;
mod device;
pub(crate) mod embed;
pub(crate) mod gate;
pub(crate) mod hadamard;
mod headers;
pub(crate) mod key_bias;
pub(crate) mod kv_read;
pub(crate) mod kv_write;
mod launch;
pub(crate) mod linear;
pub(crate) mod moe;
pub(crate) mod norm_rope;
pub(crate) mod norm_rope_write;
mod order;
mod params;
pub(crate) mod planes;
pub(crate) mod rms_norm;
pub(crate) mod sample;
pub(crate) mod softcap;
pub(crate) mod spread;
pub(crate) mod tables;
mod vectors;

pub use device::{
    Executor, LaunchPass, Limits, compile_cuda, cuda_device, cuda_executor, has_cuda_compiler, metal_busy_groups,
    metal_device,
};
pub use headers::Header;
pub use launch::{Binding, Constant, Grid, Launch, Product, Source, Use};
pub use order::Order;
pub use params::Layout;

#[cfg(feature = "cuda")]
pub(crate) use device::Gpu;
pub(crate) use device::{Builder, Kernels};
#[cfg(test)]
pub(crate) use headers::assert_table_is_exact;
pub(crate) use headers::headers;
pub(crate) use launch::{Scratch, dtype_code};
pub(crate) use params::{Params, params};
pub(crate) use vectors::{aligned4, rows_aligned4};

pub use crate::backend::{ForeignStream, Memory, MemoryAt, Owner, Replay, Transfer, Wait};

/// Threads that run in step and exchange values: a SIMD-group of Metal, a warp of CUDA.
pub(crate) const LANES: usize = 32;

/// Threads of a threadgroup if elements are independent.
pub(crate) const THREADS: usize = 256;
