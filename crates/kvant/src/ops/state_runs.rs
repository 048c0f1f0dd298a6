use super::check;
use crate::{
    DType, Device, Error, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

/// Which rows of a call continue which states. A run is the consecutive tokens of one sequence in a step.
///
/// Operations with a state per sequence ([`causal_conv`](crate::ops::causal_conv()),
/// [`delta_rule`](crate::ops::delta_rule())) take it. Run i has the rows `starts[i] .. starts[i + 1]` and the state
/// `slots[i]`. Rows of no run are not computed.
#[derive(Clone, Debug)]
pub struct StateRuns {
    starts: Tensor,
    slots: Tensor,
    past: Tensor,
    max_rows: usize,
}

rank_tensors! { StateRuns { starts, slots, past } }

impl StateRuns {
    /// The slot of a run that is not computed.
    pub const INACTIVE: u32 = u32::MAX;

    /// Uploads runs, each as (slot, tokens before the run, rows). Their rows follow one another from row 0.
    ///
    /// A run with no tokens before it starts from a state of zeros, whatever its slot holds.
    ///
    /// # Errors
    /// `Overflow` for more than 2³² rows; `OutOfMemory`.
    ///
    /// # Example
    /// ```
    /// use kvant::{Device, ops::StateRuns};
    /// // Five tokens begin the sequence in slot 2; one token continues the sequence in slot 0 at position 7.
    /// let runs = StateRuns::new(&Device::cpu(), &[(2, 0, 5), (0, 7, 1)])?;
    /// assert_eq!(runs.starts().to_vec::<u32>()?, [0, 5, 6]);
    /// # Ok::<(), kvant::Error>(())
    /// ```
    pub fn new(device: &Device, runs: &[(u32, u32, u32)]) -> Result<StateRuns> {
        let (mut starts, mut end) = (vec![0], 0u32);
        for &(_, _, rows) in runs {
            end = end.checked_add(rows).ok_or(Error::Overflow { op: "state_runs", arg: "runs" })?;
            starts.push(end);
        }
        let upload = |words: &[u32]| Tensor::from_slice(device, words, &[words.len()]);
        let column = |of: fn(&(u32, u32, u32)) -> u32| upload(&runs.iter().map(of).collect::<Vec<_>>());
        let max_rows = runs.iter().map(|run| run.2 as usize).max().unwrap_or(0);
        Ok(StateRuns { starts: upload(&starts)?, slots: column(|run| run.0)?, past: column(|run| run.1)?, max_rows })
    }

    /// Runs in existing tensors: u32 `[S + 1]`, `[S]` and `[S]`, as [`StateRuns::starts`], [`StateRuns::slots`] and
    /// [`StateRuns::past`] return them. `max_rows` is the host's estimate of the maximum rows of a run. It selects
    /// grids; longer runs are computed as well.
    pub fn from_tensors(starts: Tensor, slots: Tensor, past: Tensor, max_rows: usize) -> StateRuns {
        StateRuns { starts, slots, past, max_rows }
    }

    /// u32 `[S + 1]`: the first row of each run, and the end of the last.
    pub fn starts(&self) -> &Tensor {
        &self.starts
    }

    /// u32 `[S]`: the slot of each run's state, or [`StateRuns::INACTIVE`].
    pub fn slots(&self) -> &Tensor {
        &self.slots
    }

    /// u32 `[S]`: the tokens of the sequence before the run. Only whether it is 0 matters: the state then starts as
    /// zeros.
    pub fn past(&self) -> &Tensor {
        &self.past
    }

    /// The bound on the rows of a run.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// The number of runs, S.
    pub(crate) fn count(&self) -> usize {
        self.slots.elements()
    }

    /// Checks dtypes and shapes.
    pub(crate) fn validate(&self, op: &'static str) -> Result<()> {
        let count = self.count();
        for (arg, tensor, len) in [
            ("runs.starts", &self.starts, count + 1),
            ("runs.slots", &self.slots, count),
            ("runs.past", &self.past, count),
        ] {
            check::dtype(op, arg, tensor, DType::U32)?;
            check::shape(op, arg, tensor, &[("S", len)])?;
        }
        Ok(())
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        for (arg, tensor) in [("runs.starts", &self.starts), ("runs.slots", &self.slots), ("runs.past", &self.past)] {
            visit(Touch { arg, tensor, access: Read });
        }
    }

    /// Checks that runs are within `rows` rows, and that their states exist and differ.
    ///
    /// # Safety
    /// The buffers are in host memory, and the caller holds the device's lock.
    pub(crate) unsafe fn check_indices(&self, op: &'static str, rows: usize, states: usize) -> Result<()> {
        // SAFETY: passed on to the caller.
        let (starts, slots) = unsafe { (self.starts.host_slice::<u32>(), self.slots.host_slice::<u32>()) };
        let out_of_range =
            |arg, index, got: u32, limit: u64| Error::OutOfRange { op, arg, index, got: got.into(), limit };
        let mut before = 0;
        for (index, &start) in starts.iter().enumerate() {
            if start < before || start as usize > rows {
                return Err(out_of_range("runs.starts", index, start, rows as u64 + 1));
            }
            before = start;
        }
        let mut used: Vec<u32> = Vec::with_capacity(slots.len());
        for (index, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot != Self::INACTIVE) {
            if slot as usize >= states {
                return Err(out_of_range("runs.slots", index, slot, states as u64));
            }
            used.push(slot);
        }
        used.sort_unstable();
        let distinct = used.windows(2).all(|pair| pair[0] != pair[1]);
        check::value_is(op, "runs.slots", distinct, "a state of its own for each run", "one state of two runs")
    }

    /// The runs that are computed: (rows, slot, whether the state starts as zeros).
    ///
    /// # Safety
    /// As [`StateRuns::check_indices`], which has returned without an error.
    pub(crate) unsafe fn active(&self) -> Vec<Run> {
        // SAFETY: passed on to the caller.
        let (starts, slots, past) =
            unsafe { (self.starts.host_slice::<u32>(), self.slots.host_slice::<u32>(), self.past.host_slice::<u32>()) };
        let run = |index: usize| Run {
            rows: starts[index] as usize..starts[index + 1] as usize,
            slot: slots[index] as usize,
            is_fresh: past[index] == 0,
        };
        let is_active = |index: &usize| slots[*index] != Self::INACTIVE && starts[*index] < starts[*index + 1];
        (0..slots.len()).filter(is_active).map(run).collect()
    }
}

/// The tokens of one sequence.
pub(crate) struct Run {
    pub rows: std::ops::Range<usize>,
    pub slot: usize,
    /// Whether the state starts as zeros.
    pub is_fresh: bool,
}
