use crate::{
    Result,
    gpu::{Builder, Launch, Params, Source, copy::CopyParams},
    metal::THREADS,
    ops::copy::{Call, NAME},
};

static SOURCE: Source =
    Source { name: "copy.metal", text: include_str!("copy.metal"), headers: &[], layouts: &[CopyParams::layout] };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let bytes = call.from.bytes();
    let words = call.from.byte_offset().is_multiple_of(4) && call.to.byte_offset().is_multiple_of(4);
    let threads = bytes.div_ceil(if words { 4 } else { 1 });
    b.push(
        Launch::new(NAME, &SOURCE, "copy")
            .constant("WORDS", words)
            .read(0, &call.from)
            .write(1, &call.to)
            .params(2, &CopyParams { bytes: bytes as u64 })
            .grid([threads.div_ceil(THREADS), 1, 1], [THREADS, 1, 1]),
    )
}
