mod chunks;

use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        delta_rule::{LAYOUTS, launch},
    },
    ops::{
        StateRuns,
        delta_rule::{Call, DeltaRuleShape},
    },
};

static SOURCE: Source = Source {
    name: "delta_rule/delta_rule.metal",
    text: include_str!("delta_rule.metal"),
    headers: HEADERS,
    layouts: LAYOUTS,
};

/// Maximum rows of a run that is computed token by token, half a chunk: these runs may write states after each row.
const MAX_STEP_ROWS: u32 = StateRuns::MAX_KEPT as u32;

/// Maximum scratch memory of calls of up to `rows` rows.
pub(crate) fn max_scratch_bytes(shape: &DeltaRuleShape, rows: usize) -> usize {
    chunks::max_scratch_bytes(shape, rows)
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    if call.runs.max_rows() <= MAX_STEP_ROWS as usize {
        return b.push(launch(call, &SOURCE, "delta_rule", u32::MAX)?);
    }
    // Any run may have few tokens.
    let max_few = if chunks::push(call, MAX_STEP_ROWS, b)? { MAX_STEP_ROWS } else { u32::MAX };
    b.push(launch(call, &SOURCE, "delta_rule", max_few)?)
}
