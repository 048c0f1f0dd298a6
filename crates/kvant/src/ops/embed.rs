use super::{Weight, check, linear::WeightDims};
use crate::{
    DType, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "embed";

/// Arguments of [`embed`](embed()): out\[t\] = scale · table\[ids\[t\]\], dequantised if the table is not dense.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Embed<'a> {
    /// `[V, N]`: one row per token id.
    pub table: Weight<'a>,
    /// u32 `[T]`, each below V.
    pub ids: &'a Tensor,
    /// Multiplies every element (Gemma uses √hidden).
    pub scale: f32,
    /// `[T, N]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> Embed<'a> {
    /// The rows of `table` that `ids` name.
    pub fn new(table: impl Into<Weight<'a>>, ids: &'a Tensor, out: &'a Tensor) -> Self {
        Embed { table: table.into(), ids, out, scale: 1.0 }
    }
}

setters! { Embed<'a> {
    scale: f32,
} }

/// Runs [`Embed`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors). On the CPU, the commit returns `OutOfRange` for an id that is not
/// below V; a GPU writes zeros for such a token.
pub fn embed(enc: &mut Encoder, args: &Embed) -> Result<()> {
    let [tokens] = check::rank(NAME, "ids", args.ids, ["T"])?;
    check::dtype(NAME, "ids", args.ids, DType::U32)?;
    let dims = args.table.validate(NAME, "table", None)?;
    check::finite(NAME, "scale", args.scale)?;
    check::float(NAME, "out", args.out)?;
    check::shape(NAME, "out", args.out, &[("T", tokens), ("N", dims.inputs)])?;
    let table = args.table.to_owned_weight();
    enc.submit(super::Call::Embed(Call {
        table,
        dims,
        ids: args.ids.clone(),
        scale: args.scale,
        out: args.out.clone(),
    }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub table: super::linear::OwnedWeight,
    /// `outputs` is V, `inputs` is N.
    pub dims: WeightDims,
    pub ids: Tensor,
    pub scale: f32,
    pub out: Tensor,
}

rank_tensors! { Call { table, ids, out } }

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        self.table.touches(visit);
        visit(Touch { arg: "ids", tensor: &self.ids, access: Read });
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        // SAFETY: `Call::check_indices` runs under the lock of a host device.
        unsafe { check::indices_below(NAME, "ids", &self.ids, self.dims.outputs) }
    }
}
