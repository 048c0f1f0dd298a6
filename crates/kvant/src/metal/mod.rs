//! The Metal backend: the kernels, and the Apple runtime that runs them.
//!
//! `NAME.metal` holds the kernels of an operation, `NAME.rs` builds their launches; an operation of several files is a
//! folder. `runtime/` drives an Apple GPU. Everything except the runtime is compiled on every system, so that tests can
//! run the launches elsewhere.

mod add_bias;
mod affine;
mod all_reduce;
mod argmax;
mod attend;
#[cfg(any(target_os = "macos", test))]
mod buffer_pool;
mod causal_conv;
mod copy;
mod delta_rule;
mod embed;
mod gate;
mod hadamard;
mod headers;
#[cfg(any(target_os = "macos", test))]
mod in_flight;
mod kv_read;
mod kv_write;
mod linear;
mod moe;
mod norm_rope;
mod norm_rope_write;
mod rms_norm;
#[cfg(target_os = "macos")]
mod runtime;
mod sample;
mod seal;
mod softcap;
mod spread;
mod vectors;

use crate::{
    Device, DeviceKind, Result,
    gpu::{Builder, Kernels, LANES as SIMD, THREADS, planes},
    ops::{self, Call},
};

/// The Metal kernels, for any executor.
pub(crate) const KERNELS: Kernels =
    Kernels { kind: DeviceKind::Metal, build, build_pair: |_, _, _| Ok(false), explain_attend: attend::explain };

/// Whether a Metal device is expected on this machine.
pub(crate) fn is_expected() -> bool {
    cfg!(target_os = "macos")
}

/// The GPU of this Mac.
pub(crate) fn open() -> Result<Device> {
    #[cfg(target_os = "macos")]
    return runtime::open();
    #[cfg(not(target_os = "macos"))]
    crate::device::not_built(DeviceKind::Metal, &format!("Metal is Apple's, and this is {}", std::env::consts::OS))
}

/// Maximum scratch memory of `delta_rule`.
pub(crate) fn delta_rule_scratch(shape: &ops::delta_rule::DeltaRuleShape, rows: usize) -> usize {
    delta_rule::max_scratch_bytes(shape, rows)
}

fn build(call: &Call, b: &mut Builder) -> Result<()> {
    match call {
        Call::Add(call) => add_bias::build(&call.0, b),
        Call::AddBias(call) => add_bias::build(call, b),
        Call::AllGather(call) => copy::build(&call.of_one_rank(), b),
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
        Call::Linear(call) => call.each_part(|call| linear::build(call, b)),
        Call::MergeAttention(_) => {
            Err(b.unsupported(ops::merge_attention::NAME, "Metal devices form no groups".to_string()))
        }
        Call::MoeCombine(call) => moe::build_combine(call, b),
        Call::MoeRoute(call) => moe::build_route(call, b),
        Call::NormRope(call) => norm_rope::build(call, b),
        Call::NormRopeWrite(call) => norm_rope_write::build(call, b),
        Call::RmsNorm(call) => rms_norm::build(call, b),
        Call::Sample(call) => sample::build(call, b),
        Call::Seal(call) => seal::build(call, b),
        Call::Softcap(call) => softcap::build(call, b),
        Call::Spread(call) => spread::build(call, b),
    }
}
