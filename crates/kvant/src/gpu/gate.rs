//! The launch of `gate`, without its grid.

use super::{Launch, Layout, Params, Source, aligned4, params};
use crate::{
    Result,
    ops::{
        Activation,
        gate::{Call, NAME, OwnedColumns},
    },
};

params! {
    pub(crate) struct GateParams {
        pub rows: u32,
        pub dim: u32,
        pub gate_start: u32,
        pub gate_width: u32,
        pub up_start: u32,
        pub up_width: u32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[GateParams::layout];

/// `GELU`, `CLAMPED_SWISH`, `SIGMOID` and `IDENTITY` of the kernels.
pub(crate) fn activation_code(activation: Activation) -> u32 {
    match activation {
        Activation::GeluTanh => 0,
        Activation::Silu => 1,
        Activation::ClampedSwish => 2,
        Activation::Sigmoid => 3,
        Activation::Identity => 4,
    }
}

pub(crate) fn launch(call: &Call, source: &'static Source) -> Result<Launch> {
    let Call { gate, up, activation, out, rows, dim } = call;
    let uint = |arg, value| Launch::uint(NAME, arg, value);
    let params = GateParams {
        rows: uint("out", *rows)?,
        dim: uint("out", *dim)?,
        gate_start: uint("gate", gate.start)?,
        gate_width: uint("gate", gate.width)?,
        up_start: uint("up", up.start)?,
        up_width: uint("up", up.width)?,
    };
    let fours =
        |side: &OwnedColumns| aligned4(&side.tensor) && side.start.is_multiple_of(4) && side.width.is_multiple_of(4);
    let aligned = dim.is_multiple_of(4) && aligned4(out) && fours(gate) && fours(up);
    Ok(Launch::new(NAME, source, "gate")
        .constant("GATE_DTYPE", gate.tensor.dtype())
        .constant("UP_DTYPE", up.tensor.dtype())
        .constant("OUT_DTYPE", out.dtype())
        .constant("ACTIVATION", activation_code(*activation))
        .constant("ALIGNED", aligned)
        .read(0, &gate.tensor)
        .read(1, &up.tensor)
        .write(2, out)
        .params(3, &params))
}
