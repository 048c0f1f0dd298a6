use super::check;
use crate::{
    Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
};

pub(crate) const NAME: &str = "rms_norm";

/// Arguments of [`rms_norm`](rms_norm()): n(x) = x · weight / √(mean x² + eps) of each row, with an optional residual
/// addition before or after the norm.
///
/// | residual | result |
/// |---|---|
/// | [`Residual::None`] | out = scale · n(x) |
/// | [`Residual::After`] | out = scale · (residual + n(x)): the sandwich norm of Gemma |
/// | [`Residual::Before`] | sum = residual + x, out = scale · n(sum): the pre-norm of Llama and most others |
///
/// `out` and `sum` may each be `x` or the residual, but not the same tensor.
///
/// # Example
/// ```
/// use kvant::{DType, Device, Tensor, ops};
/// let device = Device::cpu();
/// let x = Tensor::from_slice(&device, &[3f32, -3., 3., 3.], &[1, 4])?;
/// let out = Tensor::zeros(&device, DType::F32, &[1, 4])?;
/// let residual = ops::Residual::None;
/// let mut enc = device.encoder()?;
/// ops::rms_norm(&mut enc, &ops::RmsNorm::new(&x, 0., &out).residual(residual))?;
/// enc.commit()?.wait()?;
/// assert!((out.to_vec::<f32>()?[1] + 1.).abs() < 1e-6);
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RmsNorm<'a> {
    /// `[T, N]`, f32, f16 or bf16; N is at least 1.
    pub x: &'a Tensor,
    /// `[N]`, f32, f16 or bf16, used as it is; `None` for ones.
    pub weight: Option<&'a Tensor>,
    /// Added to the mean square; finite and not negative.
    pub eps: f32,
    /// The residual addition.
    pub residual: Residual<'a>,
    /// Multiplies the result; 1 for a plain norm.
    pub scale: f32,
    /// `[T, N]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> RmsNorm<'a> {
    /// The norm of each row of `x`, without a weight or a residual.
    pub fn new(x: &'a Tensor, eps: f32, out: &'a Tensor) -> Self {
        RmsNorm { x, eps, out, weight: None, residual: Residual::None, scale: 1.0 }
    }
}

setters! { RmsNorm<'a> {
    weight: Option<&'a Tensor>,
    residual: Residual<'a>,
    scale: f32,
} }

/// The residual addition of an [`RmsNorm`]. Tensors are `[T, N]`, f32, f16 or bf16.
#[derive(Clone, Copy, Debug)]
pub enum Residual<'a> {
    /// No addition.
    None,
    /// Adds the tensor to the normed rows.
    After(&'a Tensor),
    /// Adds the tensor to the rows before the norm.
    Before {
        /// The tensor to add.
        residual: &'a Tensor,
        /// Receives the sum.
        sum: &'a Tensor,
    },
}

/// Runs [`RmsNorm`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors).
pub fn rms_norm(enc: &mut Encoder, args: &RmsNorm) -> Result<()> {
    let [rows, dim] = check::rank(NAME, "x", args.x, ["T", "N"])?;
    check::positive(NAME, "N", dim)?;
    check::float(NAME, "x", args.x)?;
    let same_shape = |arg, tensor: &Tensor| {
        check::float(NAME, arg, tensor)?;
        check::shape(NAME, arg, tensor, &[("T", rows), ("N", dim)])
    };
    same_shape("out", args.out)?;
    if let Some(weight) = args.weight {
        check::float(NAME, "weight", weight)?;
        check::shape(NAME, "weight", weight, &[("N", dim)])?;
    }
    check_eps(NAME, args.eps)?;
    check::finite(NAME, "scale", args.scale)?;
    let (residual, sum) = match args.residual {
        Residual::None => (None, None),
        Residual::After(residual) => (Some(residual), None),
        Residual::Before { residual, sum } => (Some(residual), Some(sum)),
    };
    residual.map_or(Ok(()), |t| same_shape("residual", t))?;
    sum.map_or(Ok(()), |t| same_shape("sum", t))?;
    enc.submit(super::Call::RmsNorm(Call {
        x: args.x.clone(),
        weight: args.weight.cloned(),
        eps: args.eps,
        residual: residual.cloned(),
        sum: sum.cloned(),
        scale: args.scale,
        out: args.out.clone(),
        rows,
        dim,
    }))
}

/// An epsilon is finite and not negative.
pub(crate) fn check_eps(op: &'static str, eps: f32) -> Result<()> {
    check::value_is(op, "eps", eps.is_finite() && eps >= 0.0, "finite and not negative", eps)
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub weight: Option<Tensor>,
    pub eps: f32,
    pub residual: Option<Tensor>,
    /// If present, the residual is added before the norm and the sum is stored here.
    pub sum: Option<Tensor>,
    pub scale: f32,
    pub out: Tensor,
    pub rows: usize,
    pub dim: usize,
}

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        for (arg, tensor) in [("weight", &self.weight), ("residual", &self.residual)] {
            if let Some(tensor) = tensor {
                visit(Touch { arg, tensor, access: Read });
            }
        }
        if let Some(tensor) = &self.sum {
            visit(Touch { arg: "sum", tensor, access: Write });
        }
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "x"), ("out", "residual"), ("sum", "x"), ("sum", "residual")]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
