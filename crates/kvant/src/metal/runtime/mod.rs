//! The Apple runtime: runs launches on an Apple GPU.
//!
//! Memory is shared with the processor, so a transfer is a memory copy that waits for the passes that use it. A pass is
//! a few command buffers with one compute encoder each, in which launches run concurrently unless [`Order`] puts a
//! barrier between them. Metal's hazard tracking is off; a fence orders the command buffers.
//!
//! `pipelines` compiles kernels, `queue` encodes passes and watches them.

mod cores;
mod pipelines;
mod queue;

use std::{
    any::Any,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use objc2::{
    available,
    rc::{Retained, autoreleasepool},
    runtime::ProtocolObject,
};
use objc2_foundation::NSString;
use objc2_metal::{MTLBuffer, MTLCreateSystemDefaultDevice, MTLDevice, MTLGPUFamily, MTLResource, MTLResourceOptions};

use self::{
    pipelines::{Pipelines, check_simdgroup_matrices},
    queue::{PreparedLaunch, Queue},
};
use super::buffer_pool::{BufferPool, size_class};
use crate::{
    Device, DeviceKind, Error, KernelReport, MemoryInfo, Result,
    gpu::{Executor, Launch, LaunchPass, Limits, Memory, Order, Replay, Wait, metal_busy_groups, metal_device},
};

// `MTLCreateSystemDefaultDevice` returns nil in a process that has not loaded it.
#[link(name = "CoreGraphics", kind = "framework")]
unsafe extern "C" {}

/// Opens the GPU of this Mac. An opened device is kept; a failure is not.
pub(super) fn open() -> Result<Device> {
    static OPENED: Mutex<Option<Device>> = Mutex::new(None);
    // The lock is held while the device is opened, so that two threads get the same one.
    let mut opened = lock(&OPENED);
    if let Some(device) = &*opened {
        return Ok(device.clone());
    }
    let device = autoreleasepool(|_| Runtime::new())
        .map(metal_device)
        .map_err(|reason| Error::NoDevice { kind: DeviceKind::Metal, reason })?;
    Ok(opened.insert(device).clone())
}

struct Runtime(Arc<RuntimeShared>);

/// The data that passes and graphs share.
struct RuntimeShared {
    device: Retained<ProtocolObject<dyn MTLDevice>>,
    name: String,
    limits: Limits,
    pipelines: Pipelines,
    queue: Arc<Queue>,
    pool: SharedPool,
}

type SharedPool = Arc<Mutex<BufferPool<SharedBuffer>>>;

/// Locks a mutex, ignoring poison: the protected data is consistent between any two statements.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runtime {
    fn new() -> std::result::Result<Runtime, String> {
        if !available!(macos = 13.0) {
            return Err("macOS 13 or later is needed, for Metal 3".to_string());
        }
        let device =
            MTLCreateSystemDefaultDevice().ok_or("this Mac has no Metal device, or this process may not see it")?;
        let name = device.name().to_string();
        // Every Apple GPU of a Mac is of family Apple7 or later; a virtual machine reports Apple5.
        if !device.supportsFamily(MTLGPUFamily::Apple5) {
            return Err(format!("an Apple GPU is needed, and this is {name}"));
        }
        if !device.supportsFamily(MTLGPUFamily::Apple7) {
            check_simdgroup_matrices(&device)
                .map_err(|why| format!("{name} does not support SIMD-group matrices: {why}"))?;
        }
        let limits = Limits {
            threads: device.maxThreadsPerThreadgroup().width,
            threadgroup_bytes: device.maxThreadgroupMemoryLength(),
            busy_groups: metal_busy_groups(
                cores::of_registry(device.registryID()).unwrap_or_else(|| cores_of_name(&name)),
            ),
            warpgroup_products: false,
            library_products: false,
            clusters: false,
        };
        // Unused memory beyond an eighth of the recommended working set is returned to the system.
        let spare = usize::try_from(device.recommendedMaxWorkingSetSize() / 8).unwrap_or(usize::MAX);
        let pool = Arc::new(Mutex::new(BufferPool::new(spare)));
        let queue = Arc::new(Queue::new(device.clone(), &name, pool.clone()).ok_or("Metal gives no command queue")?);
        let pipelines = Pipelines::new(device.clone(), &name, limits);
        Ok(Runtime(Arc::new(RuntimeShared { device, name, limits, pipelines, queue, pool })))
    }
}

/// GPU cores, if the system does not report them: those of the smallest GPU sold under the name's suffix. Too few
/// splits leave cores idle, too many cost a longer merge; the results are correct in both cases.
fn cores_of_name(name: &str) -> usize {
    match name.rsplit(' ').next() {
        Some("Ultra") => 48,
        Some("Max") => 24,
        Some("Pro") => 14,
        _ => 7,
    }
}

impl Executor for Runtime {
    fn name(&self) -> String {
        self.0.name.clone()
    }

    fn limits(&self) -> Limits {
        self.0.limits
    }

    fn refuses(&self, launch: &Launch) -> bool {
        self.0.pipelines.refuses(launch)
    }

    fn kernels(&self) -> Vec<KernelReport> {
        self.0.pipelines.reports()
    }

    fn allocate(&self, bytes: usize, zeroed: bool) -> Result<Box<dyn Memory>> {
        Ok(Box::new(self.0.allocate(bytes, zeroed)?))
    }

    fn memory(&self) -> Result<MemoryInfo> {
        // The recommended working set: more would be swapped.
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let total = bytes(self.0.device.recommendedMaxWorkingSetSize());
        let free = total.saturating_sub(self.0.device.currentAllocatedSize());
        Ok(MemoryInfo { total, free, held: lock(&self.0.pool).ready_bytes() })
    }

    fn trim(&self) -> Result<()> {
        // Waits for committed passes, so that the memory that they use becomes ready.
        self.0.queue.settle();
        drop(lock(&self.0.pool).trim());
        Ok(())
    }

    fn upload(&self, memory: &dyn Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        let start = MetalBuffer::of(memory).address();
        self.0.queue.exclusively(memory, offset..offset + bytes.len(), || {
            // SAFETY: the caller keeps the range within the allocation; no unfinished pass uses it, and no pass can be
            // committed and no other transfer can run during the copy.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.as_ptr().add(offset), bytes.len()) }
        })
    }

    fn download(&self, memory: &dyn Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        let start = MetalBuffer::of(memory).address();
        self.0.queue.exclusively(memory, offset..offset + out.len(), || {
            // SAFETY: as in `upload`.
            unsafe { std::ptr::copy_nonoverlapping(start.as_ptr().add(offset), out.as_mut_ptr(), out.len()) }
        })
    }

    fn begin(&self) -> Result<Box<dyn LaunchPass>> {
        Ok(Box::new(RecordedPass { shared: self.0.clone(), order: Order::new(), steps: Vec::new() }))
    }

    fn capture(self: Arc<Self>, launches: Vec<Launch>) -> Result<Box<dyn Replay>> {
        let mut pass = RecordedPass { shared: self.0.clone(), order: Order::new(), steps: Vec::new() };
        launches.into_iter().try_for_each(|launch| pass.launch(launch))?;
        Ok(Box::new(CapturedLaunches { shared: pass.shared, steps: pass.steps.into() }))
    }
}

impl RuntimeShared {
    fn allocate(&self, bytes: usize, zeroed: bool) -> Result<MetalBuffer> {
        let out_of_memory = || Error::OutOfMemory { device: self.name.clone(), bytes };
        let size = size_class(bytes).filter(|size| *size <= self.device.maxBufferLength()).ok_or_else(out_of_memory)?;
        self.queue.reap();
        let kept = lock(&self.pool).take(size);
        let buffer = match kept {
            Some(buffer) => {
                if zeroed {
                    // SAFETY: the buffer is `size` bytes long, and the pool guarantees that nothing uses it.
                    unsafe { buffer.0.contents().cast::<u8>().write_bytes(0, size) };
                }
                buffer
            }
            // Metal clears new buffers.
            None => self
                .new_buffer(size)
                .or_else(|| {
                    // Passes in flight may use memory that has been released.
                    self.queue.settle();
                    let spare = lock(&self.pool).trim();
                    drop(spare);
                    self.new_buffer(size)
                })
                .ok_or_else(out_of_memory)?,
        };
        Ok(MetalBuffer { buffer: Some(buffer), size, pool: self.pool.clone() })
    }

    fn new_buffer(&self, size: usize) -> Option<SharedBuffer> {
        autoreleasepool(|_| {
            let options = MTLResourceOptions::StorageModeShared | MTLResourceOptions::HazardTrackingModeUntracked;
            let buffer = self.device.newBufferWithLength_options(size, options)?;
            buffer.setLabel(Some(&NSString::from_str(&format!("kvant, {size} bytes"))));
            Some(SharedBuffer(buffer))
        })
    }
}

/// A Metal buffer that can be sent to and shared by threads.
struct SharedBuffer(Retained<ProtocolObject<dyn MTLBuffer>>);

// SAFETY: Metal's resources may be used and released on any thread. Their contents are read and written only by
// transfers and passes, which the queue orders, and by `allocate`, when nobody else has the buffer.
unsafe impl Send for SharedBuffer {}
// SAFETY: as above.
unsafe impl Sync for SharedBuffer {}

/// An allocation. Dropping it returns the buffer to the pool.
struct MetalBuffer {
    /// `Some` until it is dropped.
    buffer: Option<SharedBuffer>,
    size: usize,
    pool: SharedPool,
}

impl MetalBuffer {
    fn of(memory: &dyn Memory) -> &MetalBuffer {
        memory.as_any().downcast_ref().expect("memory of this device")
    }

    fn metal(&self) -> &ProtocolObject<dyn MTLBuffer> {
        &self.buffer.as_ref().expect("there until it is dropped").0
    }

    fn address(&self) -> NonNull<u8> {
        self.metal().contents().cast()
    }
}

impl Memory for MetalBuffer {
    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.address())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for MetalBuffer {
    fn drop(&mut self) {
        // Memory that the pool does not keep is released after the pool's lock.
        let _surplus = self.buffer.take().and_then(|buffer| lock(&self.pool).give(self.size, buffer));
    }
}

/// A pass that is being recorded. Pipelines and barriers are determined launch by launch, so that an error is returned
/// by the operation that caused it; Metal's commands are encoded at commit.
struct RecordedPass {
    shared: Arc<RuntimeShared>,
    order: Order,
    steps: Vec<PreparedLaunch>,
}

impl LaunchPass for RecordedPass {
    fn launch(&mut self, launch: Launch) -> Result<()> {
        let pipeline = self.shared.pipelines.get(&launch)?;
        let barrier = self.order.needs_barrier(&launch);
        self.steps.push(PreparedLaunch { launch, pipeline, barrier });
        Ok(())
    }

    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>> {
        self.shared.start(self.steps.into())
    }
}

/// Captured work, validated, planned and compiled once. Metal's command buffers run only once, so each replay encodes
/// the launches into a new one, and does nothing else.
struct CapturedLaunches {
    shared: Arc<RuntimeShared>,
    steps: Arc<[PreparedLaunch]>,
}

impl Replay for CapturedLaunches {
    fn replay(&self) -> Result<Option<Box<dyn Wait>>> {
        self.shared.start(self.steps.clone()).map(Some)
    }
}

impl RuntimeShared {
    fn start(self: &Arc<Self>, steps: Arc<[PreparedLaunch]>) -> Result<Box<dyn Wait>> {
        let running = self.queue.commit(steps)?;
        Ok(Box::new(Started { shared: self.clone(), running }))
    }
}

/// A committed pass.
struct Started {
    shared: Arc<RuntimeShared>,
    running: Option<queue::Running>,
}

impl Wait for Started {
    fn wait(self: Box<Self>) -> Result<()> {
        self.running.map_or(Ok(()), |running| self.shared.queue.wait(running))
    }

    fn is_done(&self) -> bool {
        self.running.as_ref().is_none_or(queue::Running::is_done)
    }
}
