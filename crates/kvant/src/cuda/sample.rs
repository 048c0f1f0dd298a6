use super::{argmax, headers};
use crate::{
    Result,
    gpu::{
        Builder, Source,
        sample::{LAYOUTS, LONG, greedy, launch},
    },
    ops::sample::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "sample.cu", text: include_str!("sample.cu"), headers: headers::ROWS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    if let Some(call) = greedy(call) {
        return argmax::build_for(NAME, &call, b);
    }
    let copies = if call.vocab < LONG { 1u32 } else { 8 };
    b.push(launch(call, &SOURCE, "sample", &b.limits)?.constant("COPIES", copies))
}
