#[cfg(test)]
pub(super) mod accuracy;
mod chunks;

use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, Launch, Source, aligned4,
        delta_rule::{LAYOUTS, launch},
    },
    ops::{
        StateRuns,
        delta_rule::{Call, DeltaRuleShape},
    },
};
use chunks::Chunks;

static SOURCE: Source =
    Source { name: "delta_rule.cu", text: include_str!("delta_rule.cu"), headers: headers::ALL, layouts: LAYOUTS };
static STEP: Source = Source {
    name: "delta_rule_step.cu",
    text: include_str!("delta_rule_step.cu"),
    headers: headers::ALL,
    layouts: LAYOUTS,
};

/// Maximum rows of a run for the kernel that has barriers between tokens: these runs may write states after each row.
const MAX_STEP_ROWS: u32 = StateRuns::MAX_KEPT as u32;

/// Maximum scratch memory of calls of up to `rows` rows.
pub(crate) fn max_scratch_bytes(shape: &DeltaRuleShape, rows: usize) -> usize {
    chunks::max_scratch_bytes(shape, rows)
}

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    if call.runs.max_rows() <= MAX_STEP_ROWS as usize {
        return b.push(few_tokens(call, u32::MAX)?);
    }
    // Any run may have few tokens.
    match Chunks::new(call, &b.limits) {
        Some(chunks) if chunks.push(call, MAX_STEP_ROWS, b)? => b.push(few_tokens(call, MAX_STEP_ROWS)?),
        _ => b.push(launch(call, &SOURCE, "delta_rule", u32::MAX)?),
    }
}

/// The fastest kernel for runs of few tokens. Longer runs than `max_rows` are skipped.
fn few_tokens(call: &Call, max_rows: u32) -> Result<Launch> {
    let aligned = aligned4(call.state.memory()) && call.state.stride().is_multiple_of(4);
    if !aligned {
        return launch(call, &SOURCE, "delta_rule", max_rows);
    }
    // Runs, states, and what does not depend on tokens.
    Ok(launch(call, &STEP, "delta_rule_step", max_rows)?.reads_ahead(&[3, 4, 5, 6, 7, 8, 9]))
}
