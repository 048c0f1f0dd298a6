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
    Source { name: "hadamard.cu", text: include_str!("hadamard.cu"), headers: headers::ALL, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    b.push(launch(call, &SOURCE))
}
