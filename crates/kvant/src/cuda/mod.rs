//! The CUDA backend: the kernels, and the runtime that runs them on an NVIDIA GPU.
//!
//! `NAME.cu` holds the kernels of an operation, `NAME.rs` builds their launches and, where an operation has several files
//! (`attend*`, `linear*` with `dequantise`), chooses between them; `headers.rs` lists what kernel files include. `runtime.rs` runs
//! launches: `driver.rs` is what it needs of the driver, `products.rs` is cuBLASLt, `libraries.rs` finds NVIDIA's libraries,
//! `compile.rs` and `cache.rs` make and keep machine code. Nothing of CUDA is needed to
//! build kvant, and a machine without it says so when it is asked for the device.

mod affine;
mod argmax;
mod attend;
mod attend_decode;
mod attend_prefill;
mod attend_quantised;
mod attend_short;
mod attend_short_quantised;
mod cells;
mod copy;
mod dequantise;
mod embed;
mod gate;
mod hadamard;
mod headers;
mod kv_read;
mod kv_write;
mod linear;
mod linear_bulk;
mod linear_codes;
mod linear_many;
mod linear_rows;
mod linear_shape;
mod moe;
mod norm_rope;
mod norm_rope_write;
mod rms_norm;
mod sample;
mod softcap;
mod vectors;

#[cfg(feature = "cuda")]
mod cache;
#[cfg(feature = "cuda")]
mod compile;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod libraries;
#[cfg(feature = "cuda")]
mod products;
#[cfg(feature = "cuda")]
mod runtime;

use std::sync::Arc;

use crate::{
    Device, DeviceKind, Result,
    device::not_built,
    gpu::{Builder, Executor, Kernels, LANES as WARP, Launch, Limits, THREADS, planes},
    ops::Call,
};

/// The CUDA kernels, for any executor.
pub(crate) const KERNELS: Kernels = Kernels { kind: DeviceKind::Cuda, build, plan_attend: attend::plan };

/// What the hardware keeps of a block's shared memory for itself.
const RESERVED_BYTES: usize = 1 << 10;

/// How many blocks with so much shared memory each fit on a multiprocessor.
fn blocks_beside_each_other(shared_bytes: usize, limits: &Limits) -> usize {
    (limits.threadgroup_bytes + RESERVED_BYTES) / (shared_bytes + RESERVED_BYTES)
}

/// The first NVIDIA GPU; always the same device.
#[cfg(feature = "cuda")]
pub(crate) fn open() -> Result<Device> {
    use std::sync::OnceLock;

    use crate::gpu::Gpu;

    static DEVICE: OnceLock<std::result::Result<Device, String>> = OnceLock::new();
    let open = || {
        let executor = Arc::new(runtime::Cuda::open()?);
        Ok(Device::from_backend(Arc::new(Gpu { executor, kernels: KERNELS })))
    };
    match DEVICE.get_or_init(open) {
        Ok(device) => Ok(device.clone()),
        Err(reason) => not_built(DeviceKind::Cuda, reason),
    }
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn open() -> Result<Device> {
    not_built(DeviceKind::Cuda, "this kvant was built without the feature `cuda`")
}

/// What runs launches on the first NVIDIA GPU, apart from the device.
#[cfg(feature = "cuda")]
pub(crate) fn executor() -> Option<Arc<dyn Executor>> {
    let gpu = runtime::Cuda::open().inspect_err(|why| tracing::debug!(why, "no NVIDIA GPU"));
    gpu.ok().map(|gpu| Arc::new(gpu) as Arc<dyn Executor>)
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn executor() -> Option<Arc<dyn Executor>> {
    None
}

/// Whether this machine should have a device of the kind: whether NVIDIA's driver is installed.
pub(crate) fn is_expected() -> bool {
    #[cfg(feature = "cuda")]
    return libraries::has_driver();
    #[cfg(not(feature = "cuda"))]
    false
}

/// Whether kernels can be compiled on this machine, GPU or not.
pub(crate) fn has_compiler() -> bool {
    #[cfg(feature = "cuda")]
    return libraries::has_nvrtc();
    #[cfg(not(feature = "cuda"))]
    false
}

/// The machine code of a launch's kernel for `arch` (`sm_90a`), for tests on machines without a GPU.
///
/// # Errors
/// The compiler's complaint.
#[cfg(feature = "cuda")]
pub(crate) fn compile_only(launch: &Launch, arch: &str) -> std::result::Result<Vec<u8>, String> {
    compile::Program::of(launch).compile(&compile::Target { arch: arch.to_string() })
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn compile_only(_launch: &Launch, _arch: &str) -> std::result::Result<Vec<u8>, String> {
    Err("this kvant was built without the feature `cuda`".to_string())
}

fn build(call: &Call, b: &mut Builder) -> Result<()> {
    match call {
        Call::Argmax(call) => argmax::build(call, b),
        Call::Attend(call) => attend::build(call, b),
        Call::Copy(call) => copy::build(call, b),
        Call::Embed(call) => embed::build(call, b),
        Call::Gate(call) => gate::build(call, b),
        Call::Hadamard(call) => hadamard::build(call, b),
        Call::KvRead(call) => kv_read::build(call, b),
        Call::KvWrite(call) => kv_write::build(call, b),
        Call::Linear(call) => linear::build(call, b),
        Call::MoeCombine(call) => moe::build_combine(call, b),
        Call::MoeRoute(call) => moe::build_route(call, b),
        Call::NormRope(call) => norm_rope::build(call, b),
        Call::NormRopeWrite(call) => norm_rope_write::build(call, b),
        Call::RmsNorm(call) => rms_norm::build(call, b),
        Call::Sample(call) => sample::build(call, b),
        Call::Softcap(call) => softcap::build(call, b),
    }
}
