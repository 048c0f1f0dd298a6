use super::{argmax, headers::HEADERS};
use crate::{
    Result,
    gpu::{
        Builder, Source,
        sample::{LAYOUTS, LONG, greedy, launch},
    },
    ops::sample::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "sample.metal", text: include_str!("sample.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    if let Some(call) = greedy(call) {
        return argmax::build_for(NAME, &call, b);
    }
    let kernel = if call.vocab < LONG { "sample_short" } else { "sample_long" };
    b.push(launch(call, &SOURCE, kernel, &b.limits)?.read_if(4, call.rows.as_ref()))
}
