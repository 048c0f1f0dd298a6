use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        softcap::{LAYOUTS, launch},
    },
    ops::softcap::Call,
};

static SOURCE: Source =
    Source { name: "softcap.cu", text: include_str!("softcap.cu"), headers: headers::ALL, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE)?)
}
