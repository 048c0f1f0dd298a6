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

/// Maximum SIMD-groups of a threadgroup with one row: it reads 4096 elements at once.
const MAX_SIMDGROUPS: usize = 32;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE, MAX_SIMDGROUPS)?)
}
