pub(super) mod write;

use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        norm_rope::{LAYOUTS, launch},
        planes::row_threads,
    },
    ops::norm_rope::Call,
};

static SOURCE: Source =
    Source { name: "norm_rope.cu", text: include_str!("norm_rope.cu"), headers: headers::ALL, layouts: LAYOUTS };

/// Bytes of shared memory beyond the row: NORM_ROPE_SCRATCH of `head.h`.
pub(super) const SCRATCH_BYTES: usize = 3 * 32 * size_of::<f32>();

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let dim = call.head_dim;
    b.push(
        launch(call, &SOURCE, b)?
            .threadgroup_memory(dim * size_of::<f32>() + SCRATCH_BYTES)
            // Positions, the weight, angles.
            .reads_ahead(&[1, 2, 3, 4, 5])
            .grid([call.tokens, call.heads, 1], [row_threads(dim), 1, 1]),
    )
}
