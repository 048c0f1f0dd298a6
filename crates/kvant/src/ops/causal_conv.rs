use super::{StateRuns, StateSlots, check};
use crate::{
    Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "causal_conv";

/// The largest number of taps of a convolution.
pub(crate) const MAX_TAPS: usize = 8;

/// Arguments of [`causal_conv`](causal_conv()): a depthwise convolution over the last K positions of each sequence.
///
/// For row t of a run and channel c, out\[t, c\] = f(bias\[c\] + Σⱼ weight\[c, j\] · x\[t − K + 1 + j, c\]), where f is
/// SiLU or the identity. The state holds the last K − 1 inputs of each sequence, which are the rows before the run. The
/// state after a row has the last K − 1 inputs including this row. Inputs before the sequence are zero. A state in the
/// dtype of `x` holds the inputs exactly, so that results do not depend on how a prompt is divided into runs.
///
/// Qwen3-Next and Qwen3.5 (four taps and SiLU) and LFM2 (three taps) have such layers.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CausalConv<'a> {
    /// `[T, C]`, f32, f16 or bf16.
    pub x: &'a Tensor,
    /// `[C, K]`, f32, f16 or bf16; K is 2 to 8. The last tap multiplies the row itself.
    pub weight: &'a Tensor,
    /// `[C]`, f32, f16 or bf16.
    pub bias: Option<&'a Tensor>,
    /// `[K − 1, C]` in each slot, f32, f16 or bf16: oldest input first.
    pub state: &'a StateSlots,
    /// Which rows continue which states.
    pub runs: &'a StateRuns,
    /// Whether SiLU follows.
    pub silu: bool,
    /// `[T, C]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> CausalConv<'a> {
    /// A convolution without bias and activation.
    pub fn new(
        x: &'a Tensor,
        weight: &'a Tensor,
        state: &'a StateSlots,
        runs: &'a StateRuns,
        out: &'a Tensor,
    ) -> CausalConv<'a> {
        CausalConv { x, weight, bias: None, state, runs, silu: false, out }
    }
}

setters! { CausalConv<'a> {
    bias: Option<&'a Tensor>,
    silu: bool,
} }

/// Runs [`CausalConv`].
///
/// ```
/// use kvant::{DType, Device, Tensor, ops::{self, CausalConv, StateRuns, StateSlots}};
/// let device = Device::cpu();
/// // The mean of two neighbours, in two passes over one sequence of one channel.
/// let weight = Tensor::from_slice(&device, &[0.5f32, 0.5], &[1, 2])?;
/// let state = StateSlots::new(&Tensor::zeros(&device, DType::F32, &[1, 1, 1])?)?;
/// let out = Tensor::zeros(&device, DType::F32, &[2, 1])?;
/// for (past, inputs, results) in [(0, [2f32, 4.], [1f32, 3.]), (2, [6., 8.], [5., 7.])] {
///     let x = Tensor::from_slice(&device, &inputs, &[2, 1])?;
///     let runs = StateRuns::new(&device, &[(0, past, 2)])?;
///     let mut enc = device.encoder()?;
///     ops::causal_conv(&mut enc, &CausalConv::new(&x, &weight, &state, &runs, &out))?;
///     enc.commit()?.wait()?;
///     assert_eq!(out.to_vec::<f32>()?, results);
/// }
/// # Ok::<(), kvant::Error>(())
/// ```
///
/// # Errors
/// Those of [every operation](crate::ops#errors). On the CPU, the commit returns `OutOfRange` or `Value` for runs that
/// are not within the rows, and for states that do not exist or that two runs use, unless both only read them; a GPU
/// skips such rows, and leaves a state of two runs undefined.
pub fn causal_conv(enc: &mut Encoder, args: &CausalConv) -> Result<()> {
    let [rows, channels] = check::rank(NAME, "x", args.x, ["T", "C"])?;
    let [_, taps] = check::rank(NAME, "weight", args.weight, ["C", "K"])?;
    for (arg, tensor) in [("x", args.x), ("weight", args.weight), ("state", args.state.memory()), ("out", args.out)] {
        check::float(NAME, arg, tensor)?;
    }
    let fits = (2..=MAX_TAPS).contains(&taps);
    check::value_is(NAME, "K", fits, format_args!("2 to {MAX_TAPS} taps"), taps)?;
    check::shape(NAME, "weight", args.weight, &[("C", channels), ("K", taps)])?;
    check::dims_are(NAME, "state", args.state.shape(), &[("K - 1", taps - 1), ("C", channels)])?;
    check::shape(NAME, "out", args.out, &[("T", rows), ("C", channels)])?;
    if let Some(bias) = args.bias {
        check::float(NAME, "bias", bias)?;
        check::shape(NAME, "bias", bias, &[("C", channels)])?;
    }
    args.runs.validate(NAME)?;
    let (x, weight, state, out) = (args.x.clone(), args.weight.clone(), args.state.clone(), args.out.clone());
    let (bias, runs, silu) = (args.bias.cloned(), args.runs.clone(), args.silu);
    enc.submit(super::Call::CausalConv(Call { x, weight, bias, state, runs, silu, out, rows, channels, taps }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub weight: Tensor,
    pub bias: Option<Tensor>,
    pub state: StateSlots,
    pub runs: StateRuns,
    pub silu: bool,
    pub out: Tensor,
    pub rows: usize,
    pub channels: usize,
    pub taps: usize,
}

rank_tensors! { Call { x, weight, bias, state, runs, out } }

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        visit(Touch { arg: "weight", tensor: &self.weight, access: Read });
        if let Some(tensor) = &self.bias {
            visit(Touch { arg: "bias", tensor, access: Read });
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
