//! Memory and streams of other libraries, such as PyTorch, which share the primary context.

use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use cudarc::driver::sys as cu;

use super::{
    driver::{CudaDevice, CudaEvent, CudaMemory, DriverError, driver, fault},
    stream_order::StreamId,
};
use crate::{
    Error, Result,
    gpu::{ForeignStream, Owner},
};

/// The unit in which kernels copy, and by which they select their loads.
const UNIT: usize = 16;

/// Memory that another library owns.
pub(super) struct Borrow {
    _owner: Owner,
    /// Whether work for whose end only this device's stream waits may use the memory.
    used_in_stream: AtomicBool,
}

impl Borrow {
    /// Waits for the work that may use the memory, so that its owner can be dropped. Work that is ordered with a stream
    /// of the owner needs no wait: the owner reuses the memory in this stream's order.
    pub(super) fn wait(&self, gpu: &CudaDevice) {
        if self.used_in_stream.load(Ordering::Relaxed)
            && let Err(failure) = gpu.enter().and_then(|_entered| gpu.synchronise())
        {
            tracing::debug!(%failure, "a failed device no longer uses borrowed memory");
        }
    }
}

impl CudaMemory {
    /// Work in the device's stream uses the memory, and no other stream waits for it.
    pub(super) fn used_in_stream(&self) {
        if let Some(borrow) = &self.borrow {
            borrow.used_in_stream.store(true, Ordering::Relaxed);
        }
    }
}

impl CudaDevice {
    /// `bytes` bytes of another library from `start` on, as memory that begins at a multiple of [`UNIT`], and the
    /// position of `start` in it.
    pub(super) fn borrow(self: &Arc<Self>, start: NonNull<u8>, bytes: usize, owner: Owner) -> (CudaMemory, usize) {
        let start = start.addr().get();
        let offset = start % UNIT;
        let borrow = Borrow { _owner: owner, used_in_stream: AtomicBool::new(false) };
        let (address, bytes) = ((start - offset) as u64, bytes + offset);
        (CudaMemory { address, bytes, host: None, borrow: Some(borrow), gpu: self.clone() }, offset)
    }
}

/// A stream of another library, in which a pass runs.
pub(super) struct OtherStream {
    stream: cu::CUstream,
    id: StreamId,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for OtherStream {}

impl OtherStream {
    /// # Safety
    /// The stream is of the device's context, and exists as long as this.
    ///
    /// # Errors
    /// `Unsupported` while it is captured: the pass would become a part of the capture.
    pub(super) unsafe fn new(gpu: &CudaDevice, stream: ForeignStream) -> Result<OtherStream> {
        let stream = stream.0.cast();
        let _entered = gpu.enter().map_err(fault)?;
        let mut status = cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream exists; `status` is what the function fills. It fails for the default stream while another
        // stream is captured.
        let asked = unsafe { driver!(cuStreamIsCapturing(stream, &mut status)) };
        if asked.is_err() || status != cu::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            let reason = asked.map_or_else(|failure| failure.to_string(), |()| "the stream is captured".to_string());
            return Err(Error::Unsupported { op: "order_with", device: "cuda", reason });
        }
        let mut id = 0;
        // SAFETY: the stream exists; `id` is what the function fills.
        unsafe { driver!(cuStreamGetId(stream, &mut id)) }.map_err(fault)?;
        Ok(OtherStream { stream, id })
    }

    /// The stream, whose later work begins after all work of the device. The context must be current.
    pub(super) fn enter(&self, gpu: &Arc<CudaDevice>) -> std::result::Result<cu::CUstream, DriverError> {
        gpu.enter_stream(self.stream, self.id).map(|()| self.stream)
    }

    /// An event after the work that the stream has now, before all later work of the device. The context must be
    /// current.
    pub(super) fn leave(&self, gpu: &Arc<CudaDevice>) -> std::result::Result<Arc<CudaEvent>, DriverError> {
        let done = Arc::new(CudaEvent::after(gpu, self.stream)?);
        gpu.leave_stream(done.clone());
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::c_void, ptr::null_mut};

    use super::*;
    use crate::{DType, Device, Encoder, Tensor, ops};

    const ELEMENTS: usize = 1 << 20;

    /// Another user of the GPU: its stream, and memory that is used in the order of this stream.
    struct OtherLibrary {
        gpu: Arc<CudaDevice>,
        stream: cu::CUstream,
    }

    // SAFETY: streams may be used from any thread.
    unsafe impl Send for OtherLibrary {}
    // SAFETY: as above.
    unsafe impl Sync for OtherLibrary {}

    /// Counts the tensors that have memory.
    type Count = Arc<()>;

    impl OtherLibrary {
        fn new() -> Option<(Device, OtherLibrary)> {
            let device = Device::cuda(0).inspect_err(|why| eprintln!("{why}")).ok()?;
            let gpu = Arc::new(CudaDevice::open(0).unwrap());
            let (entered, mut stream) = (gpu.enter().unwrap(), null_mut());
            let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the function fills `stream`.
            unsafe { driver!(cuStreamCreate(&mut stream, flags)) }.unwrap();
            drop(entered);
            Some((device, OtherLibrary { gpu, stream }))
        }

        fn allocate(&self, bytes: usize) -> u64 {
            let _entered = self.gpu.enter().unwrap();
            let mut address = 0;
            // SAFETY: the function fills `address`.
            unsafe { driver!(cuMemAlloc_v2(&mut address, bytes)) }.unwrap();
            address
        }

        /// Keeps the stream busy for some milliseconds.
        fn delay(&self, scratch: u64, bytes: usize) {
            let _entered = self.gpu.enter().unwrap();
            for _ in 0..8 {
                // SAFETY: the caller's range.
                unsafe { driver!(cuMemsetD8Async(scratch, 0, bytes, self.stream)) }.unwrap();
            }
        }

        fn fill(&self, address: u64, value: f32) {
            let _entered = self.gpu.enter().unwrap();
            // SAFETY: the memory has this number of elements.
            unsafe { driver!(cuMemsetD32Async(address, value.to_bits(), ELEMENTS, self.stream)) }.unwrap();
        }

        fn read(&self, address: u64) -> Vec<f32> {
            let _entered = self.gpu.enter().unwrap();
            let mut out = vec![0f32; ELEMENTS];
            // SAFETY: both ranges have this number of elements, and the copy is over when this returns.
            unsafe {
                driver!(cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), address, 4 * ELEMENTS, self.stream)).unwrap();
                driver!(cuStreamSynchronize(self.stream)).unwrap();
            }
            out
        }
    }

    fn tensor(device: &Device, address: u64, elements: usize, owner: &Count) -> Tensor {
        let start = NonNull::new(address as *mut u8).unwrap();
        // SAFETY: the test keeps the memory for its whole life, and orders passes with its stream.
        unsafe { Tensor::from_raw(device, DType::F32, &[elements], start, Box::new(Arc::clone(owner))) }.unwrap()
    }

    /// The library fills `x` in its stream, a pass reads it, and the library reads the result in its stream.
    #[test]
    fn passes_are_ordered_with_a_stream() {
        let Some((device, library)) = OtherLibrary::new() else { return };
        let (x, out) = (library.allocate(4 * ELEMENTS), library.allocate(4 * ELEMENTS));
        let scratch_bytes = 4 << 30;
        let scratch = library.allocate(scratch_bytes);
        let owner = Count::default();
        for round in 0..5 {
            // The first round compiles the kernel, which takes longer than the delay.
            let is_delayed = round > 0;
            library.delay(scratch, scratch_bytes);
            library.fill(out, -1.0);
            library.fill(x, round as f32);
            let (x, result) = (tensor(&device, x, ELEMENTS, &owner), tensor(&device, out, ELEMENTS, &owner));
            let mut enc = device.encoder().unwrap();
            // SAFETY: the stream lives as long as the test.
            unsafe { enc.order_with(library.stream.cast()) }.unwrap();
            ops::softcap(&mut enc, &ops::Softcap::new(&x, 1e6, &result)).unwrap();
            drop((x, result));
            assert_eq!(Arc::strong_count(&owner), 3, "the pass has the memory");
            let pass = enc.commit().unwrap();
            assert_eq!(Arc::strong_count(&owner), 1);
            assert!(!is_delayed || !pass.is_done(), "the host waits for nothing");
            drop(pass);
            let got = library.read(out);
            assert!(got.iter().all(|&y| (y - round as f32).abs() < 1e-3), "round {round}: {}", got[0]);
        }
    }

    /// Passes in two streams of the library, and passes and transfers in the device's own: each needs the one before.
    #[test]
    fn passes_of_all_streams_are_in_one_order() {
        let Some((device, library)) = OtherLibrary::new() else { return };
        let (x, out) = (library.allocate(4 * ELEMENTS), library.allocate(4 * ELEMENTS));
        let scratch_bytes = 4 << 30;
        let scratch = library.allocate(scratch_bytes);
        let owner = Count::default();
        let (source, result) = (tensor(&device, x, ELEMENTS, &owner), tensor(&device, out, ELEMENTS, &owner));
        let zeros = || Tensor::zeros(&device, DType::F32, &[ELEMENTS]).unwrap();
        let between = [zeros(), zeros(), zeros()];
        let pass = |stream: Option<cu::CUstream>, from: &Tensor, to: &Tensor| {
            let mut enc = device.encoder().unwrap();
            if let Some(stream) = stream {
                // SAFETY: the stream lives as long as the test; null is the default stream.
                unsafe { enc.order_with(stream.cast()) }.unwrap();
            }
            ops::softcap(&mut enc, &ops::Softcap::new(from, 1e6, to)).unwrap();
            drop(enc.commit().unwrap());
        };
        for round in 1..8 {
            library.delay(scratch, scratch_bytes);
            library.fill(x, round as f32);
            pass(Some(library.stream), &source, &between[0]);
            // Memory that is freed while a pass uses its neighbours, and used again.
            drop(zeros());
            pass(Some(library.stream), &between[0], &between[1]);
            if round % 2 == 0 {
                pass(None, &between[1], &between[2]);
            } else {
                pass(Some(null_mut()), &between[1], &between[2]);
                assert!((between[2].to_vec::<f32>().unwrap()[ELEMENTS - 1] - round as f32).abs() < 1e-3);
            }
            pass(Some(library.stream), &between[2], &result);
            let got = library.read(out);
            assert!(got.iter().all(|&y| (y - round as f32).abs() < 1e-3), "round {round}: {}", got[0]);
        }
    }

    /// Without a stream, the owner is dropped after the pass that uses the memory.
    #[test]
    fn an_owner_outlives_passes() {
        struct Overwritten(OtherLibrary, u64);
        impl Drop for Overwritten {
            fn drop(&mut self) {
                self.0.fill(self.1, -7.0);
            }
        }
        let Some((device, library)) = OtherLibrary::new() else { return };
        let x = library.allocate(4 * ELEMENTS);
        library.fill(x, 3.0);
        library.read(x);
        let start = NonNull::new(x as *mut u8).unwrap();
        let out = Tensor::zeros(&device, DType::F32, &[ELEMENTS]).unwrap();
        let slow = Tensor::zeros(&device, DType::F32, &[1 << 28]).unwrap();
        let slow_out = Tensor::zeros(&device, DType::F32, &[1 << 28]).unwrap();
        let mut enc = device.encoder().unwrap();
        (0..8).for_each(|_| ops::softcap(&mut enc, &ops::Softcap::new(&slow, 1.0, &slow_out)).unwrap());
        {
            // SAFETY: the memory is never freed; it is overwritten when the owner is dropped.
            let x =
                unsafe { Tensor::from_raw(&device, DType::F32, &[ELEMENTS], start, Box::new(Overwritten(library, x))) };
            ops::softcap(&mut enc, &ops::Softcap::new(&x.unwrap(), 1e6, &out)).unwrap();
        }
        enc.commit().unwrap().wait().unwrap();
        assert!(out.to_vec::<f32>().unwrap().iter().all(|&y| (y - 3.0).abs() < 1e-3));
    }

    /// Tensors may begin anywhere: kernels see the alignment.
    #[test]
    fn borrowed_memory_may_begin_between_units() {
        let Some((device, library)) = OtherLibrary::new() else { return };
        let (x, out) = (library.allocate(4 * ELEMENTS), library.allocate(4 * ELEMENTS));
        for at in 0..5 {
            library.fill(x, 2.0);
            library.fill(out, 0.0);
            let owner = Count::default();
            let (x, result) = (tensor(&device, x + 4 * at, 1001, &owner), tensor(&device, out + 4 * at, 1001, &owner));
            assert_eq!(x.byte_offset(), 4 * at as usize % UNIT);
            let mut enc = device.encoder().unwrap();
            // SAFETY: the stream lives as long as the test.
            unsafe { enc.order_with(library.stream.cast()) }.unwrap();
            ops::softcap(&mut enc, &ops::Softcap::new(&x, 1e6, &result)).unwrap();
            drop(enc.commit().unwrap());
            let got = library.read(out);
            let is_right = |(index, &y): (usize, &f32)| {
                let is_inside = (at as usize..at as usize + 1001).contains(&index);
                (y - if is_inside { 2.0 } else { 0.0 }).abs() < 1e-3
            };
            assert!(got.iter().enumerate().all(is_right), "at {at}");
        }
    }

    #[test]
    fn captures_are_refused() {
        let Some((device, library)) = OtherLibrary::new() else { return };
        let order = |enc: &mut Encoder, stream: *mut c_void| {
            // SAFETY: the stream lives as long as the test.
            let error = unsafe { enc.order_with(stream) }.unwrap_err();
            assert!(matches!(error, Error::Unsupported { op: "order_with", .. }), "{error}");
        };
        Encoder::capture(&device, |enc| {
            order(enc, library.stream.cast());
            Ok(())
        })
        .unwrap();
        let _entered = library.gpu.enter().unwrap();
        let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        unsafe { driver!(cuStreamBeginCapture_v2(library.stream, mode)) }.unwrap();
        order(&mut device.encoder().unwrap(), library.stream.cast());
        let mut graph = null_mut();
        // SAFETY: the function fills `graph`.
        unsafe { driver!(cuStreamEndCapture(library.stream, &mut graph)) }.unwrap();
    }
}
