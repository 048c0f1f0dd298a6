use super::{THREADS, headers};
use crate::{
    Result,
    gpu::{
        Builder, Source, rows_aligned4,
        softcap::{LAYOUTS, launch},
    },
    ops::softcap::Call,
};

static SOURCE: Source =
    Source { name: "softcap.cu", text: include_str!("softcap.cu"), headers: headers::ALL, layouts: LAYOUTS };

pub(crate) fn build(call: &Call, b: &mut Builder) -> Result<()> {
    let fours = call.elements.div_ceil(4);
    b.push(
        launch(call, &SOURCE)?
            .constant("ALIGNED", rows_aligned4(call.elements, [&call.x, &call.out]))
            .grid([fours.div_ceil(THREADS), 1, 1], [THREADS, 1, 1]),
    )
}
