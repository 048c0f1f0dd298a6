use super::check;
use crate::{
    DType, Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "spread";

/// Arguments of [`spread`](spread()): spreads values of some columns over all columns. It makes logits of a whole
/// vocabulary from logits of a part of it.
///
/// The columns of `x` belong to groups of N columns. `places` has the place of each output: place p is column p mod N
/// of group ⌊p / N⌋. Row t has the values of the groups `groups`\[t\]; an output whose group it does not have, or whose
/// place is beyond all groups, gets `fill`. If a row has a group twice, either of both counts.
///
/// Without `groups`, all columns are one group, which every row has.
///
/// # Example
/// ```
/// use kvant::{DType, Device, Tensor, ops};
/// let device = Device::cpu();
/// let x = Tensor::from_slice(&device, &[5f32, 7.], &[1, 2])?;
/// let places = Tensor::from_slice(&device, &[9u32, 1, 0], &[3])?;
/// let out = Tensor::zeros(&device, DType::F32, &[1, 3])?;
/// let mut enc = device.encoder()?;
/// ops::spread(&mut enc, &ops::Spread::new(&x, &places, f32::NEG_INFINITY, &out))?;
/// enc.commit()?.wait()?;
/// assert_eq!(out.to_vec::<f32>()?, [f32::NEG_INFINITY, 7., 5.]);
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Spread<'a> {
    /// `[T, N]`, or `[T·K, N]` with groups; f32, f16 or bf16; N is at least 1.
    pub x: &'a Tensor,
    /// u32 `[T, K]`: the group of each row of `x`.
    pub groups: Option<&'a Tensor>,
    /// u32 `[V]`: the place of each output.
    pub places: &'a Tensor,
    /// The value of outputs without a place. Not NaN.
    pub fill: f32,
    /// `[T, V]`, f32, f16 or bf16.
    pub out: &'a Tensor,
}

impl<'a> Spread<'a> {
    /// Spreads the columns of one group.
    pub fn new(x: &'a Tensor, places: &'a Tensor, fill: f32, out: &'a Tensor) -> Self {
        Spread { x, groups: None, places, fill, out }
    }
}

setters! { Spread<'a> {
    groups: Option<&'a Tensor>,
} }

/// Runs [`Spread`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors).
pub fn spread(enc: &mut Encoder, args: &Spread) -> Result<()> {
    let [tokens, outputs] = check::rank(NAME, "out", args.out, ["T", "V"])?;
    let [rows, width] = check::rank(NAME, "x", args.x, ["T·K", "N"])?;
    check::float(NAME, "x", args.x)?;
    check::float(NAME, "out", args.out)?;
    check::positive(NAME, "x.N", width)?;
    check::value_is(NAME, "fill", !args.fill.is_nan(), "a number", args.fill)?;
    check::dtype(NAME, "places", args.places, DType::U32)?;
    check::shape(NAME, "places", args.places, &[("V", outputs)])?;
    let chosen = match args.groups {
        Some(groups) => {
            check::dtype(NAME, "groups", groups, DType::U32)?;
            let [_, chosen] = check::rank(NAME, "groups", groups, ["T", "K"])?;
            check::shape(NAME, "groups", groups, &[("T", tokens), ("K", chosen)])?;
            chosen
        }
        None => 1,
    };
    check::shape(NAME, "x", args.x, &[("T·K", tokens.saturating_mul(chosen)), ("N", width)])?;
    let (x, groups, places) = (args.x.clone(), args.groups.cloned(), args.places.clone());
    debug_assert_eq!(rows, tokens * chosen);
    enc.submit(super::Call::Spread(Call {
        x,
        groups,
        places,
        fill: args.fill,
        out: args.out.clone(),
        tokens,
        chosen,
        width,
        outputs,
    }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub groups: Option<Tensor>,
    pub places: Tensor,
    pub fill: f32,
    pub out: Tensor,
    /// T.
    pub tokens: usize,
    /// K: groups of a row; 1 without groups.
    pub chosen: usize,
    /// N.
    pub width: usize,
    /// V.
    pub outputs: usize,
}

rank_tensors! { Call { x, groups, places, out } }

impl Call {
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        if let Some(groups) = &self.groups {
            visit(Touch { arg: "groups", tensor: groups, access: Read });
        }
        visit(Touch { arg: "places", tensor: &self.places, access: Read });
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// Every place and group is valid.
    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
