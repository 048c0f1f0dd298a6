use super::{BlockFormat, Blocks, FloatFormat, ScaledFloats, check};
use crate::{
    DType, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::{Rank, RankTensors, rank_tensors},
};

pub(crate) const NAME: &str = "linear";

/// Arguments of [`linear`](linear()): out\[t\] = alpha · x\[t\] · Wᵀ, for decode (T = 1) and prefill.
///
/// With [`Experts`], W holds E matrices and each output row selects one.
///
/// Products and sums are f32 for every dtype. The [table](crate::ops#accuracy) lists the cases of quantised weights
/// in which activations or weights are rounded.
///
/// # Infinities
///
/// - On CUDA, for affine weights with one or two rows for one matrix, or few rows of experts: an activation that is not
///   finite, or at least 2¹⁰⁶ in magnitude, may make all results of its row NaN.
/// - On CUDA, an infinite activation may make a result NaN that would be infinite.
/// - On Metal, with up to 8 rows of affine weights: an infinite activation, or one whose products with codes overflow,
///   may make a result NaN that would be infinite.
///
/// # Example
/// ```
/// use kvant::{DType, Device, Tensor, ops};
/// let device = Device::cpu();
/// let x = Tensor::from_slice(&device, &[1f32, 2.], &[1, 2])?;
/// let w = Tensor::from_slice(&device, &[1f32, 0., 0., 1., 1., 1.], &[3, 2])?;
/// let out = Tensor::zeros(&device, DType::F32, &[1, 3])?;
/// let mut enc = device.encoder()?;
/// let weight = ops::Weight::Dense(&w);
/// ops::linear(&mut enc, &ops::Linear::new(&x, weight, &out))?;
/// enc.commit()?.wait()?;
/// assert_eq!(out.to_vec::<f32>()?, [1., 2., 3.]);
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Linear<'a> {
    /// `[T, K]`, f32, f16 or bf16.
    pub x: &'a Tensor,
    /// `[N, K]`, or `[E, N, K]` with experts: one row per output.
    pub weight: Weight<'a>,
    /// The experts of each row, or `None` for one matrix.
    pub experts: Option<Experts<'a>>,
    /// Multiplies the result; 1 for a plain product.
    pub alpha: f32,
    /// `[T, N]`, or `[T·top_k, N]` with experts; f32, f16 or bf16.
    pub out: &'a Tensor,
    /// The numbers of outputs N₀, N₁, … of the matrices that W consists of, N in total; empty for one matrix. The
    /// memory of `out` then holds their results one after the other: `[T, N₀]`, `[T, N₁]`, … Not with experts.
    pub parts: &'a [usize],
}

impl<'a> Linear<'a> {
    /// Multiplies each row of `x` by a matrix.
    pub fn new(x: &'a Tensor, weight: impl Into<Weight<'a>>, out: &'a Tensor) -> Self {
        Linear { x, weight: weight.into(), out, experts: None, alpha: 1.0, parts: &[] }
    }
}

setters! { Linear<'a> {
    experts: Option<Experts<'a>>,
    alpha: f32,
    parts: &'a [usize],
} }

/// A weight matrix: rows of K inputs each.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// `[N, K]` or `[E, N, K]`, f32, f16 or bf16.
    Dense(&'a Tensor),
    /// Quantised in MLX's affine format.
    Affine(Affine<'a>),
    /// Quantised in a block format of GGUF files.
    Blocks(Blocks<'a>),
    /// Small floats with separate scales: MXFP4, MXFP8, NVFP4.
    Floats(ScaledFloats<'a>),
}

impl<'a> From<&'a Tensor> for Weight<'a> {
    fn from(tensor: &'a Tensor) -> Weight<'a> {
        Weight::Dense(tensor)
    }
}

impl<'a> From<Affine<'a>> for Weight<'a> {
    fn from(affine: Affine<'a>) -> Weight<'a> {
        Weight::Affine(affine)
    }
}

impl<'a> From<Blocks<'a>> for Weight<'a> {
    fn from(blocks: Blocks<'a>) -> Weight<'a> {
        Weight::Blocks(blocks)
    }
}

impl<'a> From<ScaledFloats<'a>> for Weight<'a> {
    fn from(floats: ScaledFloats<'a>) -> Weight<'a> {
        Weight::Floats(floats)
    }
}

/// MLX's affine quantisation: w = scale · q + bias, with one scale and one bias per group of consecutive inputs.
///
/// The codes of a row are one little-endian bit stream: code i is bits `i·bits .. (i+1)·bits`.
#[derive(Clone, Copy, Debug)]
pub struct Affine<'a> {
    /// u32 `[N, K·bits/32]`, or `[E, N, K·bits/32]`.
    pub codes: &'a Tensor,
    /// `[N, K/group]`, or `[E, N, K/group]`; f32, f16 or bf16.
    pub scales: &'a Tensor,
    /// The shape and dtype of `scales`.
    pub biases: &'a Tensor,
    /// Bits of a code: 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
    /// Inputs that share a scale and a bias: 32, 64 or 128.
    pub group: usize,
}

/// The expert matrix of each row.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Experts<'a> {
    /// u32 `[T, top_k]`, each below E.
    pub ids: &'a Tensor,
    /// Whether `x` has one row per (token, choice), `[T·top_k, K]`. Otherwise it has one row per token, which all
    /// choices of the token share.
    pub expanded: bool,
}

impl<'a> Experts<'a> {
    /// Selects the experts `ids`, for an `x` with one row per token.
    pub fn new(ids: &'a Tensor) -> Self {
        Experts { ids, expanded: false }
    }
}

setters! { Experts<'a> {
    expanded: bool,
} }

/// Runs [`Linear`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors). On the CPU, the commit returns `OutOfRange` for an expert id that
/// is not below E; a GPU writes zeros for such a row.
pub fn linear(enc: &mut Encoder, args: &Linear) -> Result<()> {
    check::float(NAME, "x", args.x)?;
    check::float(NAME, "out", args.out)?;
    check::finite(NAME, "alpha", args.alpha)?;
    let [x_rows, inputs] = check::rank(NAME, "x", args.x, ["T", "K"])?;
    let mut rows_per_input = 1;
    let mut experts = None;
    let mut dims_experts = None;
    if let Some(choice) = args.experts {
        check::dtype(NAME, "experts.ids", choice.ids, DType::U32)?;
        let [tokens, top_k] = check::rank(NAME, "experts.ids", choice.ids, ["T", "top_k"])?;
        let expected_rows = if choice.expanded { choice.ids.elements() } else { tokens };
        check::shape(NAME, "x", args.x, &[("T", expected_rows), ("K", inputs)])?;
        rows_per_input = if choice.expanded { 1 } else { top_k };
        experts = Some(choice.ids.clone());
        dims_experts = Some(());
    }
    let dims = args.weight.validate(NAME, "weight", dims_experts)?;
    check::shape(NAME, "x", args.x, &[("T", x_rows), ("K", dims.inputs)])?;
    let rows = experts.as_ref().map_or(x_rows, |ids: &Tensor| ids.elements());
    check::shape(NAME, "out", args.out, &[("T", rows), ("N", dims.outputs)])?;
    // A GPU cannot check the ids; without experts no id would be valid.
    check::value_is(NAME, "E", dims.experts > 0 || rows == 0, "at least 1", dims.experts)?;
    if !args.parts.is_empty() {
        let total = args.parts.iter().try_fold(0usize, |sum, &part| sum.checked_add(part));
        let expected = format_args!("outputs of matrices, {} in total", dims.outputs);
        check::value_is(NAME, "parts", total == Some(dims.outputs), expected, format_args!("{:?}", args.parts))?;
        check::value_is(NAME, "parts", experts.is_none(), "none with experts", args.parts.len())?;
    }
    enc.submit(super::Call::Linear(Call {
        x: args.x.clone(),
        weight: args.weight.to_owned_weight(),
        dims,
        experts,
        rows_per_input,
        alpha: args.alpha,
        out: args.out.clone(),
        rows,
        // With one row, the results of all parts are contiguous anyway.
        parts: if rows > 1 && args.parts.len() > 1 { args.parts.to_vec() } else { Vec::new() },
    }))
}

/// The resolved dimensions of a weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightDims {
    /// E; 1 without experts.
    pub experts: usize,
    /// N.
    pub outputs: usize,
    /// K.
    pub inputs: usize,
}

impl Weight<'_> {
    /// Checks the parts against each other. `experts` requires a leading dimension E.
    pub(crate) fn validate(&self, op: &'static str, arg: &'static str, experts: Option<()>) -> Result<WeightDims> {
        let dims = |tensor: &Tensor| -> Result<[usize; 3]> {
            if experts.is_some() {
                return check::rank(op, arg, tensor, ["E", "N", "K"]);
            }
            let [n, k] = check::rank(op, arg, tensor, ["N", "K"])?;
            Ok([1, n, k])
        };
        let affine = match self {
            Weight::Dense(w) => {
                check::float(op, arg, w)?;
                let [experts, outputs, inputs] = dims(w)?;
                return Ok(WeightDims { experts, outputs, inputs });
            }
            Weight::Affine(affine) => affine,
            Weight::Blocks(blocks) => {
                check::dtype(op, arg, blocks.data, DType::U8)?;
                let [experts, outputs, bytes] = dims(blocks.data)?;
                return Ok(WeightDims { experts, outputs, inputs: blocks.inputs(op, arg, bytes)? });
            }
            Weight::Floats(floats) => {
                floats.check_dtypes(op)?;
                let [e, outputs, columns] = dims(floats.codes)?;
                let [_, _, groups] = dims(floats.scales)?;
                let inputs = floats.inputs(op, columns, groups)?;
                let named = [("E", e), ("N", outputs), ("K/group", groups)];
                check::shape(op, "scales", floats.scales, if experts.is_some() { &named } else { &named[1..] })?;
                return Ok(WeightDims { experts: e, outputs, inputs });
            }
        };
        check::dtype(op, arg, affine.codes, DType::U32)?;
        check::value_is(op, "bits", matches!(affine.bits, 2..=6 | 8), "2 to 6 or 8", affine.bits)?;
        check::value_is(op, "group", matches!(affine.group, 32 | 64 | 128), "32, 64 or 128", affine.group)?;
        let [e, outputs, words] = dims(affine.codes)?;
        let [_, _, groups] = dims(affine.scales)?;
        let inputs = groups.saturating_mul(affine.group);
        // At every width, 32 codes are a whole number of words.
        let words_ok = inputs.checked_mul(affine.bits as usize).is_some_and(|bits| bits / 32 == words);
        check::value_is(op, arg, words_ok, format_args!("K·bits/32 words for K = {inputs}"), words)?;
        for (arg, tensor) in [("scales", affine.scales), ("biases", affine.biases)] {
            check::float(op, arg, tensor)?;
            check::value_is(
                op,
                arg,
                tensor.dtype() == affine.scales.dtype(),
                "the dtype of the scales",
                tensor.dtype(),
            )?;
            let named = [("E", e), ("N", outputs), ("K/group", groups)];
            check::shape(op, arg, tensor, if experts.is_some() { &named } else { &named[1..] })?;
        }
        Ok(WeightDims { experts: e, outputs, inputs })
    }

    pub(crate) fn to_owned_weight(self) -> OwnedWeight {
        match self {
            Weight::Dense(w) => OwnedWeight::Dense(w.clone()),
            Weight::Affine(a) => OwnedWeight::Affine {
                codes: a.codes.clone(),
                scales: a.scales.clone(),
                biases: a.biases.clone(),
                bits: a.bits,
                group: a.group,
            },
            Weight::Blocks(b) => OwnedWeight::Blocks { data: b.data.clone(), format: b.format },
            Weight::Floats(f) => {
                OwnedWeight::Floats { codes: f.codes.clone(), scales: f.scales.clone(), format: f.format }
            }
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum OwnedWeight {
    Dense(Tensor),
    Affine { codes: Tensor, scales: Tensor, biases: Tensor, bits: u32, group: usize },
    Blocks { data: Tensor, format: BlockFormat },
    Floats { codes: Tensor, scales: Tensor, format: FloatFormat },
}

impl RankTensors for OwnedWeight {
    fn move_to(&mut self, rank: &Rank) {
        match self {
            OwnedWeight::Dense(weight) => weight.move_to(rank),
            OwnedWeight::Affine { codes, scales, biases, .. } => {
                for tensor in [codes, scales, biases] {
                    tensor.move_to(rank);
                }
            }
            OwnedWeight::Blocks { data, .. } => data.move_to(rank),
            OwnedWeight::Floats { codes, scales, .. } => {
                for tensor in [codes, scales] {
                    tensor.move_to(rank);
                }
            }
        }
    }
}

impl OwnedWeight {
    /// The part of the matrix for a range of outputs; not for experts.
    fn rows(&self, outputs: std::ops::Range<usize>) -> Result<OwnedWeight> {
        let of = |tensor: &Tensor| tensor.rows(outputs.clone());
        Ok(match self {
            OwnedWeight::Dense(w) => OwnedWeight::Dense(of(w)?),
            OwnedWeight::Affine { codes, scales, biases, bits, group } => OwnedWeight::Affine {
                codes: of(codes)?,
                scales: of(scales)?,
                biases: of(biases)?,
                bits: *bits,
                group: *group,
            },
            OwnedWeight::Blocks { data, format } => OwnedWeight::Blocks { data: of(data)?, format: *format },
            OwnedWeight::Floats { codes, scales, format } => {
                OwnedWeight::Floats { codes: of(codes)?, scales: of(scales)?, format: *format }
            }
        })
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        match self {
            OwnedWeight::Dense(tensor) => visit(Touch { arg: "weight", tensor, access: Read }),
            OwnedWeight::Blocks { data, .. } => visit(Touch { arg: "weight", tensor: data, access: Read }),
            OwnedWeight::Floats { codes, scales, .. } => {
                visit(Touch { arg: "codes", tensor: codes, access: Read });
                visit(Touch { arg: "scales", tensor: scales, access: Read });
            }
            OwnedWeight::Affine { codes, scales, biases, .. } => {
                visit(Touch { arg: "codes", tensor: codes, access: Read });
                visit(Touch { arg: "scales", tensor: scales, access: Read });
                visit(Touch { arg: "biases", tensor: biases, access: Read });
            }
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub weight: OwnedWeight,
    pub dims: WeightDims,
    /// u32, one per output row.
    pub experts: Option<Tensor>,
    /// Output row r reads row r / rows_per_input of x.
    pub rows_per_input: usize,
    pub alpha: f32,
    pub out: Tensor,
    /// Output rows.
    pub rows: usize,
    /// The numbers of outputs of the matrices whose results are consecutive in `out`; empty for one matrix.
    pub parts: Vec<usize>,
}

rank_tensors! { Call { x, weight, experts, out } }

impl Call {
    /// Runs the product, or the product of each part, for devices that write one matrix at a time.
    pub(crate) fn each_part(&self, mut run: impl FnMut(&Call) -> Result<()>) -> Result<()> {
        if self.parts.is_empty() {
            return run(self);
        }
        let all = self.out.reshape(&[self.out.elements()])?;
        let mut first = 0;
        for &outputs in &self.parts {
            let out = all.rows(self.rows * first..self.rows * (first + outputs))?.reshape(&[self.rows, outputs])?;
            let weight = self.weight.rows(first..first + outputs)?;
            let dims = WeightDims { outputs, ..self.dims };
            run(&Call { x: self.x.clone(), weight, dims, experts: None, out, parts: Vec::new(), ..*self })?;
            first += outputs;
        }
        Ok(())
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        self.weight.touches(visit);
        if let Some(tensor) = &self.experts {
            visit(Touch { arg: "experts.ids", tensor, access: Read });
        }
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        let Some(ids) = &self.experts else { return Ok(()) };
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe { check::indices_below(NAME, "experts.ids", ids, self.dims.experts) }
    }
}
