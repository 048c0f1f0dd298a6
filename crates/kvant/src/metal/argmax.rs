use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        argmax::{LAYOUTS, launch},
    },
    ops::argmax::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "argmax.metal", text: include_str!("argmax.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    build_for(NAME, call, b)
}

/// Builds the launch for another operation; errors name that operation.
pub(super) fn build_for(op: &'static str, call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(op, call, &SOURCE, &b.limits)?)
}
