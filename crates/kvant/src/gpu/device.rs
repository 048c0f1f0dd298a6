//! A device made of an executor and the kernels of a backend.

use std::{
    cell::RefCell,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
};

use super::launch::{Launch, Scratch};
use crate::{
    Device, DeviceKind, Error, KernelReport, MemoryInfo, Result,
    backend::{self, Backend, ForeignStream, Memory, MemoryAt, Owner, Pass, Replay, Transfer, Wait},
    ops::{Call, attend},
};

/// A GPU's limits on a launch.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Threads of a threadgroup.
    pub threads: usize,
    /// Bytes of threadgroup memory.
    pub threadgroup_bytes: usize,
    /// Threadgroups that keep the whole device busy; splits of a context aim at this number.
    pub busy_groups: usize,
    /// Whether warpgroups multiply (`wgmma`): compute capability 9.0 only.
    pub warpgroup_products: bool,
    /// Whether a library multiplies dense matrices ([`Product`](super::Product)).
    pub library_products: bool,
    /// Whether threadgroups can read one another's memory, in clusters of up to 8.
    pub clusters: bool,
}

/// Threadgroups of 128 threads that keep an Apple GPU of `cores` cores busy: 32 SIMD-groups per core.
pub fn metal_busy_groups(cores: usize) -> usize {
    8 * cores
}

/// Runs launches.
pub trait Executor: Send + Sync + 'static {
    /// Its name, for display.
    fn name(&self) -> String;
    /// Its limits.
    fn limits(&self) -> Limits;
    /// Whether the launch's kernel is unavailable. If a simpler kernel exists, it is used instead. The first refusal of
    /// a kernel is a warning with the reason.
    fn refuses(&self, _launch: &Launch) -> bool {
        false
    }
    /// The kernels that were compiled, or refused, so far.
    fn kernels(&self) -> Vec<KernelReport> {
        Vec::new()
    }
    /// Whether launches run one after the other, whatever they touch. Calls then share their scratch memory.
    fn in_order(&self) -> bool {
        false
    }
    /// Allocates memory, zeroed or uninitialised.
    fn allocate(&self, bytes: usize, zeroed: bool) -> Result<Box<dyn Memory>>;
    /// `bytes` bytes from the device's address `start` on, which somebody else owns.
    ///
    /// # Safety
    /// The contract of [`Tensor::from_raw`](crate::Tensor::from_raw).
    unsafe fn borrow(&self, _start: NonNull<u8>, _bytes: usize, _owner: Owner) -> Result<MemoryAt> {
        Err(backend::no_borrowing("gpu"))
    }
    /// Waits for committed work that uses the bytes, then writes. `offset + bytes.len()` is within the allocation.
    fn upload(&self, memory: &dyn Memory, offset: usize, bytes: &[u8]) -> Result<()>;
    /// Waits for committed work that uses the bytes, then reads. `offset + out.len()` is within the allocation.
    fn download(&self, memory: &dyn Memory, offset: usize, out: &mut [u8]) -> Result<()>;
    /// Starts to read after committed work, without waiting for it. `None` if the executor has no such transfer, or no
    /// memory for it. `offset + bytes` is within the allocation.
    fn start_download(&self, _memory: &dyn Memory, _offset: usize, _bytes: usize) -> Result<Option<Box<dyn Transfer>>> {
        Ok(None)
    }
    /// The number by which other GPUs of its kind identify this one.
    fn number(&self) -> Option<usize> {
        None
    }
    /// Lets kernels of other GPUs, by number, access all memory of this one, now and later.
    fn share_with(&self, _others: &[usize]) -> Result<()> {
        Err(no_peers())
    }
    /// Zeroed host memory, which has an address, and which kernels of all GPUs access.
    fn allocate_host(&self, _bytes: usize) -> Result<Box<dyn Memory>> {
        Err(no_peers())
    }
    /// The amount of memory. Emulators report none.
    fn memory(&self) -> Result<MemoryInfo> {
        Err(Error::Unsupported { op: "memory", device: "gpu", reason: "the executor does not report it".to_string() })
    }
    /// Returns unused memory to the system.
    fn trim(&self) -> Result<()> {
        Ok(())
    }
    /// Starts a pass.
    fn begin(&self) -> Result<Box<dyn LaunchPass>>;
    /// Prepares launches to be replayed, in order.
    fn capture(self: Arc<Self>, launches: Vec<Launch>) -> Result<Box<dyn Replay>>;
}

fn no_peers() -> Error {
    let reason = "the executor has no access to other GPUs".to_string();
    Error::Unsupported { op: "group", device: "gpu", reason }
}

/// A pass that is being recorded.
pub trait LaunchPass: Send {
    /// Adds a launch, which sees the writes of earlier ones.
    fn launch(&mut self, launch: Launch) -> Result<()>;
    /// Orders the pass with a stream of another library.
    ///
    /// # Safety
    /// The contract of [`Encoder::order_with`](crate::Encoder::order_with).
    unsafe fn order_with(&mut self, _stream: ForeignStream) -> Result<()> {
        Err(backend::no_streams())
    }
    /// Does the slow work that can fail, such as compiling kernels, before [`LaunchPass::commit`].
    fn prepare(&mut self) -> Result<()> {
        Ok(())
    }
    /// Starts it.
    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>>;
}

/// How a backend's kernels serve the calls.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    pub kind: DeviceKind,
    /// Turns a call into launches.
    pub build: fn(&Call, &mut Builder) -> Result<()>,
    /// Turns a call and the next one into fewer launches with equal results, if kernels for both exist; otherwise adds
    /// none.
    pub build_pair: fn(&Call, &Call, &mut Builder) -> Result<bool>,
    pub explain_attend: fn(&attend::Call, &Limits) -> attend::Explanation,
}

/// A device that runs the Metal kernels on `executor`: the Apple runtime, or an emulator.
pub fn metal_device(executor: impl Executor) -> Device {
    Device::from_backend(Arc::new(Gpu::new(executor, crate::metal::KERNELS)))
}

/// A device that runs the CUDA kernels on `executor`, for an emulator.
pub fn cuda_device(executor: impl Executor) -> Device {
    Device::from_backend(Arc::new(Gpu::new(executor, crate::cuda::KERNELS)))
}

/// The executor of launches on the first NVIDIA GPU, if any: for devices that report lower limits than it has.
pub fn cuda_executor() -> Option<Arc<dyn Executor>> {
    crate::cuda::executor()
}

/// Whether [`compile_cuda`] works here: whether libnvrtc can be loaded.
pub fn has_cuda_compiler() -> bool {
    crate::cuda::has_compiler()
}

/// The machine code of a CUDA launch for `arch` (`sm_90a`); needs no GPU.
///
/// # Errors
/// The compiler's messages.
pub fn compile_cuda(launch: &Launch, arch: &str) -> std::result::Result<Vec<u8>, String> {
    crate::cuda::compile_only(launch, arch)
}

/// A backend.
pub(crate) struct Gpu<E> {
    pub executor: Arc<E>,
    pub kernels: Kernels,
    /// The scratch memory of the latest committed pass, if launches run one after the other.
    pad: Mutex<Option<Pad>>,
}

/// Maximum bytes of a block of scratch memory that is kept for later passes, and maximum blocks of a kind.
const MAX_KEPT: usize = 4 << 20;
const MAX_BLOCKS: usize = 4;

/// The scratch memory of calls that run one after the other: each takes memory that earlier calls have released.
#[derive(Default)]
pub(crate) struct Pad {
    blocks: Vec<PadBlock>,
}

struct PadBlock {
    memory: Arc<dyn Memory>,
    bytes: usize,
    /// Whether it has zeros between calls.
    zeros: bool,
    taken: bool,
}

impl Pad {
    /// Releases all memory for the next call.
    fn turn(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.taken = false);
    }

    /// Frees large blocks, and small ones beyond the maximum number.
    fn shrink(&mut self) {
        self.blocks.retain(|block| block.bytes <= MAX_KEPT);
        self.blocks.sort_by_key(|block| std::cmp::Reverse(block.bytes));
        let mut kept = [0; 2];
        self.blocks.retain(|block| {
            let of_kind = &mut kept[usize::from(block.zeros)];
            *of_kind += 1;
            *of_kind <= MAX_BLOCKS
        });
    }

    /// The smallest free block of a kind that is large enough, or a new one.
    fn take(&mut self, bytes: usize, zeros: bool, new: impl FnOnce() -> Result<Box<dyn Memory>>) -> Result<Scratch> {
        let fits = |block: &&mut PadBlock| !block.taken && block.zeros == zeros && block.bytes >= bytes;
        let memory = match self.blocks.iter_mut().filter(fits).min_by_key(|block| block.bytes) {
            Some(block) => {
                block.taken = true;
                block.memory.clone()
            }
            None => {
                let memory: Arc<dyn Memory> = new()?.into();
                self.blocks.push(PadBlock { memory: memory.clone(), bytes, zeros, taken: true });
                memory
            }
        };
        Ok(Scratch { memory, bytes })
    }
}

/// Collects the launches of a call.
pub(crate) struct Builder<'a> {
    pub limits: Limits,
    device: &'static str,
    refuses: &'a dyn Fn(&Launch) -> bool,
    allocate: &'a dyn Fn(usize, bool) -> Result<Box<dyn Memory>>,
    /// The memory that calls share, if they may share any.
    pad: Option<RefCell<&'a mut Pad>>,
    launches: Vec<Launch>,
}

impl Builder<'_> {
    /// Uninitialised memory for partial results.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<Scratch> {
        self.shared(bytes, false)
    }

    /// Memory of zeros, in which the kernel leaves zeros.
    pub(crate) fn counters(&self, bytes: usize) -> Result<Scratch> {
        self.shared(bytes, true)
    }

    fn shared(&self, bytes: usize, zeros: bool) -> Result<Scratch> {
        let new = || (self.allocate)(bytes, zeros);
        match &self.pad {
            Some(pad) => pad.borrow_mut().take(bytes, zeros, new),
            None => Ok(Scratch { memory: new()?.into(), bytes }),
        }
    }

    /// As [`Builder::scratch`], zeroed before the launches run for the first time. A replay finds the results of the
    /// last run.
    pub(crate) fn zeroed_scratch(&self, bytes: usize) -> Result<Scratch> {
        Ok(Scratch { memory: (self.allocate)(bytes, true)?.into(), bytes })
    }

    /// An error with the reason why this device does not support the call.
    pub(crate) fn unsupported(&self, op: &'static str, reason: String) -> Error {
        Error::Unsupported { op, device: self.device, reason }
    }

    /// Whether the launch's kernel is unavailable, so that a simpler one must be used. Bound buffers do not matter.
    pub(crate) fn refuses(&self, launch: &Launch) -> bool {
        (self.refuses)(launch)
    }

    /// Adds a launch; a launch without threads is dropped.
    ///
    /// # Errors
    /// `Unsupported` if the launch exceeds the device's limits.
    pub(crate) fn push(&mut self, launch: Launch) -> Result<()> {
        if launch.is_empty() {
            return Ok(());
        }
        let Limits { threads: max_threads, threadgroup_bytes: max_bytes, .. } = self.limits;
        let product = |dims: [u32; 3]| dims.into_iter().try_fold(1u64, |n, d| n.checked_mul(d.into()));
        let threads = product(launch.grid.threads);
        let total = threads.zip(product(launch.grid.groups)).and_then(|(threads, groups)| threads.checked_mul(groups));
        if threads.is_none_or(|n| n > max_threads as u64)
            || total.is_none_or(|n| n > u32::MAX.into())
            || launch.threadgroup_bytes as usize > max_bytes
        {
            let reason = format!(
                "a grid of {:?} threadgroups of {:?} threads with {} bytes each; the device allows {max_threads} \
                 threads and {max_bytes} bytes in one, and 2^32 threads in all",
                launch.grid.groups, launch.grid.threads, launch.threadgroup_bytes
            );
            return Err(self.unsupported(launch.op, reason));
        }
        self.launches.push(launch);
        Ok(())
    }
}

impl<E: Executor> Gpu<E> {
    pub(crate) fn new(executor: E, kernels: Kernels) -> Gpu<E> {
        Gpu { executor: Arc::new(executor), kernels, pad: Mutex::default() }
    }

    /// Replaces the kept scratch memory.
    fn keep(&self, pad: Option<Pad>) -> Option<Pad> {
        std::mem::replace(&mut self.pad.lock().unwrap_or_else(PoisonError::into_inner), pad)
    }

    /// The launches of a call; `pad` is memory that the calls of a pass share.
    fn launches(&self, call: &Call, pad: &mut Pad) -> Result<Vec<Launch>> {
        if call.writes_nothing() {
            return Ok(Vec::new());
        }
        let (launches, ()) = self.built(pad, |builder| (self.kernels.build)(call, builder))?;
        Ok(launches)
    }

    /// The launches of two calls that one kernel computes.
    fn launches_of_pair(&self, calls: &[Call], pad: &mut Pad) -> Result<Option<Vec<Launch>>> {
        let [first, second, ..] = calls else { return Ok(None) };
        if first.writes_nothing() || second.writes_nothing() {
            return Ok(None);
        }
        let (launches, is_built) = self.built(pad, |builder| (self.kernels.build_pair)(first, second, builder))?;
        Ok(is_built.then_some(launches))
    }

    fn built<T>(&self, pad: &mut Pad, build: impl FnOnce(&mut Builder) -> Result<T>) -> Result<(Vec<Launch>, T)> {
        let allocate = |bytes, zeroed| self.executor.allocate(bytes, zeroed);
        let limits = self.executor.limits();
        let device = self.kernels.kind.name();
        pad.turn();
        let pad = self.executor.in_order().then_some(RefCell::new(pad));
        let refuses = |launch: &Launch| self.executor.refuses(launch);
        let mut builder = Builder { limits, device, refuses: &refuses, allocate: &allocate, pad, launches: Vec::new() };
        let result = build(&mut builder)?;
        Ok((builder.launches, result))
    }
}

impl<E: Executor> Backend for Gpu<E> {
    fn kind(&self) -> DeviceKind {
        self.kernels.kind
    }

    fn name(&self) -> String {
        self.executor.name()
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        self.executor.allocate(bytes, true)
    }

    unsafe fn borrow(&self, start: NonNull<u8>, bytes: usize, owner: Owner) -> Result<MemoryAt> {
        // SAFETY: the contract is passed on to the caller.
        unsafe { self.executor.borrow(start, bytes, owner) }
    }

    fn upload(&self, memory: &dyn Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() { Ok(()) } else { self.executor.upload(memory, offset, bytes) }
    }

    fn download(&self, memory: &dyn Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        if out.is_empty() { Ok(()) } else { self.executor.download(memory, offset, out) }
    }

    fn start_download(&self, memory: &dyn Memory, offset: usize, bytes: usize) -> Result<Option<Box<dyn Transfer>>> {
        if bytes == 0 { Ok(None) } else { self.executor.start_download(memory, offset, bytes) }
    }

    fn number(&self) -> Option<usize> {
        self.executor.number()
    }

    fn share_with(&self, others: &[usize]) -> Result<()> {
        self.executor.share_with(others)
    }

    fn allocate_host(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        self.executor.allocate_host(bytes)
    }

    fn begin(self: Arc<Self>) -> Result<Box<dyn Pass>> {
        let pass = self.executor.begin()?;
        // A pass that is recorded at the same time gets memory of its own.
        let pad = self.keep(None).unwrap_or_default();
        Ok(Box::new(GpuPass { gpu: self, pass, pad }))
    }

    fn capture(self: Arc<Self>, calls: Vec<Call>) -> Result<Box<dyn Replay>> {
        let (mut launches, mut pad) = (Vec::new(), Pad::default());
        let mut left = &calls[..];
        while let [call, rest @ ..] = left {
            if let Some(both) = self.launches_of_pair(left, &mut pad)? {
                launches.extend(both);
                left = &rest[1..];
            } else {
                launches.extend(self.launches(call, &mut pad)?);
                left = rest;
            }
        }
        self.executor.clone().capture(launches)
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.executor.memory()
    }

    fn trim(&self) -> Result<()> {
        self.keep(None);
        self.executor.trim()
    }

    fn kernels(&self) -> Vec<KernelReport> {
        self.executor.kernels()
    }

    fn explain_attend(&self, call: &attend::Call) -> attend::Explanation {
        (self.kernels.explain_attend)(call, &self.executor.limits())
    }
}

struct GpuPass<E> {
    gpu: Arc<Gpu<E>>,
    pass: Box<dyn LaunchPass>,
    pad: Pad,
}

impl<E: Executor> Pass for GpuPass<E> {
    fn submit(&mut self, call: Call) -> Result<()> {
        self.gpu.launches(&call, &mut self.pad)?.into_iter().try_for_each(|launch| self.pass.launch(launch))
    }

    unsafe fn order_with(&mut self, stream: ForeignStream) -> Result<()> {
        // SAFETY: the contract is passed on to the caller.
        unsafe { self.pass.order_with(stream) }
    }

    fn prepare(&mut self) -> Result<()> {
        self.pass.prepare()
    }

    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>> {
        let GpuPass { gpu, pass, mut pad } = *self;
        let done = pass.commit()?;
        // Later passes run after this one.
        pad.shrink();
        gpu.keep(Some(pad));
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Source;

    static SOURCE: Source = Source { name: "none", text: "", headers: &[], layouts: &[] };

    /// Calls reuse memory of earlier ones, the smallest block that suffices; within a call nothing is shared.
    #[test]
    fn calls_share_scratch_memory() {
        // Tensors with a size, so that each has an address.
        struct Eight(#[expect(dead_code)] u64);
        impl Memory for Eight {
            fn host(&self) -> Option<std::ptr::NonNull<u8>> {
                None
            }
            fn as_any(&self) -> &dyn std::any::Any {
                self
            }
        }
        let (mut pad, mut allocated) = (Pad::default(), Vec::new());
        for call in [&[10, 30][..], &[20, 10], &[30, 31], &[8, 30, 31], &[]] {
            pad.turn();
            let mut taken: Vec<*const ()> = Vec::new();
            for &bytes in call {
                let scratch = pad
                    .take(bytes, false, || {
                        allocated.push(bytes);
                        Ok(Box::new(Eight(0)))
                    })
                    .unwrap();
                assert_eq!(scratch.bytes, bytes);
                taken.push(Arc::as_ptr(&scratch.memory).cast());
            }
            taken.sort();
            taken.dedup();
            assert_eq!(taken.len(), call.len(), "{call:?}");
        }
        assert_eq!(allocated, [10, 30, 31]);
        // Memory of zeros is not used for anything else, and small blocks remain.
        pad.turn();
        let zeros = pad.take(8, true, || Ok(Box::new(Eight(0)))).unwrap();
        let other = pad.take(8, false, || Ok(Box::new(Eight(0)))).unwrap();
        assert!(!Arc::ptr_eq(&zeros.memory, &other.memory));
        pad.take(MAX_KEPT + 1, false, || Ok(Box::new(Eight(0)))).unwrap();
        pad.shrink();
        assert_eq!(pad.blocks.iter().map(|block| block.bytes).collect::<Vec<_>>(), [31, 30, 10, 8]);
        for bytes in 100..110 {
            pad.take(bytes, false, || Ok(Box::new(Eight(0)))).unwrap();
        }
        pad.shrink();
        assert_eq!(pad.blocks.iter().map(|block| block.bytes).collect::<Vec<_>>(), [109, 108, 107, 106, 8]);
    }

    /// The outcome of a launch on a device of 1024 threads and 32 KiB: the number of launches, or an error.
    fn push(groups: [usize; 3], threads: [usize; 3], bytes: usize) -> Result<usize> {
        let allocate = |bytes, _| Err(Error::OutOfMemory { device: String::new(), bytes });
        let limits = Limits {
            threads: 1024,
            threadgroup_bytes: 32 << 10,
            busy_groups: 1,
            warpgroup_products: false,
            library_products: false,
            clusters: false,
        };
        let (refuses, launches) = (|_: &Launch| false, Vec::new());
        let mut builder =
            Builder { limits, device: "gpu", refuses: &refuses, allocate: &allocate, pad: None, launches };
        let launch = Launch::new("test", &SOURCE, "kernel").grid(groups, threads).threadgroup_memory(bytes);
        builder.push(launch)?;
        Ok(builder.launches.len())
    }

    #[test]
    fn launches_within_the_limits_are_taken() {
        assert_eq!(push([1, 1, 1], [1024, 1, 1], 32 << 10).unwrap(), 1);
        assert_eq!(push([70_000, 2, 3], [32, 4, 8], 0).unwrap(), 1);
        assert_eq!(push([(1 << 32) - 1, 1, 1], [1, 1, 1], 0).unwrap(), 1);
    }

    #[test]
    fn launches_without_threads_are_dropped() {
        assert_eq!(push([0, 1, 1], [32, 1, 1], 0).unwrap(), 0);
        assert_eq!(push([5, 1, 1], [32, 0, 1], 0).unwrap(), 0);
        assert_eq!(push([5, 1, 0], [5000, 1, 1], 0).unwrap(), 0);
    }

    #[test]
    fn launches_beyond_a_limit_are_refused() {
        for (groups, threads, bytes) in [
            ([1, 1, 1], [1025, 1, 1], 0),
            ([1, 1, 1], [32, 32, 2], 0),
            ([1, 1, 1], [1 << 16, 1 << 16, 1 << 16], 0),
            ([1, 1, 1], [usize::MAX, usize::MAX, usize::MAX], 0),
            ([1, 1, 1], [32, 1, 1], (32 << 10) + 1),
            ([1, 1, 1], [32, 1, 1], 1 << 40),
            ([1 << 31, 1, 1], [4, 1, 1], 0),
            ([1 << 22, 1, 1], [1024, 1, 1], 0),
            ([usize::MAX, usize::MAX, 3], [1, 1, 1], 0),
        ] {
            let error = push(groups, threads, bytes).unwrap_err();
            let Error::Unsupported { op: "test", device: "gpu", reason } = error else { panic!("{error}") };
            assert!(reason.contains("1024 threads and 32768 bytes"), "{reason}");
        }
    }
}
