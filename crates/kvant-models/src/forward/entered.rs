//! Passes of a drafter, whose residual stream does not start as an embedding.

use kvant::{Encoder, KvPool, Step, Tensor};

use super::{Network, Pass, Stream, Views, Wanted};
use crate::Result;

/// The start of a drafter's pass. The residual stream is in the views.
#[derive(Clone, Copy)]
pub(crate) struct Entered<'a> {
    /// The input of the first block's mixer, instead of a norm of the residual stream.
    pub first_input: Option<&'a Tensor>,
    /// The positions by which queries of blocks with external keys rotate, u32 `[T]`.
    pub query_positions: Option<&'a Tensor>,
}

impl Network {
    /// Encodes the blocks and the final norm, without logits. Afterwards the norm is in x and the residual stream in h,
    /// of the views of the wanted rows. Without wanted rows, only keys and values are computed.
    pub(crate) fn encode_entered(
        &self,
        enc: &mut Encoder,
        (views, entered): (&Views, Entered),
        pool: &KvPool,
        step: &Step,
        wanted: &Wanted,
    ) -> Result<()> {
        let Entered { first_input, query_positions } = entered;
        let mut pass = Pass { first_input, query_positions, ..Pass::new(self, enc, views, step) };
        if first_input.is_some() {
            pass.stream = Stream::Normed;
        }
        let Some(last) = self.spec().blocks.len().checked_sub(1) else { return pass.finish(None) };
        for l in 0..last {
            pass.block(l, pool)?;
        }
        pass.first_half(last, pool)?;
        if matches!(wanted, Wanted::Nothing) {
            return Ok(());
        }
        // The remaining operations do not mix rows.
        pass.keep(wanted)?;
        pass.second_half(last)?;
        pass.finish(None)
    }
}
