//! The launch of `sample`.

use super::{LANES, Launch, Layout, Limits, Params, Source, params, rows_aligned4};
use crate::{
    DType, Result,
    ops::{
        argmax,
        sample::{Call, NAME, scaled},
    },
};

params! {
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

/// Entries of a row from which on threads would often meet in one bin of the histogram.
pub(crate) const LONG: usize = 16 * 1024;

/// What takes the place of the call at temperature 0.
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
        // A GPU may take a subnormal number for zero.
        temperature: call.how.temperature.max(f32::MIN_POSITIVE),
        min_p: call.how.min_p,
    };
    // Sign, exponent and mantissa, in digits of 8 bits, of what a logit is when it is an f32.
    let key_digits: u32 = match call.logits.dtype() {
        DType::BF16 => 2,
        DType::F16 => 3,
        _ => 4,
    };
    let id_digits = (u32::BITS - (params.vocab - 1).leading_zeros()).div_ceil(8);
    // Fewer than 2^44 only where as many as there are of a probability of 1 would add up to 2^64.
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
