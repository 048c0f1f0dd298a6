use super::check;
use crate::{
    DType, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::{Rank, RankTensors, rank_tensors},
};

pub(crate) const NAME: &str = "add_bias";

/// Arguments of [`add_bias`](add_bias()): out\[r\] = x\[r\] + bias, or the bias of row r's expert. `out` may be `x`.
///
/// # Example
/// ```
/// use kvant::{DType, Device, Tensor, ops};
/// let device = Device::cpu();
/// let x = Tensor::from_slice(&device, &[1f32, 2., 3., 4.], &[2, 2])?;
/// let bias = Tensor::from_slice(&device, &[10f32, 20., 30., 40., 50., 60.], &[3, 2])?;
/// let experts = Tensor::from_slice(&device, &[2u32, 0], &[1, 2])?;
/// let mut enc = device.encoder()?;
/// ops::add_bias(&mut enc, &ops::AddBias::new(&x, &bias, &x).experts(Some(&experts)))?;
/// enc.commit()?.wait()?;
/// assert_eq!(x.to_vec::<f32>()?, [51., 62., 13., 24.]);
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct AddBias<'a> {
    /// `[R, N]`, f32, f16 or bf16.
    pub x: &'a Tensor,
    /// `[N]`, or `[E, N]` with experts; f32, f16 or bf16.
    pub bias: &'a Tensor,
    /// u32 `[T, top_k]` with T·top_k = R: the expert of each row, below E. `None` for one bias.
    pub experts: Option<&'a Tensor>,
    /// `[R, N]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> AddBias<'a> {
    /// Adds one bias to every row.
    pub fn new(x: &'a Tensor, bias: &'a Tensor, out: &'a Tensor) -> Self {
        AddBias { x, bias, out, experts: None }
    }
}

setters! { AddBias<'a> {
    experts: Option<&'a Tensor>,
} }

/// Runs [`AddBias`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors). On the CPU, the commit returns `OutOfRange` for an expert that is not
/// below E; a GPU writes zeros for such a row.
pub fn add_bias(enc: &mut Encoder, args: &AddBias) -> Result<()> {
    let [rows, dim] = check::rank(NAME, "x", args.x, ["R", "N"])?;
    for (arg, tensor) in [("x", args.x), ("bias", args.bias), ("out", args.out)] {
        check::float(NAME, arg, tensor)?;
    }
    check::shape(NAME, "out", args.out, &[("R", rows), ("N", dim)])?;
    let bias_row = match args.experts {
        None => {
            check::shape(NAME, "bias", args.bias, &[("N", dim)])?;
            BiasRow::Only
        }
        Some(ids) => {
            check::dtype(NAME, "experts", ids, DType::U32)?;
            check::rank(NAME, "experts", ids, ["T", "top_k"])?;
            check::value_is(NAME, "experts", ids.elements() == rows, format_args!("{rows} ids"), ids.elements())?;
            let [experts, _] = check::rank(NAME, "bias", args.bias, ["E", "N"])?;
            check::shape(NAME, "bias", args.bias, &[("E", experts), ("N", dim)])?;
            // A GPU cannot check the ids; without experts no id would be valid.
            check::value_is(NAME, "E", experts > 0 || rows == 0, "at least 1", experts)?;
            BiasRow::Expert { ids: ids.clone(), experts }
        }
    };
    let (x, bias, out) = (args.x.clone(), args.bias.clone(), args.out.clone());
    enc.submit(super::Call::AddBias(Call { op: NAME, x, bias, bias_row, out, rows, dim }))
}

/// The row of `bias` that is added to a row of `x`.
#[derive(Clone, Debug)]
pub(crate) enum BiasRow {
    /// The only one.
    Only,
    /// Its expert's, below `experts`; `ids` are u32, one per row.
    Expert { ids: Tensor, experts: usize },
    /// The row with its own index.
    Own,
}

impl RankTensors for BiasRow {
    fn move_to(&mut self, rank: &Rank) {
        if let BiasRow::Expert { ids, .. } = self {
            ids.move_to(rank);
        }
    }
}

/// Also the call of [`add`](super::add()), whose second operand has a row for each row of `x`.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// The operation's name.
    pub op: &'static str,
    pub x: Tensor,
    pub bias: Tensor,
    pub bias_row: BiasRow,
    pub out: Tensor,
    pub rows: usize,
    pub dim: usize,
}

rank_tensors! { Call { x, bias, bias_row, out } }

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        visit(Touch { arg: "bias", tensor: &self.bias, access: Read });
        if let BiasRow::Expert { ids: tensor, .. } = &self.bias_row {
            visit(Touch { arg: "experts", tensor, access: Read });
        }
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "x")]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        let BiasRow::Expert { ids, experts } = &self.bias_row else { return Ok(()) };
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe { check::indices_below(NAME, "experts", ids, *experts) }
    }
}
