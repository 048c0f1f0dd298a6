//! The definition of "correct": every operation in plain f64 loops.

use std::borrow::Cow;

use crate::{
    Result,
    device::DeviceKind,
    host::Executor,
    ops::{self, Call},
};

mod argmax;
mod attend;
mod copy;
mod embed;
mod gate;
mod hadamard;
mod kv_read;
mod kv_write;
mod linear;
mod moe;
mod norm_rope;
mod norm_rope_write;
mod rms_norm;
mod sample;
mod softcap;

/// The reference device's executor.
pub(crate) struct Reference;

impl Executor for Reference {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Reference
    }

    fn name(&self) -> String {
        "plain f64 loops".to_string()
    }

    fn run(&self, call: &Call) -> Result<()> {
        match call {
            Call::Argmax(call) => argmax::run(call),
            Call::Attend(call) => attend::run(call),
            Call::Copy(call) => copy::run(call),
            Call::Embed(call) => embed::run(call),
            Call::Gate(call) => gate::run(call),
            Call::Hadamard(call) => hadamard::run(call),
            Call::KvRead(call) => kv_read::run(call),
            Call::KvWrite(call) => kv_write::run(call),
            Call::Linear(call) => linear::run(call),
            Call::MoeCombine(call) => moe::run_combine(call),
            Call::MoeRoute(call) => moe::run_route(call),
            Call::NormRope(call) => norm_rope::run(call),
            Call::NormRopeWrite(call) => norm_rope_write::run(call),
            Call::RmsNorm(call) => rms_norm::run(call),
            Call::Sample(call) => sample::run(call),
            Call::Softcap(call) => softcap::run(call),
        }
        Ok(())
    }

    fn plan_attend(&self, _: &ops::attend::Call) -> ops::attend::Plan {
        ops::attend::Plan { kernel: "reference", reason: Cow::Borrowed("the only kernel"), splits: 1 }
    }
}
