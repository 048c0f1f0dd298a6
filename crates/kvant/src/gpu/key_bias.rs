//! The bias that keys of sealed pages are stored without, as kernels take it.

use super::Launch;
use crate::KeyBias;

/// Binds the four tensors of a bias from index `first` on, and the constant KEY_BIAS: whether there is one.
pub(crate) fn bind(launch: Launch, first: u32, bias: Option<&KeyBias>) -> Launch {
    let launch = launch.constant("KEY_BIAS", bias.is_some());
    let tensors = bias.map(KeyBias::tensors).into_iter().flatten();
    (first..).zip(tensors).fold(launch, |launch, (index, tensor)| launch.read(index, tensor))
}
