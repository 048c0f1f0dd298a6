//! The functions of the CUDA driver that the runtime uses. Every status is checked.

use std::{
    ffi::{CStr, c_void},
    ptr::{NonNull, null, null_mut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::sys::{self as cu, CUresult};

use super::{
    foreign::Borrow,
    libraries,
    locked::{CudaDownload, LockedPool},
    stream_order::{StreamId, StreamOrder},
};
use crate::{Error, device::MemoryInfo};

/// A failed call of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DriverError {
    call: &'static str,
    status: CUresult,
}

impl DriverError {
    pub(super) fn is_out_of_memory(self) -> bool {
        self.status == CUresult::CUDA_ERROR_OUT_OF_MEMORY
    }

    /// Whether the status only reports that the work has not finished.
    pub(super) fn is_not_ready(self) -> bool {
        self.status == CUresult::CUDA_ERROR_NOT_READY
    }
}

impl std::fmt::Display for DriverError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = null();
        // SAFETY: the function fills the pointer with a string that lives forever, or fails.
        let known =
            unsafe { cu::cuGetErrorString(self.status, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        let what = if known {
            // SAFETY: see above.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        } else {
            "an unknown status".into()
        };
        write!(f, "{}: {what} ({:?})", self.call, self.status)
    }
}

/// A failure on the device, as the library's error.
pub(super) fn fault(reason: impl ToString) -> Error {
    Error::DeviceFault { device: "cuda".to_string(), reason: reason.to_string() }
}

/// Converts a status to a result.
pub(super) fn check(call: &'static str, status: CUresult) -> Result<(), DriverError> {
    if status == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(DriverError { call, status }) }
}

/// Calls a function of the driver and returns its failure. The caller guarantees valid arguments, in its `unsafe`
/// block.
macro_rules! driver {
    ($name:ident($($arg:expr),* $(,)?)) => {
        $crate::cuda::runtime::driver::check(stringify!($name), ::cudarc::driver::sys::$name($($arg),*))
    };
}
pub(super) use driver;

/// Initialises the driver, and returns the version of CUDA that it supports: 12030 for 12.3.
fn initialise() -> Result<i32, String> {
    if !libraries::has_driver() {
        return Err("the NVIDIA driver (libcuda) cannot be loaded".to_string());
    }
    require(&["cuInit", "cuDriverGetVersion", "cuDeviceGetCount"])?;
    let text = |failure: DriverError| failure.to_string();
    let mut version = 0;
    // SAFETY: the driver is loaded; `version` is what the function fills.
    unsafe {
        driver!(cuInit(0)).map_err(text)?;
        driver!(cuDriverGetVersion(&mut version)).map_err(text)?;
    }
    Ok(version)
}

/// The loaded driver has these functions.
fn require(names: &[&'static str]) -> Result<(), String> {
    match libraries::missing_in_driver(names) {
        Some(name) => Err(format!("the loaded NVIDIA driver (libcuda) has no function {name}")),
        None => Ok(()),
    }
}

/// The number of GPUs. The driver must be initialised.
fn device_count() -> Result<usize, DriverError> {
    let mut count = 0;
    // SAFETY: `count` is what the function fills.
    unsafe { driver!(cuDeviceGetCount(&mut count)) }?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// GPUs that the driver reports; 0 if it cannot be used.
pub(in crate::cuda) fn count() -> usize {
    initialise().ok().and_then(|_| device_count().ok()).unwrap_or(0)
}

/// Maximum events that wait for their next use.
const MAX_EVENTS: usize = 64;

/// A device, its context, its stream, and the memory pool of the stream.
pub(super) struct CudaDevice {
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    pub driver_version: i32,
    pub multiprocessors: usize,
    pub threads_per_block: usize,
    /// Maximum shared memory that a block can request.
    pub shared_bytes: usize,
    pub memory_bytes: usize,
    /// Whether copies read pageable host memory in place, instead of a copy made by the driver.
    reads_host_memory: bool,
    pub device: cu::CUdevice,
    context: cu::CUcontext,
    /// For functions that enqueue nothing in it; [`CudaDevice::stream`] is for work.
    pub own_stream: cu::CUstream,
    /// Keeps an event of the latest pass in another stream, and with it this device, until the own stream gets work.
    order: StreamOrder<CudaEvent>,
    /// Events that nobody has.
    events: Mutex<Vec<cu::CUevent>>,
    pub pool: cu::CUmemoryPool,
    pub locked: LockedPool,
    turn: Mutex<()>,
}

// SAFETY: contexts, streams and pools may be used from any thread; `enter` makes the context current first.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for CudaDevice {}

impl CudaDevice {
    /// Opens a device by its number.
    pub(super) fn open(index: usize) -> Result<CudaDevice, String> {
        let text = |failure: DriverError| failure.to_string();
        let version = initialise()?;
        if version < 12000 {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(format!("the NVIDIA driver supports CUDA {major}.{minor}; 12.0 is needed"));
        }
        // The newest functions that the runtime calls.
        require(&["cuMemAllocFromPoolAsync", "cuLaunchKernelEx", "cuStreamGetId"])?;
        if !libraries::has_nvrtc() {
            return Err(
                "libnvrtc, which compiles the kernels, cannot be loaded: it comes with the CUDA toolkit, or as \
                        the Python package nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for drivers of CUDA 12); \
                        LD_LIBRARY_PATH says where it is"
                    .to_string(),
            );
        }
        let all = device_count().map_err(text)?;
        if index >= all {
            return Err(format!("there is no GPU {index}: the NVIDIA driver reports {all}"));
        }
        let gpu = CudaDevice::numbered(index as i32, version).map_err(text)?;
        // The kernels use tensor cores and asynchronous copies of Ampere or later.
        let (major, minor) = gpu.capability;
        if major < 8 {
            return Err(format!("{} has compute capability {major}.{minor}; 8.0 is needed", gpu.name));
        }
        Ok(gpu)
    }

    fn numbered(index: i32, driver_version: i32) -> Result<CudaDevice, DriverError> {
        use cu::CUdevice_attribute::*;
        let (mut device, mut context, mut name, mut memory_bytes) = (0, null_mut(), [0u8; 256], 0);
        let (mut stream, mut pool) = (null_mut(), null_mut());
        // SAFETY: every pointer is to a local of the type that the function fills; the name has 256 bytes.
        unsafe {
            driver!(cuDeviceGet(&mut device, index))?;
            driver!(cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device))?;
            driver!(cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
            // The primary context, which other CUDA libraries of the process share.
            driver!(cuDevicePrimaryCtxRetain(&mut context, device))?;
            let _entered = enter(context)?;
            let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            driver!(cuStreamCreate(&mut stream, flags))?;
            // A pool of our own keeps freed memory for later allocations until memory runs out.
            let mut props: cu::CUmemPoolProps = std::mem::zeroed();
            props.allocType = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            props.location.type_ = cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
            props.location.id = device;
            driver!(cuMemPoolCreate(&mut pool, &props))?;
            let mut keep = u64::MAX;
            let threshold = cu::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            driver!(cuMemPoolSetAttribute(pool, threshold, (&raw mut keep).cast()))?;
        }
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` is what the function fills.
            unsafe { driver!(cuDeviceGetAttribute(&mut value, attribute, device)) }.map(|()| value)
        };
        let name = CStr::from_bytes_until_nul(&name).map_or_else(|_| "?".into(), CStr::to_string_lossy);
        Ok(CudaDevice {
            name: name.into_owned(),
            capability: (
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            driver_version,
            multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
            threads_per_block: attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)? as usize,
            shared_bytes: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            memory_bytes,
            reads_host_memory: attribute(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)? != 0,
            device,
            context,
            own_stream: stream,
            order: StreamOrder::default(),
            events: Mutex::default(),
            pool,
            locked: LockedPool::default(),
            turn: Mutex::new(()),
        })
    }

    /// Locks the stream: while the guard lives, no other thread enqueues a pass or a transfer, which would see half of
    /// a pass's results. A product of the library may consist of several kernels, which share a workspace.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the context current in this thread while the guard lives. Every other call needs it.
    pub(super) fn enter(&self) -> Result<ContextGuard, DriverError> {
        enter(self.context)
    }

    pub(super) fn memory(&self) -> Result<MemoryInfo, DriverError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        let (mut reserved, mut used) = (0u64, 0u64);
        use cu::CUmemPool_attribute::*;
        // SAFETY: the pool is alive; the functions fill the locals that they are given.
        unsafe {
            driver!(cuMemGetInfo_v2(&mut free, &mut total))?;
            let reserved = (&raw mut reserved).cast();
            driver!(cuMemPoolGetAttribute(self.pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, reserved))?;
            driver!(cuMemPoolGetAttribute(self.pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, (&raw mut used).cast()))?;
        }
        Ok(MemoryInfo { total, free, held: usize::try_from(reserved.saturating_sub(used)).unwrap_or(usize::MAX) })
    }

    /// Returns unused memory of the pool to the driver.
    pub(super) fn trim(&self) -> Result<(), DriverError> {
        let _entered = self.enter()?;
        self.synchronise()?;
        // SAFETY: the pool is alive.
        unsafe { driver!(cuMemPoolTrimTo(self.pool, 0)) }
    }

    /// CudaMemory, in the order of the stream.
    pub(super) fn allocate(self: &Arc<Self>, bytes: usize) -> crate::Result<CudaMemory> {
        let _entered = self.enter().map_err(fault)?;
        // The driver rejects allocations of 0 bytes. Copies in pieces of 16 bytes read the last piece whole, even if
        // only its beginning belongs to a row.
        let size = bytes.max(1).checked_next_multiple_of(16).unwrap_or(usize::MAX);
        if size > self.memory_bytes {
            return Err(self.out_of_memory(bytes));
        }
        let allocate = || {
            let mut address = 0;
            // SAFETY: pool and stream are alive; `address` is what the function fills.
            unsafe { driver!(cuMemAllocFromPoolAsync(&mut address, size, self.pool, self.stream()?)) }.map(|()| address)
        };
        let address = match allocate() {
            Err(failure) if failure.is_out_of_memory() => {
                // Freed memory may be fragmented: return it to the driver and try again.
                self.trim().map_err(fault)?;
                allocate()
            }
            first => first,
        };
        match address {
            Ok(address) => Ok(CudaMemory { address, bytes, host: None, borrow: None, gpu: self.clone() }),
            Err(failure) if failure.is_out_of_memory() => Err(self.out_of_memory(bytes)),
            Err(failure) => Err(fault(failure)),
        }
    }

    /// The error of a failed allocation of `bytes` bytes.
    pub(super) fn out_of_memory(&self, bytes: usize) -> Error {
        Error::OutOfMemory { device: format!("cuda ({})", self.name), bytes }
    }

    /// The stream for new work, after all enqueued passes. The context must be current.
    pub(super) fn stream(&self) -> Result<cu::CUstream, DriverError> {
        self.order.before_work(|pass| self.wait(self.own_stream, pass)).map(|()| self.own_stream)
    }

    /// The stream after all enqueued passes, for functions whose end no later pass awaits. The context must be current.
    pub(super) fn stream_to_end(&self) -> Result<cu::CUstream, DriverError> {
        self.order.before_end(|pass| self.wait(self.own_stream, pass)).map(|()| self.own_stream)
    }

    /// Later work in a stream of another library begins after all enqueued work. The context must be current.
    pub(super) fn enter_stream(self: &Arc<Self>, stream: cu::CUstream, id: StreamId) -> Result<(), DriverError> {
        let join = || self.wait(stream, &CudaEvent::after(self, self.own_stream)?);
        self.order.before_pass(id, |pass| self.wait(self.own_stream, pass), join)
    }

    /// All later work begins after the event, which follows a pass in a stream of another library.
    pub(super) fn leave_stream(&self, pass: Arc<CudaEvent>) {
        self.order.after_pass(pass);
    }

    fn wait(&self, stream: cu::CUstream, event: &CudaEvent) -> Result<(), DriverError> {
        // SAFETY: both are alive; waiting streams do not need the event later.
        unsafe { driver!(cuStreamWaitEvent(stream, event.event, 0)) }
    }

    /// Waits for all enqueued work.
    pub(super) fn synchronise(&self) -> Result<(), DriverError> {
        // SAFETY: the stream lives as long as this.
        unsafe { driver!(cuStreamSynchronize(self.stream_to_end()?)) }
    }

    /// An event after all enqueued work.
    pub(super) fn event(self: &Arc<Self>) -> Result<CudaEvent, DriverError> {
        let _entered = self.enter()?;
        CudaEvent::after(self, self.stream_to_end()?)
    }
}

/// Keeps a context current in this thread. Dropping it restores the previous context, which may belong to another
/// library and another GPU.
#[must_use]
pub(super) struct ContextGuard {
    /// The previous context, if it differs; null if there was none.
    before: Option<cu::CUcontext>,
}

fn enter(context: cu::CUcontext) -> Result<ContextGuard, DriverError> {
    let mut before = null_mut();
    // SAFETY: `before` is what the function fills; the context lives as long as the process.
    unsafe {
        driver!(cuCtxGetCurrent(&mut before))?;
        if before == context {
            return Ok(ContextGuard { before: None });
        }
        driver!(cuCtxSetCurrent(context))?;
    }
    Ok(ContextGuard { before: Some(before) })
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current in this thread.
            if let Err(failure) = unsafe { driver!(cuCtxSetCurrent(before)) } {
                tracing::debug!(%failure, "this thread's context is not the one before");
            }
        }
    }
}

/// A point in the order of a stream.
pub(super) struct CudaEvent {
    pub event: cu::CUevent,
    gpu: Arc<CudaDevice>,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// An event after all work enqueued in a stream of the device's context.
    pub(super) fn after(gpu: &Arc<CudaDevice>, stream: cu::CUstream) -> Result<CudaEvent, DriverError> {
        let _entered = gpu.enter()?;
        let unused = gpu.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let event = match unused {
            Some(event) => event,
            None => new_event()?,
        };
        let event = CudaEvent { event, gpu: gpu.clone() };
        // SAFETY: both are alive and of the same context.
        unsafe { driver!(cuEventRecord(event.event, stream)) }?;
        Ok(event)
    }

    pub(super) fn wait(&self) -> Result<(), DriverError> {
        let _entered = self.gpu.enter()?;
        // SAFETY: the event is alive.
        unsafe { driver!(cuEventSynchronize(self.event)) }
    }

    /// Whether the work before it has finished or failed.
    pub(super) fn is_done(&self) -> bool {
        // SAFETY: the event is alive.
        let asked = self.gpu.enter().and_then(|_entered| unsafe { driver!(cuEventQuery(self.event)) });
        !asked.is_err_and(DriverError::is_not_ready)
    }
}

/// A new event. The context must be current.
fn new_event() -> Result<cu::CUevent, DriverError> {
    let mut event = null_mut();
    // SAFETY: `event` is what the function fills.
    unsafe { driver!(cuEventCreate(&mut event, cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)) }?;
    Ok(event)
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // Streams that wait for the event wait for its latest record at that time, so that it can be recorded again.
        let mut events = self.gpu.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() < MAX_EVENTS {
            events.push(self.event);
            return;
        }
        drop(events);
        // SAFETY: nobody else has the event. Another call reports or has reported the failure.
        unsafe {
            let _ = self.gpu.enter().and_then(|_entered| driver!(cuEventDestroy_v2(self.event)));
        }
    }
}

/// Maximum bytes of an upload that is staged in page-locked memory. For other memory, the driver may wait for the
/// stream before it copies.
const MAX_STAGED: usize = 1 << 20;

/// An allocation, freed in stream order: work enqueued before may still use it.
pub(super) struct CudaMemory {
    pub address: cu::CUdeviceptr,
    pub bytes: usize,
    /// The host's address of the memory, if it is host memory. Host memory is never freed.
    pub host: Option<NonNull<u8>>,
    /// Present if another library owns it.
    pub borrow: Option<Borrow>,
    pub gpu: Arc<CudaDevice>,
}

// SAFETY: the driver may be used from any thread; each use of the host address states why it is valid.
unsafe impl Send for CudaMemory {}
// SAFETY: as above.
unsafe impl Sync for CudaMemory {}

impl CudaMemory {
    pub(super) fn fill_with_zeros(&self) -> Result<(), DriverError> {
        let _entered = self.gpu.enter()?;
        // SAFETY: the range is the allocation.
        unsafe { driver!(cuMemsetD8Async(self.address, 0, self.bytes.max(16), self.gpu.stream()?)) }
    }

    /// Writes in stream order. `bytes` may change after it returns.
    ///
    /// Panics if the range exceeds the allocation.
    pub(super) fn upload(&self, offset: usize, bytes: &[u8]) -> Result<(), DriverError> {
        let to = self.at(offset, bytes.len());
        self.used_in_stream();
        let _entered = self.gpu.enter()?;
        if bytes.len() <= MAX_STAGED
            && let Some(staged) = self.gpu.locked.take(bytes.len())
        {
            // SAFETY: the block holds at least `bytes.len()` bytes and is not shared.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), staged.address, bytes.len()) };
            let _turn = self.gpu.turn();
            let stream = self.gpu.stream()?;
            // SAFETY: both ranges exist, and the block is not written before the event that is recorded below.
            let begun =
                unsafe { driver!(cuMemcpyHtoDAsync_v2(to, staged.address.cast::<c_void>(), bytes.len(), stream)) };
            let recorded = begun.and(staged.record(stream));
            // Without the event, nothing reports when the block is free.
            if recorded.is_ok() {
                self.gpu.locked.give(staged);
            }
            return recorded;
        }
        let turn = self.gpu.turn();
        let stream = self.gpu.stream()?;
        // SAFETY: both ranges exist. The driver has copied pageable host memory when it returns; where it reads later,
        // the stream is synchronised below.
        unsafe { driver!(cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast::<c_void>(), bytes.len(), stream)) }?;
        drop(turn);
        if self.gpu.reads_host_memory || is_known(bytes) { self.gpu.synchronise() } else { Ok(()) }
    }

    /// Reads after all work enqueued in the stream.
    ///
    /// Panics if the range exceeds the allocation.
    pub(super) fn download(&self, offset: usize, out: &mut [u8]) -> Result<(), DriverError> {
        let from = self.at(offset, out.len());
        let _entered = self.gpu.enter()?;
        let turn = self.gpu.turn();
        let stream = self.gpu.stream()?;
        // SAFETY: both ranges exist, and the copy is over when this returns.
        let begun = unsafe { driver!(cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), from, out.len(), stream)) };
        drop(turn);
        begun.and(self.gpu.synchronise())
    }

    /// Reads after all work enqueued in the stream, without waiting for it. `None` without page-locked host memory.
    ///
    /// Panics if the range exceeds the allocation.
    pub(super) fn start_download(&self, offset: usize, bytes: usize) -> Result<Option<CudaDownload>, DriverError> {
        let from = self.at(offset, bytes);
        self.used_in_stream();
        let _entered = self.gpu.enter()?;
        let Some(memory) = self.gpu.locked.take(bytes) else { return Ok(None) };
        let _turn = self.gpu.turn();
        let stream = self.gpu.stream()?;
        // SAFETY: both ranges exist; the block is not given to others before the event that is recorded below.
        let begun = unsafe { driver!(cuMemcpyDtoHAsync_v2(memory.address.cast::<c_void>(), from, bytes, stream)) };
        begun.and(memory.record(stream))?;
        Ok(Some(CudaDownload::new(memory, bytes, self.gpu.clone())))
    }

    fn at(&self, offset: usize, len: usize) -> cu::CUdeviceptr {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.bytes), "the caller keeps to the allocation");
        self.address + offset as u64
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if let Some(borrow) = &self.borrow {
            borrow.wait(&self.gpu);
            return;
        }
        if self.host.is_some() {
            return;
        }
        let freed = self.gpu.enter().and_then(|_entered| {
            let stream = self.gpu.stream_to_end()?;
            // SAFETY: nobody else has the allocation. Another call reports or has reported the failure.
            unsafe { driver!(cuMemFreeAsync(self.address, stream)) }
        });
        if let Err(failure) = freed {
            tracing::debug!(%failure, "an allocation was not freed");
        }
    }
}

/// Whether the driver knows this host memory, page-locked or managed, and reads it in place.
fn is_known(bytes: &[u8]) -> bool {
    let is_known = |byte: &u8| {
        let mut kind = 0u32;
        let mut attribute = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        let mut filled = (&raw mut kind).cast();
        let address = std::ptr::from_ref(byte).addr() as u64;
        // The function takes any address and returns kind 0 for other memory; its variant for one attribute would
        // report an error. SAFETY: one attribute, and `kind` is what the function fills.
        let asked = unsafe { driver!(cuPointerGetAttributes(1, &mut attribute, &mut filled, address)) };
        asked.is_ok() && kind != 0
    };
    // Part of an allocation may be page-locked.
    bytes.first().is_some_and(is_known) || bytes.last().is_some_and(is_known)
}

/// A loaded kernel; never unloaded.
#[derive(Clone, Copy)]
pub(super) struct CudaFunction(pub cu::CUfunction);

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for CudaFunction {}
// SAFETY: as above.
unsafe impl Sync for CudaFunction {}

impl CudaFunction {
    /// Loads machine code and finds a kernel in it, which may then use all of a block's shared memory.
    pub(super) fn load(gpu: &CudaDevice, code: &[u8], name: &CStr) -> Result<CudaFunction, DriverError> {
        use cu::CUfunction_attribute::*;
        let _entered = gpu.enter()?;
        // PTX is text that ends with NUL. Machine code contains its size.
        let mut code = code.to_vec();
        code.push(0);
        let (mut module, mut function, mut static_bytes) = (null_mut(), null_mut(), 0);
        // SAFETY: the image is what the compiler made, and outlives the call; `module` is a local.
        unsafe { driver!(cuModuleLoadData(&mut module, code.as_ptr().cast())) }?;
        let mut find = || {
            // SAFETY: the module is loaded; the other pointers are to locals.
            unsafe {
                driver!(cuModuleGetFunction(&mut function, module, name.as_ptr()))?;
                driver!(cuFuncGetAttribute(&mut static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))?;
                let most = gpu.shared_bytes as i32 - static_bytes;
                driver!(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most))
            }
        };
        if let Err(failure) = find() {
            // SAFETY: nothing uses the module. A later attempt loads it again.
            let _ = unsafe { driver!(cuModuleUnload(module)) };
            return Err(failure);
        }
        Ok(CudaFunction(function))
    }

    /// Whether the device can run a cluster of `blocks` blocks, each with the maximum shared memory of a block.
    pub(super) fn fits_as_cluster(self, gpu: &CudaDevice, blocks: u32) -> Result<bool, DriverError> {
        use cu::{CUfunction_attribute::*, CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION};
        let _entered = gpu.enter()?;
        let (mut clusters, mut most) = (0, 0);
        // SAFETY: a launch attribute may be all zeros.
        let mut attribute: cu::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attribute.value.clusterDim = cu::CUlaunchAttributeValue_union__bindgen_ty_1 { x: blocks, y: 1, z: 1 };
        // SAFETY: all pointers are to locals that outlive the calls.
        unsafe {
            driver!(cuFuncGetAttribute(&mut most, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.0))?;
            let config = cu::CUlaunchConfig {
                gridDimX: blocks,
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: 640,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: most as u32,
                hStream: gpu.own_stream,
                attrs: &raw mut attribute,
                numAttrs: 1,
            };
            driver!(cuOccupancyMaxActiveClusters(&mut clusters, self.0, &config))?;
        }
        Ok(clusters > 0)
    }
}

/// A captured sequence of work.
pub(super) struct CudaGraph {
    exec: cu::CUgraphExec,
    gpu: Arc<CudaDevice>,
}

// SAFETY: graphs may be used from any thread, one at a time, which the owner ensures.
unsafe impl Send for CudaGraph {}

impl CudaGraph {
    /// Captures the work that `record` enqueues in its stream.
    pub(super) fn capture(
        gpu: &Arc<CudaDevice>,
        record: impl FnOnce(cu::CUstream) -> crate::Result<()>,
    ) -> crate::Result<CudaGraph> {
        let _entered = gpu.enter().map_err(fault)?;
        let (mut stream, mut graph, mut exec) = (null_mut(), null_mut(), null_mut());
        // SAFETY: every pointer is to a local; the stream is private to this function, and is destroyed in the end.
        unsafe {
            driver!(cuStreamCreate(&mut stream, cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32)).map_err(fault)?;
            let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            let recorded = match driver!(cuStreamBeginCapture_v2(stream, mode)) {
                Ok(()) => {
                    let recorded = record(stream);
                    // Ends the capture even if recording failed.
                    let ended = driver!(cuStreamEndCapture(stream, &mut graph));
                    recorded.and(ended.map_err(fault))
                }
                Err(failure) => Err(fault(failure)),
            };
            let made = recorded.and_then(|()| driver!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)).map_err(fault));
            if !graph.is_null() {
                let _ = driver!(cuGraphDestroy(graph));
            }
            let _ = driver!(cuStreamDestroy_v2(stream));
            made?;
        }
        Ok(CudaGraph { exec, gpu: gpu.clone() })
    }

    /// Enqueues it in the stream.
    pub(super) fn launch(&self) -> Result<(), DriverError> {
        let _entered = self.gpu.enter()?;
        // SAFETY: graph and stream are alive.
        unsafe { driver!(cuGraphLaunch(self.exec, self.gpu.stream()?)) }
    }
}

/// A second stream of a captured graph, for branches.
pub(super) struct SideStream {
    pub stream: cu::CUstream,
    event: cu::CUevent,
    gpu: Arc<CudaDevice>,
}

impl SideStream {
    pub(super) fn new(gpu: &Arc<CudaDevice>) -> Result<SideStream, DriverError> {
        let _entered = gpu.enter()?;
        let mut side = SideStream { stream: null_mut(), event: null_mut(), gpu: gpu.clone() };
        // SAFETY: every pointer is to a local; `drop` destroys what was made.
        unsafe {
            driver!(cuStreamCreate(&mut side.stream, cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
            driver!(cuEventCreate(&mut side.event, cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32))?;
        }
        Ok(side)
    }

    /// Later work in this stream follows the work already in `main`.
    pub(super) fn fork(&self, main: cu::CUstream) -> Result<(), DriverError> {
        // SAFETY: streams and event are alive.
        unsafe {
            driver!(cuEventRecord(self.event, main))
                .and_then(|()| driver!(cuStreamWaitEvent(self.stream, self.event, 0)))
        }
    }

    /// Later work in `main` follows the work already in this stream.
    pub(super) fn join(&self, main: cu::CUstream) -> Result<(), DriverError> {
        // SAFETY: as above.
        unsafe {
            driver!(cuEventRecord(self.event, self.stream))
                .and_then(|()| driver!(cuStreamWaitEvent(main, self.event, 0)))
        }
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: nobody else has them; the driver keeps what is captured.
        unsafe {
            let _ = self.gpu.enter().map(|_entered| {
                if !self.event.is_null() {
                    let _ = driver!(cuEventDestroy_v2(self.event));
                }
                if !self.stream.is_null() {
                    let _ = driver!(cuStreamDestroy_v2(self.stream));
                }
            });
        }
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // SAFETY: nobody else has it; the driver keeps what still runs until it is done.
        unsafe {
            let _ = self.gpu.enter().and_then(|_entered| driver!(cuGraphExecDestroy(self.exec)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `None` without a GPU.
    fn gpu() -> Option<Arc<CudaDevice>> {
        CudaDevice::open(0).inspect_err(|why| eprintln!("{why}")).ok().map(Arc::new)
    }

    fn current() -> cu::CUcontext {
        let mut context = null_mut();
        // SAFETY: `context` is what the function fills.
        unsafe { driver!(cuCtxGetCurrent(&mut context)) }.unwrap();
        context
    }

    #[test]
    fn a_thread_keeps_its_context() {
        let Some(gpu) = gpu() else { return };
        assert!(current().is_null());
        let memory = gpu.allocate(64).unwrap();
        assert!(current().is_null());
        memory.fill_with_zeros().unwrap();
        memory.upload(0, &[1; 64]).unwrap();
        memory.download(0, &mut [0; 64]).unwrap();
        gpu.event().unwrap().wait().unwrap();
        assert!(current().is_null());
        {
            let _entered = gpu.enter().unwrap();
            let _again = gpu.enter().unwrap();
            assert_eq!(current(), gpu.context);
            drop(memory);
            assert_eq!(current(), gpu.context);
        }
        assert!(current().is_null());
    }

    /// A started download sees the memory as of that point in the stream, also if its block is reused.
    #[test]
    fn downloads_are_in_the_order_of_the_stream() {
        let Some(gpu) = gpu() else { return };
        let memory = gpu.allocate(1 << 20).unwrap();
        let busy = gpu.allocate(4 << 30).unwrap();
        let mut downloads = Vec::new();
        for round in 0..20u8 {
            // Delays what follows, and leaves some downloads without a reader.
            busy.fill_with_zeros().unwrap();
            memory.upload(0, &[round; 5000]).unwrap();
            let download = memory.start_download(1, 4999 - usize::from(round)).unwrap().unwrap();
            if round % 3 == 0 {
                drop(download);
            } else {
                downloads.push((round, download));
            }
        }
        assert!(downloads.iter().any(|(_, download)| !download.is_done()));
        for (round, download) in downloads {
            let mut got = vec![0; 4999 - usize::from(round)];
            download.finish(&mut got).unwrap();
            assert!(got.iter().all(|&byte| byte == round), "round {round}");
        }
        assert!(gpu.locked.len() <= 40, "{}", gpu.locked.len());
    }

    #[test]
    fn host_memory_may_change_after_an_upload() {
        let Some(gpu) = gpu() else { return };
        let len = 32 << 20;
        let memory = gpu.allocate(len).unwrap();
        let busy = gpu.allocate(4 << 30).unwrap();
        let _entered = gpu.enter().unwrap();
        let mut locked = null_mut();
        // SAFETY: `locked` is what the function fills.
        unsafe { driver!(cuMemAllocHost_v2(&mut locked, len)) }.unwrap();
        // SAFETY: it holds `len` bytes and is not shared.
        let locked_bytes = unsafe { std::slice::from_raw_parts_mut(locked.cast::<u8>(), len) };
        let mut ordinary = vec![0; len];
        for bytes in [&mut *locked_bytes, &mut ordinary[..]] {
            bytes.fill(1);
            // Delays the copy.
            (0..20).for_each(|_| busy.fill_with_zeros().unwrap());
            memory.upload(0, bytes).unwrap();
            bytes.fill(2);
            let mut got = vec![0; len];
            memory.download(0, &mut got).unwrap();
            assert!(got.iter().all(|&byte| byte == 1));
        }
        // SAFETY: nothing uses it any more.
        unsafe { driver!(cuMemFreeHost(locked)) }.unwrap();
    }
}
