//! Converts a call of a group to the call of one rank, with the rank's tensors.

use std::{fmt, sync::Arc};

use super::{Exchange, Meeting, storages};
use crate::{Device, Result, Tensor, ops::Call, ops::check};

/// One of the devices of a group.
pub(crate) struct Rank {
    index: usize,
    device: Device,
    meeting: Arc<Meeting>,
    exchange: Option<Arc<Exchange>>,
}

impl Rank {
    pub(super) fn new(index: usize, device: &Device, meeting: &Arc<Meeting>, exchange: Option<&Arc<Exchange>>) -> Rank {
        Rank { index, device: device.clone(), meeting: Arc::clone(meeting), exchange: exchange.cloned() }
    }

    /// The number of the rank in its group.
    pub(crate) fn index(&self) -> usize {
        self.index
    }
}

/// A value that may hold tensors of a group.
pub(crate) trait RankTensors {
    /// Replaces the tensors by those of a rank, which share the rank's memory.
    fn move_to(&mut self, rank: &Rank);
}

/// Implements [`RankTensors`] by the fields that have tensors.
macro_rules! rank_tensors {
    ($name:ident { $($field:tt),* $(,)? }) => {
        impl $crate::group::RankTensors for $name {
            fn move_to(&mut self, rank: &$crate::group::Rank) {
                $($crate::group::RankTensors::move_to(&mut self.$field, rank);)*
            }
        }
    };
}
pub(crate) use rank_tensors;

impl RankTensors for Tensor {
    fn move_to(&mut self, rank: &Rank) {
        if let Some(storage) = storages(&*self.storage().memory).get(rank.index) {
            *self = self.with_storage(Arc::clone(storage));
        }
    }
}

impl<T: RankTensors> RankTensors for Option<T> {
    fn move_to(&mut self, rank: &Rank) {
        self.iter_mut().for_each(|value| value.move_to(rank));
    }
}

impl<T: RankTensors> RankTensors for Vec<T> {
    fn move_to(&mut self, rank: &Rank) {
        self.iter_mut().for_each(|value| value.move_to(rank));
    }
}

impl<T: RankTensors, const N: usize> RankTensors for [T; N] {
    fn move_to(&mut self, rank: &Rank) {
        self.iter_mut().for_each(|value| value.move_to(rank));
    }
}

impl Call {
    /// The call of a rank.
    ///
    /// # Errors
    /// `WrongDevice` if [`RankTensors`] does not replace a tensor of the call. No kernel gets a tensor of the group.
    pub(crate) fn for_rank(&self, rank: &Rank) -> Result<Call> {
        let mut call = self.clone();
        call.move_to(rank);
        let mut fits = Ok(());
        call.touches(&mut |touch| {
            if fits.is_ok() {
                fits = check::device(self.name(), touch.arg, touch.tensor, &rank.device);
            }
        });
        fits.map(|()| call)
    }
}

/// The tensors of all ranks in a collective, in the order of ranks, and the barrier or memory for waiting for them.
#[derive(Clone)]
pub(crate) struct Peers {
    /// The rank that runs the call.
    pub rank: usize,
    pub x: Vec<Tensor>,
    pub out: Vec<Tensor>,
    meeting: Arc<Meeting>,
    exchange: Option<Arc<Exchange>>,
}

impl Peers {
    /// Makes the peers of `rank` for the group's tensors `x` and `out`.
    pub(crate) fn new(rank: &Rank, x: &Tensor, out: &Tensor) -> Peers {
        let (meeting, exchange) = (Arc::clone(&rank.meeting), rank.exchange.clone());
        Peers { rank: rank.index, x: Peers::of_all(x), out: Peers::of_all(out), meeting, exchange }
    }

    /// The tensors of all ranks of a group's tensor.
    pub(crate) fn of_all(tensor: &Tensor) -> Vec<Tensor> {
        let storages = storages(&*tensor.storage().memory).iter();
        storages.map(|storage| tensor.with_storage(Arc::clone(storage))).collect()
    }

    /// The memory through which GPUs exchange data; `None` in host memory.
    pub(crate) fn exchange(&self) -> Option<&Exchange> {
        self.exchange.as_deref()
    }

    /// Waits for all ranks, in host memory.
    ///
    /// # Errors
    /// `DeviceFault` if a rank has failed.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        self.meeting.wait_for_all()
    }
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.x.len())
    }
}
