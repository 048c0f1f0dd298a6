//! Runs launches on an NVIDIA GPU, through the driver, which is loaded at run time.
//!
//! All work is enqueued in one stream, so a launch sees all earlier writes; transfers, allocations and frees are
//! ordered as well. A pass in a stream of another library is ordered with it (`stream_order.rs`). A [`Launch`] becomes
//! a kernel call:
//!
//! - Its file is compiled for this device, once, with its constants as macros. The code is kept in memory and on disk.
//! - The kernel's argument i is the address bound to index i, or the parameter struct, by value, if that has the index.
//!   An index without a binding is a null pointer: an optional buffer that is absent.
//! - `threadgroup_bytes` is the dynamic shared memory of a block.

use std::{
    any::Any,
    collections::HashMap,
    ffi::{CString, c_void},
    num::NonZero,
    ptr::NonNull,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use cudarc::driver::sys::{self as cu, CUstream};

mod branches;
pub(super) mod compile;
mod cublaslt;
mod driver;
mod foreign;
mod kernel_cache;
pub(super) mod libraries;
mod locked;
mod peers;
mod running;
mod stream_order;

use branches::{Branch, branches};
use compile::{CompileTarget, KernelProgram};
use cublaslt::{CublasLt, CublasLtPlan};
pub(super) use driver::count;
use driver::{CudaDevice, CudaEvent, CudaFunction, CudaGraph, CudaMemory, SideStream, driver, fault};
use foreign::OtherStream;
use kernel_cache::KernelCache;
use locked::CudaDownload;
use running::RunningKernels;

use crate::{
    Error, Result,
    cuda::{MAX_CLUSTER, headers},
    device::MemoryInfo,
    gpu::{
        self, Constant, Executor, ForeignStream, Launch, LaunchPass, Limits, MemoryAt, Owner, Replay, Source, Transfer,
        Wait,
    },
};

/// Maximum arguments of a kernel.
const ARGUMENTS: usize = 64;

/// The environment variable that lowers the limits to those of `sm_80` or `sm_89`, so that a Hopper GPU runs the
/// kernels of these GPUs.
const LIKE: &str = "KVANT_CUDA_LIKE";

/// The executor.
pub(super) struct CudaExecutor {
    launcher: Arc<Launcher>,
}

struct Launcher {
    gpu: Arc<CudaDevice>,
    target: CompileTarget,
    /// Compiler, driver and device: with the source, they determine the machine code.
    environment: String,
    cache: KernelCache,
    functions: Mutex<HashMap<SpecialisedKernel, FunctionSlot>>,
    /// Opened when first needed, under the lock `opening`; None if it is not installed.
    cublaslt: OnceLock<Option<CublasLt>>,
    opening: Mutex<()>,
    /// Whether the device can run every cluster that kernels use.
    clusters: bool,
    /// The shared memory of the earlier GPU whose limits apply, if [`LIKE`] names one.
    shared_like: Option<usize>,
}

/// A kernel whose clusters need the maximum of resources: maximum threads and all shared memory.
static EMPTY: Source = Source {
    name: "empty.cu",
    text: "extern \"C\" __global__ void __launch_bounds__(640, 1) KVANT_KERNEL() {}",
    headers: &[],
    layouts: &[],
};

/// The shared memory of the GPU that [`LIKE`] names.
fn shared_like(name: Option<&str>) -> std::result::Result<Option<usize>, String> {
    match name {
        None | Some("") => Ok(None),
        Some("sm_80") => Ok(Some(163 << 10)),
        Some("sm_89") => Ok(Some(99 << 10)),
        Some(other) => Err(format!("{LIKE} is {other:?}; it can be sm_80 or sm_89")),
    }
}

/// The limits of a GPU before Hopper with `shared_bytes` of shared memory.
fn lowered(limits: Limits, shared_bytes: usize) -> Limits {
    let threadgroup_bytes = limits.threadgroup_bytes.min(shared_bytes);
    Limits { threadgroup_bytes, warpgroup_products: false, clusters: false, ..limits }
}

/// How a launch runs: by its kernel, or by a library that computes an equal product.
enum Runner {
    Kernel(CudaFunction),
    Library(Arc<CublasLtPlan>),
}

/// A kernel with its constants: file (by address), name, values.
type SpecialisedKernel = (usize, &'static str, Vec<(&'static str, Constant)>);

fn key_of(launch: &Launch) -> SpecialisedKernel {
    (std::ptr::from_ref(launch.source) as usize, launch.kernel, launch.constants.clone())
}

/// A kernel. The first thread that needs it loads it while others wait. A failure, for example a lack of memory, is not
/// cached: the next launch tries again.
type FunctionSlot = Arc<Mutex<Option<CudaFunction>>>;

impl CudaExecutor {
    /// Opens an NVIDIA GPU by its number.
    pub(super) fn open(index: usize) -> std::result::Result<CudaExecutor, String> {
        let gpu = Arc::new(CudaDevice::open(index)?);
        let target = CompileTarget::new(gpu.capability.0, gpu.capability.1)?;
        let compiler = compile::version()?;
        let driver = (gpu.driver_version / 1000, gpu.driver_version % 1000 / 10);
        if compiler.0 > driver.0 {
            // A driver loads code of compilers of its own major version and of earlier ones.
            return Err(format!(
                "libnvrtc {}.{} is too new for the NVIDIA driver, which supports CUDA {}.{}: a libnvrtc {} is needed",
                compiler.0, compiler.1, driver.0, driver.1, driver.0
            ));
        }
        let environment = format!("nvrtc {compiler:?}, driver {}, {}\n", gpu.driver_version, gpu.name);
        let mut launcher = Launcher {
            gpu,
            target,
            environment,
            cache: KernelCache::of_user(),
            functions: Mutex::default(),
            cublaslt: OnceLock::new(),
            opening: Mutex::default(),
            clusters: false,
            shared_like: shared_like(std::env::var(LIKE).ok().as_deref())?,
        };
        // On Hopper and later, if the compiler supports clusters. A slice of a GPU may have too few neighbouring
        // multiprocessors.
        if launcher.target.has_waits() {
            let fits = launcher
                .load(&Launch::new("open", &EMPTY, "empty"))
                .and_then(|empty| empty.fits_as_cluster(&launcher.gpu, MAX_CLUSTER as u32).map_err(fault));
            launcher.clusters = fits.unwrap_or_else(|error| {
                tracing::debug!(%error, "no clusters are used");
                false
            });
        }
        Ok(CudaExecutor { launcher: Arc::new(launcher) })
    }
}

impl Launcher {
    fn function(&self, launch: &Launch) -> Result<CudaFunction> {
        let loading = {
            let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
            functions.entry(key_of(launch)).or_default().clone()
        };
        let mut loaded = loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = *loaded {
            return Ok(function);
        }
        let function = self.load(launch)?;
        *loaded = Some(function);
        Ok(function)
    }

    fn load(&self, launch: &Launch) -> Result<CudaFunction> {
        let program = KernelProgram::of(launch);
        let name = CString::new(program.entry.as_str()).map_err(fault)?;
        let key = self.environment.clone() + &program.key(&self.target);
        if let Some(code) = self.cache.get(&key) {
            match CudaFunction::load(&self.gpu, &code, &name) {
                Ok(function) => return Ok(function),
                Err(failure) => tracing::debug!(kernel = program.entry, %failure, "stored code does not load"),
            }
        }
        let code = program.compile(&self.target).map_err(|message| Error::Compile {
            device: self.gpu.name.clone(),
            kernel: format!("{} of {}", program.entry, launch.source.name),
            message,
        })?;
        let function = CudaFunction::load(&self.gpu, &code, &name).map_err(|failure| {
            if failure.is_out_of_memory() {
                self.gpu.out_of_memory(code.len())
            } else {
                fault(format!("{launch:?}: {failure}"))
            }
        })?;
        self.cache.put(&key, &code);
        Ok(function)
    }

    /// The library, if it is installed.
    ///
    /// # Errors
    /// There is no memory for its workspace; the next call tries again.
    fn cublaslt(&self) -> Result<Option<&CublasLt>> {
        let _guard = match self.cublaslt.get() {
            Some(opened) => return Ok(opened.as_ref()),
            None => self.opening.lock().unwrap_or_else(PoisonError::into_inner),
        };
        if self.cublaslt.get().is_none() {
            let opened = CublasLt::open(&self.gpu)?;
            return Ok(self.cublaslt.get_or_init(|| opened).as_ref());
        }
        Ok(self.cublaslt.get().and_then(Option::as_ref))
    }

    /// Enqueues launches in a stream, in their order, after kernels that may still be `running` there. Returns the
    /// kernels that may still run after the last one has been enqueued.
    fn enqueue_all<'a>(
        &self,
        launches: &'a [(Launch, Runner)],
        mut running: RunningKernels<'a>,
        stream: CUstream,
    ) -> Result<RunningKernels<'a>> {
        for (launch, runner) in launches {
            let overlaps = self.may_begin_early(launch) && running.allow(launch);
            self.enqueue(launch, runner, overlaps, stream)?;
            match runner {
                Runner::Kernel(_) => running.push(launch, overlaps),
                Runner::Library(_) => running.clear(),
            }
        }
        Ok(running)
    }

    /// As above, while `stream` is captured, with branches in a second stream.
    fn capture_all(&self, launches: &[(Launch, Runner)], stream: CUstream, side: &SideStream) -> Result<()> {
        let of_kernels: Vec<&Launch> = launches.iter().map(|(launch, _)| launch).collect();
        // Not usable in branches: products of the library, which share one workspace; and operations whose blocks may
        // wait for all other blocks of their grid, or for other ranks, which have the collectives in this order.
        let waits = |launch: &Launch| launch.collective || ["attend", "argmax", "sample"].contains(&launch.op);
        let usable = |at: usize| matches!(launches[at].1, Runner::Kernel(_)) && !waits(&launches[at].0);
        let mut at = 0;
        for Branch { main, side: side_launches } in branches(&of_kernels, usable) {
            let running = self.enqueue_all(&launches[at..main.start], RunningKernels::default(), stream)?;
            side.fork(stream).map_err(fault)?;
            self.enqueue_all(&launches[main], running, stream)?;
            self.enqueue_all(&launches[side_launches.clone()], RunningKernels::default(), side.stream)?;
            side.join(stream).map_err(fault)?;
            at = side_launches.end;
        }
        self.enqueue_all(&launches[at..], RunningKernels::default(), stream).map(drop)
    }

    /// Whether a kernel can begin before the previous one has ended: it must wait for its results itself
    /// (`device/dependent_launch.h`).
    fn may_begin_early(&self, launch: &Launch) -> bool {
        // Graphs support such edges since CUDA 12.3.
        self.target.has_waits() && self.gpu.driver_version >= 12030 && headers::waits_itself(launch.source)
    }

    /// Enqueues a launch in a stream; with `overlaps`, it may begin before the previous kernel has ended.
    fn enqueue(&self, launch: &Launch, runner: &Runner, overlaps: bool, stream: CUstream) -> Result<()> {
        // A capture does not allow opening the library here.
        let function = match (runner, launch.product, self.cublaslt.get().and_then(Option::as_ref)) {
            (Runner::Library(plan), Some(product), Some(cublaslt)) => {
                let address = |index| {
                    let binding = launch.bindings.iter().find(|b| b.index == index).expect("a product binds all three");
                    memory_of(binding.memory()).address + binding.offset as u64
                };
                // SAFETY: the plan was made for this product; the memory outlives the work, as below.
                return unsafe { cublaslt.run(plan, product.alpha, product.bindings.map(address), stream) }
                    .map_err(|error| fault(format!("{launch:?}: {error}")));
            }
            (Runner::Kernel(function), ..) => function,
            (Runner::Library(_), ..) => unreachable!("only products are prepared for the library"),
        };
        let mut values = [0u64; ARGUMENTS];
        for binding in &launch.bindings {
            let memory = memory_of(binding.memory());
            values[binding.index as usize] = memory.address + binding.offset as u64;
        }
        let mut pointers = [std::ptr::null_mut::<c_void>(); ARGUMENTS];
        for (pointer, value) in pointers.iter_mut().zip(&mut values) {
            *pointer = std::ptr::from_mut(value).cast();
        }
        if let Some((index, bytes)) = &launch.params {
            pointers[*index as usize] = bytes.as_ptr().cast_mut().cast();
        }
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid.groups, launch.grid.threads);
        let mut attribute = cu::CUlaunchAttribute {
            id: cu::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: cu::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = cu::CUlaunchConfig {
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: bx,
            blockDimY: by,
            blockDimZ: bz,
            sharedMemBytes: launch.threadgroup_bytes,
            hStream: stream,
            attrs: &raw mut attribute,
            numAttrs: overlaps.into(),
        };
        // SAFETY: the driver copies as many arguments as the kernel has, each of its own size: addresses of 8 bytes,
        // and the struct whose layout the compiler has checked. The memory outlives the work: it is freed in stream
        // order.
        unsafe { driver!(cuLaunchKernelEx(&config, function.0, pointers.as_mut_ptr(), std::ptr::null_mut())) }
            .map_err(|failure| fault(format!("{launch:?}: {failure}")))
    }

    /// Loads the kernels of launches, or plans their products. Missing kernels are compiled on all cores.
    fn prepare_all(&self, launches: Vec<Launch>) -> Result<Vec<(Launch, Runner)>> {
        let loaded: Vec<_> = launches.iter().map(|launch| self.loaded(launch)).collect();
        let mut missing: Vec<&Launch> = Vec::new();
        for (launch, _) in launches.iter().zip(&loaded).filter(|(_, loaded)| loaded.is_none()) {
            if launch.product.is_none() && !missing.iter().any(|other| key_of(other) == key_of(launch)) {
                missing.push(launch);
            }
        }
        // Counting processors reads files on Linux.
        if missing.len() > 1 {
            let workers = std::thread::available_parallelism().map_or(1, NonZero::get).min(missing.len());
            let next = AtomicUsize::new(0);
            let load = || {
                while let Some(launch) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // A failure is repeated below, and reported there.
                    let _ = self.function(launch);
                }
            };
            std::thread::scope(|scope| {
                for _ in 0..workers {
                    scope.spawn(load);
                }
            });
        }
        launches.into_iter().zip(loaded).map(|(launch, loaded)| self.prepare(launch, loaded)).collect()
    }

    /// The kernel of a launch, if it is loaded.
    fn loaded(&self, launch: &Launch) -> Option<CudaFunction> {
        let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        functions.get(&key_of(launch))?.try_lock().ok()?.as_ref().copied()
    }

    /// Loads the kernel of a launch, unless that is done, or plans its product.
    fn prepare(&self, launch: Launch, loaded: Option<CudaFunction>) -> Result<(Launch, Runner)> {
        let [gx, gy, gz] = launch.grid.groups;
        let highest = launch.bindings.iter().map(|b| b.index).chain(launch.params.iter().map(|p| p.0)).max();
        if gy > 65535 || gz > 65535 || gx > i32::MAX as u32 || highest >= Some(ARGUMENTS as u32) {
            return Err(Error::Unsupported {
                op: launch.op,
                device: "cuda",
                reason: format!("a grid of {:?} blocks, or argument {highest:?}", launch.grid.groups),
            });
        }
        let plan = match launch.product {
            Some(product) => self.cublaslt()?.and_then(|cublaslt| cublaslt.plan(&self.gpu, &product)),
            None => None,
        };
        let runner = match plan {
            Some(plan) => Runner::Library(plan),
            None => Runner::Kernel(match loaded {
                Some(function) => function,
                None => self.function(&launch)?,
            }),
        };
        Ok((launch, runner))
    }
}

/// The memory of this backend as a trait object.
fn memory_of(memory: &dyn gpu::Memory) -> &CudaMemory {
    memory.as_any().downcast_ref().expect("the encoder has checked that tensors are of this device")
}

impl gpu::Memory for CudaMemory {
    fn host(&self) -> Option<NonNull<u8>> {
        self.host
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Executor for CudaExecutor {
    fn name(&self) -> String {
        let gpu = &self.launcher.gpu;
        let (major, minor) = (gpu.driver_version / 1000, gpu.driver_version % 1000 / 10);
        format!("{}, {} GiB, {}, CUDA {major}.{minor}", gpu.name, gpu.memory_bytes >> 30, self.launcher.target.arch)
    }

    fn limits(&self) -> Limits {
        let Launcher { gpu, target, clusters, shared_like, .. } = &*self.launcher;
        let limits = Limits {
            threads: gpu.threads_per_block,
            threadgroup_bytes: gpu.shared_bytes,
            busy_groups: gpu.multiprocessors,
            warpgroup_products: target.arch == "sm_90a",
            clusters: *clusters,
            library_products: libraries::has_cublaslt(),
        };
        shared_like.map_or(limits, |bytes| lowered(limits, bytes))
    }

    /// All launches are in one stream. A kernel that begins before the previous one has ended waits before it uses
    /// scratch memory (`device/dependent_launch.h`).
    fn in_order(&self) -> bool {
        true
    }

    fn allocate(&self, bytes: usize, zeroed: bool) -> Result<Box<dyn gpu::Memory>> {
        let memory = self.launcher.gpu.allocate(bytes)?;
        if zeroed {
            memory.fill_with_zeros().map_err(fault)?;
        }
        Ok(Box::new(memory))
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.launcher.gpu.memory().map_err(fault)
    }

    fn trim(&self) -> Result<()> {
        self.launcher.gpu.trim().map_err(fault)
    }

    fn number(&self) -> Option<usize> {
        Some(self.launcher.gpu.number())
    }

    fn share_with(&self, others: &[usize]) -> Result<()> {
        self.launcher.gpu.share_with(others)
    }

    fn allocate_host(&self, bytes: usize) -> Result<Box<dyn gpu::Memory>> {
        Ok(Box::new(self.launcher.gpu.allocate_host(bytes).map_err(fault)?))
    }

    unsafe fn borrow(&self, start: NonNull<u8>, bytes: usize, owner: Owner) -> Result<MemoryAt> {
        let (memory, offset) = self.launcher.gpu.borrow(start, bytes, owner);
        Ok((Box::new(memory), offset))
    }

    fn upload(&self, memory: &dyn gpu::Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        memory_of(memory).upload(offset, bytes).map_err(fault)
    }

    fn download(&self, memory: &dyn gpu::Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        memory_of(memory).download(offset, out).map_err(fault)
    }

    fn start_download(
        &self,
        memory: &dyn gpu::Memory,
        offset: usize,
        bytes: usize,
    ) -> Result<Option<Box<dyn Transfer>>> {
        let download = memory_of(memory).start_download(offset, bytes).map_err(fault)?;
        Ok(download.map(|download| Box::new(download) as Box<dyn Transfer>))
    }

    fn begin(&self) -> Result<Box<dyn LaunchPass>> {
        let launcher = self.launcher.clone();
        Ok(Box::new(CudaPass { launcher, launches: Vec::new(), prepared: Vec::new(), other: None }))
    }

    fn capture(self: Arc<Self>, launches: Vec<Launch>) -> Result<Box<dyn Replay>> {
        let launcher = self.launcher.clone();
        // Before the capture, during which kernels cannot be loaded.
        let launches = launcher.prepare_all(launches)?;
        let side = SideStream::new(&launcher.gpu).map_err(fault)?;
        let graph = CudaGraph::capture(&launcher.gpu, |stream| launcher.capture_all(&launches, stream, &side))?;
        used_in_stream(&launches);
        let launches = launches.into_iter().map(|(launch, _)| launch).collect();
        Ok(Box::new(CudaReplay { graph: Mutex::new(graph), gpu: launcher.gpu.clone(), _launches: launches }))
    }
}

/// Launches that the commit enqueues: a dropped pass does nothing.
struct CudaPass {
    launcher: Arc<Launcher>,
    launches: Vec<Launch>,
    prepared: Vec<(Launch, Runner)>,
    /// The stream of another library in which it runs.
    other: Option<OtherStream>,
}

/// Marks the memory of launches for whose end no other stream waits.
fn used_in_stream(launches: &[(Launch, Runner)]) {
    let bindings = launches.iter().flat_map(|(launch, _)| &launch.bindings);
    bindings.for_each(|binding| memory_of(binding.memory()).used_in_stream());
}

impl LaunchPass for CudaPass {
    fn launch(&mut self, launch: Launch) -> Result<()> {
        self.launches.push(launch);
        Ok(())
    }

    fn prepare(&mut self) -> Result<()> {
        let launches = std::mem::take(&mut self.launches);
        self.prepared.extend(self.launcher.prepare_all(launches)?);
        Ok(())
    }

    unsafe fn order_with(&mut self, stream: ForeignStream) -> Result<()> {
        // SAFETY: the caller keeps the stream until the commit.
        self.other = Some(unsafe { OtherStream::new(&self.launcher.gpu, stream) }?);
        Ok(())
    }

    fn commit(mut self: Box<Self>) -> Result<Box<dyn Wait>> {
        self.prepare()?;
        let CudaPass { launcher, prepared, other, .. } = *self;
        let gpu = &launcher.gpu;
        let _entered = gpu.enter().map_err(fault)?;
        let _turn = gpu.turn();
        let Some(other) = other else {
            used_in_stream(&prepared);
            launcher.enqueue_all(&prepared, RunningKernels::default(), gpu.stream().map_err(fault)?)?;
            return Ok(Box::new(Arc::new(gpu.event().map_err(fault)?)));
        };
        let stream = other.enter(gpu).map_err(fault)?;
        let enqueued = launcher.enqueue_all(&prepared, RunningKernels::default(), stream).map(drop);
        // Also after a failure: kernels before it may run.
        let done = other.leave(gpu);
        if done.is_err() {
            used_in_stream(&prepared);
        }
        enqueued?;
        Ok(Box::new(done.map_err(fault)?))
    }
}

impl Wait for Arc<CudaEvent> {
    fn wait(self: Box<Self>) -> Result<()> {
        CudaEvent::wait(&self).map_err(fault)
    }

    fn is_done(&self) -> bool {
        CudaEvent::is_done(self)
    }
}

impl Transfer for CudaDownload {
    fn finish(self: Box<Self>, out: &mut [u8]) -> Result<()> {
        CudaDownload::finish(*self, out).map_err(fault)
    }

    fn is_done(&self) -> bool {
        CudaDownload::is_done(self)
    }
}

/// A CUDA graph, with the memory that its kernels use.
struct CudaReplay {
    graph: Mutex<CudaGraph>,
    gpu: Arc<CudaDevice>,
    _launches: Vec<Launch>,
}

impl Replay for CudaReplay {
    fn replay(&self) -> Result<Option<Box<dyn Wait>>> {
        let _turn = self.gpu.turn();
        self.graph.lock().unwrap_or_else(PoisonError::into_inner).launch().map_err(fault)?;
        Ok(Some(Box::new(Arc::new(self.gpu.event().map_err(fault)?))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_those_of_gpus_that_are_known() {
        assert_eq!([None, Some("")].map(shared_like), [const { Ok(None) }; 2]);
        assert_eq!(shared_like(Some("sm_89")), Ok(Some(99 << 10)));
        let error = shared_like(Some("sm_86")).unwrap_err();
        assert!(error.contains("KVANT_CUDA_LIKE") && error.contains("sm_86") && error.contains("sm_89"), "{error}");
    }
}
