use crate::{
    Result,
    cuda::{THREADS, headers},
    gpu::{Builder, Launch, Params, Source, params},
    ops::softcap::{Call, NAME},
};

params! {
    pub(crate) struct SoftcapParams {
        pub elements: u32,
        pub cap: f32,
    }
}

static SOURCE: Source = Source {
    name: "softcap.cu",
    text: include_str!("softcap.cu"),
    headers: headers::ELEMENTS,
    layouts: &[SoftcapParams::layout],
};

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let elements = Launch::uint(NAME, "x", call.elements)?;
    b.push(
        Launch::new(NAME, &SOURCE, "softcap")
            .constant("X_DTYPE", call.x.dtype())
            .constant("OUT_DTYPE", call.out.dtype())
            .read(0, &call.x)
            .write(1, &call.out)
            .params(2, &SoftcapParams { elements, cap: call.cap })
            .grid([call.elements.div_ceil(THREADS), 1, 1], [THREADS, 1, 1]),
    )
}
