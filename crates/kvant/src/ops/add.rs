use super::{
    add_bias::{self, BiasRow},
    check,
};
use crate::{
    Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "add";

/// Arguments of [`add`](add()): out = x + y, element by element. `out` may be `x` or `y`.
///
/// [`add_bias`](super::add_bias()) adds one row to every row.
///
/// # Example
/// ```
/// use kvant::{DType, Device, Tensor, ops};
/// let device = Device::cpu();
/// let x = Tensor::from_slice(&device, &[1f32, 2., 3., 4.], &[2, 2])?;
/// let y = Tensor::from_slice(&device, &[10f32, 20., 30., 40.], &[2, 2])?;
/// let out = Tensor::zeros(&device, DType::F16, &[2, 2])?;
/// let mut enc = device.encoder()?;
/// ops::add(&mut enc, &ops::Add::new(&x, &y, &out))?;
/// enc.commit()?.wait()?;
/// assert_eq!(out.to_f32()?, [11., 22., 33., 44.]);
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Add<'a> {
    /// `[R, N]`, f32, f16 or bf16.
    pub x: &'a Tensor,
    /// `[R, N]`, f32, f16 or bf16.
    pub y: &'a Tensor,
    /// `[R, N]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> Add<'a> {
    /// Adds the elements of two tensors.
    pub fn new(x: &'a Tensor, y: &'a Tensor, out: &'a Tensor) -> Self {
        Add { x, y, out }
    }
}

/// Runs [`Add`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors).
pub fn add(enc: &mut Encoder, args: &Add) -> Result<()> {
    let [rows, dim] = check::rank(NAME, "x", args.x, ["R", "N"])?;
    for (arg, tensor) in [("x", args.x), ("y", args.y), ("out", args.out)] {
        check::float(NAME, arg, tensor)?;
        check::shape(NAME, arg, tensor, &[("R", rows), ("N", dim)])?;
    }
    let (x, bias, out) = (args.x.clone(), args.y.clone(), args.out.clone());
    let sum = add_bias::Call { op: NAME, x, bias, bias_row: BiasRow::Own, out, rows, dim };
    enc.submit(super::Call::Add(Call(sum)))
}

/// A call of the kernels of `add_bias`: its `bias` is `y`.
#[derive(Clone, Debug)]
pub(crate) struct Call(pub add_bias::Call);

rank_tensors! { Call { 0 } }

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.0.x, access: Read });
        visit(Touch { arg: "y", tensor: &self.0.bias, access: Read });
        visit(Touch { arg: "out", tensor: &self.0.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "x"), ("out", "y")]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
