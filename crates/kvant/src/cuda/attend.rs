use crate::{
    Result,
    gpu::Builder,
    ops::attend::{Call, NAME},
};

pub(crate) fn build(_call: &Call, _b: &mut Builder) -> Result<()> {
    Err(super::unsupported(NAME))
}

pub(crate) fn plan(_call: &Call, _limits: &crate::gpu::Limits) -> crate::ops::attend::Plan {
    crate::ops::attend::Plan { kernel: "none", reason: "not written yet".into(), splits: 0 }
}
