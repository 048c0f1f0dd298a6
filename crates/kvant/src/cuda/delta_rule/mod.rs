use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, Source, aligned4,
        delta_rule::{LAYOUTS, launch},
    },
    ops::delta_rule::Call,
};

static SOURCE: Source =
    Source { name: "delta_rule.cu", text: include_str!("delta_rule.cu"), headers: headers::ALL, layouts: LAYOUTS };
static STEP: Source = Source {
    name: "delta_rule_step.cu",
    text: include_str!("delta_rule_step.cu"),
    headers: headers::ALL,
    layouts: LAYOUTS,
};

/// Maximum rows of a run for the kernel that has barriers between tokens.
const MAX_STEP_ROWS: usize = 8;

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let aligned = aligned4(call.state.memory()) && call.state.stride().is_multiple_of(4);
    let is_step = call.runs.max_rows() <= MAX_STEP_ROWS && aligned;
    let (kernel, source) = if is_step { ("delta_rule_step", &STEP) } else { ("delta_rule", &SOURCE) };
    b.push(launch(call, source, kernel)?)
}
