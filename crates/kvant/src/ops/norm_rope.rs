use super::{Query, check, rms_norm::check_eps};
use crate::{
    DType, Encoder, HeadOrder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::{Rank, RankTensors, rank_tensors},
};

pub(crate) const NAME: &str = "norm_rope";

/// Arguments of [`norm_rope`](norm_rope()): per-head RMS norm and rotary embedding in one pass, y = rope(x · weight /
/// √(mean x² + eps)), for each head of each token. The result can also be rotated for a quantised cache.
///
/// `out` may be `x` if both are token-major.
///
/// # Example
/// ```
/// use kvant::{Device, Tensor, ops};
/// let device = Device::cpu();
/// let (heads, head_dim) = (2, 64);
/// let q = Tensor::from_slice(&device, &vec![1f32; heads * head_dim], &[1, heads, head_dim])?;
/// let positions = Tensor::from_slice(&device, &[17u32], &[1])?;
/// let rope = ops::Rope::new(10_000.0, head_dim / 2);
/// let mut enc = device.encoder()?;
/// let in_place = ops::NormRope::new(&q, &positions, &q);
/// ops::norm_rope(&mut enc, &in_place.norm(Some(ops::HeadNorm::new(1e-6))).rope(Some(rope)))?;
/// enc.commit()?.wait()?;
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NormRope<'a> {
    /// `[T, H, D]`, f32, f16 or bf16.
    pub x: &'a Tensor,
    /// The norm; `None` skips it.
    pub norm: Option<HeadNorm<'a>>,
    /// The rotary embedding; `None` skips it (Gemma 4's values).
    pub rope: Option<Rope<'a>>,
    /// u32 `[T]`: the position of each token.
    pub positions: &'a Tensor,
    /// Whether to apply the Hadamard rotation to the result, for queries of a TurboQuant cache. D must be a power of
    /// two from 2 to 4096.
    pub rotate: bool,
    /// The layout of `out`.
    pub out_order: HeadOrder,
    /// `[T, H, D]` or `[H, T, D]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> NormRope<'a> {
    /// Copies `x`: without norm, embedding or rotation.
    pub fn new(x: &'a Tensor, positions: &'a Tensor, out: &'a Tensor) -> Self {
        NormRope { x, positions, out, norm: None, rope: None, rotate: false, out_order: HeadOrder::TokenMajor }
    }
}

setters! { NormRope<'a> {
    norm: Option<HeadNorm<'a>>,
    rope: Option<Rope<'a>>,
    rotate: bool,
    out_order: HeadOrder,
} }

/// An RMS norm over the D coordinates of each head.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HeadNorm<'a> {
    /// `[D]`, f32, f16 or bf16, used as it is; `None` for ones. For models that multiply by 1 + w, pass 1 + w.
    pub weight: Option<&'a Tensor>,
    /// Added to the mean square; finite and not negative.
    pub eps: f32,
}

impl<'a> HeadNorm<'a> {
    /// A norm without a weight.
    pub fn new(eps: f32) -> Self {
        HeadNorm { eps, weight: None }
    }
}

setters! { HeadNorm<'a> {
    weight: Option<&'a Tensor>,
} }

/// Rotary position embedding (Su et al. 2021): rotates pair i of a head by the angle position · frequencyᵢ.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Rope<'a> {
    /// The source of the angles.
    pub angles: Angles<'a>,
    /// The number of rotated pairs, at most D/2. The other coordinates pass through.
    pub rotated_pairs: usize,
    /// Which coordinates form a pair.
    pub layout: PairLayout,
    /// f32 `[rotated_pairs]`: divides the angle of each pair (Llama 3's scaling, for example). Only with
    /// `Angles::Theta`.
    pub freq_factors: Option<&'a Tensor>,
}

impl<'a> Rope<'a> {
    /// Rotates pairs of the layout [`PairLayout::Halves`].
    pub fn new(angles: impl Into<Angles<'a>>, rotated_pairs: usize) -> Self {
        Rope { angles: angles.into(), rotated_pairs, layout: PairLayout::Halves, freq_factors: None }
    }
}

setters! { Rope<'a> {
    layout: PairLayout,
    freq_factors: Option<&'a Tensor>,
} }

/// The source of the angles of a [`Rope`].
#[derive(Clone, Copy, Debug)]
pub enum Angles<'a> {
    /// frequencyᵢ = theta^(−2i/n), with n = D for [`PairLayout::Halves`] and n = 2·rotated_pairs for the other
    /// layouts. Angles are exact to 1e-5 rad up to position 1 048 576.
    Theta(f64),
    /// Cosines and sines, f32 `[P, rotated_pairs]` each; row p is for position p. Positions must be below P.
    Tables {
        /// cos(angle).
        cos: &'a Tensor,
        /// sin(angle).
        sin: &'a Tensor,
    },
}

impl From<f64> for Angles<'_> {
    /// [`Angles::Theta`].
    fn from(theta: f64) -> Self {
        Angles::Theta(theta)
    }
}

/// Which coordinates of a head form pair i.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairLayout {
    /// (i, i + D/2): NeoX. With fewer than D/2 pairs, this is Gemma 4's "proportional" layout.
    Halves,
    /// (i, i + rotated_pairs): GPT-NeoX partial rotary; MLX's default with `dims` = 2·rotated_pairs.
    LeadingHalves,
    /// (2i, 2i + 1): GPT-J; MLX's "traditional".
    Interleaved,
}

impl PairLayout {
    /// The coordinates of pair i.
    #[inline]
    pub(crate) fn pair(self, i: usize, head_dim: usize, rotated_pairs: usize) -> (usize, usize) {
        match self {
            PairLayout::Halves => (i, i + head_dim / 2),
            PairLayout::LeadingHalves => (i, i + rotated_pairs),
            PairLayout::Interleaved => (2 * i, 2 * i + 1),
        }
    }

    /// The n of frequencyᵢ = theta^(−2i/n).
    pub(crate) fn frequency_base(self, head_dim: usize, rotated_pairs: usize) -> usize {
        match self {
            PairLayout::Halves => head_dim,
            PairLayout::LeadingHalves | PairLayout::Interleaved => 2 * rotated_pairs,
        }
    }
}

/// Runs [`NormRope`], with the same kernel for one token and for many. Returns the result as queries: rotated if
/// [`NormRope::rotate`] is set.
///
/// # Errors
/// Those of [every operation](crate::ops#errors). On the CPU, the commit returns `OutOfRange` for a position beyond
/// the tables; a GPU skips such a token.
pub fn norm_rope<'a>(enc: &mut Encoder, args: &NormRope<'a>) -> Result<Query<'a>> {
    let [tokens, heads, head_dim] = check::rank(NAME, "x", args.x, ["T", "H", "D"])?;
    check::float(NAME, "x", args.x)?;
    check::float(NAME, "out", args.out)?;
    args.out_order.check(NAME, "out", args.out, [tokens, heads, head_dim])?;
    check::positive(NAME, "D", head_dim)?;
    check::dtype(NAME, "positions", args.positions, DType::U32)?;
    check::shape(NAME, "positions", args.positions, &[("T", tokens)])?;
    let norm = args.norm.map(|norm| norm.validate(NAME, "weight", head_dim)).transpose()?;
    let rope = args.rope.map(|rope| rope.validate(NAME, head_dim)).transpose()?;
    check_rotate(NAME, args.rotate, head_dim)?;
    enc.submit(super::Call::NormRope(Call {
        x: args.x.clone(),
        norm,
        rope,
        positions: args.positions.clone(),
        rotate: args.rotate,
        out_order: args.out_order,
        out: args.out.clone(),
        tokens,
        heads,
        head_dim,
    }))?;
    Ok(Query::of(args.out, args.rotate))
}

/// Checks that the head size is a power of two if the Hadamard rotation is applied.
pub(crate) fn check_rotate(op: &'static str, rotate: bool, head_dim: usize) -> Result<()> {
    let ok = !rotate || (head_dim.is_power_of_two() && (2..=4096).contains(&head_dim));
    check::value_is(op, "rotate", ok, "false unless D is a power of two from 2 to 4096", head_dim)
}

impl HeadNorm<'_> {
    pub(crate) fn validate(&self, op: &'static str, arg: &'static str, head_dim: usize) -> Result<NormCall> {
        if let Some(weight) = self.weight {
            check::float(op, arg, weight)?;
            check::shape(op, arg, weight, &[("D", head_dim)])?;
        }
        check_eps(op, "eps", self.eps)?;
        Ok(NormCall { weight: self.weight.cloned(), eps: self.eps })
    }
}

impl Rope<'_> {
    pub(crate) fn validate(&self, op: &'static str, head_dim: usize) -> Result<RopeCall> {
        let pairs = self.rotated_pairs;
        let max_pairs = head_dim / 2;
        let expected = format_args!("at most D/2 = {max_pairs}");
        check::value_is(op, "rope.rotated_pairs", pairs <= head_dim / 2, expected, pairs)?;
        // Pairs (i, i + D/2) cover a head only if D is even.
        let even = self.layout != PairLayout::Halves || head_dim.is_multiple_of(2);
        check::value_is(op, "D", even, "even for PairLayout::Halves", head_dim)?;
        let angles = match self.angles {
            Angles::Theta(theta) => {
                let ok = theta.is_finite() && theta > 0.0;
                check::value_is(op, "rope.angles.theta", ok, "positive and finite", theta)?;
                AnglesCall::Theta(theta)
            }
            Angles::Tables { cos, sin } => {
                let [rows, _] = check::rank(op, "rope.angles.cos", cos, ["P", "rotated_pairs"])?;
                for (arg, table) in [("rope.angles.cos", cos), ("rope.angles.sin", sin)] {
                    check::dtype(op, arg, table, DType::F32)?;
                    check::shape(op, arg, table, &[("P", rows), ("rotated_pairs", pairs)])?;
                }
                let none = self.freq_factors.is_none();
                check::value_is(op, "rope.freq_factors", none, "None with Angles::Tables", "Some")?;
                AnglesCall::Tables { cos: cos.clone(), sin: sin.clone(), rows }
            }
        };
        if let Some(factors) = self.freq_factors {
            check::dtype(op, "rope.freq_factors", factors, DType::F32)?;
            check::shape(op, "rope.freq_factors", factors, &[("rotated_pairs", pairs)])?;
        }
        let freq_factors = self.freq_factors.cloned();
        Ok(RopeCall { angles, rotated_pairs: pairs, layout: self.layout, freq_factors })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct NormCall {
    pub weight: Option<Tensor>,
    pub eps: f32,
}

rank_tensors! { NormCall { weight } }

impl NormCall {
    pub(crate) fn touches(&self, arg: &'static str, visit: &mut dyn FnMut(Touch)) {
        if let Some(tensor) = &self.weight {
            visit(Touch { arg, tensor, access: Read });
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct RopeCall {
    pub angles: AnglesCall,
    pub rotated_pairs: usize,
    pub layout: PairLayout,
    pub freq_factors: Option<Tensor>,
}

rank_tensors! { RopeCall { angles, freq_factors } }

#[derive(Clone, Debug)]
pub(crate) enum AnglesCall {
    Theta(f64),
    Tables { cos: Tensor, sin: Tensor, rows: usize },
}

impl RankTensors for AnglesCall {
    fn move_to(&mut self, rank: &Rank) {
        if let AnglesCall::Tables { cos, sin, .. } = self {
            for tensor in [cos, sin] {
                tensor.move_to(rank);
            }
        }
    }
}

impl RopeCall {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        if let AnglesCall::Tables { cos, sin, .. } = &self.angles {
            visit(Touch { arg: "rope.angles.cos", tensor: cos, access: Read });
            visit(Touch { arg: "rope.angles.sin", tensor: sin, access: Read });
        }
        if let Some(tensor) = &self.freq_factors {
            visit(Touch { arg: "rope.freq_factors", tensor, access: Read });
        }
    }

    /// Checks that positions are within the tables.
    ///
    /// # Safety
    /// The caller holds the device's lock.
    pub(crate) unsafe fn check_positions(&self, op: &'static str, arg: &'static str, positions: &Tensor) -> Result<()> {
        match self.angles {
            AnglesCall::Theta(_) => Ok(()),
            // SAFETY: passed on to the caller.
            AnglesCall::Tables { rows, .. } => unsafe { check::indices_below(op, arg, positions, rows) },
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub norm: Option<NormCall>,
    pub rope: Option<RopeCall>,
    pub positions: Tensor,
    pub rotate: bool,
    pub out_order: HeadOrder,
    pub out: Tensor,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
}

rank_tensors! { Call { x, norm, rope, positions, out } }

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        if let Some(norm) = &self.norm {
            norm.touches("weight", visit);
        }
        if let Some(rope) = &self.rope {
            rope.touches(visit);
        }
        visit(Touch { arg: "positions", tensor: &self.positions, access: Read });
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        match self.out_order {
            HeadOrder::TokenMajor => &[("out", "x")],
            HeadOrder::HeadMajor => &[],
        }
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        let Some(rope) = &self.rope else { return Ok(()) };
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe { rope.check_positions(NAME, "positions", &self.positions) }
    }
}
