use super::check;
use crate::{
    DType, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "argmax";

/// Arguments of [`argmax`](argmax()): the index of the largest element of each row.
///
/// Among equal elements, the lowest index wins. NaN is never chosen; a row that holds only NaN gives `u32::MAX`,
/// which is not a valid index.
///
/// # Example
/// ```
/// use kvant::{DType, Device, Tensor, ops};
/// let device = Device::cpu();
/// let x = Tensor::from_slice(&device, &[1f32, 7., f32::NAN, 7.], &[1, 4])?;
/// let out = Tensor::zeros(&device, DType::U32, &[1])?;
/// let mut enc = device.encoder()?;
/// ops::argmax(&mut enc, &ops::Argmax::new(&x, &out))?;
/// enc.commit()?.wait()?;
/// assert_eq!(out.to_vec::<u32>()?, [1]);
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Argmax<'a> {
    /// `[T, N]`, f32, f16 or bf16; N is at least 1.
    pub x: &'a Tensor,
    /// u32 `[T]`.
    pub out: &'a Tensor,
}

impl<'a> Argmax<'a> {
    /// The largest element of each row of `x`.
    pub fn new(x: &'a Tensor, out: &'a Tensor) -> Self {
        Argmax { x, out }
    }
}

/// Runs [`Argmax`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors).
pub fn argmax(enc: &mut Encoder, args: &Argmax) -> Result<()> {
    let [rows, dim] = check::rank(NAME, "x", args.x, ["T", "N"])?;
    check::float(NAME, "x", args.x)?;
    check::positive(NAME, "N", dim)?;
    check::dtype(NAME, "out", args.out, DType::U32)?;
    check::shape(NAME, "out", args.out, &[("T", rows)])?;
    enc.submit(super::Call::Argmax(Call { x: args.x.clone(), out: args.out.clone(), dim }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub out: Tensor,
    pub dim: usize,
}

rank_tensors! { Call { x, out } }

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
