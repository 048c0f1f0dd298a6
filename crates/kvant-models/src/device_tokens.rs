//! Sampled tokens that stay on the device for the next step.

use std::borrow::Cow;

use kvant::{Encoder, Tensor, ops};

use crate::{Error, Result};

/// Tokens of a batch that an earlier step samples on the device. The host need not know them.
///
/// ```no_run
/// # fn run(decoder: &mut kvant_models::BatchDecoder, how: &kvant_models::Sampling) -> kvant_models::Result<()> {
/// use kvant_models::DeviceTokens;
/// // The previous step has sampled a token for each of two sequences. They swap places.
/// let drawn = decoder.drawn()?;
/// let fed = DeviceTokens { drawn: &drawn, places: &[(0, 1), (1, 0)] };
/// decoder.run_fed(&[0, 0], Some(fed), &[how, how])?.wait()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DeviceTokens<'a> {
    /// u32 `[n]`: the tokens that the earlier step samples. An entry that is not an id of the vocabulary, for example
    /// after NaN logits, gets an embedding of zeros on a GPU, and fails the pass on a CPU.
    pub drawn: &'a Tensor,
    /// A pair for each sampled token: its index in the batch, and its index in `drawn`. First indices ascend.
    pub places: &'a [(usize, usize)],
}

impl DeviceTokens<'_> {
    /// Writes the ids of a batch: known ones immediately, the others by operations of the encoder.
    pub(crate) fn write(&self, enc: &mut Encoder, known: &[u32], ids: &Tensor) -> Result<()> {
        let rising = self.places.windows(2).all(|pair| pair[0].0 < pair[1].0);
        if !rising || self.places.last().is_some_and(|&(to, _)| to >= known.len()) {
            let (len, places) = (known.len(), &self.places);
            let (expected, got) = (format_args!("rising, below {len}"), format_args!("{places:?}"));
            return Err(Error::argument("fed", expected, got));
        }
        if self.places.len() < known.len() {
            ids.write(known)?;
        }
        // Adjacent sequences were mostly adjacent in the earlier step.
        for run in self.places.chunk_by(|a, b| (a.0 + 1, a.1 + 1) == (b.0, b.1)) {
            let (to, from) = run[0];
            ops::copy(enc, &self.drawn.rows(from..from + run.len())?, &ids.rows(to..to + run.len())?)?;
        }
        Ok(())
    }

    /// The known ids, with a valid placeholder for the others.
    pub(crate) fn known<'t>(fed: Option<&DeviceTokens>, tokens: &'t [u32]) -> Cow<'t, [u32]> {
        let mut known = Cow::Borrowed(tokens);
        for &(to, _) in fed.map_or(&[][..], |fed| fed.places) {
            if to < tokens.len() {
                known.to_mut()[to] = 0;
            }
        }
        known
    }
}
