use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        rms_norm::{LAYOUTS, launch},
    },
    ops::rms_norm::Call,
};

static SOURCE: Source =
    Source { name: "rms_norm.cu", text: include_str!("rms_norm.cu"), headers: headers::ALL, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE)?.reads_ahead(&[1]))
}
