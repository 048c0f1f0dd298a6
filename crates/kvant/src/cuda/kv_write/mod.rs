use super::{THREADS, blocks_per_multiprocessor, codec::threshold_cells as cells, headers};
use crate::{
    Codec, Result, Tensor,
    gpu::{
        Builder, LANES, Launch, Source,
        kv_write::{LAYOUTS, Vectors, WritePass, WrittenVectors, launch, means_launch},
    },
    ops::kv_write::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "kv_write.cu", text: include_str!("kv_write.cu"), headers: headers::ALL, layouts: LAYOUTS };

static MEANS: Source =
    Source { name: "page_means.cu", text: include_str!("page_means.cu"), headers: headers::ALL, layouts: LAYOUTS };

/// Threads of a block that encodes.
const ENCODERS: usize = 128;
/// Threads of a block whose warps encode eight rows at a time.
const EIGHTS: usize = 256;
/// Copies of the lookup tables, as many as there is room for: one for each lane, or fewer of the long tables of 8 bits,
/// which take longer to fill.
const COPIES: [usize; 5] = [32, 16, 8, 4, 2];
const COPIES_OF_8: usize = 8;

/// Coordinates of a row that a lane encodes; up to 32 lanes share a row.
fn per_lane(dim: usize) -> usize {
    dim.min(32).max(dim / LANES)
}

/// Whether warps encode eight rows at a time (`codec/encode_tiles.h`): many rows of 16-bit numbers that begin at
/// multiples of 16 bytes, whose pages have their means.
fn by_eights(vectors: &WrittenVectors, pass: &WritePass, all: usize, busy_groups: usize) -> bool {
    let (spec, layer) = (vectors.layer.spec(), vectors.layer);
    let aligned16 = |t: &Tensor| t.byte_offset().is_multiple_of(16);
    let encodes = |source: Vectors, codec: Codec, low: &Tensor| {
        let Vectors::Tensor(source) = source else { return false };
        let moves = codec == Codec::Dense(source.dtype());
        source.dtype().size() == 2 && aligned16(source) && aligned16(low) && (codec.is_quantised() || moves)
    };
    let sides = encodes(vectors.k, spec.k, &layer.k.low) && encodes(vectors.v, spec.v, &layer.v.low);
    let quantised = spec.k.is_quantised() || spec.v.is_quantised();
    let has_means = !layer.is_centred() || !matches!(pass, WritePass::Alone);
    // Enough for all warps, and few enough that 32-bit row numbers do not overflow.
    let many = (EIGHTS / 8 * busy_groups..1 << 31).contains(&all);
    sides && quantised && has_means && many && matches!(spec.head_dim, 128 | 256 | 512)
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    push(&WrittenVectors::of(call), b)
}

/// The launches that write the vectors of a step.
pub(super) fn push(vectors: &WrittenVectors, b: &mut Builder) -> Result<()> {
    let Some(passes) = WritePass::around_means(vectors, b)? else {
        return push_write(vectors, &WritePass::Alone, b);
    };
    for pass in &passes {
        let spec = vectors.layer.spec();
        b.push(
            means_launch(vectors, pass, &MEANS)?
                .constant("HEAD_DIM", spec.head_dim as u32)
                .constant("PER", spec.head_dim.min(8).max(spec.head_dim / LANES) as u32)
                .constant("THREADS", THREADS as u32)
                .grid([vectors.tokens, spec.kv_heads, 2], [THREADS, 1, 1]),
        )?;
        push_write(vectors, pass, b)?;
    }
    Ok(())
}

fn push_write(vectors: &WrittenVectors, pass: &WritePass, b: &mut Builder) -> Result<()> {
    let (spec, layer) = (vectors.layer.spec(), vectors.layer);
    let launch = || launch(vectors, pass, &SOURCE);
    let dim = spec.head_dim;
    let all = Launch::uint(NAME, "T", vectors.tokens.saturating_mul(spec.kv_heads))? as usize;
    if by_eights(vectors, pass, all, b.limits.busy_groups) {
        // One block per multiprocessor for keys, and one for values. Eight rows of 512 coordinates fill its registers.
        let blocks = all.div_ceil(EIGHTS / 4).min(b.limits.busy_groups);
        let at_once = if dim == 512 { 1 } else { 2 };
        let bits = |codec| match codec {
            Codec::Dense(_) => 0,
            Codec::TurboQuant(tq) => tq.bits,
        };
        let (k, v) = (bits(spec.k), bits(spec.v));
        let tables = |copies| 2 * dim + cells::table_bytes(k, copies).max(cells::table_bytes(v, copies));
        let most = if k.max(v) == 8 { COPIES_OF_8 } else { COPIES[0] };
        let fits = |&copies: &usize| copies <= most && blocks_per_multiprocessor(tables(copies), &b.limits) >= at_once;
        let copies = COPIES.into_iter().find(fits).unwrap_or(1);
        return b.push(
            launch()?
                .constant("TILES", true)
                .constant("HEAD_DIM", dim as u32)
                .constant("THREADS", EIGHTS as u32)
                .constant("MINBLOCKS", at_once as u32)
                .constant("TABLE_COPIES", copies as u32)
                .constant("SHARED_BYTES", tables(copies) as u32)
                .threadgroup_memory(tables(copies))
                .grid([blocks, 2, 1], [EIGHTS, 1, 1]),
        );
    }
    if spec.k.is_quantised() || spec.v.is_quantised() {
        let per = per_lane(dim);
        return b.push(
            launch()?
                .constant("TILES", false)
                .constant("ENCODE", true)
                .constant("TABLE_COPIES", 1)
                .constant("MINBLOCKS", 1)
                .constant("THREADS", ENCODERS as u32)
                .constant("HEAD_DIM", dim as u32)
                .constant("PER", per as u32)
                .threadgroup_memory(0)
                .grid([all.div_ceil(ENCODERS / (dim / per)), 2, 1], [ENCODERS, 1, 1]),
        );
    }
    let aligned16 = |t: &Tensor| t.byte_offset().is_multiple_of(16) && (dim * t.dtype().size()).is_multiple_of(16);
    // Only sides of a centred layer are written from scratch memory.
    let (Vectors::Tensor(k), Vectors::Tensor(v)) = (vectors.k, vectors.v) else { return Ok(()) };
    let wide = [k, v, &layer.k.low, &layer.v.low].into_iter().all(aligned16);
    // Four elements a thread, or 16 bytes.
    let across = dim.div_ceil(if wide && k.dtype().size() == 2 { 8 } else { 4 }).clamp(1, THREADS);
    let down = (THREADS / across).min(all.max(1));
    b.push(
        launch()?
            .constant("TILES", false)
            .constant("ENCODE", false)
            .constant("MINBLOCKS", 1)
            .constant("THREADS", THREADS as u32)
            .constant("ALIGNED16", wide)
            .constant("ROWS", 1)
            .threadgroup_memory(0)
            .grid([all.div_ceil(down), 2, 1], [across, down, 1]),
    )
}
