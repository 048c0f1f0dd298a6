use super::{THREADS, headers};
use crate::{
    Result, Tensor,
    gpu::{
        Builder, LANES, Launch, Source,
        kv_write::{LAYOUTS, launch},
    },
    ops::kv_write::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "kv_write.cu", text: include_str!("kv_write.cu"), headers: headers::WRITE, layouts: LAYOUTS };

/// Threads of a block that encodes.
const ENCODERS: usize = 128;
/// Rows that a thread moves one behind the other, when there are many.
const ROWS: usize = 4;

/// Coordinates of a row that a lane encodes, of 32 that there are at the most.
fn per_lane(dim: usize) -> usize {
    dim.min(32).max(dim / LANES)
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (spec, layer) = (call.layer.spec(), &call.layer);
    let dim = spec.head_dim;
    let all = Launch::uint(NAME, "T", call.tokens.saturating_mul(spec.kv_heads))? as usize;
    if spec.k.is_quantised() || spec.v.is_quantised() {
        let per = per_lane(dim);
        return b.push(
            launch(call, &SOURCE)?
                .constant("ENCODE", true)
                .constant("HEAD_DIM", dim as u32)
                .constant("PER", per as u32)
                .threadgroup_memory(0)
                .grid([all.div_ceil(ENCODERS / (dim / per)), 2, 1], [ENCODERS, 1, 1]),
        );
    }
    let aligned16 = |t: &Tensor| t.byte_offset().is_multiple_of(16) && (dim * t.dtype().size()).is_multiple_of(16);
    let wide = [&call.k, &call.v, &layer.k.low, &layer.v.low].into_iter().all(aligned16);
    // Pieces of four elements, or of 16 bytes.
    let across = dim.div_ceil(if wide && call.k.dtype().size() == 2 { 8 } else { 4 }).clamp(1, THREADS);
    let down = (THREADS / across).min(all.max(1));
    let rows = if all >= 4096 { ROWS } else { 1 };
    b.push(
        launch(call, &SOURCE)?
            .constant("ENCODE", false)
            .constant("ALIGNED16", wide)
            .constant("ROWS", rows as u32)
            .threadgroup_memory(0)
            .grid([all.div_ceil(down * rows), 2, 1], [across, down, 1]),
    )
}
