use super::check;
use crate::{
    Encoder, Result, Tensor,
    encoder::{Access::*, Touch},
    group::{Peers, Rank, RankTensors},
};

pub(crate) const NAME: &str = "all_reduce";

/// Arguments of [`all_reduce`](all_reduce()): `out` of every rank becomes the sum of `x` over all ranks of the group,
/// element by element.
///
/// The sum is ((x₀ + x₁) + x₂) + …, in the order of ranks and in f32, and is rounded once, to the dtype of `out`. All
/// ranks and all runs get equal bits. On a single device, and on a group of one rank, `out` becomes `x`. `out` may be
/// `x`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct AllReduce<'a> {
    /// f32, f16 or bf16, of any shape.
    pub x: &'a Tensor,
    /// f32, f16 or bf16, with the number of elements of `x`.
    pub out: &'a Tensor,
}

impl<'a> AllReduce<'a> {
    /// Adds `x` of all ranks.
    pub fn new(x: &'a Tensor, out: &'a Tensor) -> Self {
        AllReduce { x, out }
    }
}

/// Runs [`AllReduce`].
///
/// ```
/// use kvant::{CpuOptions, DType, Device, Tensor, ops};
/// let one = || Device::cpu_with(CpuOptions { threads: Some(1), ..CpuOptions::default() });
/// let group = Device::group(&[one()?, one()?])?;
/// let x = Tensor::zeros(&group, DType::F32, &[2])?;
/// x.on_rank(0)?.write(&[1f32, 2.])?;
/// x.on_rank(1)?.write(&[10f32, 20.])?;
/// let mut enc = group.encoder()?;
/// ops::all_reduce(&mut enc, &ops::AllReduce::new(&x, &x))?;
/// enc.commit()?.wait()?;
/// assert_eq!(x.on_rank(1)?.to_vec::<f32>()?, [11., 22.]);
/// # Ok::<(), kvant::Error>(())
/// ```
///
/// # Errors
/// Those of [every operation](crate::ops#errors). If a rank fails, the pass of all ranks fails with its error.
pub fn all_reduce(enc: &mut Encoder, args: &AllReduce) -> Result<()> {
    check::float(NAME, "x", args.x)?;
    check::float(NAME, "out", args.out)?;
    let (elements, got) = (args.x.elements(), args.out.elements());
    check::value_is(NAME, "out", got == elements, format_args!("{elements} elements"), got)?;
    enc.submit(super::Call::AllReduce(Call { x: args.x.clone(), out: args.out.clone(), elements, peers: None }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub x: Tensor,
    pub out: Tensor,
    pub elements: usize,
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
    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "x", tensor: &self.x, access: Read });
        visit(Touch { arg: "out", tensor: &self.out, access: Write });
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[("out", "x")]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
