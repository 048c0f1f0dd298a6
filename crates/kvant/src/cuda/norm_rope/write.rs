use crate::cuda::{headers, norm_rope};
use crate::{
    Result,
    gpu::{
        Builder, LANES, Source,
        norm_rope_write::{LAYOUTS, launch},
        planes::row_threads,
    },
    ops::norm_rope_write::Call,
};

static SOURCE: Source = Source {
    name: "norm_rope_write.cu",
    text: include_str!("norm_rope_write.cu"),
    headers: headers::ALL,
    layouts: LAYOUTS,
};

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let spec = call.layer.spec();
    let (dim, all_heads) = (call.head_dim, call.heads + 2 * spec.kv_heads);
    // If a warp holds a row in registers, a shorter part per lane is faster.
    let in_registers = call.rotate_q || spec.k.is_quantised() || spec.v.is_quantised();
    let per = dim.min(8).max(dim / LANES);
    let threads = row_threads(dim);
    // On a rank that stores a share of the positions, slots differ from positions.
    let is_divided = call.layer.position_ranks() > 1;
    b.push(
        launch(call, &SOURCE, b)?
            .constant("IN_REGISTERS", in_registers)
            .constant("HEAD_DIM", dim as u32)
            .constant("PER", per as u32)
            .constant("THREADS", threads as u32)
            .constant("DIVIDED", is_divided)
            .read_if(21, is_divided.then_some(&call.step.positions))
            .threadgroup_memory(dim * size_of::<f32>() + norm_rope::SCRATCH_BYTES)
            // Weights, angles, positions, sequences, lengths and page tables.
            .reads_ahead(&[3, 4, 5, 6, 7, 8, 9, 10, 11, 20, 21])
            .grid([call.tokens, all_heads, 1], [threads, 1, 1]),
    )
}
