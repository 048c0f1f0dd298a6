use super::check;
use crate::{
    DType, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::{Peers, Rank, RankTensors, rank_tensors},
};

pub(crate) const NAME: &str = "rms_norm";

/// Norms of `out` that one call may add.
pub(crate) const MAX_NEXT: usize = 3;

/// Arguments of [`rms_norm`](rms_norm()): n(x) = x · weight / √(mean x² + eps) of each row, with an optional residual
/// addition before or after the norm, an optional gate, and optional norms of the result.
///
/// | residual | result |
/// |---|---|
/// | [`Residual::None`] | out = scale · n(x) |
/// | [`Residual::After`] | out = scale · (residual + n(x)): the sandwich norm of Gemma |
/// | [`Residual::Normed`] | out = scale · (n(residual) + n(x)), each with its own weight: parallel branches of Gemma 4 |
/// | [`Residual::Before`] | sum = residual + x, out = scale · n(sum): the pre-norm of Llama and most others |
///
/// With `combine`, x is the weighted sum of several rows, as [`moe_combine`](super::moe_combine()) computes it.
///
/// With `gate`, `out` is multiplied by gate / (1 + e^(−gate)), the SiLU of each element: the gated norm of delta nets.
/// An infinite negative gate gives NaN, as in [`gate`](super::gate()).
///
/// `out` may be `x`, the residual or the gate, and `sum` may be `x` or the residual, but not the tensor of `out`.
///
/// With `sum_ranks`, x is the sum of the tensors of all ranks, as [`all_reduce`](super::all_reduce()) computes it. No
/// other argument may then be `x`.
///
/// Each [`NextNorm`] of `next` is a norm of `out` with a weight of its own. It reads `out` as stored, rounded to its
/// dtype, so that results equal those of separate calls.
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
    /// `[T, N]`, with `combine` `[T·K, N]`; f32, f16 or bf16; N is at least 1.
    pub x: &'a Tensor,
    /// f32 `[T, K]`: row t of x is Σⱼ combine\[t, j\] · x\[t·K + j\], not rounded before the norm.
    pub combine: Option<&'a Tensor>,
    /// Whether x is first replaced by its sum over the ranks of a group. The sum is that of
    /// [`AllReduce`](super::AllReduce), rounded to the dtype of x: results equal those of separate calls, to the bit.
    /// Afterwards the contents of `x` are unspecified. On a device that is no group, it has no effect. Not with
    /// `combine`.
    pub sum_ranks: bool,
    /// `[N]`, f32, f16 or bf16, used as it is; `None` for ones.
    pub weight: Option<&'a Tensor>,
    /// Added to the mean square; finite and not negative.
    pub eps: f32,
    /// The residual addition.
    pub residual: Residual<'a>,
    /// Multiplies the result; 1 for a plain norm.
    pub scale: f32,
    /// `[T, N]`, f32, f16 or bf16: its SiLU multiplies the result; `None` for ones.
    pub gate: Option<&'a Tensor>,
    /// `[T, N]`, f32, f16 or bf16.
    pub out: &'a Tensor,
    /// Norms of `out`; at most 3.
    pub next: &'a [NextNorm<'a>],
    /// The `eps` of the norms in `next`; [`RmsNorm::new`] sets it to the first norm's.
    pub next_eps: f32,
}

impl<'a> RmsNorm<'a> {
    /// The norm of each row of `x`, without a weight or a residual.
    pub fn new(x: &'a Tensor, eps: f32, out: &'a Tensor) -> Self {
        RmsNorm {
            x,
            eps,
            out,
            combine: None,
            sum_ranks: false,
            weight: None,
            residual: Residual::None,
            scale: 1.0,
            gate: None,
            next: &[],
            next_eps: eps,
        }
    }
}

setters! { RmsNorm<'a> {
    combine: Option<&'a Tensor>,
    sum_ranks: bool,
    weight: Option<&'a Tensor>,
    residual: Residual<'a>,
    scale: f32,
    gate: Option<&'a Tensor>,
    next: &'a [NextNorm<'a>],
    next_eps: f32,
} }

/// A norm of the result of an [`RmsNorm`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NextNorm<'a> {
    /// `[N]`, f32, f16 or bf16, used as it is; `None` for ones.
    pub weight: Option<&'a Tensor>,
    /// Multiplies the norm; 1 for a plain norm.
    pub scale: f32,
    /// `[T, N]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> NextNorm<'a> {
    /// The norm without a weight.
    pub fn new(out: &'a Tensor) -> Self {
        NextNorm { weight: None, scale: 1.0, out }
    }
}

setters! { NextNorm<'a> {
    weight: Option<&'a Tensor>,
    scale: f32,
} }

/// The residual addition of an [`RmsNorm`]. Tensors are `[T, N]`, f32, f16 or bf16.
#[derive(Clone, Copy, Debug)]
pub enum Residual<'a> {
    /// No addition.
    None,
    /// Adds the tensor to the normed rows.
    After(&'a Tensor),
    /// Adds the norm of the tensor, with the same `eps`, to the normed rows.
    Normed {
        /// The tensor to norm and add.
        residual: &'a Tensor,
        /// `[N]`, the weight of its norm; `None` for ones.
        weight: Option<&'a Tensor>,
    },
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
/// Errors of [every operation](crate::ops#errors). With `sum_ranks`, the error of a rank fails the pass of all ranks.
pub fn rms_norm(enc: &mut Encoder, args: &RmsNorm) -> Result<()> {
    let [mut rows, dim] = check::rank(NAME, "x", args.x, ["T", "N"])?;
    if let Some(combine) = args.combine {
        check::dtype(NAME, "combine", combine, DType::F32)?;
        [rows, _] = check::rank(NAME, "combine", combine, ["T", "K"])?;
        check::shape(NAME, "x", args.x, &[("T·K", combine.elements()), ("N", dim)])?;
        check::value_is(NAME, "sum_ranks", !args.sum_ranks, "false with `combine`", args.sum_ranks)?;
    }
    check::positive(NAME, "N", dim)?;
    check::float(NAME, "x", args.x)?;
    let same_shape = |arg, tensor: &Tensor| {
        check::float(NAME, arg, tensor)?;
        check::shape(NAME, arg, tensor, &[("T", rows), ("N", dim)])
    };
    same_shape("out", args.out)?;
    let check_weight = |arg, weight: Option<&Tensor>| {
        let Some(weight) = weight else { return Ok(()) };
        check::float(NAME, arg, weight)?;
        check::shape(NAME, arg, weight, &[("N", dim)])
    };
    check_weight("weight", args.weight)?;
    check_eps(NAME, "eps", args.eps)?;
    check_eps(NAME, "next_eps", args.next_eps)?;
    check::finite(NAME, "scale", args.scale)?;
    if let Some(residual) = args.residual.tensor() {
        same_shape("residual", residual)?;
    }
    if let Some(gate) = args.gate {
        same_shape("gate", gate)?;
    }
    match args.residual {
        Residual::None | Residual::After(_) => {}
        Residual::Normed { weight, .. } => check_weight("residual_weight", weight)?,
        Residual::Before { sum, .. } => same_shape("sum", sum)?,
    }
    check::at_most(NAME, "next", args.next.len(), MAX_NEXT)?;
    for next in args.next {
        check_weight("next_weight", next.weight)?;
        check::finite(NAME, "next_scale", next.scale)?;
        same_shape("next_out", next.out)?;
    }
    enc.submit(super::Call::RmsNorm(Call {
        x: args.x.clone(),
        combine: args.combine.cloned(),
        sums_ranks: args.sum_ranks && args.x.device().ranks() > 1,
        peers: None,
        weight: args.weight.cloned(),
        eps: args.eps,
        next_eps: args.next_eps,
        residual: args.residual.tensor().cloned(),
        add: match args.residual {
            Residual::None | Residual::After(_) => Addition::After,
            Residual::Normed { weight, .. } => Addition::Normed { weight: weight.cloned() },
            Residual::Before { sum, .. } => Addition::Before { sum: sum.clone() },
        },
        scale: args.scale,
        gate: args.gate.cloned(),
        out: args.out.clone(),
        next: std::array::from_fn(|i| args.next.get(i).map(NextCall::new)),
        rows,
        dim,
    }))
}

impl<'a> Residual<'a> {
    fn tensor(&self) -> Option<&'a Tensor> {
        match *self {
            Residual::None => None,
            Residual::After(residual) | Residual::Normed { residual, .. } | Residual::Before { residual, .. } => {
                Some(residual)
            }
        }
    }
}

/// Checks that an epsilon is finite and not negative.
pub(crate) fn check_eps(op: &'static str, arg: &'static str, eps: f32) -> Result<()> {
    check::value_is(op, arg, eps.is_finite() && eps >= 0.0, "finite and not negative", eps)
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub combine: Option<Tensor>,
    /// x is summed over ranks first.
    pub sums_ranks: bool,
    /// The other ranks, if x is summed over them. None until the call is that of a rank.
    pub peers: Option<Peers>,
    pub weight: Option<Tensor>,
    pub eps: f32,
    pub next_eps: f32,
    pub residual: Option<Tensor>,
    pub add: Addition,
    pub scale: f32,
    pub gate: Option<Tensor>,
    pub out: Tensor,
    /// Present entries come first. An array, so that a decode step allocates nothing.
    pub next: [Option<NextCall>; MAX_NEXT],
    pub rows: usize,
    pub dim: usize,
}

impl RankTensors for Call {
    fn move_to(&mut self, rank: &Rank) {
        self.peers = self.sums_ranks.then(|| Peers::new(rank, &self.x, &self.x));
        [&mut self.x, &mut self.out].into_iter().for_each(|tensor| tensor.move_to(rank));
        let optional = [&mut self.combine, &mut self.weight, &mut self.residual, &mut self.gate];
        optional.into_iter().for_each(|tensor| tensor.move_to(rank));
        self.add.move_to(rank);
        self.next.move_to(rank);
    }
}

/// How the residual, if present, is added.
#[derive(Clone, Debug)]
pub(crate) enum Addition {
    After,
    /// After a norm of its own.
    Normed {
        weight: Option<Tensor>,
    },
    /// Before the norm; the sum is stored.
    Before {
        sum: Tensor,
    },
}

impl RankTensors for Addition {
    fn move_to(&mut self, rank: &Rank) {
        match self {
            Addition::After => {}
            Addition::Normed { weight } => weight.move_to(rank),
            Addition::Before { sum } => sum.move_to(rank),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct NextCall {
    pub weight: Option<Tensor>,
    pub scale: f32,
    pub out: Tensor,
}

rank_tensors! { NextCall { weight, out } }

impl NextCall {
    fn new(next: &NextNorm) -> NextCall {
        NextCall { weight: next.weight.cloned(), scale: next.scale, out: next.out.clone() }
    }
}

impl Call {
    /// The sum of x over ranks, in place, as a call of its own.
    pub(crate) fn all_reduce(&self) -> Option<super::all_reduce::Call> {
        let (x, peers) = (&self.x, self.peers.clone()?);
        Some(super::all_reduce::Call { x: x.clone(), out: x.clone(), elements: x.elements(), peers: Some(peers) })
    }

    pub(crate) fn nexts(&self) -> impl DoubleEndedIterator<Item = &NextCall> {
        self.next.iter().flatten()
    }

    /// The number of rows of x that are summed into one row.
    pub(crate) fn terms(&self) -> usize {
        self.combine.as_ref().map_or(1, |combine| combine.shape()[1])
    }

    /// The tensor that receives the sum, if the residual is added before the norm.
    pub(crate) fn sum(&self) -> Option<&Tensor> {
        match &self.add {
            Addition::Before { sum } => Some(sum),
            _ => None,
        }
    }

    /// The weight of the residual's own norm, if it has a norm with a weight.
    pub(crate) fn residual_weight(&self) -> Option<&Tensor> {
        match &self.add {
            Addition::Normed { weight } => weight.as_ref(),
            _ => None,
        }
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: if self.sums_ranks { Write } else { Read } });
        let optional = [
            ("combine", self.combine.as_ref()),
            ("weight", self.weight.as_ref()),
            ("residual", self.residual.as_ref()),
            ("residual_weight", self.residual_weight()),
            ("gate", self.gate.as_ref()),
        ];
        let weights = self.nexts().map(|next| ("next_weight", next.weight.as_ref()));
        for (arg, tensor) in optional.into_iter().chain(weights) {
            if let Some(tensor) = tensor {
                visit(Touch { arg, tensor, access: Read });
            }
        }
        if let Some(tensor) = self.sum() {
            visit(Touch { arg: "sum", tensor, access: Write });
        }
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
        for next in self.nexts() {
            visit(Touch { arg: "next_out", tensor: &next.out, access: Write });
        }
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "x"), ("out", "residual"), ("out", "gate"), ("sum", "x"), ("sum", "residual")]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
