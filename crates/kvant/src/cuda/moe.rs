use crate::{
    Result,
    gpu::Builder,
    ops::moe::{combine, route},
};

pub(crate) fn build_route(_call: &route::Call, _b: &mut Builder) -> Result<()> {
    Err(super::unsupported(route::NAME))
}

pub(crate) fn build_combine(_call: &combine::Call, _b: &mut Builder) -> Result<()> {
    Err(super::unsupported(combine::NAME))
}
