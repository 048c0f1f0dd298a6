//! The launch of `add_bias` except its grid.

use super::{Launch, Layout, Params, Source, params, rows_aligned4};
use crate::{
    Result,
    ops::add_bias::{Call, NAME},
};

params! {
    pub(crate) struct AddBiasParams {
        pub rows: u32,
        pub dim: u32,
        pub experts: u32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[AddBiasParams::layout];

pub(crate) fn launch(call: &Call, source: &'static Source) -> Result<Launch> {
    let uint = |arg, value| Launch::uint(NAME, arg, value);
    let params =
        AddBiasParams { rows: uint("x", call.rows)?, dim: uint("x", call.dim)?, experts: uint("bias", call.experts)? };
    Ok(Launch::new(NAME, source, "add_bias")
        .constant("X_DTYPE", call.x.dtype())
        .constant("BIAS_DTYPE", call.bias.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("OF_EXPERTS", call.ids.is_some())
        .constant("ALIGNED", rows_aligned4(call.dim, [&call.x, &call.bias, &call.out]))
        .read(0, &call.x)
        .read(1, &call.bias)
        .read_if(2, call.ids.as_ref())
        .write(3, &call.out)
        .params(4, &params))
}
