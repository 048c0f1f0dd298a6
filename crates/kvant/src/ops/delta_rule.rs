use super::{StateRuns, StateSlots, check};
use crate::{
    DType, DeviceKind, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "delta_rule";

/// The largest head dimension of keys and of values.
pub(crate) const MAX_DIM: usize = 256;
/// Added to the sum of squares of queries and keys before their root.
pub(crate) const NORM_EPS: f32 = 1e-6;

/// Arguments of [`delta_rule`](delta_rule()): the gated delta rule of linear attention (Yang, Kautz, Hatamizadeh: Gated
/// Delta Networks, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 use it.
///
/// A head h of a sequence has a state S, a matrix of D × Dv. For each token, with q and k of head h·Hk/H (h mod Hk if
/// `tiled`) divided by √(Σx² + 10⁻⁶) and q also by √D:
///
/// ```text
/// decay = exp(rate[h] · softplus(a[h] + a_bias[h]))        rate = −exp(A_log)
/// beta  = 1 / (1 + exp(−b[h]))
/// S     ← decay · S
/// S     ← S + k ⊗ beta · (v − Sᵀk)
/// out   = Sᵀq
/// ```
///
/// Tokens of a run follow one another, from the state of its slot on.
///
/// A device may compute up to 64 tokens together (section 3.3 of the paper: products of decays, and the inverse of a
/// triangular matrix, instead of 64 steps). If `qkv` and `out` are bf16, it may then round factors of products to bf16
/// ([accuracy](crate::ops#accuracy)).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeltaRule<'a> {
    /// `[T, 2·Hk·D + H·Dv]`, f32, f16 or bf16: queries, keys, values of all heads.
    pub qkv: &'a Tensor,
    /// `[T, H]`, f32, f16 or bf16: the decay before its bias.
    pub a: &'a Tensor,
    /// `[T, H]`, f32, f16 or bf16: the logit of beta.
    pub b: &'a Tensor,
    /// f32 `[H]`: the negative rate of decay, −exp(A_log).
    pub rate: &'a Tensor,
    /// f32 `[H]`: the bias of `a` (`dt_bias`).
    pub a_bias: &'a Tensor,
    /// f32 `[H, D, Dv]` in each slot. D is a multiple of 32, Dv of 16, both at most 256.
    pub state: &'a StateSlots,
    /// Which rows continue which states.
    pub runs: &'a StateRuns,
    /// `[T, H, Dv]`, f32, f16 or bf16.
    pub out: &'a Tensor,
    /// Whether the heads that share a query and a key are Hk apart, as in GGUF files, instead of adjacent.
    pub tiled: bool,
}

impl<'a> DeltaRule<'a> {
    /// The rule for tokens of several sequences. `gates` are `a` and `b`, `decay` are `rate` and `a_bias`.
    pub fn new(
        qkv: &'a Tensor,
        gates: [&'a Tensor; 2],
        decay: [&'a Tensor; 2],
        state: &'a StateSlots,
        runs: &'a StateRuns,
        out: &'a Tensor,
    ) -> DeltaRule<'a> {
        let ([a, b], [rate, a_bias]) = (gates, decay);
        DeltaRule { qkv, a, b, rate, a_bias, state, runs, out, tiled: false }
    }

    /// Sets the field.
    pub fn tiled(self, tiled: bool) -> DeltaRule<'a> {
        DeltaRule { tiled, ..self }
    }
}

/// Shapes of a [`DeltaRule`], for estimates of memory.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRuleShape {
    /// Hk.
    pub key_heads: usize,
    /// H.
    pub heads: usize,
    /// D.
    pub key_dim: usize,
    /// Dv.
    pub value_dim: usize,
    /// The dtype of `qkv` and `out`.
    pub dtype: DType,
}

impl DeltaRuleShape {
    /// Maximum bytes that a device of a kind allocates for calls of up to `rows` rows: memory between the kernels that
    /// compute chunks. Calls of one pass share them.
    pub fn max_scratch_bytes(&self, kind: DeviceKind, rows: usize) -> usize {
        match kind {
            DeviceKind::Cuda => crate::cuda::delta_rule_scratch(self, rows),
            DeviceKind::Metal => crate::metal::delta_rule_scratch(self, rows),
            _ => 0,
        }
    }
}

/// Runs [`DeltaRule`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors); `Value` for a width of `qkv` that is not 2·Hk·D + H·Dv, or
/// for key heads that do not divide H. On the CPU, the commit returns `OutOfRange` or `Value` for runs that are not
/// within the rows, and for states that do not exist or that two runs use, unless both only read them; a GPU skips such
/// rows, and leaves a state of two runs undefined.
pub fn delta_rule(enc: &mut Encoder, args: &DeltaRule) -> Result<()> {
    let [rows, width] = check::rank(NAME, "qkv", args.qkv, ["T", "2·Hk·D + H·Dv"])?;
    let [heads, key_dim, value_dim] = check::rank_of(NAME, "state", args.state.shape(), ["H", "D", "Dv"])?;
    check::dtype(NAME, "state", args.state.memory(), DType::F32)?;
    for (arg, tensor) in [("qkv", args.qkv), ("a", args.a), ("b", args.b), ("out", args.out)] {
        check::float(NAME, arg, tensor)?;
    }
    let dim_fits = |dim: usize, unit| dim.is_multiple_of(unit) && (1..=MAX_DIM).contains(&dim);
    check::value_is(NAME, "D", dim_fits(key_dim, 32), "a multiple of 32 up to 256", key_dim)?;
    check::value_is(NAME, "Dv", dim_fits(value_dim, 16), "a multiple of 16 up to 256", value_dim)?;
    check::positive(NAME, "H", heads)?;
    let of_keys = width.saturating_sub(heads * value_dim);
    let key_heads = of_keys / (2 * key_dim);
    let fits = of_keys > 0 && of_keys.is_multiple_of(2 * key_dim) && heads.is_multiple_of(key_heads);
    check::value_is(
        NAME,
        "qkv",
        fits,
        format_args!("2·Hk·{key_dim} + {heads}·{value_dim} columns, with Hk a divisor of {heads}"),
        width,
    )?;
    for (arg, tensor) in [("a", args.a), ("b", args.b)] {
        check::shape(NAME, arg, tensor, &[("T", rows), ("H", heads)])?;
    }
    for (arg, tensor) in [("rate", args.rate), ("a_bias", args.a_bias)] {
        check::dtype(NAME, arg, tensor, DType::F32)?;
        check::shape(NAME, arg, tensor, &[("H", heads)])?;
    }
    check::shape(NAME, "out", args.out, &[("T", rows), ("H", heads), ("Dv", value_dim)])?;
    args.runs.validate(NAME)?;
    enc.submit(super::Call::DeltaRule(Call {
        qkv: args.qkv.clone(),
        a: args.a.clone(),
        b: args.b.clone(),
        rate: args.rate.clone(),
        a_bias: args.a_bias.clone(),
        state: args.state.clone(),
        runs: args.runs.clone(),
        out: args.out.clone(),
        rows,
        heads,
        key_heads,
        key_dim,
        value_dim,
        key_repeats: if args.tiled { 1 } else { heads / key_heads },
    }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub qkv: Tensor,
    pub a: Tensor,
    pub b: Tensor,
    pub rate: Tensor,
    pub a_bias: Tensor,
    pub state: StateSlots,
    pub runs: StateRuns,
    pub out: Tensor,
    pub rows: usize,
    pub heads: usize,
    pub key_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Adjacent heads with one key head.
    pub key_repeats: usize,
}

rank_tensors! { Call { qkv, a, b, rate, a_bias, state, runs, out } }

impl Call {
    /// The head of the query and the key of a head.
    pub(crate) fn key_head(&self, head: usize) -> usize {
        head / self.key_repeats % self.key_heads
    }

    /// Columns of `qkv`.
    pub(crate) fn width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.heads * self.value_dim
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        for (arg, tensor) in
            [("qkv", &self.qkv), ("a", &self.a), ("b", &self.b), ("rate", &self.rate), ("a_bias", &self.a_bias)]
        {
            visit(Touch { arg, tensor, access: Read });
        }
        self.runs.touches(visit);
        visit(Touch { arg: "state", tensor: self.state.memory(), access: Write });
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe { self.runs.check_indices(NAME, self.rows, self.state.count()) }
    }
}
