//! Batches of decode rows and prompt chunks: each part runs the kernel that suits it.

use std::ops::Range;

use crate::{
    Result, Tensor,
    ops::attend::{Call, Explanation, Results},
};

/// The decode rows of a call, and its other rows, if it has both.
pub(crate) fn parts(call: &Call) -> Result<Option<[Call; 2]>> {
    let batch = call.step.batch();
    let decode = batch.decode.min(call.tokens);
    if decode == 0 || decode == call.tokens || batch.max_new <= 1 {
        return Ok(None);
    }
    let rest = batch.sequences(batch.sequences.saturating_sub(decode)).decode(0);
    let of = |tokens: Range<usize>, batch| -> Result<Call> {
        let step = call.step.range(tokens.clone(), batch)?;
        let rows = |tensor: &Tensor| tensor.rows(tokens.clone());
        let earlier =
            call.earlier.as_ref().map(|Results { out, ends }| Ok(Results { out: rows(out)?, ends: rows(ends)? }));
        let (earlier, ends) = (earlier.transpose()?, call.ends.as_ref().map(rows).transpose()?);
        let (q, out) = (rows(&call.q)?, rows(&call.out)?);
        Ok(Call { q, out, step, earlier, ends, tokens: tokens.len(), ..call.clone() })
    };
    Ok(Some([of(0..decode, batch.sequences(decode).max_new(1))?, of(decode..call.tokens, rest)?]))
}

/// Explains both parts of a call, or the whole if it has one.
pub(crate) fn explain(call: &Call, explain: impl Fn(&Call) -> Explanation) -> Explanation {
    let Ok(Some([decode, rest])) = parts(call) else { return explain(call) };
    let (count, decode, rest) = (decode.tokens, explain(&decode), explain(&rest));
    let reason = format!("{}; {count} decode rows run {}: {}", rest.reason, decode.kernel, decode.reason);
    Explanation { kernel: rest.kernel, reason: reason.into() }
}
