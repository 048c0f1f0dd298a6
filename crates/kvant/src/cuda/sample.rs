use super::{THREADS, argmax, headers};
use crate::{
    Result,
    gpu::{
        Builder, Source, Use,
        sample::{LAYOUTS, LONG, greedy, launch},
    },
    ops::sample::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "sample.cu", text: include_str!("sample.cu"), headers: headers::ALL, layouts: LAYOUTS };

/// Minimum entries of a block if several blocks share a row.
const PART: usize = 4096;
/// Bins of a histogram: `BINS` of `sample.cu`.
const BINS: usize = 256;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    if let Some(call) = greedy(call) {
        return argmax::build_for(NAME, &call, b);
    }
    let rows = call.out.elements();
    // Blocks that share a row wait for each other, so all of them must run at once.
    let most = (b.limits.busy_groups / rows.max(1)).min(call.vocab / PART).max(1);
    let blocks = 1 << most.ilog2();
    let copies = if call.vocab < LONG { 1u32 } else { 8 };
    let launch = launch(call, &SOURCE, "sample", &b.limits)?
        .constant("COPIES", copies)
        .constant("BLOCKS", blocks as u32)
        .read_if(5, call.rows.as_ref());
    if blocks == 1 {
        return b.push(launch);
    }
    let shares = b.zeroed_scratch(rows * (8 + 2 * blocks + 3 * BINS) * size_of::<u64>())?;
    b.push(launch.scratch(4, &shares, Use::ReadWrite).grid([rows * blocks, 1, 1], [THREADS, 1, 1]))
}
