//! Page-locked host memory, through which the stream copies small tensors while the host continues.

use std::{
    ptr::null_mut,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::sys as cu;

use super::driver::{CudaDevice, DriverError, driver};

/// Bytes of the smallest page-locked block.
const MIN_LOCKED: usize = 4 << 10;
/// Maximum cached blocks. If the stream uses all of them, copies do not use page-locked memory.
const MAX_LOCKED: usize = 64;

/// Page-locked blocks that no transfer holds. The stream may still use them.
#[derive(Default)]
pub(super) struct LockedPool(Mutex<Vec<LockedMemory>>);

impl LockedPool {
    /// Memory that the stream no longer uses. `None` if the driver has no more, or if the stream uses every block.
    ///
    /// [`LockedPool::give`] returns it, also while a copy still runs. The device's context must be current.
    pub(super) fn take(&self, bytes: usize) -> Option<LockedMemory> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Blocks return in the order of the stream, so only the first of each size is queried: loaders of many threads
        // wait for this lock.
        let mut min_bytes = bytes;
        loop {
            let fitting = free.iter().enumerate().filter(|(_, memory)| memory.bytes >= min_bytes);
            let Some((index, memory)) = fitting.min_by_key(|(_, memory)| memory.bytes) else { break };
            if memory.is_done() {
                return Some(free.remove(index));
            }
            min_bytes = memory.bytes.saturating_add(1);
        }
        if free.len() >= MAX_LOCKED {
            return None;
        }
        drop(free);
        let size = bytes.checked_next_power_of_two()?.max(MIN_LOCKED);
        let memory = LockedMemory::new(size);
        memory.inspect_err(|failure| tracing::debug!(%failure, "no page-locked host memory")).ok()
    }

    pub(super) fn give(&self, memory: LockedMemory) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// Page-locked host memory, and the point in the stream after which no copy uses it. Never freed: the device keeps it.
pub(super) struct LockedMemory {
    pub address: *mut u8,
    bytes: usize,
    done: cu::CUevent,
}

// SAFETY: only the owner uses the memory; events may be used from any thread.
unsafe impl Send for LockedMemory {}

impl LockedMemory {
    /// The context must be current.
    fn new(bytes: usize) -> Result<LockedMemory, DriverError> {
        let (mut address, mut done) = (null_mut(), null_mut());
        // SAFETY: both are what the functions fill. The event is complete until it is recorded.
        unsafe {
            driver!(cuEventCreate(&mut done, cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32))?;
            if let Err(failure) = driver!(cuMemAllocHost_v2(&mut address, bytes)) {
                let _ = driver!(cuEventDestroy_v2(done));
                return Err(failure);
            }
        }
        Ok(LockedMemory { address: address.cast(), bytes, done })
    }

    /// Whether no copy uses it. False if the device has failed. The context must be current.
    fn is_done(&self) -> bool {
        // SAFETY: the event is alive.
        unsafe { driver!(cuEventQuery(self.done)) }.is_ok()
    }

    /// Marks the end of the work enqueued in a stream. The context must be current.
    pub(super) fn record(&self, stream: cu::CUstream) -> Result<(), DriverError> {
        // SAFETY: both are alive and of the same context.
        unsafe { driver!(cuEventRecord(self.done, stream)) }
    }
}

/// A copy to the host that has been enqueued in the stream.
pub(super) struct CudaDownload {
    /// Present until it is dropped.
    memory: Option<LockedMemory>,
    bytes: usize,
    gpu: Arc<CudaDevice>,
}

impl CudaDownload {
    /// A copy of `bytes` bytes to `memory`, after which the event of `memory` has been recorded.
    pub(super) fn new(memory: LockedMemory, bytes: usize, gpu: Arc<CudaDevice>) -> CudaDownload {
        CudaDownload { memory: Some(memory), bytes, gpu }
    }

    /// Waits for the copy, and writes its bytes.
    ///
    /// Panics if `out` has another number of bytes than the copy.
    pub(super) fn finish(self, out: &mut [u8]) -> Result<(), DriverError> {
        let Some(memory) = &self.memory else { return Ok(()) };
        assert_eq!(out.len(), self.bytes, "the caller knows the length");
        let _entered = self.gpu.enter()?;
        // SAFETY: the event is alive.
        unsafe { driver!(cuEventSynchronize(memory.done)) }?;
        // SAFETY: the copy has finished; the block holds at least `out.len()` bytes and is not shared.
        unsafe { std::ptr::copy_nonoverlapping(memory.address, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Whether the copy has finished, or the device has failed.
    pub(super) fn is_done(&self) -> bool {
        let Some(memory) = &self.memory else { return true };
        // SAFETY: the event is alive.
        let asked = self.gpu.enter().and_then(|_entered| unsafe { driver!(cuEventQuery(memory.done)) });
        !asked.is_err_and(DriverError::is_not_ready)
    }
}

impl Drop for CudaDownload {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.gpu.locked.give(memory);
        }
    }
}
