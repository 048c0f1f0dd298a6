use super::headers;
use crate::{
    Result,
    gpu::{
        Builder, Source,
        hadamard::{LAYOUTS, launch},
    },
    ops::hadamard::Call,
};

static SOURCE: Source =
    Source { name: "hadamard.metal", text: include_str!("hadamard.metal"), headers: headers::ROTATE, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE))
}
