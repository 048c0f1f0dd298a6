//! The positions of one step's tokens.

use crate::{
    DType, Device, Error, Result, Tensor,
    encoder::{Access, Touch},
    ops::check,
};

/// The tokens of one forward pass: T tokens of up to S sequences, each with its own position.
///
/// [`KvCache`](crate::KvCache) makes steps; an engine with its own cache manager can make them itself. The three
/// tensors are stored on the device, so that a captured [`Graph`](crate::Graph) reads the new values when they are
/// rewritten.
///
/// No two tokens may have the same sequence and position. If two do, the contents of their slot are unspecified (on a
/// GPU, a mix of both).
///
/// On the CPU, an entry that is out of range is an error when the operation runs
/// ([`Encoder::commit`](crate::Encoder::commit)). A GPU kernel skips such a token, or writes zeros for it where the
/// operation says so. It never reads or writes outside the layer.
#[derive(Clone, Debug)]
pub struct Step {
    /// u32 `[T]`: the position of each token, counted from 0 in its sequence.
    pub positions: Tensor,
    /// u32 `[T]`: the sequence of each token, below S.
    pub sequence: Tensor,
    /// u32 `[S]`: the number of tokens of each sequence after this step's tokens are written, including those that a
    /// ring has overwritten. Each position is below its sequence's length.
    pub lens: Tensor,
}

impl Step {
    /// Uploads a step for a cache of `sequences` sequences. `tokens` are (sequence, position) pairs. The length of
    /// each sequence is its largest position in this step plus one; sequences without tokens have length 0.
    ///
    /// # Errors
    /// `OutOfRange` for a sequence that does not exist; `Value`, `Overflow`, `OutOfMemory`.
    ///
    /// # Example
    /// ```
    /// use kvant::{Device, Step};
    /// // Two tokens of sequence 0, and one of sequence 2.
    /// let step = Step::new(&Device::cpu(), 3, &[(0, 5), (0, 6), (2, 0)])?;
    /// assert_eq!(step.lens.to_vec::<u32>()?, [7, 0, 1]);
    /// # Ok::<(), kvant::Error>(())
    /// ```
    pub fn new(device: &Device, sequences: usize, tokens: &[(u32, u32)]) -> Result<Step> {
        check::at_most("step", "sequences", sequences, u32::MAX as usize)?;
        let (mut lens, bytes) = (Vec::new(), sequences.saturating_mul(size_of::<u32>()));
        let failed = |_| Error::OutOfMemory { device: device.to_string(), bytes };
        lens.try_reserve_exact(sequences).map_err(failed)?;
        lens.resize(sequences, 0u32);
        for (index, &(sequence, position)) in tokens.iter().enumerate() {
            let len = lens.get_mut(sequence as usize).ok_or(Error::OutOfRange {
                op: "step",
                arg: "sequence",
                index,
                got: sequence.into(),
                limit: sequences as u64,
            })?;
            let end = position.checked_add(1).ok_or(Error::Overflow { op: "step", arg: "position" })?;
            *len = end.max(*len);
        }
        let (sequence, positions): (Vec<u32>, Vec<u32>) = tokens.iter().copied().unzip();
        Ok(Step {
            positions: Tensor::from_slice(device, &positions, &[tokens.len()])?,
            sequence: Tensor::from_slice(device, &sequence, &[tokens.len()])?,
            lens: Tensor::from_slice(device, &lens, &[sequences])?,
        })
    }

    /// The number of tokens, T.
    pub fn tokens(&self) -> usize {
        self.positions.elements()
    }

    /// Checks dtypes and shapes for `tokens` tokens of a layer of `sequences` sequences.
    pub(crate) fn validate(&self, op: &'static str, tokens: usize, sequences: usize) -> Result<()> {
        for (arg, tensor, len) in [
            ("step.positions", &self.positions, tokens),
            ("step.sequence", &self.sequence, tokens),
            ("step.lens", &self.lens, sequences),
        ] {
            check::dtype(op, arg, tensor, DType::U32)?;
            check::shape(op, arg, tensor, &[("", len)])?;
        }
        Ok(())
    }

    /// Checks the contents of the buffers: sequences exist, lengths fit a linear layer, and positions are below the
    /// lengths.
    ///
    /// # Safety
    /// The buffers are in host memory, and the caller holds the device's lock.
    pub(crate) unsafe fn check_indices(&self, op: &'static str, linear_capacity: Option<usize>) -> Result<()> {
        // SAFETY: passed on to the caller.
        let (positions, sequence, lens) = unsafe {
            (self.positions.host_slice::<u32>(), self.sequence.host_slice::<u32>(), self.lens.host_slice::<u32>())
        };
        if let Some(capacity) = linear_capacity {
            for (index, &len) in lens.iter().enumerate() {
                if len as usize > capacity {
                    let limit = capacity as u64 + 1;
                    return Err(Error::OutOfRange { op, arg: "step.lens", index, got: len.into(), limit });
                }
            }
        }
        for (index, (&position, &seq)) in positions.iter().zip(sequence).enumerate() {
            let Some(&len) = lens.get(seq as usize) else {
                let limit = lens.len() as u64;
                return Err(Error::OutOfRange { op, arg: "step.sequence", index, got: seq.into(), limit });
            };
            if position >= len {
                let (got, limit) = (position.into(), len.into());
                return Err(Error::OutOfRange { op, arg: "step.positions", index, got, limit });
            }
        }
        Ok(())
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        for (arg, tensor) in
            [("step.positions", &self.positions), ("step.sequence", &self.sequence), ("step.lens", &self.lens)]
        {
            visit(Touch { arg, tensor, access: Access::Read });
        }
    }
}
