use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        spread::{LAYOUTS, launch},
    },
    ops::spread::Call,
};

static SOURCE: Source =
    Source { name: "spread.metal", text: include_str!("spread.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE)?)
}
