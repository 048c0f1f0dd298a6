//! The launch of `sample`.

use super::{LANES, Launch, Layout, Limits, Params, Source, params, rows_aligned4};
use crate::{
    DType, Result,
    ops::{
        argmax,
        sample::{Call, NAME, SampleRow, scaled},
    },
};

params! {
    /// Parameters of all rows. A row of `rows` has the layout of this struct; its `vocab` is not read.
    pub(crate) struct SampleParams {
        pub seed: u64,
        pub top_p: u64,
        pub vocab: u32,
        pub top_k: u32,
        pub temperature: f32,
        pub min_p: f32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[SampleParams::layout];

const _: () = assert!(size_of::<SampleParams>() == SampleRow::WORDS * size_of::<u32>());

/// Minimum entries of a row for several copies of the histogram: with more entries, threads would often add to one bin
/// at once.
pub(crate) const LONG: usize = 16 * 1024;

/// At temperature 0 without parameters of rows, the `argmax` that replaces the call.
pub(crate) fn greedy(call: &Call) -> Option<argmax::Call> {
    let (x, out) = (&call.logits, &call.out);
    (call.rows.is_none() && call.how.temperature == 0.0).then(|| argmax::Call {
        x: x.clone(),
        out: out.clone(),
        dim: call.vocab,
    })
}

pub(crate) fn launch(call: &Call, source: &'static Source, kernel: &'static str, limits: &Limits) -> Result<Launch> {
    let vocab = call.vocab;
    let params = SampleParams {
        seed: call.how.seed,
        top_p: scaled(call.how.top_p),
        vocab: Launch::uint(NAME, "V", vocab)?,
        top_k: Launch::uint(NAME, "top_k", call.how.top_k)?,
        // A GPU may flush a subnormal number to zero.
        temperature: call.how.temperature.max(f32::MIN_POSITIVE),
        min_p: call.how.min_p,
    };
    // Digits of 8 bits of a logit's sign, exponent and mantissa, as an f32.
    let key_digits: u32 = match call.logits.dtype() {
        DType::BF16 => 2,
        DType::F16 => 3,
        _ => 4,
    };
    let id_digits = (u32::BITS - (params.vocab - 1).leading_zeros()).div_ceil(8);
    // Log2 of the units of a probability of 1: at most 44, and less if the sum over a vocabulary could reach 2^64.
    let unit_bits = params.vocab.leading_zeros() + u32::BITS;
    let threads = (vocab / 16).next_multiple_of(LANES).clamp(LANES, limits.threads.min(1024));
    Ok(Launch::new(NAME, source, kernel)
        .constant("X_DTYPE", call.logits.dtype())
        .constant("ALIGNED", rows_aligned4(vocab, [&call.logits]))
        .constant("TOP_K", call.how.top_k < vocab)
        .constant("TOP_P", call.how.top_p < 1.0)
        .constant("KEY_DIGITS", key_digits)
        .constant("ID_DIGITS", id_digits)
        .constant("UNIT_BITS", unit_bits.min(44))
        .constant("ROWS", call.rows.is_some())
        .read(0, &call.logits)
        .read(1, &call.counter)
        .write(2, &call.out)
        .params(3, &params)
        .grid([call.out.elements(), 1, 1], [threads, 1, 1]))
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn words_of_a_row_have_the_layout_of_the_parameters() {
        let row = SampleRow::default().temperature(0.5).top_k(7).top_p(0.25).min_p(0.125).seed(0x0123_4567_89AB_CDEF);
        let words = row.words();
        let at = |offset: usize| words[offset / size_of::<u32>()];
        let long = |offset: usize| u64::from(at(offset)) | u64::from(at(offset + size_of::<u32>())) << 32;
        assert_eq!(long(offset_of!(SampleParams, seed)), 0x0123_4567_89AB_CDEF);
        assert_eq!(long(offset_of!(SampleParams, top_p)), 1 << 62);
        assert_eq!(at(offset_of!(SampleParams, top_k)), 7);
        assert_eq!(f32::from_bits(at(offset_of!(SampleParams, temperature))), 0.5);
        assert_eq!(f32::from_bits(at(offset_of!(SampleParams, min_p))), 0.125);
    }
}
