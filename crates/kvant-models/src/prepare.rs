//! Compiles kernels before they are needed.

use kvant::{DType, KvPool, StepSize, Tensor, ops};

use crate::{
    Model, Result,
    batch_decoder::{capture, is_host},
    forward::Wanted,
};

/// The shape of a pass that mixes decoding with a prompt chunk, which determines its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixedSize {
    /// Number of sequences with one token each.
    pub decode: usize,
    /// Tokens of one more sequence.
    pub prompt: usize,
    /// Maximum length of the sequences.
    pub longest: usize,
}

/// Minimum length of sequences for which attention is compiled. Each further length is twice the previous one.
const MIN_LENGTH: usize = 64;

impl Model {
    /// Shapes of mixed passes of up to `tokens` tokens and `sequences` sequences of up to `max_len` tokens. Passes of
    /// other shapes use the kernels of these. Empty on a CPU, which compiles nothing.
    pub fn mixed_sizes(&self, sequences: usize, tokens: usize, max_len: usize) -> Vec<MixedSize> {
        if is_host(self) {
            return Vec::new();
        }
        let doubled = |min: usize| std::iter::successors(Some(min), |n| n.checked_mul(2));
        let below = |min: usize, max: usize| doubled(min).take_while(move |&n| n < max);
        let mut totals: Vec<usize> = (1..9).chain(below(12, tokens)).chain(below(16, tokens)).collect();
        totals.retain(|&n| n < tokens);
        totals.push(tokens);
        totals.sort_unstable();
        let decodes = || std::iter::once(0).chain(below(1, sequences));
        let mut sizes = Vec::new();
        for longest in below(MIN_LENGTH, max_len).chain([max_len]) {
            // Only attention depends on the length.
            let is_last = longest == max_len;
            let totals = totals.iter().filter(|&&n| is_last || n == tokens || n.is_power_of_two() && n % 8 == 0);
            for decode in decodes() {
                let fits = totals.clone().filter(|&&n| n > decode && n - decode <= longest);
                sizes.extend(fits.map(|&n| MixedSize { decode, prompt: n - decode, longest }));
            }
        }
        sizes
    }

    /// Compiles the kernels of a mixed pass and of sampling, without running them.
    ///
    /// # Errors
    /// `Kvant`: `Compile`, `OutOfMemory`, `Unsupported`.
    pub fn prepare(&self, pool: &KvPool, size: MixedSize) -> Result<()> {
        self.check_pool(pool)?;
        let MixedSize { decode, prompt, longest } = size;
        let (tokens, rows) = (decode + prompt, decode + 1);
        let alone = if prompt == 1 { tokens } else { decode };
        let step = pool.reserve_step(StepSize::decode(rows, longest).tokens(tokens, prompt).alone(alone))?;
        // The rows whose logits are wanted: the last token of each sequence.
        let of_rows = pool.reserve_step(StepSize::decode(rows, longest))?;
        let (mut space, mut fewer) = (self.space(tokens)?, self.space(rows)?);
        space.fit(self.rank_decoder(), tokens)?;
        fewer.fit(self.rank_decoder(), rows)?;
        let logits = Tensor::zeros(self.device(), DType::F32, &[rows, self.vocab_size()])?;
        let zeros = |shape: &[usize]| Tensor::zeros(self.device(), DType::U32, shape);
        let (drawn, how) = (zeros(&[rows + 1])?, zeros(&[rows, ops::SampleRow::WORDS])?);
        let result = capture(self, |enc| {
            let views = &fewer.views;
            let wanted = match tokens == rows {
                true => Wanted::Every { logits: Some(&logits) },
                false => Wanted::Some { rows: &views.ids, views, step: &of_rows, logits: Some(&logits) },
            };
            self.network().encode(enc, &space.views, pool, &step, &wanted, None)?;
            let (out, counter) = (drawn.rows(0..rows)?, of_rows.lens());
            for rows in [None, Some(&how)] {
                ops::sample(enc, &ops::Sample::new(&logits, counter, &out).rows(rows))?;
            }
            // Fed tokens at addresses with and without 16-byte alignment.
            for first in 0..2 {
                ops::copy(enc, &drawn.rows(first..first + 1)?, &space.views.ids.rows(0..1)?)?;
            }
            Ok(())
        });
        self.give_spaces([space, fewer]);
        result.map(drop)
    }
}
