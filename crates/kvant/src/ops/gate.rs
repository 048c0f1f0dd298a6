use super::check;
use crate::{
    Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "gate";

/// Arguments of [`gate`](gate()): out = activation(gate) · up, element by element. This is the middle of a gated MLP.
/// [`Activation::ClampedSwish`] changes `up`, too.
///
/// `gate` and `up` may be columns of one tensor (a fused projection) or of two tensors. `out` may be the gate's
/// tensor if the gate covers all of its columns.
///
/// The formulas also hold for infinities: every activation of −∞ is NaN, except the sigmoid, which is 0,
/// and the identity.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Gate<'a> {
    /// The input of the activation.
    pub gate: Columns<'a>,
    /// The factor.
    pub up: Columns<'a>,
    /// The activation function.
    pub activation: Activation,
    /// `[T, N]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> Gate<'a> {
    /// Gates `up` by `gate`.
    pub fn new(
        gate: impl Into<Columns<'a>>,
        up: impl Into<Columns<'a>>,
        activation: Activation,
        out: &'a Tensor,
    ) -> Self {
        Gate { gate: gate.into(), up: up.into(), activation, out }
    }
}

/// Columns `start .. start + N` of a tensor `[T, W]`, f32, f16 or bf16. N is the width of the output.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// `[T, W]`.
    pub tensor: &'a Tensor,
    /// The first column.
    pub start: usize,
}

impl<'a> From<&'a Tensor> for Columns<'a> {
    /// Columns from the first one on.
    fn from(tensor: &'a Tensor) -> Columns<'a> {
        Columns { tensor, start: 0 }
    }
}

/// Activation functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// ½x(1 + tanh(√(2/π)(x + 0.044715x³))).
    GeluTanh,
    /// x / (1 + e⁻ˣ).
    Silu,
    /// gpt-oss: with g = min(gate, 7) and u = up clamped to ±7, the result is (u + 1)·g / (1 + e^(−1.702·g)).
    ClampedSwish,
    /// 1 / (1 + e⁻ˣ): gates of attention.
    Sigmoid,
    /// x: a plain product, as in LFM2.
    Identity,
}

/// Runs [`Gate`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors).
pub fn gate(enc: &mut Encoder, args: &Gate) -> Result<()> {
    let [rows, dim] = check::rank(NAME, "out", args.out, ["T", "N"])?;
    check::float(NAME, "out", args.out)?;
    let side = |arg, columns: &Columns| {
        check::float(NAME, arg, columns.tensor)?;
        let [_, width] = check::rank(NAME, arg, columns.tensor, ["T", "W"])?;
        check::shape(NAME, arg, columns.tensor, &[("T", rows), ("W", width)])?;
        let end = columns.start.saturating_add(dim);
        check::value_is(NAME, arg, end <= width, format_args!("{dim} columns from {} on", columns.start), width)?;
        Ok(OwnedColumns { tensor: columns.tensor.clone(), start: columns.start, width })
    };
    let (gate, up) = (side("gate", &args.gate)?, side("up", &args.up)?);
    enc.submit(super::Call::Gate(Call { gate, up, activation: args.activation, out: args.out.clone(), rows, dim }))
}

#[derive(Clone, Debug)]
pub(crate) struct OwnedColumns {
    pub tensor: Tensor,
    pub start: usize,
    /// Columns of the tensor: the distance between rows.
    pub width: usize,
}

rank_tensors! { OwnedColumns { tensor } }

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub gate: OwnedColumns,
    pub up: OwnedColumns,
    pub activation: Activation,
    pub out: Tensor,
    pub rows: usize,
    pub dim: usize,
}

rank_tensors! { Call { gate, up, out } }

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "gate", tensor: &self.gate.tensor, access: Read });
        visit(Touch { arg: "up", tensor: &self.up.tensor, access: Read });
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "gate")]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
