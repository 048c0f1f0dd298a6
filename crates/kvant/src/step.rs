//! Where the tokens of one step stand.

use crate::{
    DType, Device, Error, Result, Tensor,
    encoder::{Access, Touch},
    ops::check,
};

/// The tokens of one forward pass: T tokens of up to S sequences, each at its own position.
///
/// The three tensors live on the device, so that a captured [`Graph`](crate::Graph) follows when they are rewritten.
/// A [`KvCache`](crate::KvCache) makes them; an engine with its own bookkeeping can, too. No two tokens share sequence and
/// position: if they do, what a write leaves in that one slot is unspecified (on a GPU, a mix of both).
///
/// The CPU refuses an entry that is out of range, when the operation runs ([`Encoder::commit`](crate::Encoder::commit)). A GPU's
/// kernels skip such a token, or write zeros for it where the operation says so, and neither read nor write outside the layer.
#[derive(Clone, Debug)]
pub struct Step {
    /// u32 `[T]`: the logical position of each token, counted from 0 in its sequence.
    pub positions: Tensor,
    /// u32 `[T]`: the sequence of each token, below S.
    pub sequence: Tensor,
    /// u32 `[S]`: how many tokens of each sequence the cache holds (or has held, on a ring) once this step's are
    /// written. A position is below its sequence's length.
    pub lens: Tensor,
}

impl Step {
    /// Uploads a step for a cache of `sequences` sequences, in which every length ends with this step's last token:
    /// `tokens` are (sequence, position) pairs.
    ///
    /// # Errors
    /// `OutOfRange` for a sequence that does not exist, `Value`, `Overflow`, `OutOfMemory`.
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

    /// Number of tokens, T.
    pub fn tokens(&self) -> usize {
        self.positions.elements()
    }

    /// Dtypes and shapes, for `tokens` tokens of a layer of `sequences`.
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

    /// What is in the buffers: sequences exist, lengths fit a linear layer, and positions are below the lengths.
    ///
    /// # Safety
    /// The buffers are in host memory and the device's lock is held.
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
