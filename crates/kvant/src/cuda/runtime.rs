//! Runs launches on an NVIDIA GPU, through the driver that is found at run time.
//!
//! Everything goes to one stream, so a launch sees what the ones before it wrote; transfers, allocations and frees take
//! their place in the same order. A [`Launch`] becomes a kernel call in this way:
//!
//! - Its file is compiled for this device, with its constants as macros, once; the code is kept in memory and on disk.
//! - The kernel's argument i is the address bound to index i, or the parameter struct, by value, if that has the index.
//!   An index that nothing is bound to is a null pointer: an optional buffer that is absent.
//! - `threadgroup_bytes` is the dynamic shared memory of a block.

use std::{
    any::Any,
    collections::HashMap,
    ffi::{CString, c_void},
    ptr::NonNull,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use cudarc::driver::sys::{self as cu, CUstream};

use super::{
    attend::MAX_CLUSTER,
    cache::Cache,
    compile::{self, Program, Target},
    driver::{Event, Function, Gpu, Graph, Memory, driver, fault},
    products::{Plan, Products},
};
use crate::{
    Error, Result,
    gpu::{self, Constant, Executor, Launch, LaunchPass, Limits, Replay, Source, Wait},
};

/// The most arguments of a kernel.
const ARGUMENTS: usize = 64;

/// The executor.
pub(super) struct Cuda {
    shared: Arc<Shared>,
}

struct Shared {
    gpu: Arc<Gpu>,
    target: Target,
    /// What the machine code depends on besides its source: compiler, driver and device.
    environment: String,
    cache: Cache,
    functions: Mutex<HashMap<Specialised, Loading>>,
    /// Opened when it is first needed, by whoever has the other one; empty where there is no library.
    products: OnceLock<Option<Products>>,
    opening: Mutex<()>,
    /// Whether every cluster that attention asks for finds a place.
    clusters: bool,
}

/// What is asked whether it fits: no kernel of clusters has more threads or shared memory.
static EMPTY: Source = Source {
    name: "empty.cu",
    text: "extern \"C\" __global__ void __launch_bounds__(512, 1) empty() {}",
    headers: &[],
    layouts: &[],
};

/// What runs a launch: its kernel, or the library that computes the same.
enum Runner {
    Kernel(Function),
    Library(Arc<Plan>),
}

/// A kernel with its constants: file (by address), name, values.
type Specialised = (usize, &'static str, Vec<(&'static str, Constant)>);

/// Filled by whoever needs it first, while others wait. What fails, for want of memory perhaps, is tried again the next time.
type Loading = Arc<Mutex<Option<Function>>>;

impl Cuda {
    /// The first NVIDIA GPU, or why there is none.
    pub(super) fn open() -> std::result::Result<Cuda, String> {
        let gpu = Arc::new(Gpu::open()?);
        let target = Target::new(gpu.capability.0, gpu.capability.1)?;
        let compiler = compile::version()?;
        let driver = (gpu.driver_version / 1000, gpu.driver_version % 1000 / 10);
        if compiler.0 > driver.0 {
            // A driver loads what compilers of its own major version make, and of older ones.
            return Err(format!(
                "libnvrtc {}.{} is too new for the NVIDIA driver, which supports CUDA {}.{}: a libnvrtc {} is needed",
                compiler.0, compiler.1, driver.0, driver.1, driver.0
            ));
        }
        let environment = format!("nvrtc {compiler:?}, driver {}, {}\n", gpu.driver_version, gpu.name);
        let mut shared = Shared {
            gpu,
            target,
            environment,
            cache: Cache::of_user(),
            functions: Mutex::default(),
            products: OnceLock::new(),
            opening: Mutex::default(),
            clusters: false,
        };
        // From Hopper on, if the compiler knows it. A slice of a GPU may have too few multiprocessors that are neighbours.
        if shared.target.has_waits() {
            let fits = shared
                .load(&Launch::new("open", &EMPTY, "empty"))
                .and_then(|empty| empty.fits_as_cluster(&shared.gpu, MAX_CLUSTER as u32).map_err(fault));
            shared.clusters = fits.unwrap_or_else(|error| {
                tracing::debug!(%error, "attention does without clusters");
                false
            });
        }
        Ok(Cuda { shared: Arc::new(shared) })
    }
}

impl Shared {
    fn function(&self, launch: &Launch) -> Result<Function> {
        let key = (std::ptr::from_ref(launch.source) as usize, launch.kernel, launch.constants.clone());
        let loading = {
            let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
            functions.entry(key).or_default().clone()
        };
        let mut loaded = loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = *loaded {
            return Ok(function);
        }
        let function = self.load(launch)?;
        *loaded = Some(function);
        Ok(function)
    }

    fn load(&self, launch: &Launch) -> Result<Function> {
        let program = Program::of(launch);
        let name = CString::new(launch.kernel).map_err(fault)?;
        let key = self.environment.clone() + &program.key(&self.target);
        if let Some(code) = self.cache.get(&key) {
            match Function::load(&self.gpu, &code, &name) {
                Ok(function) => return Ok(function),
                Err(failure) => tracing::debug!(kernel = launch.kernel, %failure, "kept code does not load"),
            }
        }
        let code = program.compile(&self.target).map_err(|message| Error::Compile {
            device: self.gpu.name.clone(),
            kernel: format!("{} of {}", launch.kernel, launch.source.name),
            message,
        })?;
        let function = Function::load(&self.gpu, &code, &name).map_err(|failure| {
            if failure.is_out_of_memory() {
                self.gpu.out_of_memory(code.len())
            } else {
                fault(format!("{launch:?}: {failure}"))
            }
        })?;
        self.cache.put(&key, &code);
        Ok(function)
    }

    /// # Errors
    /// There is a library, and no memory for what it needs; the next call asks again.
    fn products(&self) -> Result<Option<&Products>> {
        let _guard = match self.products.get() {
            Some(products) => return Ok(products.as_ref()),
            None => self.opening.lock().unwrap_or_else(PoisonError::into_inner),
        };
        if self.products.get().is_none() {
            let opened = Products::open(&self.gpu)?;
            return Ok(self.products.get_or_init(|| opened).as_ref());
        }
        Ok(self.products.get().and_then(Option::as_ref))
    }

    /// Gives launches to a stream, in their order.
    fn enqueue_all(&self, launches: &[(Launch, Runner)], stream: CUstream) -> Result<()> {
        let mut previous = None;
        for (launch, runner) in launches {
            let overlaps = previous.is_some_and(|previous| self.may_overlap(launch, previous));
            self.enqueue(launch, runner, overlaps, stream)?;
            previous = matches!(runner, Runner::Kernel(_)).then_some(launch);
        }
        Ok(())
    }

    /// Whether a kernel may begin before the one in front of it, `previous`, has ended: if it waits for that by itself
    /// (`ahead.h`, which its file includes then), and what it reads before is not what the other one writes. What was in
    /// front of `previous` has ended by then: a kernel lets the next one begin when it has waited.
    fn may_overlap(&self, launch: &Launch, previous: &Launch) -> bool {
        // Graphs have such edges since CUDA 12.3.
        self.target.has_waits()
            && self.gpu.driver_version >= 12030
            && launch.source.text.contains("#include \"ahead.h\"")
            && launch.may_read_beside(previous)
    }

    /// Gives a launch to a stream; with `overlaps`, it may begin before the kernel in front of it has ended.
    fn enqueue(&self, launch: &Launch, runner: &Runner, overlaps: bool, stream: CUstream) -> Result<()> {
        // Not opened here: that is not allowed within a capture.
        let function = match (runner, launch.product, self.products.get().and_then(Option::as_ref)) {
            (Runner::Library(plan), Some(product), Some(products)) => {
                let address = |index| {
                    let binding = launch.bindings.iter().find(|b| b.index == index).expect("a product binds all three");
                    memory_of(binding.memory()).address + binding.offset as u64
                };
                // SAFETY: the plan was made for this product; the memory outlives the work, as below.
                return unsafe { products.run(plan, product.alpha, product.bindings.map(address), stream) }
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
        // SAFETY: the driver copies as many arguments as the kernel has, each of its own size: addresses of 8 bytes, and
        // the struct whose layout the compiler has confirmed. The memory outlives the work: it is freed in stream order.
        unsafe { driver!(cuLaunchKernelEx(&config, function.0, pointers.as_mut_ptr(), std::ptr::null_mut())) }
            .map_err(|failure| fault(format!("{launch:?}: {failure}")))
    }

    /// What a launch needs before it is run.
    fn prepare(&self, launch: Launch) -> Result<(Launch, Runner)> {
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
            Some(product) => self.products()?.and_then(|products| products.plan(&self.gpu, &product)),
            None => None,
        };
        let runner = match plan {
            Some(plan) => Runner::Library(plan),
            None => Runner::Kernel(self.function(&launch)?),
        };
        Ok((launch, runner))
    }
}

/// The memory of this backend behind the trait.
fn memory_of(memory: &dyn gpu::Memory) -> &Memory {
    memory.as_any().downcast_ref().expect("the encoder has checked that tensors are of this device")
}

impl gpu::Memory for Memory {
    fn host(&self) -> Option<NonNull<u8>> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Executor for Cuda {
    fn name(&self) -> String {
        let gpu = &self.shared.gpu;
        let (major, minor) = (gpu.driver_version / 1000, gpu.driver_version % 1000 / 10);
        format!("{}, {} GiB, {}, CUDA {major}.{minor}", gpu.name, gpu.memory_bytes >> 30, self.shared.target.arch)
    }

    fn limits(&self) -> Limits {
        let Shared { gpu, target, clusters, .. } = &*self.shared;
        Limits {
            threads: gpu.threads_per_block,
            threadgroup_bytes: gpu.shared_bytes,
            busy_groups: gpu.multiprocessors,
            warpgroup_products: target.arch == "sm_90a",
            clusters: *clusters,
        }
    }

    /// They are all of one stream, and a kernel that begins before the one in front has ended waits before it touches scratch
    /// memory (`ahead.h`).
    fn in_order(&self) -> bool {
        true
    }

    fn allocate(&self, bytes: usize, zeroed: bool) -> Result<Box<dyn gpu::Memory>> {
        let memory = self.shared.gpu.allocate(bytes)?;
        if zeroed {
            memory.fill_with_zeros().map_err(fault)?;
        }
        Ok(Box::new(memory))
    }

    fn upload(&self, memory: &dyn gpu::Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        memory_of(memory).upload(offset, bytes).map_err(fault)
    }

    fn download(&self, memory: &dyn gpu::Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        memory_of(memory).download(offset, out).map_err(fault)
    }

    fn begin(&self) -> Result<Box<dyn LaunchPass>> {
        Ok(Box::new(Pass { shared: self.shared.clone(), launches: Vec::new() }))
    }

    fn capture(self: Arc<Self>, launches: Vec<Launch>) -> Result<Box<dyn Replay>> {
        let shared = self.shared.clone();
        // Before the capture: loading a kernel is not allowed within.
        let launches = launches.into_iter().map(|launch| shared.prepare(launch)).collect::<Result<Vec<_>>>()?;
        let graph = Graph::capture(&shared.gpu, |stream| shared.enqueue_all(&launches, stream))?;
        let launches = launches.into_iter().map(|(launch, _)| launch).collect();
        Ok(Box::new(Captured { graph: Mutex::new(graph), gpu: shared.gpu.clone(), _launches: launches }))
    }
}

/// Launches that wait for the commit: a pass that is dropped does nothing.
struct Pass {
    shared: Arc<Shared>,
    launches: Vec<(Launch, Runner)>,
}

impl LaunchPass for Pass {
    fn launch(&mut self, launch: Launch) -> Result<()> {
        self.launches.push(self.shared.prepare(launch)?);
        Ok(())
    }

    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>> {
        let Pass { shared, launches } = *self;
        let _entered = shared.gpu.enter().map_err(fault)?;
        let _turn = shared.gpu.turn();
        shared.enqueue_all(&launches, shared.gpu.stream)?;
        Ok(Box::new(shared.gpu.event().map_err(fault)?))
    }
}

impl Wait for Event {
    fn wait(self: Box<Self>) -> Result<()> {
        Event::wait(&self).map_err(fault)
    }
}

/// A CUDA graph, with the memory that its kernels use.
struct Captured {
    graph: Mutex<Graph>,
    gpu: Arc<Gpu>,
    _launches: Vec<Launch>,
}

impl Replay for Captured {
    fn replay(&self) -> Result<Option<Box<dyn Wait>>> {
        let _turn = self.gpu.turn();
        self.graph.lock().unwrap_or_else(PoisonError::into_inner).launch().map_err(fault)?;
        Ok(Some(Box::new(self.gpu.event().map_err(fault)?)))
    }
}
