use super::{headers::HEADERS, vectors::grid};
use crate::{
    Result,
    gpu::{
        Builder, Source,
        add_bias::{LAYOUTS, launch},
    },
    ops::add_bias::Call,
};

static SOURCE: Source =
    Source { name: "add_bias.metal", text: include_str!("add_bias.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (groups, threads) = grid(call.rows, call.dim);
    b.push(launch(call, &SOURCE)?.grid(groups, threads))
}
