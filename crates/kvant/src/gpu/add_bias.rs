//! The launch of `add_bias` and `add`, without its grid.

use super::{Launch, Layout, Params, Source, params, rows_aligned4};
use crate::{
    Result,
    ops::add_bias::{BiasRow, Call},
};

params! {
    pub(crate) struct AddBiasParams {
        pub rows: u32,
        pub dim: u32,
        pub biases: u32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[AddBiasParams::layout];

pub(crate) fn launch(call: &Call, source: &'static Source) -> Result<Launch> {
    let uint = |arg, value| Launch::uint(call.op, arg, value);
    let (ids, biases) = match &call.bias_row {
        BiasRow::Only => (None, 1),
        BiasRow::Expert { ids, experts } => (Some(ids), *experts),
        BiasRow::Own => (None, call.rows),
    };
    let params =
        AddBiasParams { rows: uint("x", call.rows)?, dim: uint("x", call.dim)?, biases: uint("bias", biases)? };
    Ok(Launch::new(call.op, source, "add_bias")
        .constant("X_DTYPE", call.x.dtype())
        .constant("BIAS_DTYPE", call.bias.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("OF_EXPERTS", ids.is_some())
        .constant("OWN_ROW", matches!(call.bias_row, BiasRow::Own))
        .constant("ALIGNED", rows_aligned4(call.dim, [&call.x, &call.bias, &call.out]))
        .read(0, &call.x)
        .read(1, &call.bias)
        .read_if(2, ids)
        .write(3, &call.out)
        .params(4, &params))
}
