use super::headers::HEADERS;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        hadamard::{LAYOUTS, launch},
    },
    ops::hadamard::Call,
};

static SOURCE: Source =
    Source { name: "hadamard.metal", text: include_str!("hadamard.metal"), headers: HEADERS, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE))
}
