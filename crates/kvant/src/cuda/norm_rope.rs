use crate::{
    Result,
    gpu::Builder,
    ops::norm_rope::{Call, NAME},
};

pub(crate) fn build(_call: &Call, _b: &mut Builder) -> Result<()> {
    Err(super::unsupported(NAME))
}
