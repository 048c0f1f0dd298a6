use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        softcap::{LAYOUTS, launch},
    },
    ops::softcap::Call,
};

static SOURCE: Source =
    Source { name: "softcap.metal", text: include_str!("softcap.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE)?)
}
