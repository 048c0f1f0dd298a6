//! The results of several matrices that one product computes, one after the other.

use crate::{
    Result,
    gpu::Launch,
    ops::linear::{Call, NAME},
};

/// The most matrices.
pub(super) const MOST_PARTS: usize = 3;

/// The outputs at which the second and the third part begin; the number of outputs where there is none.
pub(super) fn begins(call: &Call) -> Result<[u32; 2]> {
    let begin = |part: usize| {
        let outputs = if part < call.parts.len() { call.parts[..part].iter().sum() } else { call.dims.outputs };
        Launch::uint(NAME, "out", outputs)
    };
    Ok([begin(1)?, begin(2)?])
}
