use super::check;
use crate::{
    Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "copy";

/// Copies the bytes of `from` to `to`. Both have the same number of bytes; dtypes and shapes may differ.
///
/// # Errors
/// Those of [every operation](crate::ops#errors); `Value` for another number of bytes.
pub fn copy(enc: &mut Encoder, from: &Tensor, to: &Tensor) -> Result<()> {
    check::value_is(NAME, "to", from.bytes() == to.bytes(), format_args!("{} bytes", from.bytes()), to.bytes())?;
    enc.submit(super::Call::Copy(Call { from: from.clone(), to: to.clone() }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub from: Tensor,
    pub to: Tensor,
}

rank_tensors! { Call { from, to } }

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "from", tensor: &self.from, access: Read });
        visit(Touch { arg: "to", tensor: &self.to, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
