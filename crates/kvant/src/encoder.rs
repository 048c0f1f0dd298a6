//! Recording operations, and replaying them.

use std::ops::Range;

use crate::{
    Device, Error, Result, Tensor,
    backend::{Pass, Replay, Wait},
    ops::Call,
};

/// How an operation touches a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Reads it.
    Read,
    /// Writes it (all of it, or the part the operation defines).
    Write,
}

/// One tensor that an operation touches.
pub(crate) struct Touch<'a> {
    pub arg: &'static str,
    pub tensor: &'a Tensor,
    pub access: Access,
}

/// Takes operations in order, and starts them at [`Encoder::commit`]: the same on every device, the CPU too. What is dropped
/// without it never runs. Every operation declares which tensors it reads and writes, and the backend derives the ordering
/// from that: an operation always sees what the ones before it wrote.
///
/// **What is not an operation does not wait for the encoder.** [`Tensor::write`], [`Tensor::to_vec`] and their like,
/// [`KvCache::append_into`](crate::KvCache::append_into), [`KvCache::fork`](crate::KvCache::fork) and
/// [`KvCache::save`](crate::KvCache::save) act at once: they find the memory as the last commit left it, and what they write
/// is what the recorded operations will read. Commit first.
///
/// An operation's arguments are checked when it is recorded, with nothing written by an error. The contents of index buffers
/// (positions, sequences, ids) may themselves be computed, so the CPU checks them when the operation runs: `commit` returns
/// the error, the operations before have run, that one and the later ones have not. A GPU's kernels skip such an entry, or write zeros
/// where the operation says so.
///
/// ```
/// use kvant::{Device, DType, Tensor, ops};
/// let device = Device::cpu();
/// let x = Tensor::from_slice(&device, &[3f32, -100.], &[2])?;
/// let y = Tensor::zeros(&device, DType::F32, &[2])?;
/// let mut enc = device.encoder()?;
/// ops::softcap(&mut enc, &ops::Softcap { x: &x, cap: 30., out: &y })?;
/// enc.commit()?.wait()?;
/// assert!(y.to_vec::<f32>()?[1] > -30.);
/// # Ok::<(), kvant::Error>(())
/// ```
pub struct Encoder {
    device: Device,
    mode: Mode,
}

enum Mode {
    Run(Box<dyn Pass>),
    Capture(Vec<Call>),
}

impl Encoder {
    pub(crate) fn new(device: &Device) -> Result<Encoder> {
        Ok(Encoder { device: device.clone(), mode: Mode::Run(device.backend().clone().begin()?) })
    }

    /// Records what `record` encodes, without running it, as a [`Graph`] that can be replayed.
    ///
    /// Positions, sequence numbers and lengths are read from their device buffers at each replay: rewrite those and
    /// replay the same graph for the next token.
    ///
    /// # Errors
    /// Those of `record`; `Value` when it puts another encoder in place of the one that it gets. On a GPU also those that kernels bring
    /// (`Unsupported`, `Compile`, `OutOfMemory`, `DeviceFault`): they are compiled once `record` has returned.
    pub fn capture(device: &Device, record: impl FnOnce(&mut Encoder) -> Result<()>) -> Result<Graph> {
        let mut enc = Encoder { device: device.clone(), mode: Mode::Capture(Vec::new()) };
        record(&mut enc)?;
        match enc.mode {
            Mode::Capture(calls) if enc.device == *device => {
                Ok(Graph { replay: device.backend().clone().capture(calls)? })
            }
            // A `&mut` can be assigned to.
            _ => Err(Error::Value {
                op: "capture",
                arg: "record",
                expected: "to leave the encoder that it gets in its place".to_string(),
                got: format!("another encoder, for {}", enc.device),
            }),
        }
    }

    /// The device whose tensors it takes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Starts what was recorded. On the CPU it is done when this returns. Passes of other threads come before all of it, or after,
    /// and so do what they write to tensors and read.
    ///
    /// # Errors
    /// `OutOfRange` on the CPU, for what an index buffer holds; `DeviceFault`.
    pub fn commit(self) -> Result<Submission> {
        match self.mode {
            Mode::Run(pass) => Ok(Submission { pending: Some(pass.commit()?) }),
            Mode::Capture(_) => Ok(Submission { pending: None }),
        }
    }

    /// Takes a call whose shapes, dtypes and values `ops/` has validated.
    pub(crate) fn submit(&mut self, call: Call) -> Result<()> {
        self.check_tensors(&call)?;
        match &mut self.mode {
            Mode::Run(pass) => pass.submit(call),
            Mode::Capture(calls) => {
                calls.push(call);
                Ok(())
            }
        }
    }

    /// Every tensor is on this device, and no output overlaps another argument, unless it is that very argument and
    /// the operation works in place on that pair.
    fn check_tensors(&self, call: &Call) -> Result<()> {
        let op = call.name();
        let mut wrong = Ok(());
        call.touches(&mut |touch| {
            if wrong.is_ok() && touch.tensor.device() != &self.device {
                wrong = Err(Error::WrongDevice {
                    op,
                    arg: touch.arg,
                    expected: self.device.to_string(),
                    got: touch.tensor.device().to_string(),
                });
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

fn overlap(a: &Tensor, b: &Tensor) -> bool {
    let (ra, rb) = (byte_range(a), byte_range(b));
    std::sync::Arc::ptr_eq(a.storage(), b.storage()) && ra.start < rb.end && rb.start < ra.end
}

/// Work that has been started.
#[must_use = "wait for it, or drop it to go on without waiting"]
pub struct Submission {
    pending: Option<Box<dyn Wait>>,
}

impl Submission {
    /// Returns when the work is done, with the device's error if it failed. Only this tells surely of this very work: where nobody
    /// waits for what failed, the next transfer of any thread tells of it: on Metal once, on CUDA, where a device that failed stays so, and
    /// every call after it, too.
    pub fn wait(self) -> Result<()> {
        self.pending.map_or(Ok(()), Wait::wait)
    }
}

/// Operations captured once, to be run again and again.
///
/// They are validated, planned and compiled at capture, and never again. What a replay still does depends on the
/// device: Metal's command buffers run only once, so there it encodes the launches into a fresh one.
///
/// It may go to another thread, but is one thread's at a time.
pub struct Graph {
    replay: Box<dyn Replay>,
}

impl Graph {
    /// Runs the captured operations once more.
    pub fn replay(&self) -> Result<Submission> {
        Ok(Submission { pending: self.replay.replay()? })
    }
}
