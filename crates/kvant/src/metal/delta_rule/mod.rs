use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        delta_rule::{LAYOUTS, launch},
    },
    ops::delta_rule::Call,
};

static SOURCE: Source =
    Source { name: "delta_rule.metal", text: include_str!("delta_rule.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE, "delta_rule", u32::MAX)?)
}
