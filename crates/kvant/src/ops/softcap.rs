use super::check;
use crate::{
    Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "softcap";

/// Arguments of [`softcap`](softcap()): out = cap · tanh(x / cap), element by element. `out` may be `x`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Softcap<'a> {
    /// f32, f16 or bf16, of any shape.
    pub x: &'a Tensor,
    /// 1.2e-38 to 1e30.
    pub cap: f32,
    /// As many elements as `x`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> Softcap<'a> {
    /// Softcaps the elements of `x`.
    pub fn new(x: &'a Tensor, cap: f32, out: &'a Tensor) -> Self {
        Softcap { x, cap, out }
    }
}

/// Runs [`Softcap`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors).
pub fn softcap(enc: &mut Encoder, args: &Softcap) -> Result<()> {
    check::float(NAME, "x", args.x)?;
    check::float(NAME, "out", args.out)?;
    check::cap(NAME, "cap", args.cap)?;
    let elements = args.x.elements();
    check::value_is(
        NAME,
        "out",
        args.out.elements() == elements,
        format_args!("{elements} elements"),
        args.out.elements(),
    )?;
    enc.submit(super::Call::Softcap(Call { x: args.x.clone(), cap: args.cap, out: args.out.clone(), elements }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub cap: f32,
    pub out: Tensor,
    pub elements: usize,
}

rank_tensors! { Call { x, out } }

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "x")]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
