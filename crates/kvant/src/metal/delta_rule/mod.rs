mod chunks;

use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        delta_rule::{LAYOUTS, launch},
    },
    ops::delta_rule::{Call, DeltaRuleShape},
};

static SOURCE: Source = Source {
    name: "delta_rule/delta_rule.metal",
    text: include_str!("delta_rule.metal"),
    headers: HEADERS,
    layouts: LAYOUTS,
};

/// Maximum rows of a run that is computed token by token: half a chunk.
const MAX_STEP_ROWS: u32 = 16;

/// Maximum scratch memory of calls of up to `rows` rows.
pub(crate) fn max_scratch_bytes(shape: &DeltaRuleShape, rows: usize) -> usize {
    chunks::max_scratch_bytes(shape, rows)
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    if call.runs.max_rows() <= MAX_STEP_ROWS as usize {
        return b.push(launch(call, &SOURCE, "delta_rule", u32::MAX)?);
    }
    // A step may have prompts and sequences that continue with a token.
    let max_few = if call.runs.count() > 1 { MAX_STEP_ROWS } else { 0 };
    match chunks::push(call, max_few, b)? {
        false => b.push(launch(call, &SOURCE, "delta_rule", u32::MAX)?),
        true if max_few > 0 => b.push(launch(call, &SOURCE, "delta_rule", max_few)?),
        true => Ok(()),
    }
}
