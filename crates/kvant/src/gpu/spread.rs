//! The launch of `spread`.

use super::{Launch, Layout, Params, Source, THREADS, params};
use crate::{
    Result,
    ops::spread::{Call, NAME},
};

params! {
    pub(crate) struct SpreadParams {
        pub elements: u32,
        pub outputs: u32,
        pub chosen: u32,
        pub width: u32,
        pub fill: f32,
    }
}

pub(crate) const LAYOUTS: &[fn() -> Layout] = &[SpreadParams::layout];

/// The index of the groups. It follows the parameters, whose index does not depend on options.
const GROUPS: u32 = 4;

pub(crate) fn launch(call: &Call, source: &'static Source) -> Result<Launch> {
    let elements = call.out.elements();
    let params = SpreadParams {
        elements: Launch::uint(NAME, "out", elements)?,
        outputs: Launch::uint(NAME, "out", call.outputs)?,
        chosen: Launch::uint(NAME, "groups", call.chosen)?,
        width: Launch::uint(NAME, "x", call.width)?,
        fill: call.fill,
    };
    Ok(Launch::new(NAME, source, "spread")
        .constant("X_DTYPE", call.x.dtype())
        .constant("OUT_DTYPE", call.out.dtype())
        .constant("GROUPED", call.groups.is_some())
        .read(0, &call.x)
        .read(1, &call.places)
        .write(2, &call.out)
        .params(3, &params)
        .read_if(GROUPS, call.groups.as_ref())
        .grid([elements.div_ceil(THREADS), 1, 1], [THREADS, 1, 1]))
}
