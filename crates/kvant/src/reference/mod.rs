//! The definition of "correct": every operation in plain f64 loops.
//!
//! The functions here work on slices. [`Device::reference`](crate::Device::reference) runs them as a device: it widens
//! inputs to f64, computes, and rounds once, to the output's dtype. Every other device is compared with it.

use std::borrow::Cow;

use crate::{
    Error, Result,
    device::DeviceKind,
    host::HostExecutor,
    ops::{self, Call},
};

mod add;
mod add_bias;
mod all_gather;
mod all_reduce;
mod argmax;
mod attend;
mod blocks;
mod causal_conv;
mod copy;
mod delta_rule;
mod embed;
mod gate;
mod hadamard;
mod io;
mod key_bias;
mod kv_read;
mod kv_write;
mod linear;
mod merge_attention;
mod moe;
mod norm_rope;
mod norm_rope_write;
mod rms_norm;
mod sample;
mod seal;
mod softcap;
mod spread;

pub use all_reduce::all_reduce;
pub use argmax::argmax;
pub use attend::{QueryVector, State, attend};
pub use blocks::{dequantise_blocks, dequantise_floats};
pub use embed::embed;
pub use gate::{activate, gate};
pub use hadamard::hadamard;
pub(crate) use io::round_f16;
pub use linear::{AffineRow, dequantise, linear};
pub use merge_attention::merge_attention;
pub use moe::{Routing, moe_combine, moe_route};
pub use norm_rope::{rope, rope_angles};
pub use rms_norm::rms_norm;
pub use sample::{Sampling, candidates, sample};
pub use softcap::softcap;
pub use spread::spread;

/// The reference device's executor.
pub(crate) struct Reference;

impl HostExecutor for Reference {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Reference
    }

    fn name(&self) -> String {
        "plain f64 loops".to_string()
    }

    fn run(&self, call: &Call) -> Result<()> {
        match call {
            Call::Add(call) => add::run(call),
            Call::AddBias(call) => add_bias::run(call),
            Call::AllGather(call) => all_gather::run(call)?,
            Call::AllReduce(call) => all_reduce::run(call)?,
            Call::Argmax(call) => argmax::run(call),
            Call::Attend(call) => attend::run(call),
            Call::CausalConv(call) => causal_conv::run(call),
            Call::Copy(call) => copy::run(call),
            Call::DeltaRule(call) => delta_rule::run(call),
            Call::Embed(call) => embed::run(call),
            Call::Gate(call) => gate::run(call),
            Call::Hadamard(call) => hadamard::run(call),
            Call::KvRead(call) => kv_read::run(call),
            Call::KvWrite(call) => kv_write::run(call),
            Call::Linear(call) => call.each_part(|call| {
                linear::run(call);
                Ok(())
            })?,
            Call::MergeAttention(call) => merge_attention::run(call)?,
            Call::MoeCombine(call) => moe::run_combine(call),
            Call::MoeRoute(call) => moe::run_route(call),
            Call::NormRope(call) => norm_rope::run(call),
            Call::NormRopeWrite(call) => norm_rope_write::run(call),
            Call::RmsNorm(call) => rms_norm::run(call)?,
            Call::Sample(call) => sample::run(call),
            Call::Seal(call) => seal::run(call),
            Call::Softcap(call) => softcap::run(call),
            Call::Spread(call) => spread::run(call),
        }
        Ok(())
    }

    fn explain_attend(&self, _: &ops::attend::Call) -> ops::attend::Explanation {
        ops::attend::Explanation { kernel: "reference", reason: Cow::Borrowed("the only kernel") }
    }
}

/// Checks that a slice has the expected length.
fn check_len(op: &'static str, arg: &'static str, expected: usize, got: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Shape { op, arg, expected: format!("[{expected}]"), got: vec![got] })
}
