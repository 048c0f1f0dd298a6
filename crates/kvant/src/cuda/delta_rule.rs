use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        delta_rule::{LAYOUTS, launch},
    },
    ops::delta_rule::Call,
};

static SOURCE: Source =
    Source { name: "delta_rule.cu", text: include_str!("delta_rule.cu"), headers: headers::ALL, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE)?)
}
