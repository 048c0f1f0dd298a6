use super::check;
use crate::{DType, Error, Result, Tensor, group::rank_tensors};

const NAME: &str = "state_slots";

/// The states of one recurrent layer: slots, each with the state of one sequence.
///
/// Operations with a state per sequence ([`causal_conv`](crate::ops::causal_conv()),
/// [`delta_rule`](crate::ops::delta_rule())) take it, with [`StateRuns`](crate::ops::StateRuns) that assign slots to
/// sequences. [`KvPool::state`](crate::KvPool::state) returns the slots of a pool; their indices are numbers of pages.
///
/// # Example
/// ```
/// use kvant::{DType, Device, Tensor, ops::StateSlots};
/// let tensor = Tensor::zeros(&Device::cpu(), DType::F32, &[3, 2, 8])?;
/// let slots = StateSlots::new(&tensor)?; // of three sequences
/// assert_eq!((slots.count(), slots.shape()), (3, &[2, 8][..]));
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StateSlots {
    /// The memory, from the first element of slot 0 on.
    memory: Tensor,
    shape: Vec<usize>,
    count: usize,
    /// Elements between the starts of two slots. The slots of a pool overlap: only some of them are in use at a time.
    stride: usize,
}

rank_tensors! { StateSlots { memory } }

impl StateSlots {
    /// The states in a tensor `[N, ...]`, one for each slot.
    ///
    /// # Errors
    /// `Shape` for a tensor without dimensions; `Value` for states without elements.
    pub fn new(tensor: &Tensor) -> Result<StateSlots> {
        let [count, shape @ ..] = tensor.shape() else {
            let (expected, got) = ("[slots, ...]".to_string(), tensor.shape().to_vec());
            return Err(Error::Shape { op: NAME, arg: "tensor", expected, got });
        };
        let stride = shape.iter().product();
        check::positive(NAME, "elements of a state", stride)?;
        let (count, shape) = (*count, shape.to_vec());
        Ok(StateSlots { memory: tensor.reshape(&[tensor.elements()])?, shape, count, stride })
    }

    /// The states in the pages of a pool. The state of slot n begins `first + n · stride` bytes after the start of
    /// `memory`.
    pub(crate) fn paged(
        memory: &Tensor,
        dtype: DType,
        shape: &[usize],
        first: usize,
        count: usize,
        stride: usize,
    ) -> Result<StateSlots> {
        let memory = memory.typed_from(first, dtype)?;
        let slots = StateSlots { memory, shape: shape.to_vec(), count, stride: stride / dtype.size() };
        debug_assert!((slots.count.max(1) - 1) * slots.stride + slots.elements() <= slots.memory.elements());
        Ok(slots)
    }

    /// The number of slots.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The shape of one state.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The dtype of the states.
    pub fn dtype(&self) -> DType {
        self.memory.dtype()
    }

    /// Copies the state of a slot to the host.
    ///
    /// # Errors
    /// `Value` for a slot that does not exist; as [`Tensor::to_f32`].
    pub fn to_f32(&self, slot: usize) -> Result<Vec<f32>> {
        check::value_is(NAME, "slot", slot < self.count, format_args!("below {}", self.count), slot)?;
        self.slot(slot)?.to_f32()
    }

    /// Elements of one state.
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements between the starts of two slots.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// The memory, from the first element of slot 0.
    pub(crate) fn memory(&self) -> &Tensor {
        &self.memory
    }

    /// The state of a slot that exists.
    pub(crate) fn slot(&self, slot: usize) -> Result<Tensor> {
        let first = slot * self.stride;
        self.memory.rows(first..first + self.elements())
    }
}
