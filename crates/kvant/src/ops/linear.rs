use super::check;
use crate::{
    DType, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
};

pub(crate) const NAME: &str = "linear";

/// out\[t\] = alpha · x\[t\] · Wᵀ, for the shapes of decode (T = 1) and prefill alike.
///
/// With [`Experts`], W holds E matrices and each output row picks one.
///
/// # Accuracy
/// Products and sums are those of f32, whatever the types, with four exceptions, all of affine weights:
///
/// - Up to 15 rows for one matrix (with experts: of each), the CPU's level [`SimdLevel::Avx512Vnni`](crate::SimdLevel::Avx512Vnni) counts
///   activations in steps of some 2⁻²³ of the largest of their group: what is smaller than half a step beside it is lost.
/// - From 16 rows for one matrix on (with experts: once one of them has as many, for all), the CPU's level [`SimdLevel::Avx512Vnni`](crate::SimdLevel::Avx512Vnni) rounds activations
///   to 16 bits, counted from the largest of each group. That is an error of about 2·10⁻⁵ of a result's root mean square, where
///   f32 has 10⁻⁷ and bf16 some 10⁻³; the products take half the time. Any other level, asked for by
///   [`CpuOptions`](crate::CpuOptions), multiplies in f32.
/// - On CUDA, a row or two for one matrix, and few rows of experts, count activations in steps of 2⁻²² of the largest of 128
///   consecutive inputs: what is smaller than a step beside it is lost. An activation that is not finite, or 2¹⁰⁶ and more, makes
///   NaN of all results of its row.
/// - On CUDA, 48 rows and more of bf16 with an `out` of bf16 (without experts; up to 2²⁸ elements of weight and `x` together)
///   take a weight with groups of 32, and before or after Hopper any, as the sum of two bf16 numbers, which keeps 16 bits of it.
///
/// On CUDA an infinite activation may make NaN of a result that would be infinite; so may, on Metal up to 8 rows of affine weights, one
/// that is infinite or so large that its products with codes are.
pub struct Linear<'a> {
    /// `[T, K]`, f32, f16 or bf16.
    pub x: &'a Tensor,
    /// `[N, K]`, or `[E, N, K]` with experts: one row per output.
    pub weight: Weight<'a>,
    /// A mixture of experts' choice, or `None` for one matrix.
    pub experts: Option<Experts<'a>>,
    /// Multiplies the result; 1 for a plain product.
    pub alpha: f32,
    /// `[T, N]`, or `[T·top_k, N]` with experts; f32, f16 or bf16.
    pub out: &'a Tensor,
}

/// A weight matrix: rows of K inputs each.
#[derive(Clone, Copy)]
pub enum Weight<'a> {
    /// `[N, K]` or `[E, N, K]`, f32, f16 or bf16.
    Dense(&'a Tensor),
    /// Quantised as MLX does.
    Affine(Affine<'a>),
}

/// MLX's affine quantisation: w = scale · q + bias, per group of consecutive inputs.
///
/// The codes of a row are one little-endian bit stream: code i takes bits `i·bits .. (i+1)·bits` of it.
#[derive(Clone, Copy)]
pub struct Affine<'a> {
    /// u32 `[N, K·bits/32]` (or `[E, N, ..]`).
    pub codes: &'a Tensor,
    /// `[N, K/group]` (or `[E, N, K/group]`), f32, f16 or bf16.
    pub scales: &'a Tensor,
    /// As `scales`.
    pub biases: &'a Tensor,
    /// 4, 6 or 8.
    pub bits: u32,
    /// Inputs that share a scale and a bias: 32, 64 or 128.
    pub group: usize,
}

/// Which expert's matrix each row goes through.
#[derive(Clone, Copy)]
pub struct Experts<'a> {
    /// u32 `[T, top_k]`, each below E.
    pub ids: &'a Tensor,
    /// Whether `x` has one row per (token, choice), `[T·top_k, K]`, rather than one per token that all its choices
    /// share.
    pub expanded: bool,
}

/// Runs [`Linear`].
///
/// # Errors
/// At the commit, `OutOfRange` when an expert id is not below E, on devices where the host sees the ids; elsewhere such a row is
/// zeros.
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
    // A GPU does not know the ids, and there would be no matrix to take instead of one that is not there.
    check::value_is(NAME, "E", dims.experts > 0 || rows == 0, "at least 1", dims.experts)?;
    enc.submit(super::Call::Linear(Call {
        x: args.x.clone(),
        weight: args.weight.to_owned_weight(),
        dims,
        experts,
        rows_per_input,
        alpha: args.alpha,
        out: args.out.clone(),
        rows,
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
    /// Checks the parts against each other. `experts` asks for a leading dimension E.
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
        };
        check::dtype(op, arg, affine.codes, DType::U32)?;
        check::value_is(op, "bits", matches!(affine.bits, 4 | 6 | 8), "4, 6 or 8", affine.bits)?;
        check::value_is(op, "group", matches!(affine.group, 32 | 64 | 128), "32, 64 or 128", affine.group)?;
        let [e, outputs, words] = dims(affine.codes)?;
        let [_, _, groups] = dims(affine.scales)?;
        let inputs = groups.saturating_mul(affine.group);
        // A group of 32 codes or more is a whole number of words at each width.
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
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum OwnedWeight {
    Dense(Tensor),
    Affine { codes: Tensor, scales: Tensor, biases: Tensor, bits: u32, group: usize },
}

impl OwnedWeight {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        match self {
            OwnedWeight::Dense(tensor) => visit(Touch { arg: "weight", tensor, access: Read }),
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
}

impl Call {
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
