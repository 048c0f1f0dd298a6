//! Sealing of pages on CUDA.

use super::{
    codec::encoders::{EIGHTS, can_encode_eights, per_lane, table_bytes, table_copies},
    headers,
};
use crate::{
    Result,
    gpu::{
        Builder, LANES, Launch, Params, Source, Use, dtype_code, key_bias, params,
        planes::{self, codec_code, norm_code, page_shift},
    },
    ops::seal::{Call, NAME},
};

params! {
    pub(crate) struct SealParams {
        pub count: u32,
        pub kv_heads: u32,
        pub dense_entries: u32,
        pub sealed_entries: u32,
        pub k_scale: f32,
        pub v_scale: f32,
    }
}

static SOURCE: Source =
    Source { name: "seal.cu", text: include_str!("seal.cu"), headers: headers::ALL, layouts: &[SealParams::layout] };

/// Maximum threads of a block, and maximum sums of coordinates of its warps.
const MAX_THREADS: usize = 512;
const MAX_SUMS: usize = 4096;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (dense, sealed, spec) = (&call.dense, &call.sealed, call.sealed.spec());
    let (Some(from), Some(to)) = (dense.pages(), sealed.pages()) else { return Ok(()) };
    let (dim, page_tokens) = (spec.head_dim, to.page_tokens);
    let items = Launch::uint(NAME, "pages", call.count().saturating_mul(spec.kv_heads))? as usize;
    let sides = [(&dense.k, &sealed.k), (&dense.v, &sealed.v)];
    // Tiles of rows are copied asynchronously, without conversion.
    let tiles = matches!(dim, 128 | 256 | 512)
        && sealed.key_bias().is_none()
        && sides.into_iter().all(|(from, to)| can_encode_eights(&from.low, to.codec(), &to.low));
    let per = per_lane(dim);
    let threads = if tiles {
        EIGHTS.min(page_tokens * 4)
    } else {
        // Threads for all rows of a page, and memory for their sums.
        let most = (LANES * MAX_SUMS / dim).clamp(LANES, MAX_THREADS);
        (page_tokens * (dim / per)).clamp(LANES, most)
    };
    // PageSums of page_mean.h: two sums and counts of each warp, and a mean.
    let sums = (threads / LANES * (3 * dim + 2) * size_of::<f32>()).next_multiple_of(16);
    let signs = if tiles { 2 * dim } else { 0 };
    let shared = |copies| (signs + table_bytes(spec, copies)).next_multiple_of(16) + sums;
    // Blocks of a multiprocessor that its registers allow; long rows take more registers.
    let at_once = match (tiles, dim) {
        (true, 512) => EIGHTS / threads,
        (false, 1024..) => 1,
        _ => (2 * EIGHTS / threads).max(1),
    };
    let copies = if tiles { table_copies(spec, at_once, shared, &b.limits) } else { 1 };
    // Half of the blocks for keys, and half for values.
    let blocks = items.min((b.limits.busy_groups * at_once).div_ceil(2));
    let ((k_norm, k_scale), (v_norm, v_scale)) = (norm_code(spec.k), norm_code(spec.v));
    let params = SealParams {
        count: Launch::uint(NAME, "pages", call.count())?,
        kv_heads: Launch::uint(NAME, "layer.kv_heads", spec.kv_heads)?,
        dense_entries: from.entries,
        sealed_entries: to.entries,
        k_scale,
        v_scale,
    };
    let launch = Launch::new(NAME, &SOURCE, "seal")
        .constant("TILES", tiles)
        .constant("DENSE", dtype_code(dense.k.low.dtype()))
        .constant("K_CODEC", codec_code(spec.k))
        .constant("V_CODEC", codec_code(spec.v))
        .constant("K_NORM", k_norm)
        .constant("V_NORM", v_norm)
        .constant("PAGE_SHIFT", page_shift(sealed))
        .constant("HEAD_DIM", dim as u32)
        .constant("PER", per as u32)
        .constant("THREADS", threads as u32)
        .constant("MINBLOCKS", at_once as u32)
        .constant("TABLE_COPIES", copies as u32)
        .constant("SHARED_BYTES", shared(copies) as u32)
        .read(0, &call.pages)
        .read(1, &dense.k.low)
        .read(2, &dense.v.low);
    let launch = planes::bind(planes::bind(launch, 3, &sealed.k, Use::Write), 6, &sealed.v, Use::Write);
    let launch = key_bias::bind(launch, 12, sealed.key_bias());
    b.push(
        planes::bind_means(launch, [9, 10], sealed, Use::Write)
            .params(11, &params)
            .threadgroup_memory(shared(copies))
            .grid([blocks, 2, 1], [threads, 1, 1]),
    )
}
