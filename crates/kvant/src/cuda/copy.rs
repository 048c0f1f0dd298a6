use crate::{
    Result,
    cuda::{THREADS, headers},
    gpu::{Builder, Launch, Params, Source, copy::CopyParams},
    ops::copy::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "copy.cu", text: include_str!("copy.cu"), headers: headers::ALL, layouts: &[CopyParams::layout] };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let bytes = call.from.bytes();
    let aligned = |unit| call.from.byte_offset().is_multiple_of(unit) && call.to.byte_offset().is_multiple_of(unit);
    let unit = [16, 4].into_iter().find(|&unit| aligned(unit)).unwrap_or(1);
    b.push(
        Launch::new(NAME, &SOURCE, "copy")
            .constant("UNIT", unit as u32)
            .read(0, &call.from)
            .write(1, &call.to)
            .params(2, &CopyParams { bytes: bytes as u64 })
            .grid([bytes.div_ceil(unit).div_ceil(THREADS), 1, 1], [THREADS, 1, 1]),
    )
}
