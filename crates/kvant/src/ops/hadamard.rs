use super::check;
use crate::{
    Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "hadamard";

/// Arguments of [`hadamard`](hadamard()): the randomised Hadamard rotation of each row, y = H_D·(s ⊙ x)/√D, or its
/// inverse x = s ⊙ (H_D·y)/√D.
///
/// H_D is the Sylvester matrix; s are the fixed signs of [`codec::signs`](crate::codec::signs). The rotation is
/// orthonormal: it preserves lengths and inner products. `out` may be `x`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Hadamard<'a> {
    /// `[.., D]`, f32, f16 or bf16; D is a power of two from 2 to 4096.
    pub x: &'a Tensor,
    /// Whether to undo the rotation.
    pub inverse: bool,
    /// The shape of `x`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> Hadamard<'a> {
    /// Rotates the rows of `x`.
    pub fn new(x: &'a Tensor, out: &'a Tensor) -> Self {
        Hadamard { x, out, inverse: false }
    }
}

setters! { Hadamard<'a> {
    inverse: bool,
} }

/// Runs [`Hadamard`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors).
pub fn hadamard(enc: &mut Encoder, args: &Hadamard) -> Result<()> {
    check::float(NAME, "x", args.x)?;
    check::float(NAME, "out", args.out)?;
    let dim = args.x.shape().last().copied().unwrap_or(0);
    let ok = dim.is_power_of_two() && (2..=4096).contains(&dim);
    check::value_is(NAME, "D", ok, "a power of two from 2 to 4096", dim)?;
    let dims: Vec<(&str, usize)> = args.x.shape().iter().map(|&n| ("", n)).collect();
    check::shape(NAME, "out", args.out, &dims)?;
    let rows = args.x.elements() / dim;
    let (x, out) = (args.x.clone(), args.out.clone());
    enc.submit(super::Call::Hadamard(Call { x, inverse: args.inverse, out, rows, dim }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub inverse: bool,
    pub out: Tensor,
    pub rows: usize,
    pub dim: usize,
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
