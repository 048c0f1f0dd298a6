//! The few parts of the CUDA driver that the runtime uses, with every status checked.

use std::{
    ffi::{CStr, c_void},
    ptr::{null, null_mut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::sys::{self as cu, CUresult};

use super::libraries;
use crate::Error;

/// What a call of the driver answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    call: &'static str,
    status: CUresult,
}

impl Failure {
    pub(super) fn is_out_of_memory(self) -> bool {
        self.status == CUresult::CUDA_ERROR_OUT_OF_MEMORY
    }
}

impl std::fmt::Display for Failure {
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

/// What went wrong on the device, as the library's error.
pub(super) fn fault(reason: impl ToString) -> Error {
    Error::DeviceFault { device: "cuda".to_string(), reason: reason.to_string() }
}

/// A status as a result.
pub(super) fn check(call: &'static str, status: CUresult) -> Result<(), Failure> {
    if status == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(Failure { call, status }) }
}

/// Calls a function of the driver and returns its failure. The caller vouches for the arguments: `unsafe` stands there.
macro_rules! driver {
    ($name:ident($($arg:expr),* $(,)?)) => {
        $crate::cuda::driver::check(stringify!($name), ::cudarc::driver::sys::$name($($arg),*))
    };
}
pub(super) use driver;

/// A device, its context, the one stream that all work goes through, and the memory pool of that stream.
pub(super) struct Gpu {
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    pub driver_version: i32,
    pub multiprocessors: usize,
    pub threads_per_block: usize,
    /// The most shared memory of a block, when it is asked for.
    pub shared_bytes: usize,
    pub memory_bytes: usize,
    /// Whether copies read any host memory where it is, and not what the driver has taken of it.
    reads_host_memory: bool,
    context: cu::CUcontext,
    pub stream: cu::CUstream,
    pool: cu::CUmemoryPool,
    turn: Mutex<()>,
}

// SAFETY: contexts, streams and pools may be used from any thread; `enter` makes the context current first.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// The first device, or why there is none.
    pub(super) fn open() -> Result<Gpu, String> {
        if !libraries::has_driver() {
            return Err("the NVIDIA driver (libcuda) cannot be loaded".to_string());
        }
        let has = |names: &[&'static str]| match libraries::missing_in_driver(names) {
            Some(name) => Err(format!("what is loaded as the NVIDIA driver (libcuda) has no function {name}")),
            None => Ok(()),
        };
        has(&["cuInit", "cuDriverGetVersion"])?;
        let text = |failure: Failure| failure.to_string();
        let mut version = 0;
        // SAFETY: the driver is loaded; `version` is what the function fills.
        unsafe {
            driver!(cuInit(0)).map_err(text)?;
            driver!(cuDriverGetVersion(&mut version)).map_err(text)?;
        }
        if version < 12000 {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(format!("the NVIDIA driver supports CUDA {major}.{minor}; 12.0 is needed"));
        }
        // Of those that came with later versions than the first ones.
        has(&["cuMemAllocFromPoolAsync", "cuLaunchKernelEx"])?;
        if !libraries::has_nvrtc() {
            return Err(
                "libnvrtc, which compiles the kernels, cannot be loaded: it comes with the CUDA toolkit, or as \
                        the Python package nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for drivers of CUDA 12); \
                        LD_LIBRARY_PATH says where it is"
                    .to_string(),
            );
        }
        let gpu = Gpu::first(version).map_err(text)?;
        // The kernels multiply with matrix units, and copy behind arithmetic, as GPUs do from Ampere on.
        let (major, minor) = gpu.capability;
        if major < 8 {
            return Err(format!("{} has compute capability {major}.{minor}; 8.0 is needed", gpu.name));
        }
        Ok(gpu)
    }

    fn first(driver_version: i32) -> Result<Gpu, Failure> {
        use cu::CUdevice_attribute::*;
        let (mut device, mut context, mut name, mut memory_bytes) = (0, null_mut(), [0u8; 256], 0);
        let (mut stream, mut pool) = (null_mut(), null_mut());
        // SAFETY: every pointer is to a local of the type that the function fills; the name has 256 bytes.
        unsafe {
            driver!(cuDeviceGet(&mut device, 0))?;
            driver!(cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device))?;
            driver!(cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
            // The primary context, which other CUDA libraries of this process use, too.
            driver!(cuDevicePrimaryCtxRetain(&mut context, device))?;
            let _entered = enter(context)?;
            let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            driver!(cuStreamCreate(&mut stream, flags))?;
            // A pool of our own keeps what is freed for the next allocation, until memory is short.
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
        Ok(Gpu {
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
            context,
            stream,
            pool,
            turn: Mutex::new(()),
        })
    }

    /// While the guard lives, no other thread gives the stream a pass or a transfer: what stands between two launches of one would see half of it,
    /// and a library's product may be several kernels, with a workspace that all products share.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the context current in this thread, for as long as the guard lives: around every other call.
    pub(super) fn enter(&self) -> Result<Entered, Failure> {
        enter(self.context)
    }

    /// Memory, in the order of the stream.
    pub(super) fn allocate(self: &Arc<Self>, bytes: usize) -> crate::Result<Memory> {
        let _entered = self.enter().map_err(fault)?;
        // The driver refuses to allocate nothing.
        let size = bytes.max(16);
        if size > self.memory_bytes {
            return Err(self.out_of_memory(bytes));
        }
        let allocate = || {
            let mut address = 0;
            // SAFETY: pool and stream are alive; `address` is what the function fills.
            unsafe { driver!(cuMemAllocFromPoolAsync(&mut address, size, self.pool, self.stream)) }.map(|()| address)
        };
        let address = match allocate() {
            Err(failure) if failure.is_out_of_memory() => {
                // What was freed may be in pieces that do not fit: give them back, and ask once more.
                self.synchronise().map_err(fault)?;
                // SAFETY: the pool is alive.
                unsafe { driver!(cuMemPoolTrimTo(self.pool, 0)) }.map_err(fault)?;
                allocate()
            }
            first => first,
        };
        match address {
            Ok(address) => Ok(Memory { address, bytes, gpu: self.clone() }),
            Err(failure) if failure.is_out_of_memory() => Err(self.out_of_memory(bytes)),
            Err(failure) => Err(fault(failure)),
        }
    }

    /// The error of too little memory for so many bytes.
    pub(super) fn out_of_memory(&self, bytes: usize) -> Error {
        Error::OutOfMemory { device: format!("cuda ({})", self.name), bytes }
    }

    /// Waits for all that the stream was given.
    pub(super) fn synchronise(&self) -> Result<(), Failure> {
        // SAFETY: the stream lives as long as this.
        unsafe { driver!(cuStreamSynchronize(self.stream)) }
    }

    /// An event behind all that the stream was given.
    pub(super) fn event(self: &Arc<Self>) -> Result<Event, Failure> {
        let _entered = self.enter()?;
        let mut event = null_mut();
        // SAFETY: `event` is what the function fills.
        unsafe { driver!(cuEventCreate(&mut event, cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)) }?;
        let event = Event { event, gpu: self.clone() };
        // SAFETY: both are alive and of the same context.
        unsafe { driver!(cuEventRecord(event.event, self.stream)) }?;
        Ok(event)
    }
}

/// A context that is current in this thread. Afterwards the thread has the one again that it had before: it may belong to another
/// library, and to another GPU.
#[must_use]
pub(super) struct Entered {
    /// If that is another one; null where there was none.
    before: Option<cu::CUcontext>,
}

fn enter(context: cu::CUcontext) -> Result<Entered, Failure> {
    let mut before = null_mut();
    // SAFETY: `before` is what the function fills; the context lives as long as the process.
    unsafe {
        driver!(cuCtxGetCurrent(&mut before))?;
        if before == context {
            return Ok(Entered { before: None });
        }
        driver!(cuCtxSetCurrent(context))?;
    }
    Ok(Entered { before: Some(before) })
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current in this thread.
            if let Err(failure) = unsafe { driver!(cuCtxSetCurrent(before)) } {
                tracing::debug!(%failure, "this thread's context is not the one before");
            }
        }
    }
}

/// A place in the order of the stream.
pub(super) struct Event {
    event: cu::CUevent,
    gpu: Arc<Gpu>,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(super) fn wait(&self) -> Result<(), Failure> {
        let _entered = self.gpu.enter()?;
        // SAFETY: the event is alive.
        unsafe { driver!(cuEventSynchronize(self.event)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody else has the event. A failure was, or will be, told by a call that returns one.
        unsafe {
            let _ = self.gpu.enter().and_then(|_entered| driver!(cuEventDestroy_v2(self.event)));
        }
    }
}

/// An allocation. It is freed in the order of the stream: work that was given before may still use it.
pub(super) struct Memory {
    pub address: cu::CUdeviceptr,
    pub bytes: usize,
    gpu: Arc<Gpu>,
}

impl Memory {
    pub(super) fn fill_with_zeros(&self) -> Result<(), Failure> {
        let _entered = self.gpu.enter()?;
        // SAFETY: the range is the allocation.
        unsafe { driver!(cuMemsetD8Async(self.address, 0, self.bytes.max(16), self.gpu.stream)) }
    }

    /// Writes, in the order of the stream; returns when `bytes` may change.
    ///
    /// Panics when the range is beyond the allocation.
    pub(super) fn upload(&self, offset: usize, bytes: &[u8]) -> Result<(), Failure> {
        let to = self.at(offset, bytes.len());
        let _entered = self.gpu.enter()?;
        let turn = self.gpu.turn();
        // SAFETY: both ranges exist. From ordinary host memory the driver has taken the bytes when it returns; it is waited for
        // where it reads them later.
        unsafe { driver!(cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast::<c_void>(), bytes.len(), self.gpu.stream)) }?;
        drop(turn);
        if self.gpu.reads_host_memory || is_known(bytes) { self.gpu.synchronise() } else { Ok(()) }
    }

    /// Reads, after all that the stream was given.
    ///
    /// Panics when the range is beyond the allocation.
    pub(super) fn download(&self, offset: usize, out: &mut [u8]) -> Result<(), Failure> {
        let from = self.at(offset, out.len());
        let _entered = self.gpu.enter()?;
        let turn = self.gpu.turn();
        // SAFETY: both ranges exist, and the copy is over when this returns.
        let begun = unsafe { driver!(cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), from, out.len(), self.gpu.stream)) };
        drop(turn);
        begun.and(self.gpu.synchronise())
    }

    fn at(&self, offset: usize, len: usize) -> cu::CUdeviceptr {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.bytes), "the caller keeps to the allocation");
        self.address + offset as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nobody else has the allocation. A failure was, or will be, told by a call that returns one.
        let freed =
            unsafe { self.gpu.enter().and_then(|_entered| driver!(cuMemFreeAsync(self.address, self.gpu.stream))) };
        if let Err(failure) = freed {
            tracing::debug!(%failure, "an allocation was not freed");
        }
    }
}

/// Whether the driver has heard of host memory: page-locked or managed, which it reads where it is.
fn is_known(bytes: &[u8]) -> bool {
    let is_known = |byte: &u8| {
        let mut kind = 0u32;
        let mut attribute = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        let mut filled = (&raw mut kind).cast();
        let address = std::ptr::from_ref(byte).addr() as u64;
        // It takes any address, and has a kind of 0 for other memory, where its twin for one attribute reports an error.
        // SAFETY: one attribute, and `kind` is what the function fills.
        let asked = unsafe { driver!(cuPointerGetAttributes(1, &mut attribute, &mut filled, address)) };
        asked.is_ok() && kind != 0
    };
    // Part of an allocation may be page-locked.
    bytes.first().is_some_and(is_known) || bytes.last().is_some_and(is_known)
}

/// A loaded kernel; never unloaded.
#[derive(Clone, Copy)]
pub(super) struct Function(pub cu::CUfunction);

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Loads machine code and finds a kernel in it; it may use all the shared memory that the device has.
    pub(super) fn load(gpu: &Gpu, code: &[u8], name: &CStr) -> Result<Function, Failure> {
        use cu::CUfunction_attribute::*;
        let _entered = gpu.enter()?;
        // PTX is text that ends with a NUL; machine code knows its size.
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
            // SAFETY: nobody has anything of the module. Whoever tries again, for want of memory perhaps, loads it anew.
            let _ = unsafe { driver!(cuModuleUnload(module)) };
            return Err(failure);
        }
        Ok(Function(function))
    }

    /// Whether the device has a place for so many blocks of it that are one cluster, each with all the shared memory that a block
    /// can have.
    pub(super) fn fits_as_cluster(self, gpu: &Gpu, blocks: u32) -> Result<bool, Failure> {
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
                blockDimX: 512,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: most as u32,
                hStream: gpu.stream,
                attrs: &raw mut attribute,
                numAttrs: 1,
            };
            driver!(cuOccupancyMaxActiveClusters(&mut clusters, self.0, &config))?;
        }
        Ok(clusters > 0)
    }
}

/// A captured sequence of work.
pub(super) struct Graph {
    exec: cu::CUgraphExec,
    gpu: Arc<Gpu>,
}

// SAFETY: graphs may be used from any thread, one at a time: the owner sees to that.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `record` gives to the stream that it is handed.
    pub(super) fn capture(
        gpu: &Arc<Gpu>,
        record: impl FnOnce(cu::CUstream) -> crate::Result<()>,
    ) -> crate::Result<Graph> {
        let _entered = gpu.enter().map_err(fault)?;
        let (mut stream, mut graph, mut exec) = (null_mut(), null_mut(), null_mut());
        // SAFETY: every pointer is to a local; the stream is private to this function, and is destroyed in the end.
        unsafe {
            driver!(cuStreamCreate(&mut stream, cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32)).map_err(fault)?;
            let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            let recorded = match driver!(cuStreamBeginCapture_v2(stream, mode)) {
                Ok(()) => {
                    let recorded = record(stream);
                    // Ends the capture also when recording failed.
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
        Ok(Graph { exec, gpu: gpu.clone() })
    }

    /// Gives it to the stream.
    pub(super) fn launch(&self) -> Result<(), Failure> {
        let _entered = self.gpu.enter()?;
        // SAFETY: graph and stream are alive.
        unsafe { driver!(cuGraphLaunch(self.exec, self.gpu.stream)) }
    }
}

impl Drop for Graph {
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

    /// `None` where there is no GPU.
    fn gpu() -> Option<Arc<Gpu>> {
        Gpu::open().inspect_err(|why| eprintln!("{why}")).ok().map(Arc::new)
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

    #[test]
    fn what_was_uploaded_may_change() {
        let Some(gpu) = gpu() else { return };
        let len = 32 << 20;
        let memory = gpu.allocate(len).unwrap();
        let busy = gpu.allocate(4 << 30).unwrap();
        let _entered = gpu.enter().unwrap();
        let mut locked = null_mut();
        // SAFETY: `locked` is what the function fills.
        unsafe { driver!(cuMemAllocHost_v2(&mut locked, len)) }.unwrap();
        // SAFETY: it has so many bytes, which nobody else knows.
        let locked_bytes = unsafe { std::slice::from_raw_parts_mut(locked.cast::<u8>(), len) };
        let mut ordinary = vec![0; len];
        for bytes in [&mut *locked_bytes, &mut ordinary[..]] {
            bytes.fill(1);
            // The copy's turn comes later.
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
