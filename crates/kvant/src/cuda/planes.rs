//! The planes of a cache layer as kernels are told of them.

use crate::{Codec, gpu::dtype_code};

/// The number of a codec in kernels: `planes.h` has the same.
pub(super) fn codec_code(codec: Codec) -> u32 {
    match codec {
        Codec::Dense(dtype) => dtype_code(dtype),
        Codec::TurboQuant(tq) => tq.bits,
    }
}
