//! Recording operations, and replaying them.

use std::{ffi::c_void, ops::Range, sync::Arc};

use crate::{
    Device, Error, Result, Tensor,
    backend::{ForeignStream, Pass, Replay, Wait, no_streams},
    ops::{Call, check},
    step::StepPages,
};

/// How an operation accesses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Reads it.
    Read,
    /// Writes all of it, or the part that the operation defines.
    Write,
}

/// One tensor that an operation accesses.
pub(crate) struct Touch<'a> {
    pub arg: &'static str,
    pub tensor: &'a Tensor,
    pub access: Access,
}

/// Records operations in order and runs them at [`Encoder::commit`], on every device, the CPU included.
///
/// Each operation declares the tensors that it reads and writes. The backend derives the order from these: an
/// operation sees the writes of all operations before it. Dropping an encoder discards its operations.
///
/// **Only operations wait for the encoder.** [`Tensor::write`], [`Tensor::to_vec`] and the other transfers,
/// [`KvPool::step`](crate::KvPool::step), [`KvPool::step_into`](crate::KvPool::step_into) and
/// [`Sequence::export`](crate::Sequence::export) act at once. They see the memory after the last commit, and recorded
/// operations see their writes. Commit first.
///
/// # Errors
///
/// Arguments are checked when an operation is recorded; a call that returns an error writes nothing. The contents of
/// index buffers (positions, sequences, ids) may themselves be computed, so the CPU checks them when the operation
/// runs. If such a check fails, `commit` returns the error: the operations before have run, this one and the later ones
/// have not. A GPU kernel skips an invalid entry, or writes zeros if the operation's documentation says so.
///
/// ```
/// use kvant::{Device, DType, Tensor, ops};
/// let device = Device::cpu();
/// let x = Tensor::from_slice(&device, &[3f32, -100.], &[2])?;
/// let y = Tensor::zeros(&device, DType::F32, &[2])?;
/// let mut enc = device.encoder()?;
/// ops::softcap(&mut enc, &ops::Softcap::new(&x, 30., &y))?;
/// enc.commit()?.wait()?;
/// assert!(y.to_vec::<f32>()?[1] > -30.);
/// # Ok::<(), kvant::Error>(())
/// ```
#[must_use = "operations run when the encoder is committed"]
pub struct Encoder {
    device: Device,
    mode: Mode,
    steps: PoolSteps,
}

/// The steps of pools that recorded operations use.
///
/// A step is checked when an operation is recorded, and again before the operations run: a sequence that was dropped or
/// truncated in between has released pages, which may already have another owner.
#[derive(Default)]
struct PoolSteps {
    /// The first step is not in `others`, so that recording a decode step allocates nothing.
    first: Option<Arc<StepPages>>,
    others: Vec<Arc<StepPages>>,
}

impl PoolSteps {
    fn add(&mut self, call: &Call) {
        let Some(step) = call.step().and_then(|step| step.pages.as_ref()) else { return };
        match &self.first {
            None => self.first = Some(step.clone()),
            Some(_) if self.all().any(|known| Arc::ptr_eq(known, step)) => {}
            Some(_) => self.others.push(step.clone()),
        }
    }

    fn all(&self) -> impl Iterator<Item = &Arc<StepPages>> {
        self.first.iter().chain(&self.others)
    }

    fn check(&self, op: &'static str) -> Result<()> {
        self.all().try_for_each(|step| step.check_is_latest(op))
    }
}

enum Mode {
    Run(Box<dyn Pass>),
    Capture(Vec<Call>),
}

impl Encoder {
    pub(crate) fn new(device: &Device) -> Result<Encoder> {
        let mode = Mode::Run(device.backend().clone().begin()?);
        Ok(Encoder { device: device.clone(), mode, steps: PoolSteps::default() })
    }

    /// Records the operations of `record` without running them, as a [`Graph`] that can be replayed.
    ///
    /// Each replay reads positions, sequences and lengths from their device buffers. To run the graph for the next
    /// token, rewrite these buffers and replay.
    ///
    /// # Errors
    /// The errors of `record`; `Value` if `record` replaces the encoder that it is given. On a GPU also `Unsupported`,
    /// `Compile`, `OutOfMemory` and `DeviceFault`, because kernels are compiled when `record` has returned.
    ///
    /// # Example
    /// ```
    /// use kvant::{Device, DType, Encoder, Tensor, ops};
    /// let device = Device::cpu();
    /// let x = Tensor::zeros(&device, DType::F32, &[1])?;
    /// let y = Tensor::zeros(&device, DType::F32, &[1])?;
    /// let graph = Encoder::capture(&device, |enc| ops::softcap(enc, &ops::Softcap::new(&x, 1., &y)))?;
    /// for input in [0f32, 100.] {
    ///     x.write(&[input])?;
    ///     graph.replay()?.wait()?;
    ///     println!("{:?}", y.to_vec::<f32>()?); // [0.0], then [1.0]
    /// }
    /// # Ok::<(), kvant::Error>(())
    /// ```
    pub fn capture(device: &Device, record: impl FnOnce(&mut Encoder) -> Result<()>) -> Result<Graph> {
        let mode = Mode::Capture(Vec::new());
        let mut enc = Encoder { device: device.clone(), mode, steps: PoolSteps::default() };
        record(&mut enc)?;
        match enc.mode {
            Mode::Capture(calls) if enc.device == *device => {
                Ok(Graph { replay: device.backend().clone().capture(calls)?, steps: enc.steps })
            }
            // `record` can assign another encoder through its `&mut`.
            _ => Err(Error::Value {
                op: "capture",
                arg: "record",
                expected: "a closure that does not replace its encoder".to_string(),
                got: format!("one that replaced it with an encoder for {}", enc.device),
            }),
        }
    }

    /// The device of the encoder's tensors.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Orders this encoder's operations with a stream of another library, without blocking the host: they begin after
    /// the work that the stream has at the commit, and later work in the stream begins after them. They run in this
    /// stream; events order it with the device's own stream only if both have got work. `stream` is a `CUstream`; null
    /// is the default stream.
    ///
    /// ```no_run
    /// # use kvant::{Device, Tensor, ops};
    /// # fn run(device: &Device, stream: *mut std::ffi::c_void, x: &Tensor, out: &Tensor) -> kvant::Result<()> {
    /// let mut enc = device.encoder()?;
    /// // SAFETY: the stream is one of this GPU, and exists until the commit.
    /// unsafe { enc.order_with(stream) }?;
    /// ops::softcap(&mut enc, &ops::Softcap::new(x, 30., out))?;
    /// enc.commit()?; // The stream's next kernel sees `out`.
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// `stream` is a stream of the primary context of the encoder's GPU, and exists until the encoder is committed or
    /// dropped.
    ///
    /// # Errors
    /// `Unsupported` on devices other than CUDA, for an encoder of [`Encoder::capture`], and while the stream is
    /// captured.
    pub unsafe fn order_with(&mut self, stream: *mut c_void) -> Result<()> {
        match &mut self.mode {
            // SAFETY: the contract is passed on to the caller.
            Mode::Run(pass) => unsafe { pass.order_with(ForeignStream(stream)) },
            Mode::Capture(_) => Err(no_streams()),
        }
    }

    /// Starts the recorded operations. On the CPU, they have finished when this returns.
    ///
    /// Passes are atomic with respect to other threads: a pass or transfer of another thread runs before all of the
    /// operations or after all of them.
    ///
    /// # Errors
    /// `Value` if a step of a pool is out of date: one of its sequences has changed since the operation was recorded,
    /// or the step from which it was selected has been rewritten. Nothing runs then. A change by another thread during
    /// the call is not detected. `OutOfRange` on the CPU, for the contents of an index buffer; `DeviceFault`.
    pub fn commit(self) -> Result<Submission> {
        self.steps.check("commit")?;
        match self.mode {
            Mode::Run(pass) => Ok(Submission { pending: Some(pass.commit()?) }),
            Mode::Capture(_) => Ok(Submission { pending: None }),
        }
    }

    /// Accepts a call whose shapes, dtypes and values `ops/` has validated.
    pub(crate) fn submit(&mut self, call: Call) -> Result<()> {
        self.check_tensors(&call)?;
        self.steps.add(&call);
        match &mut self.mode {
            Mode::Run(pass) => pass.submit(call),
            Mode::Capture(calls) => {
                calls.push(call);
                Ok(())
            }
        }
    }

    /// Checks that every tensor is on this device, and that no output overlaps another argument. An output may be
    /// another argument if the operation works in place on that pair.
    fn check_tensors(&self, call: &Call) -> Result<()> {
        let op = call.name();
        let mut wrong = Ok(());
        call.touches(&mut |touch| {
            if wrong.is_ok() {
                wrong = check::device(op, touch.arg, touch.tensor, &self.device);
            }
        });
        wrong?;
        let mut wrong = Ok(());
        call.touches(&mut |written| {
            if written.access != Access::Write {
                return;
            }
            let mut seen_self = false;
            call.touches(&mut |other| {
                let same_entry = std::ptr::eq(written.tensor, other.tensor) && other.access == Access::Write;
                if same_entry && !seen_self {
                    seen_self = true;
                    return;
                }
                let identical = byte_range(written.tensor) == byte_range(other.tensor)
                    && written.tensor.dtype() == other.tensor.dtype();
                let allowed = identical && call.in_place().contains(&(written.arg, other.arg));
                if wrong.is_ok() && overlap(written.tensor, other.tensor) && !allowed {
                    wrong = Err(Error::Overlap { op, output: written.arg, other: other.arg });
                }
            });
        });
        wrong
    }
}

fn byte_range(t: &Tensor) -> Range<usize> {
    t.byte_offset()..t.byte_offset() + t.bytes()
}

/// Whether two tensors have bytes in common.
pub(crate) fn overlap(a: &Tensor, b: &Tensor) -> bool {
    let (ra, rb) = (byte_range(a), byte_range(b));
    std::sync::Arc::ptr_eq(a.storage(), b.storage()) && ra.start < rb.end && rb.start < ra.end
}

/// Committed work.
#[must_use = "call `wait`, or drop it to continue without waiting"]
pub struct Submission {
    pending: Option<Box<dyn Wait>>,
}

impl Submission {
    /// Waits until the work is done, and returns the device's error if it failed.
    ///
    /// Only `wait` reports whether this submission failed. If nobody waits for a failed submission, the next transfer
    /// of any thread reports the failure: once on Metal, and on every later call on CUDA, where a failed device stays
    /// failed.
    pub fn wait(self) -> Result<()> {
        self.pending.map_or(Ok(()), Wait::wait)
    }

    /// Whether the work is done, or has failed: [`Submission::wait`] returns at once.
    pub fn is_done(&self) -> bool {
        self.pending.as_ref().is_none_or(|pending| pending.is_done())
    }
}

/// Operations that were captured once and can run many times.
///
/// They are validated, planned and compiled only at capture. The cost of a replay depends on the device: Metal's
/// command buffers run only once, so a replay there encodes the launches into a new one.
///
/// A graph can be sent to another thread, but only one thread at a time can use it.
pub struct Graph {
    replay: Box<dyn Replay>,
    steps: PoolSteps,
}

impl Graph {
    /// Runs the captured operations again.
    ///
    /// # Errors
    /// `Value` if a step of a pool is out of date ([`KvPool::step_into`](crate::KvPool::step_into) renews it): nothing
    /// runs. `OutOfRange` on the CPU, for the contents of an index buffer; `DeviceFault`.
    pub fn replay(&self) -> Result<Submission> {
        self.steps.check("replay")?;
        Ok(Submission { pending: self.replay.replay()? })
    }
}
