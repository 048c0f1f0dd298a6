use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source, THREADS,
        kv_write::{LAYOUTS, WritePass, WrittenVectors, launch, pass_launch},
        planes::row_threads,
    },
    ops::kv_write::Call,
};

static SOURCE: Source =
    Source { name: "kv_write.metal", text: include_str!("kv_write.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    push(&WrittenVectors::of(call), b)
}

/// The launches that write the vectors of a step.
pub(super) fn push(vectors: &WrittenVectors, b: &mut Builder) -> Result<()> {
    let Some(passes) = WritePass::around_means(vectors, vectors.tokens, b)? else {
        return push_write(vectors, &WritePass::Alone, b);
    };
    for pass in &passes {
        let spec = vectors.layer.spec();
        // A row, or partial sums of four numbers a thread.
        let row_bytes = (spec.head_dim * size_of::<f32>()).max(THREADS * 16);
        let means = pass_launch(vectors, pass, &SOURCE, "page_means")?.threadgroup_memory(row_bytes);
        b.push(means.grid([spec.kv_heads, vectors.tokens, 2], [THREADS, 1, 1]))?;
        push_write(vectors, pass, b)?;
    }
    Ok(())
}

fn push_write(vectors: &WrittenVectors, pass: &WritePass, b: &mut Builder) -> Result<()> {
    let spec = vectors.layer.spec();
    let quantised = spec.k.is_quantised() || spec.v.is_quantised();
    // A dense row is copied without a stop.
    let row_bytes = if quantised { spec.head_dim * size_of::<f32>() } else { 16 };
    let grid = [spec.kv_heads, vectors.tokens, 2];
    let launch = launch(vectors, pass, &SOURCE)?.threadgroup_memory(row_bytes);
    b.push(launch.grid(grid, [row_threads(spec.head_dim), 1, 1]))
}
