//! Downloads that do not wait for the device: [`Tensor::read_back`] starts one, [`Readback::to_vec`] returns the
//! elements.

use crate::{DType, Element, Error, Result, Submission, Tensor, backend::Transfer, ops};

/// A download that has been started: [`Tensor::read_back`].
///
/// It has the contents of the tensor after all work committed before it; later work does not change it. The device can
/// run other passes during the download. Dropping a `Readback` discards the elements.
#[must_use = "the elements come from `to_vec`"]
pub struct Readback {
    dtype: DType,
    elements: usize,
    from: From,
}

/// The source of the elements.
enum From {
    /// A copy into host memory.
    Transfer(Box<dyn Transfer>),
    /// A copy on the device, which is visible to the host on most devices.
    Copy { submission: Submission, copy: Tensor },
}

impl Tensor {
    /// Starts to download the elements after committed work, without waiting for it.
    ///
    /// On CUDA, the stream copies them to page-locked host memory. Elsewhere, a copy is made on the device.
    ///
    /// ```
    /// use kvant::{Device, Tensor};
    /// let x = Tensor::from_slice(&Device::cpu(), &[1u32, 2], &[2])?;
    /// let before = x.read_back()?;
    /// x.write(&[3u32, 4])?;
    /// assert_eq!(before.to_vec::<u32>()?, [1, 2]);
    /// # Ok::<(), kvant::Error>(())
    /// ```
    ///
    /// # Errors
    /// `OutOfMemory` for the copy; `DeviceFault`.
    pub fn read_back(&self) -> Result<Readback> {
        let (dtype, elements) = (self.dtype(), self.elements());
        let started =
            self.device().backend().start_download(&*self.storage().memory, self.byte_offset(), self.bytes())?;
        let from = match started {
            Some(transfer) => From::Transfer(transfer),
            None => {
                let copy = Tensor::zeros(self.device(), dtype, self.shape())?;
                let mut enc = self.device().encoder()?;
                ops::copy(&mut enc, self, &copy)?;
                From::Copy { submission: enc.commit()?, copy }
            }
        };
        Ok(Readback { dtype, elements, from })
    }
}

impl Readback {
    /// Waits for the download, and returns the elements; `E` must match the dtype.
    ///
    /// # Errors
    /// `DType` for another element type; `DeviceFault`, also of work that was committed before.
    pub fn to_vec<E: Element>(self) -> Result<Vec<E>> {
        if self.dtype != E::DTYPE {
            return Err(Error::DType { op: "read_back", arg: "self", expected: E::DTYPE.name(), got: self.dtype });
        }
        let mut out = vec![E::zeroed(); self.elements];
        let bytes = bytemuck::cast_slice_mut(&mut out);
        match self.from {
            From::Transfer(transfer) => transfer.finish(bytes)?,
            From::Copy { submission, copy } => {
                submission.wait()?;
                match copy.storage().memory.host() {
                    // Does not wait for later commits.
                    // SAFETY: the memory is at least `copy.bytes()` long, nobody else has the copy, and its pass is
                    // done.
                    Some(start) => unsafe {
                        std::ptr::copy_nonoverlapping(start.as_ptr(), bytes.as_mut_ptr(), bytes.len());
                    },
                    None => copy.read_bytes(bytes)?,
                }
            }
        }
        Ok(out)
    }

    /// Whether the download is done, or has failed: [`Readback::to_vec`] returns without waiting for the device.
    pub fn is_done(&self) -> bool {
        match &self.from {
            From::Transfer(transfer) => transfer.is_done(),
            From::Copy { submission, .. } => submission.is_done(),
        }
    }
}
