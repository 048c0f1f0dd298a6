//! The planes of a cache layer as the kernels see them.

use super::{LANES, Launch, THREADS, Use, dtype_code, params};
use crate::{Codec, KvLayer, Planes, SlotOrder, codec::Norm};

params! {
    /// The shape of a layer.
    pub(crate) struct LayerParams {
        pub sequences: u32,
        pub kv_heads: u32,
        pub capacity: u32,
        pub ring: u32,
        pub token_major: u32,
    }
}

impl LayerParams {
    pub(crate) fn new(op: &'static str, layer: &KvLayer) -> crate::Result<LayerParams> {
        let spec = layer.spec();
        let uint = |arg, n| Launch::uint(op, arg, n);
        Ok(LayerParams {
            sequences: uint("layer.sequences", spec.sequences)?,
            kv_heads: uint("layer.kv_heads", spec.kv_heads)?,
            capacity: uint("layer.capacity", spec.capacity)?,
            ring: spec.ring.into(),
            token_major: (spec.order == SlotOrder::TokenMajor).into(),
        })
    }
}

/// The number of a codec in kernels: `planes.h` has the same.
pub(crate) fn codec_code(codec: Codec) -> u32 {
    match codec {
        Codec::Dense(dtype) => dtype_code(dtype),
        Codec::TurboQuant(tq) => tq.bits,
    }
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

/// Binds the planes of one side at three indices from `first` on; those that do not exist stay free.
pub(crate) fn bind(launch: Launch, first: u32, planes: &Planes, access: Use) -> Launch {
    let tensors = [Some(&planes.low), planes.high.as_ref(), planes.norms.as_ref()];
    (first..).zip(tensors).fold(launch, |launch, (index, tensor)| match tensor {
        Some(tensor) => launch.tensor(index, tensor, access),
        None => launch,
    })
}

/// Threads that share a row of `dim` elements, four at a time.
pub(crate) fn row_threads(dim: usize) -> usize {
    dim.div_ceil(4).next_multiple_of(LANES).clamp(LANES, THREADS)
}
