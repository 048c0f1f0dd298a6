use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, LANES, Source,
        rms_norm::{LAYOUTS, launch, warps_of_row},
    },
    ops::rms_norm::Call,
};

static SOURCE: Source =
    Source { name: "rms_norm.cu", text: include_str!("rms_norm.cu"), headers: headers::ALL, layouts: LAYOUTS };

/// Warps of a block that has one row at most: their registers hold 8192 elements.
const MAX_WARPS: usize = 16;
/// Groups of four elements that a thread holds.
const MAX_HELD: usize = 4;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let groups = call.dim.div_ceil(4 * LANES * warps_of_row(call.dim, MAX_WARPS));
    let launch = launch(call, &SOURCE, MAX_WARPS)?
        .constant("HELD", groups.min(MAX_HELD) as u32)
        .constant("BEYOND", groups > MAX_HELD);
    b.push(launch.reads_ahead(&[1, 5, 6, 7, 8]))
}
