use std::ops::Range;

use super::check;
use crate::{
    DType, Device, Error, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

/// Which rows of a call continue which states. A run is the consecutive tokens of one sequence in a step.
///
/// Operations with a state per sequence ([`causal_conv`](crate::ops::causal_conv()),
/// [`delta_rule`](crate::ops::delta_rule())) take it. Run i has the rows `starts[i] .. starts[i + 1]`. It continues the
/// state `slots[i]`. The state after row t is written to the slot `after[t]`. Rows of no run are not computed.
///
/// A run may write the state after its last row alone, or after several rows, so that some of its tokens can be removed
/// later: if it has at most [`StateRuns::MAX_KEPT`] rows.
#[derive(Clone, Debug)]
pub struct StateRuns {
    starts: Tensor,
    slots: Tensor,
    past: Tensor,
    after: Tensor,
    max_rows: usize,
}

rank_tensors! { StateRuns { starts, slots, past, after } }

impl StateRuns {
    /// The slot of a run that is not computed, and of a row whose state is not written.
    pub const INACTIVE: u32 = u32::MAX;
    /// Maximum rows of a run that writes states after other rows than its last.
    pub const MAX_KEPT: usize = 16;

    /// Uploads runs, each as (slot, tokens before the run, rows). Their rows follow one another from row 0. The state
    /// after a run replaces the one before it.
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
    /// assert_eq!(runs.after().to_vec::<u32>()?[4..], [2, 0]);
    /// # Ok::<(), kvant::Error>(())
    /// ```
    pub fn new(device: &Device, runs: &[(u32, u32, u32)]) -> Result<StateRuns> {
        let overflow = Error::Overflow { op: "state_runs", arg: "runs" };
        let rows = runs.iter().try_fold(0u32, |rows, run| rows.checked_add(run.2)).ok_or(overflow)?;
        let mut after = Vec::new();
        let failed = |_| Error::OutOfMemory { device: device.to_string(), bytes: rows as usize * size_of::<u32>() };
        after.try_reserve_exact(rows as usize).map_err(failed)?;
        for &(slot, _, rows) in runs.iter().filter(|run| run.2 > 0) {
            after.resize(after.len() + rows as usize - 1, Self::INACTIVE);
            after.push(slot);
        }
        let after = Tensor::from_slice(device, &after, &[after.len()])?;
        Self::with_after(device, runs, after)
    }

    /// As [`StateRuns::new`], with other slots for the states after rows: u32 `[T]`, as [`StateRuns::after`] returns
    /// them.
    ///
    /// # Errors
    /// As [`StateRuns::new`].
    pub fn with_after(device: &Device, runs: &[(u32, u32, u32)], after: Tensor) -> Result<StateRuns> {
        let (mut starts, mut end) = (vec![0], 0u32);
        for &(_, _, rows) in runs {
            end = end.checked_add(rows).ok_or(Error::Overflow { op: "state_runs", arg: "runs" })?;
            starts.push(end);
        }
        let upload = |words: &[u32]| Tensor::from_slice(device, words, &[words.len()]);
        let column = |of: fn(&(u32, u32, u32)) -> u32| upload(&runs.iter().map(of).collect::<Vec<_>>());
        let max_rows = runs.iter().map(|run| run.2 as usize).max().unwrap_or(0);
        let (starts, slots, past) = (upload(&starts)?, column(|run| run.0)?, column(|run| run.1)?);
        Ok(StateRuns { starts, slots, past, after, max_rows })
    }

    /// Runs in existing tensors: u32 `[S + 1]`, `[S]`, `[S]` and `[T]`, as [`StateRuns::starts`], [`StateRuns::slots`],
    /// [`StateRuns::past`] and [`StateRuns::after`] return them. `max_rows` is the host's estimate of the maximum rows
    /// of a run. It selects grids; longer runs are computed as well.
    pub fn from_tensors(starts: Tensor, slots: Tensor, past: Tensor, after: Tensor, max_rows: usize) -> StateRuns {
        StateRuns { starts, slots, past, after, max_rows }
    }

    /// u32 `[S + 1]`: the first row of each run, and the end of the last.
    pub fn starts(&self) -> &Tensor {
        &self.starts
    }

    /// u32 `[S]`: the slot of the state that each run continues, or [`StateRuns::INACTIVE`].
    pub fn slots(&self) -> &Tensor {
        &self.slots
    }

    /// u32 `[S]`: the tokens of the sequence before the run. Only whether it is 0 matters: the state then starts as
    /// zeros.
    pub fn past(&self) -> &Tensor {
        &self.past
    }

    /// u32 `[T]`: the slot that gets the state after each row, or [`StateRuns::INACTIVE`]. It may be the slot that the
    /// run continues. Rows from T on are in no run. A run without a slot for the state after its last row is not
    /// computed. In a run of more than [`StateRuns::MAX_KEPT`] rows, only the last row may have a slot.
    pub fn after(&self) -> &Tensor {
        &self.after
    }

    /// The bound on the rows of a run.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// The number of runs, S.
    pub(crate) fn count(&self) -> usize {
        self.slots.elements()
    }

    /// The rows that can be in a run, of `rows` rows of a call.
    pub(crate) fn rows(&self, rows: usize) -> usize {
        self.after.elements().min(rows)
    }

    /// Checks dtypes and shapes.
    pub(crate) fn validate(&self, op: &'static str) -> Result<()> {
        let count = self.count();
        for (arg, tensor, len) in [
            ("runs.starts", &self.starts, count + 1),
            ("runs.slots", &self.slots, count),
            ("runs.past", &self.past, count),
            ("runs.after", &self.after, self.after.elements()),
        ] {
            check::dtype(op, arg, tensor, DType::U32)?;
            check::shape(op, arg, tensor, &[("S", len)])?;
        }
        Ok(())
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        for (arg, tensor) in [
            ("runs.starts", &self.starts),
            ("runs.slots", &self.slots),
            ("runs.past", &self.past),
            ("runs.after", &self.after),
        ] {
            visit(Touch { arg, tensor, access: Read });
        }
    }

    /// Checks that runs are within `rows` rows, that their states exist, and that no run writes a state that another
    /// one reads or writes.
    ///
    /// # Safety
    /// The buffers are in host memory, and the caller holds the device's lock.
    pub(crate) unsafe fn check_indices(&self, op: &'static str, rows: usize, states: usize) -> Result<()> {
        // SAFETY: passed on to the caller.
        let (starts, slots, after) = unsafe {
            (self.starts.host_slice::<u32>(), self.slots.host_slice::<u32>(), self.after.host_slice::<u32>())
        };
        let out_of_range =
            |arg, index, got: u32, limit: u64| Error::OutOfRange { op, arg, index, got: got.into(), limit };
        let (mut before, rows) = (0, self.rows(rows));
        for (index, &start) in starts.iter().enumerate() {
            if start < before || start as usize > rows {
                return Err(out_of_range("runs.starts", index, start, rows as u64 + 1));
            }
            before = start;
        }
        // The slots that runs write, each with its run.
        let mut written: Vec<(u32, usize)> = Vec::with_capacity(slots.len());
        for (index, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot != Self::INACTIVE) {
            if slot as usize >= states {
                return Err(out_of_range("runs.slots", index, slot, states as u64));
            }
            let own = starts[index] as usize..starts[index + 1] as usize;
            for row in own.clone().filter(|&row| after[row] != Self::INACTIVE) {
                if after[row] as usize >= states {
                    return Err(out_of_range("runs.after", row, after[row], states as u64));
                }
                let may_write = own.len() <= Self::MAX_KEPT || row + 1 == own.end;
                let expected = format_args!("none within a run of more than {} rows", Self::MAX_KEPT);
                check::value_is(op, "runs.after", may_write, expected, after[row])?;
                written.push((after[row], index));
            }
        }
        written.sort_unstable();
        let are_distinct = written.windows(2).all(|pair| pair[0].0 != pair[1].0);
        check::value_is(op, "runs.after", are_distinct, "a slot of its own for each state", "one slot of two states")?;
        let is_own = |(index, slot): (usize, &u32)| {
            let at = written.binary_search_by_key(slot, |(slot, _)| *slot);
            at.map_or(true, |at| written[at].1 == index)
        };
        let are_apart = slots.iter().enumerate().all(is_own);
        check::value_is(op, "runs.slots", are_apart, "states that no other run writes", "one that another run writes")
    }

    /// The runs that are computed.
    ///
    /// # Safety
    /// As [`StateRuns::check_indices`], which has returned without an error.
    pub(crate) unsafe fn active(&self) -> Vec<Run<'_>> {
        // SAFETY: passed on to the caller.
        let (starts, slots, past, after) = unsafe {
            (
                self.starts.host_slice::<u32>(),
                self.slots.host_slice::<u32>(),
                self.past.host_slice::<u32>(),
                self.after.host_slice::<u32>(),
            )
        };
        let run = |index: usize| {
            let rows = starts[index] as usize..starts[index + 1] as usize;
            let (slot, is_fresh) = (slots[index] as usize, past[index] == 0);
            Run { after: &after[rows.clone()], rows, slot, is_fresh }
        };
        let is_active = |run: &Run| {
            run.slot != Self::INACTIVE as usize && run.after.last().is_some_and(|slot| *slot != Self::INACTIVE)
        };
        (0..slots.len()).map(run).filter(is_active).collect()
    }
}

/// The tokens of one sequence.
pub(crate) struct Run<'a> {
    pub rows: Range<usize>,
    /// The slot of the state before the run.
    pub slot: usize,
    /// Whether the state starts as zeros.
    pub is_fresh: bool,
    /// The slot of the state after each row.
    after: &'a [u32],
}

impl Run<'_> {
    /// The slot of the state after a row of the run, if it is written.
    pub fn slot_after(&self, row: usize) -> Option<usize> {
        let slot = self.after[row - self.rows.start];
        (slot != StateRuns::INACTIVE).then_some(slot as usize)
    }

    /// The rows in parts, each with the slot of the state after it.
    pub fn parts(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let mut start = self.rows.start;
        self.rows.clone().filter_map(move |row| {
            let slot = self.slot_after(row)?;
            Some((std::mem::replace(&mut start, row + 1)..row + 1, slot))
        })
    }
}
