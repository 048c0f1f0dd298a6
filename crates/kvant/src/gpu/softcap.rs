//! The launch of `softcap`.

use super::{Launch, Layout, Params, Source, THREADS, params};
use crate::{
    Result,
    ops::softcap::{Call, NAME},
};

params! {
    pub(crate) struct SoftcapParams {
        pub elements: u32,
        pub cap: f32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[SoftcapParams::layout];

pub(crate) fn launch(call: &Call, source: &'static Source) -> Result<Launch> {
    let elements = Launch::uint(NAME, "x", call.elements)?;
    Ok(Launch::new(NAME, source, "softcap")
        .constant("X_DTYPE", call.x.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .read(0, &call.x)
        .write(1, &call.out)
        .params(2, &SoftcapParams { elements, cap: call.cap })
        .grid([call.elements.div_ceil(THREADS), 1, 1], [THREADS, 1, 1]))
}
