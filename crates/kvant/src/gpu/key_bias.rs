//! The key bias as an argument of kernels. Sealed pages store keys without it.

use super::Launch;
use crate::KeyBias;

/// Sets the constant KEY_BIAS, and binds four buffers at indices from `first` on: pairs f32 `[Hk, 2, D/2]`, places u32
/// `[D]`, starts f32 `[pages, 2, D/2]`, steps f32 `[P, 2, D/2]`. Without a bias, it binds nothing.
pub(crate) fn bind(launch: Launch, first: u32, bias: Option<&KeyBias>) -> Launch {
    bind_tensors(launch.constant("KEY_BIAS", bias.is_some()), first, bias)
}

/// As [`bind`], without the constant.
pub(crate) fn bind_tensors(launch: Launch, first: u32, bias: Option<&KeyBias>) -> Launch {
    let tensors = bias.into_iter().flat_map(KeyBias::tensors);
    (first..).zip(tensors).fold(launch, |launch, (index, tensor)| launch.read(index, tensor))
}
