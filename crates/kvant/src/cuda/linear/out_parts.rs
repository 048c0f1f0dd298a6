//! Results of several matrices that one product computes; they are consecutive in `out`.

use crate::{
    Result,
    gpu::{Launch, params},
    ops::linear::{Call, NAME},
};

params! {
    /// The outputs at which the second and the third part begin; the number of outputs if a part is missing.
    pub(crate) struct OutParts {
        pub second: u32,
        pub third: u32,
    }
}

/// Maximum matrices.
pub(super) const MAX_PARTS: usize = 3;

impl OutParts {
    /// The parts of a call with at most [`MAX_PARTS`].
    pub(super) fn of(call: &Call) -> Result<OutParts> {
        let begin = |part: usize| {
            let outputs = if part < call.parts.len() { call.parts[..part].iter().sum() } else { call.dims.outputs };
            Launch::uint(NAME, "out", outputs)
        };
        Ok(OutParts { second: begin(1)?, third: begin(2)? })
    }
}
