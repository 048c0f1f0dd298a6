use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, LANES, Launch, Params, Source, THREADS, Use, key_bias, params,
        planes::{self, codec_code, norm_code, page_shift},
        rows_aligned4,
    },
    ops::seal::{Call, NAME},
};

params! {
    pub(crate) struct MetalSealParams {
        pub head_dim: u32,
        pub dense_entries: u32,
        pub sealed_entries: u32,
        pub k_scale: f32,
        pub v_scale: f32,
    }
}

static SOURCE: Source = Source {
    name: "seal.metal",
    text: include_str!("seal.metal"),
    headers: HEADERS,
    layouts: &[MetalSealParams::layout],
};

/// Maximum coordinates of a row that a SIMD-group processes alone.
const MAX_ALONE: usize = 512;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let (dense, sealed, spec) = (&call.dense, &call.sealed, call.sealed.spec());
    let (Some(from), Some(to)) = (dense.pages(), sealed.pages()) else { return Ok(()) };
    let ((k_norm, k_scale), (v_norm, v_scale)) = (norm_code(spec.k), norm_code(spec.v));
    let dim = spec.head_dim;
    let params = MetalSealParams {
        head_dim: Launch::uint(NAME, "D", dim)?,
        dense_entries: from.entries,
        sealed_entries: to.entries,
        k_scale,
        v_scale,
    };
    let rows_at_once = if dim <= MAX_ALONE { THREADS / LANES } else { 1 };
    let launch = Launch::new(NAME, &SOURCE, "seal")
        .constant("DENSE", dense.k.low.dtype())
        .constant("K_CODEC", codec_code(spec.k))
        .constant("V_CODEC", codec_code(spec.v))
        .constant("K_NORM", k_norm)
        .constant("V_NORM", v_norm)
        .constant("PAGE_SHIFT", page_shift(sealed))
        .constant("ALIGNED", rows_aligned4(dim, [&dense.k.low, &dense.v.low, &sealed.k.low, &sealed.v.low]))
        .read(0, &call.pages)
        .read(1, &dense.k.low)
        .read(2, &dense.v.low);
    let launch = planes::bind(planes::bind(launch, 3, &sealed.k, Use::Write), 6, &sealed.v, Use::Write);
    // Means are written, then read.
    let launch = planes::bind_means(launch, [9, 10], sealed, Use::ReadWrite);
    b.push(
        key_bias::bind(launch, 12, sealed.key_bias())
            .params(11, &params)
            .threadgroup_memory(rows_at_once * dim * size_of::<f32>())
            .grid([spec.kv_heads, call.count(), 2], [THREADS, 1, 1]),
    )
}
