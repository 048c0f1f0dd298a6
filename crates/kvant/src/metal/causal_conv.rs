use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        causal_conv::{LAYOUTS, launch},
    },
    ops::causal_conv::Call,
};

static SOURCE: Source =
    Source { name: "causal_conv.metal", text: include_str!("causal_conv.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE)?)
}
