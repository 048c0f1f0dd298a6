use super::{affine::parts, headers::HEADERS, vectors::grid};
use crate::{
    Result,
    gpu::{
        Builder, Source,
        embed::{LAYOUTS, launch},
    },
    ops::embed::Call,
};

static SOURCE: Source =
    Source { name: "embed.metal", text: include_str!("embed.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let dim = call.dims.inputs;
    let table = parts(&call.table, dim);
    // A thread has 4 elements of a dense table, 16 of others.
    let (groups, threads) = grid(call.ids.elements(), if table.is_dense() { dim } else { dim / 4 });
    b.push(launch(call, &table, &SOURCE)?.grid(groups, threads))
}
