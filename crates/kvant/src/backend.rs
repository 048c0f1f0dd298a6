//! The interface of a backend: memory, and the execution of validated calls. Private; `ops/` is its only caller.

use std::{any::Any, ffi::c_void, ptr::NonNull, sync::Arc};

use crate::{
    Device, Error, Result,
    device::{DeviceKind, KernelReport, MemoryInfo},
    ops::{Call, attend},
};

/// One allocation of a device.
pub trait Memory: Send + Sync {
    /// The host's address of the memory, on devices that share the host's memory.
    fn host(&self) -> Option<NonNull<u8>>;
    /// For downcasts by the backend that allocated it.
    fn as_any(&self) -> &dyn Any;
}

/// Keeps borrowed memory alive.
pub type Owner = Box<dyn Any + Send + Sync>;

/// A stream of another library: a `CUstream`.
#[derive(Clone, Copy, Debug)]
pub struct ForeignStream(pub *mut c_void);

// SAFETY: streams may be used from any thread.
unsafe impl Send for ForeignStream {}

/// Borrowed memory, and the position of the first borrowed byte in it.
pub type MemoryAt = (Box<dyn Memory>, usize);

/// A device. Calls arrive validated: a backend never checks an argument.
pub(crate) trait Backend: Send + Sync {
    fn kind(&self) -> DeviceKind;
    /// A name for people: model, SIMD level, threads.
    fn name(&self) -> String;
    /// The devices of a group; none for a plain device.
    fn ranks(&self) -> &[Device] {
        &[]
    }
    /// Zeroed memory.
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>>;
    /// Allocates zeroed memory that will be used only in parts. On the host, the system maps each page at its first
    /// use.
    fn allocate_sparse(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        self.allocate(bytes)
    }
    /// `bytes` bytes that somebody else owns, kept alive by `owner`.
    ///
    /// # Safety
    /// The contract of [`Tensor::from_raw`](crate::Tensor::from_raw).
    unsafe fn borrow(&self, _start: NonNull<u8>, _bytes: usize, _owner: Owner) -> Result<MemoryAt> {
        Err(no_borrowing(self.kind().name()))
    }
    /// `offset + bytes.len()` is within the allocation.
    fn upload(&self, memory: &dyn Memory, offset: usize, bytes: &[u8]) -> Result<()>;
    /// `offset + out.len()` is within the allocation; waits for committed work.
    fn download(&self, memory: &dyn Memory, offset: usize, out: &mut [u8]) -> Result<()>;
    /// Starts a download that begins after committed work, and does not wait for it. `None` if the device has no
    /// asynchronous transfer, or no memory for one. `offset + bytes` is within the allocation.
    fn start_download(&self, _memory: &dyn Memory, _offset: usize, _bytes: usize) -> Result<Option<Box<dyn Transfer>>> {
        Ok(None)
    }
    /// The number by which other devices of its kind identify this one ([`Backend::share_with`]).
    fn number(&self) -> Option<usize> {
        None
    }
    /// Lets kernels of other devices of the kind, by number, access all memory of this one, now and later.
    fn share_with(&self, _others: &[usize]) -> Result<()> {
        Err(no_peers(self.kind()))
    }
    /// Zeroed host memory, which has an address, and which kernels of all devices of the kind access.
    fn allocate_host(&self, _bytes: usize) -> Result<Box<dyn Memory>> {
        Err(no_peers(self.kind()))
    }
    /// Starts a pass.
    fn begin(self: Arc<Self>) -> Result<Box<dyn Pass>>;
    /// Prepares calls for replay.
    fn capture(self: Arc<Self>, calls: Vec<Call>) -> Result<Box<dyn Replay>>;
    fn memory(&self) -> Result<MemoryInfo>;
    /// Returns unused memory to the system.
    fn trim(&self) -> Result<()>;
    /// The kernels that were compiled or rejected so far.
    fn kernels(&self) -> Vec<KernelReport> {
        Vec::new()
    }
    /// The kernel that this attention call selects, and the reason.
    fn explain_attend(&self, call: &attend::Call) -> attend::Explanation;
}

/// The error of a device that uses no memory of other libraries.
pub(crate) fn no_borrowing(device: &'static str) -> Error {
    let reason = "tensors of other libraries can be used in place on the CPU and on CUDA only".to_string();
    Error::Unsupported { op: "from_raw", device, reason }
}

/// The error of a pass that cannot be ordered with a stream.
pub(crate) fn no_streams() -> Error {
    let reason = "only passes of a CUDA device can be ordered with a stream".to_string();
    Error::Unsupported { op: "order_with", device: "this device", reason }
}

fn no_peers(kind: DeviceKind) -> Error {
    let reason = "devices of this kind do not access each other's memory".to_string();
    Error::Unsupported { op: "group", device: kind.name(), reason }
}

/// A pass being recorded. Nothing runs before `commit`, on any device, so that code has the same meaning on all of
/// them.
pub(crate) trait Pass: Send {
    fn submit(&mut self, call: Call) -> Result<()>;
    /// Orders the pass with a stream of another library.
    ///
    /// # Safety
    /// The contract of [`Encoder::order_with`](crate::Encoder::order_with).
    unsafe fn order_with(&mut self, _stream: ForeignStream) -> Result<()> {
        Err(no_streams())
    }
    /// Does the slow work that can fail, such as compiling kernels, before [`Pass::commit`].
    fn prepare(&mut self) -> Result<()> {
        Ok(())
    }
    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>>;
}

/// Committed work that can be waited for.
pub trait Wait: Send {
    /// Waits until the work is done, and returns its error if it failed.
    fn wait(self: Box<Self>) -> Result<()>;
    /// Whether [`Wait::wait`] would return at once.
    fn is_done(&self) -> bool;
}

/// A started transfer to the host.
pub trait Transfer: Send {
    /// Waits until the transfer is done and writes its bytes to `out`, whose length matches.
    fn finish(self: Box<Self>, out: &mut [u8]) -> Result<()>;
    /// Whether [`Transfer::finish`] would return at once.
    fn is_done(&self) -> bool;
}

/// Captured work.
pub trait Replay: Send {
    /// Runs the work again; returns `None` if it is already done.
    fn replay(&self) -> Result<Option<Box<dyn Wait>>>;
}
