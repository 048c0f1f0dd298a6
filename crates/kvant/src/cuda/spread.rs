use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        spread::{LAYOUTS, launch},
    },
    ops::spread::Call,
};

static SOURCE: Source =
    Source { name: "spread.cu", text: include_str!("spread.cu"), headers: headers::ALL, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE)?)
}
