//! What both GPUs share: the [`Launch`], and the device made of an [`Executor`] that runs launches.
//!
//! For each operation `metal/NAME.rs` (or `cuda/NAME.rs`) turns the validated `Call` into launches: kernel, buffers,
//! parameters, grid. An executor knows nothing of operations; it runs launches: the Apple runtime, the CUDA runtime,
//! and in tests a machine that plays the GPU. All of them get the very same `Launch`.
//!
//! Not part of the stable interface: it is public for such executors.

mod device;
mod launch;
mod order;
mod params;

pub use device::{Executor, LaunchPass, Limits, compile_cuda, cuda_device, has_cuda_compiler, metal_device};
pub use launch::{Binding, Constant, Grid, Header, Launch, Product, Source, Use};
pub use order::Order;
pub use params::Layout;

#[cfg(feature = "cuda")]
pub(crate) use device::Gpu;
pub(crate) use device::{Builder, Kernels};
pub(crate) use launch::{Scratch, dtype_code};
pub(crate) use params::{Params, params};

pub use crate::backend::{Memory, Replay, Wait};
