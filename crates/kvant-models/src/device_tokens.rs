//! Tokens that an earlier step draws, and that go from there to the next step on the device.

use std::borrow::Cow;

use kvant::{Encoder, Tensor, ops};

use crate::{Error, Result};

/// Tokens of a batch that an earlier step has drawn or still draws. The host need not know them.
///
/// ```no_run
/// # fn run(decoder: &mut kvant_models::BatchDecoder, how: &kvant_models::Sampling) -> kvant_models::Result<()> {
/// use kvant_models::DeviceTokens;
/// // The step before has drawn a token for each of two sequences. They change places.
/// let drawn = decoder.drawn()?;
/// let fed = DeviceTokens { drawn: &drawn, places: &[(0, 1), (1, 0)] };
/// decoder.run_fed(&[0, 0], Some(fed), &[how, how])?.wait()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DeviceTokens<'a> {
    /// u32 `[n]`: the tokens that the earlier step draws. An entry that is not an id of the vocabulary, such as that of
    /// logits that are all NaN, gets an embedding of zeros on a GPU, and fails the pass on a CPU.
    pub drawn: &'a Tensor,
    /// The index of each such token in the batch, rising, and its index in `drawn`.
    pub places: &'a [(usize, usize)],
}

impl DeviceTokens<'_> {
    /// Writes the ids of a batch: those that the host knows at once, the others by operations of an encoder.
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
        // Sequences that follow one another mostly did so in the earlier step.
        for run in self.places.chunk_by(|a, b| (a.0 + 1, a.1 + 1) == (b.0, b.1)) {
            let (to, from) = run[0];
            ops::copy(enc, &self.drawn.rows(from..from + run.len())?, &ids.rows(to..to + run.len())?)?;
        }
        Ok(())
    }

    /// The ids that the host knows, with a valid one in place of the others.
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
