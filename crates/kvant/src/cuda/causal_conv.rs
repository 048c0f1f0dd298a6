use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        causal_conv::{LAYOUTS, launch},
    },
    ops::causal_conv::Call,
};

static SOURCE: Source =
    Source { name: "causal_conv.cu", text: include_str!("causal_conv.cu"), headers: headers::ALL, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE)?)
}
