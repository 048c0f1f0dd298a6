//! The planes of a cache layer as arguments of kernels.

use super::{LANES, Launch, THREADS, Use, dtype_code, params};
use crate::{Codec, HeadOrder, KvLayer, Planes, Step, codec::Norm};

params! {
    /// The shape of a layer, and of its page table in a step: u32 `[sequences, page_width]`, an entry of at least
    /// `page_entries` is no page. Both are 0 for a contiguous layer. The constant PAGE_SHIFT has the size of pages.
    pub(crate) struct LayerParams {
        pub sequences: u32,
        pub kv_heads: u32,
        pub capacity: u32,
        pub ring: u32,
        pub token_major: u32,
        pub page_width: u32,
        pub page_entries: u32,
    }
}

impl LayerParams {
    /// `step` has the page table; `None` for reads of a contiguous layer.
    pub(crate) fn new(op: &'static str, layer: &KvLayer, step: Option<&Step>) -> crate::Result<LayerParams> {
        let spec = layer.spec();
        let uint = |arg, n| Launch::uint(op, arg, n);
        let sequences = step.map_or(spec.sequences, Step::sequences);
        let width = step.and_then(|step| step.table_of(layer)).map_or(0, |table| table.shape()[1]);
        Ok(LayerParams {
            sequences: uint("layer.sequences", sequences)?,
            kv_heads: uint("layer.kv_heads", spec.kv_heads)?,
            capacity: uint("layer.capacity", spec.capacity)?,
            ring: spec.ring.into(),
            token_major: (spec.order == HeadOrder::TokenMajor).into(),
            page_width: uint("step.page_tables", width)?,
            page_entries: layer.pages().map_or(0, |pages| pages.entries),
        })
    }
}

/// The constant PAGE_SHIFT of kernels: a page holds 2 to this power positions; 0 for a contiguous layer.
pub(crate) fn page_shift(layer: &KvLayer) -> u32 {
    layer.pages().map_or(0, |pages| pages.page_tokens.trailing_zeros())
}

/// Added to the bits of a quantised codec to form its number, which is above the numbers of dtypes.
const QUANTISED: u32 = 16;

/// Added to the number of a centred codec.
const CENTRED: u32 = 32;

/// The number of a codec in kernels: `planes.h` has the same.
pub(crate) fn codec_code(codec: Codec) -> u32 {
    match codec {
        Codec::Dense(dtype) => dtype_code(dtype),
        Codec::TurboQuant(tq) => QUANTISED + tq.bits + if tq.centred { CENTRED } else { 0 },
    }
}

/// As [`codec_code`], without page means.
pub(crate) fn plain_code(codec: Codec) -> u32 {
    codec_code(codec) % CENTRED
}

/// The name of a codec by its number.
#[cfg(feature = "cuda")]
pub(crate) fn codec_name(code: u32) -> String {
    let suffix = if code >= CENTRED { "c" } else { "" };
    match (code % CENTRED).checked_sub(QUANTISED) {
        Some(bits) => format!("tq{bits}{suffix}"),
        None => dtype_name(code),
    }
}

/// The name of a dtype by its number.
#[cfg(feature = "cuda")]
pub(crate) fn dtype_name(code: u32) -> String {
    use crate::DType::{BF16, F16, F32, U8, U32};
    let dtypes = [F32, F16, BF16, U32, U8];
    let dtype = dtypes.into_iter().find(|&dtype| dtype_code(dtype) == code);
    dtype.map_or_else(|| format!("dtype{code}"), |dtype| dtype.to_string())
}

/// The number of a codec's norm in kernels, as `turboquant.h` has it, and its scale.
pub(crate) fn norm_code(codec: Codec) -> (u32, f32) {
    match codec {
        Codec::Dense(_) => (0, 1.0),
        Codec::TurboQuant(tq) => {
            let norm = match tq.norm {
                Norm::Rms => 0,
                Norm::LeastSquares => 1,
                Norm::Unbiased => 2,
            };
            (norm, tq.scale)
        }
    }
}

/// Binds the planes of one side at three indices from `first` on; indices of missing planes stay free.
pub(crate) fn bind(launch: Launch, first: u32, planes: &Planes, access: Use) -> Launch {
    let tensors = [Some(&planes.low), planes.high.as_ref(), planes.norms.as_ref()];
    (first..).zip(tensors).fold(launch, |launch, (index, tensor)| match tensor {
        Some(tensor) => launch.tensor(index, tensor, access),
        None => launch,
    })
}

/// Binds the means of keys and the means of values, if they exist.
pub(crate) fn bind_means(launch: Launch, indices: [u32; 2], layer: &KvLayer, access: Use) -> Launch {
    let means = [layer.k(), layer.v()].map(|planes| planes.means.as_ref());
    indices.into_iter().zip(means).fold(launch, |launch, (index, means)| match means {
        Some(means) => launch.tensor(index, means, access),
        None => launch,
    })
}

/// Threads that share a row of `dim` elements, four at a time.
pub(crate) fn row_threads(dim: usize) -> usize {
    dim.div_ceil(4).next_multiple_of(LANES).clamp(LANES, THREADS)
}
