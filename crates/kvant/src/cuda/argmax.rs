use super::{THREADS, headers};
use crate::{
    Result,
    gpu::{
        Builder, Source, Use,
        argmax::{LAYOUTS, launch},
    },
    ops::argmax::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "argmax.cu", text: include_str!("argmax.cu"), headers: headers::ALL, layouts: LAYOUTS };

/// Minimum elements of a block if several blocks share a row.
const PART: usize = 2048;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    build_for(NAME, call, b)
}

/// As above, on behalf of another operation.
pub(super) fn build_for(op: &'static str, call: &Call, b: &mut Builder) -> Result<()> {
    let rows = call.out.elements();
    // The blocks that the device runs at once share a long row.
    let blocks = (2 * b.limits.busy_groups / rows.max(1)).min(call.dim / PART).max(1);
    let launch = launch(op, call, &SOURCE, &b.limits)?.constant("BLOCKS", blocks as u32);
    if blocks == 1 {
        return b.push(launch);
    }
    let parts = b.zeroed_scratch(rows * (1 + blocks) * size_of::<u64>())?;
    b.push(launch.scratch(3, &parts, Use::ReadWrite).grid([rows * blocks, 1, 1], [THREADS, 1, 1]))
}
