use crate::{
    Result,
    gpu::Builder,
    ops::kv_read::{Call, NAME},
};

pub(crate) fn build(_call: &Call, _b: &mut Builder) -> Result<()> {
    Err(super::unsupported(NAME))
}
