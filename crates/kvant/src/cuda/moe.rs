use super::{grids::grid, headers};
use crate::{
    Result,
    gpu::{
        Builder, LANES, Source,
        moe::{self, LAYOUTS},
    },
    ops::moe::{combine, route},
};

static SOURCE: Source =
    Source { name: "moe.cu", text: include_str!("moe.cu"), headers: headers::ALL, layouts: LAYOUTS };

/// Logits that a lane holds in registers, if these suffice.
const MAX_PER_LANE: usize = 16;

pub(crate) fn build_route(call: &route::Call, b: &mut Builder) -> Result<()> {
    let per_lane = call.experts.div_ceil(LANES).next_power_of_two();
    let per_lane = if call.top_k <= LANES && per_lane <= MAX_PER_LANE { per_lane } else { 0 };
    let launch = moe::route(call, &SOURCE)?.constant("PER_LANE", per_lane as u32);
    // The general kernel reads nothing ahead.
    b.push(if per_lane == 0 { launch } else { launch.reads_ahead(&[1, moe::BIAS]) })
}

pub(crate) fn build_combine(call: &combine::Call, b: &mut Builder) -> Result<()> {
    let (groups, threads) = grid(call.tokens, call.dim);
    b.push(moe::combine(call, &SOURCE)?.grid(groups, threads))
}
