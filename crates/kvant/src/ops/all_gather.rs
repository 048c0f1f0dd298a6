use super::check;
use crate::{
    Encoder, Error, Result, Tensor,
    encoder::{Access::*, Touch},
    group::{Peers, Rank, RankTensors},
};

pub(crate) const NAME: &str = "all_gather";

/// Arguments of [`all_gather`](all_gather()): `out` of every rank gets the columns of all ranks' `x`.
///
/// Columns r·N to (r + 1)·N of `out` are `x` of rank r, bit for bit. On a device that is no group, and on a group of
/// one rank, `out` becomes `x`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct AllGather<'a> {
    /// `[R, N]`, of any dtype.
    pub x: &'a Tensor,
    /// `[R, ranks · N]`, of the dtype of `x`; see [`Device::ranks`](crate::Device::ranks).
    pub out: &'a Tensor,
}

impl<'a> AllGather<'a> {
    /// Gathers the columns of `x` of all ranks.
    pub fn new(x: &'a Tensor, out: &'a Tensor) -> Self {
        AllGather { x, out }
    }
}

/// Runs [`AllGather`].
///
/// # Errors
/// Those of [every operation](crate::ops#errors). If a rank fails, the pass of all ranks fails with its error.
pub fn all_gather(enc: &mut Encoder, args: &AllGather) -> Result<()> {
    let [rows, columns] = check::rank(NAME, "x", args.x, ["R", "N"])?;
    check::dtype(NAME, "out", args.out, args.x.dtype())?;
    let ranks = args.x.device().ranks();
    let all = columns.checked_mul(ranks).ok_or(Error::Overflow { op: NAME, arg: "x" })?;
    check::shape(NAME, "out", args.out, &[("R", rows), ("ranks · N", all)])?;
    let (x, out) = (args.x.clone(), args.out.clone());
    enc.submit(super::Call::AllGather(Call { x, out, rows, columns, peers: None }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub out: Tensor,
    pub rows: usize,
    /// N.
    pub columns: usize,
    /// None on a plain device.
    pub peers: Option<Peers>,
}

impl RankTensors for Call {
    fn move_to(&mut self, rank: &Rank) {
        self.peers = Some(Peers::new(rank, &self.x, &self.out));
        self.x.move_to(rank);
        self.out.move_to(rank);
    }
}

impl Call {
    /// The call without other ranks: a copy.
    pub(crate) fn of_one_rank(&self) -> super::copy::Call {
        super::copy::Call { from: self.x.clone(), to: self.out.clone() }
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
