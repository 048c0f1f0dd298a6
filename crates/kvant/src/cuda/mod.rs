//! The CUDA backend: the kernels, and the runtime that runs them on an NVIDIA GPU.
//!
//! An operation of one kernel file is `NAME.cu`, the kernels, and `NAME.rs`, which builds their launches. An operation
//! of several is a folder: `attend/`, `linear/`, `norm_rope/`, `seal/`. In the first two `route.rs` selects the kernel.
//!
//! | shared | contents |
//! |---|---|
//! | `device/` | device headers: dtypes, loads and stores, warp products, barriers, clusters |
//! | `codec/` | device headers: reading and encoding of quantised rows, the Hadamard rotation |
//! | `headers.rs` | the table of headers, and which of them a kernel file includes |
//! | `entry.rs` | the names of compiled kernels, as profilers show them |
//! | `runtime/` | the executor: driver, compiler, kernel cache, cuBLASLt |
//!
//! Building kvant needs nothing of CUDA. The libraries are loaded at run time; without them, opening the device is an
//! error.

mod add_bias;
mod affine;
mod all_gather;
mod all_reduce;
mod argmax;
mod attend;
mod causal_conv;
mod codec;
mod copy;
mod delta_rule;
mod embed;
#[cfg(feature = "cuda")]
mod entry;
mod gate;
mod grids;
mod hadamard;
mod headers;
mod kv_read;
mod kv_write;
mod linear;
mod merge_attention;
mod moe;
mod norm_rope;
mod rms_norm;
#[cfg(feature = "cuda")]
mod runtime;
mod sample;
mod seal;
mod softcap;
mod spread;

#[cfg(feature = "cuda")]
use std::collections::BTreeMap;
use std::{path::PathBuf, sync::Arc};

use crate::{
    Device, DeviceKind, Result,
    device::not_built,
    gpu::{Builder, Executor, Kernels, LANES as WARP, Launch, Limits, THREADS, Use, planes},
    group::{Exchange, Peers},
    ops::{self, Call},
};

/// The CUDA kernels, for any executor.
pub(crate) const KERNELS: Kernels =
    Kernels { kind: DeviceKind::Cuda, build, build_pair, explain_attend: attend::explain };

/// This backend's rows of the accuracy table in `ops/mod.rs`, in the table's order: attention, products, the delta
/// rule.
#[cfg(test)]
pub(crate) fn accuracy_rows() -> [Vec<String>; 3] {
    [attend::accuracy::rows(), linear::accuracy::rows(), delta_rule::accuracy::rows()]
}

/// Maximum blocks of a cluster.
const MAX_CLUSTER: usize = 8;

/// Shared memory of a block that the hardware reserves.
const RESERVED_BYTES: usize = 1 << 10;

/// Blocks with `shared_bytes` of shared memory each that fit on a multiprocessor.
fn blocks_per_multiprocessor(shared_bytes: usize, limits: &Limits) -> usize {
    (limits.threadgroup_bytes + RESERVED_BYTES) / (shared_bytes + RESERVED_BYTES)
}

/// Shared memory of each of `blocks` blocks of a multiprocessor.
fn shared_bytes_of_each(blocks: usize, limits: &Limits) -> usize {
    (limits.threadgroup_bytes + RESERVED_BYTES) / blocks - RESERVED_BYTES
}

/// Clusters of `blocks` blocks that run at once, if each block has a multiprocessor to itself. All multiprocessors form
/// pairs, but not all belong to a larger group: an H200 with 132 runs 66 clusters of two, 30 of four, 15 of eight.
fn clusters_at_once(blocks: usize, limits: &Limits) -> usize {
    if blocks <= 2 { limits.busy_groups / blocks } else { limits.busy_groups * 7 / 8 / blocks }
}

/// An NVIDIA GPU. A device that has been opened is kept; a failure is not.
#[cfg(feature = "cuda")]
pub(crate) fn open(index: usize) -> Result<Device> {
    use std::sync::{Mutex, PoisonError};

    use crate::gpu::Gpu;

    static OPENED: Mutex<BTreeMap<usize, Device>> = Mutex::new(BTreeMap::new());
    // The lock is held while a device is opened: two threads get the same one.
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = opened.get(&index) {
        return Ok(device.clone());
    }
    match runtime::CudaExecutor::open(index) {
        Ok(executor) => {
            let device = Device::from_backend(Arc::new(Gpu::new(executor, KERNELS)));
            Ok(opened.entry(index).or_insert(device).clone())
        }
        Err(reason) => not_built(DeviceKind::Cuda, &reason),
    }
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn open(_: usize) -> Result<Device> {
    not_built(DeviceKind::Cuda, "this kvant was built without the feature `cuda`")
}

/// Adds folders in which the compiler and cuBLASLt are searched.
pub(crate) fn search_in(folders: Vec<PathBuf>) {
    #[cfg(feature = "cuda")]
    runtime::libraries::search_in(folders);
    #[cfg(not(feature = "cuda"))]
    drop(folders);
}

/// NVIDIA GPUs that the driver reports; 0 without a driver.
pub(crate) fn count() -> usize {
    #[cfg(feature = "cuda")]
    return runtime::count();
    #[cfg(not(feature = "cuda"))]
    0
}

/// The executor of launches on the first NVIDIA GPU, without the device.
#[cfg(feature = "cuda")]
pub(crate) fn executor() -> Option<Arc<dyn Executor>> {
    let gpu = runtime::CudaExecutor::open(0).inspect_err(|why| tracing::debug!(why, "no NVIDIA GPU"));
    gpu.ok().map(|gpu| Arc::new(gpu) as Arc<dyn Executor>)
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn executor() -> Option<Arc<dyn Executor>> {
    None
}

/// Whether NVIDIA's driver is installed, so that this machine should have a device.
pub(crate) fn is_expected() -> bool {
    #[cfg(feature = "cuda")]
    return runtime::libraries::has_driver();
    #[cfg(not(feature = "cuda"))]
    false
}

/// Whether kernels can be compiled on this machine, GPU or not.
pub(crate) fn has_compiler() -> bool {
    #[cfg(feature = "cuda")]
    return runtime::libraries::has_nvrtc();
    #[cfg(not(feature = "cuda"))]
    false
}

/// The machine code of a launch's kernel for `arch` (`sm_90a`), for tests on machines without a GPU.
///
/// # Errors
/// The compiler's messages.
#[cfg(feature = "cuda")]
pub(crate) fn compile_only(launch: &Launch, arch: &str) -> std::result::Result<Vec<u8>, String> {
    runtime::compile::KernelProgram::of(launch).compile(&runtime::compile::CompileTarget { arch: arch.to_string() })
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn compile_only(_launch: &Launch, _arch: &str) -> std::result::Result<Vec<u8>, String> {
    Err("this kvant was built without the feature `cuda`".to_string())
}

fn build_pair(first: &Call, second: &Call, b: &mut Builder) -> Result<bool> {
    match (first, second) {
        (Call::Linear(product), Call::Gate(gate)) => linear::build_gated(product, gate, b),
        _ => Ok(false),
    }
}

/// Maximum scratch memory of `delta_rule`.
pub(crate) fn delta_rule_scratch(shape: &ops::delta_rule::DeltaRuleShape, rows: usize) -> usize {
    delta_rule::max_scratch_bytes(shape, rows)
}

fn build(call: &Call, b: &mut Builder) -> Result<()> {
    match call {
        Call::Add(call) => add_bias::build(&call.0, b),
        Call::AddBias(call) => add_bias::build(call, b),
        Call::AllGather(call) => all_gather::build(call, b),
        Call::AllReduce(call) => all_reduce::build(call, b),
        Call::Argmax(call) => argmax::build(call, b),
        Call::Attend(call) => attend::build(call, b),
        Call::CausalConv(call) => causal_conv::build(call, b),
        Call::Copy(call) => copy::build(call, b),
        Call::DeltaRule(call) => delta_rule::build(call, b),
        Call::Embed(call) => embed::build(call, b),
        Call::Gate(call) => gate::build(call, b),
        Call::Hadamard(call) => hadamard::build(call, b),
        Call::KvRead(call) => kv_read::build(call, b),
        Call::KvWrite(call) => kv_write::build(call, b),
        Call::Linear(call) => linear::build(call, b),
        Call::MergeAttention(call) => merge_attention::build(call, b),
        Call::MoeCombine(call) => moe::build_combine(call, b),
        Call::MoeRoute(call) => moe::build_route(call, b),
        Call::NormRope(call) => norm_rope::build(call, b),
        Call::NormRopeWrite(call) => norm_rope::write::build(call, b),
        Call::RmsNorm(call) => rms_norm::build(call, b),
        Call::Sample(call) => sample::build(call, b),
        Call::Seal(call) => seal::build(call, b),
        Call::Softcap(call) => softcap::build(call, b),
        Call::Spread(call) => spread::build(call, b),
    }
}

/// The ranks of a collective, and the memory in which they meet. `None` if there is one rank.
fn peers<'a>(peers: Option<&'a Peers>, op: &'static str, b: &Builder) -> Result<Option<(&'a Peers, &'a Exchange)>> {
    let Some(peers) = peers.filter(|peers| peers.x.len() > 1) else { return Ok(None) };
    let exchange = peers.exchange().ok_or_else(|| b.unsupported(op, "the GPUs are not connected".to_string()))?;
    Ok(Some((peers, exchange)))
}

/// Binds what `device/peers.h` needs, from an index on: the word of failures, the rank's own exchange, and those of all
/// ranks.
fn bind_exchange(launch: Launch, first: u32, peers: &Peers, exchange: &Exchange) -> Launch {
    let own = &exchange.ranks()[peers.rank];
    let launch = launch.scratch(first, exchange.failed(), Use::ReadWrite).scratch(first + 1, own, Use::ReadWrite);
    let all = exchange.ranks().iter().zip(first + 2..);
    all.fold(launch.collective(), |launch, (exchange, index)| launch.scratch(index, exchange, Use::Write))
}
