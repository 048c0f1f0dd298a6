use super::{headers::HEADERS, vectors::grid};
use crate::{
    Result,
    gpu::{
        Builder, Source,
        gate::{LAYOUTS, launch},
    },
    ops::gate::Call,
};

static SOURCE: Source =
    Source { name: "gate.metal", text: include_str!("gate.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (groups, threads) = grid(call.rows, call.dim);
    b.push(launch(call, &SOURCE)?.grid(groups, threads))
}
