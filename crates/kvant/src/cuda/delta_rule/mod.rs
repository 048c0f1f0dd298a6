mod chunks;

use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, Source, aligned4,
        delta_rule::{LAYOUTS, launch},
    },
    ops::delta_rule::Call,
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

/// Maximum rows of a run for the kernel that has barriers between tokens.
const MAX_STEP_ROWS: u32 = 8;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let has_step = aligned4(call.state.memory()) && call.state.stride().is_multiple_of(4);
    let (short, source_of_short) = if has_step { ("delta_rule_step", &STEP) } else { ("delta_rule", &SOURCE) };
    if call.runs.max_rows() <= MAX_STEP_ROWS as usize {
        return b.push(launch(call, source_of_short, short, u32::MAX)?);
    }
    match Chunks::new(call, &b.limits) {
        Some(chunks) if chunks.push(call, MAX_STEP_ROWS, b)? => {
            // A step has prompts beside sequences that continue with a token.
            if call.runs.count() > 1 {
                b.push(launch(call, source_of_short, short, MAX_STEP_ROWS)?)?;
            }
            Ok(())
        }
        _ => b.push(launch(call, &SOURCE, "delta_rule", u32::MAX)?),
    }
}
