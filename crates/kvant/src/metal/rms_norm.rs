use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        rms_norm::{LAYOUTS, launch},
    },
    ops::rms_norm::Call,
};

static SOURCE: Source =
    Source { name: "rms_norm.metal", text: include_str!("rms_norm.metal"), headers: HEADERS, layouts: LAYOUTS };

/// SIMD-groups of a threadgroup that has one row at most: 4096 elements are read at once.
const MOST: usize = 32;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE, MOST)?)
}
