//! The launch of `embed`, without its grid.

use super::{Launch, Layout, Params, Source, affine::Parts, params, rows_aligned4};
use crate::{
    Result,
    ops::embed::{Call, NAME},
};

params! {
    pub(crate) struct EmbedParams {
        pub vocab: u32,
        pub dim: u32,
        pub tokens: u32,
        pub scale: f32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[EmbedParams::layout];

/// `table` is the table of the call.
pub(crate) fn launch(call: &Call, table: &Parts, source: &'static Source) -> Result<Launch> {
    let (dim, tokens) = (call.dims.inputs, call.ids.elements());
    let params = EmbedParams {
        vocab: Launch::uint(NAME, "table", call.dims.outputs)?,
        dim: Launch::uint(NAME, "table", dim)?,
        tokens: Launch::uint(NAME, "ids", tokens)?,
        scale: call.scale,
    };
    Ok(Launch::new(NAME, source, "embed")
        .constant("TABLE_DTYPE", table.dtype)
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("BITS", table.bits)
        .constant("GROUP", table.group)
        .constant("FORMAT", table.format)
        .constant("BLOCK_ALIGNMENT", table.block_alignment)
        .constant("ALIGNED", table.aligned)
        .constant("OUT_ALIGNED", rows_aligned4(dim, [&call.out]))
        .read(0, table.weight)
        .read_if(1, table.scales)
        .read_if(2, table.biases)
        .read(3, &call.ids)
        .write(4, &call.out)
        .params(5, &params))
}
