use super::{
    THREADS,
    codec::encoders::{EIGHTS, can_encode_eights, per_lane, table_bytes, table_copies},
    headers,
};
use crate::{
    Result, Tensor,
    gpu::{
        Builder, Launch, Source,
        kv_write::{LAYOUTS, launch},
    },
    ops::kv_write::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "kv_write.cu", text: include_str!("kv_write.cu"), headers: headers::ALL, layouts: LAYOUTS };

/// Threads of a block that encodes.
const ENCODERS: usize = 128;

/// Whether warps encode eight rows at a time, which needs many rows.
fn by_eights(call: &Call, all: usize, busy_groups: usize) -> bool {
    let (spec, layer) = (call.layer.spec(), &call.layer);
    let sides = can_encode_eights(&call.k, spec.k, &layer.k.low) && can_encode_eights(&call.v, spec.v, &layer.v.low);
    let quantised = spec.k.is_quantised() || spec.v.is_quantised();
    // Enough rows for all warps, and few enough that 32-bit row numbers do not overflow.
    let many = (EIGHTS / 8 * busy_groups..1 << 31).contains(&all);
    sides && quantised && many && matches!(spec.head_dim, 128 | 256 | 512)
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (spec, layer, dim) = (call.layer.spec(), &call.layer, call.layer.spec().head_dim);
    let launch = launch(call, &SOURCE)?;
    let all = Launch::uint(NAME, "T", call.tokens.saturating_mul(spec.kv_heads))? as usize;
    if by_eights(call, all, b.limits.busy_groups) {
        // One block per multiprocessor for keys, and one for values. Eight rows of 512 coordinates fill its registers.
        let blocks = all.div_ceil(EIGHTS / 4).min(b.limits.busy_groups);
        let at_once = if dim == 512 { 1 } else { 2 };
        let tables = |copies| 2 * dim + table_bytes(spec, copies);
        let copies = table_copies(spec, at_once, tables, &b.limits);
        return b.push(
            launch
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
            launch
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
    let wide = [&call.k, &call.v, &layer.k.low, &layer.v.low].into_iter().all(aligned16);
    // Four elements a thread, or 16 bytes.
    let across = dim.div_ceil(if wide && call.k.dtype().size() == 2 { 8 } else { 4 }).clamp(1, THREADS);
    let down = (THREADS / across).min(all.max(1));
    b.push(
        launch
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
