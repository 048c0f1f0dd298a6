use super::{grids::grid, headers};
use crate::{
    Result,
    gpu::{
        Builder, Source,
        moe::{self, LAYOUTS},
    },
    ops::moe::{combine, route},
};

static SOURCE: Source =
    Source { name: "moe.cu", text: include_str!("moe.cu"), headers: headers::ALL, layouts: LAYOUTS };

pub(crate) fn build_route(call: &route::Call, b: &mut Builder) -> Result<()> {
    b.push(moe::route(call, &SOURCE)?)
}

pub(crate) fn build_combine(call: &combine::Call, b: &mut Builder) -> Result<()> {
    let (groups, threads) = grid(call.tokens, call.dim);
    b.push(moe::combine(call, &SOURCE)?.grid(groups, threads))
}
