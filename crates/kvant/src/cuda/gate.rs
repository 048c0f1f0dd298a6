use super::{grids::grid, headers};
use crate::{
    Result,
    gpu::{
        Builder, Source,
        gate::{LAYOUTS, launch},
    },
    ops::gate::Call,
};

static SOURCE: Source =
    Source { name: "gate.cu", text: include_str!("gate.cu"), headers: headers::ALL, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (groups, threads) = grid(call.rows, call.dim);
    b.push(launch(call, &SOURCE)?.grid(groups, threads))
}
