//! The common part of the devices in host memory (`cpu`, `reference`): allocation, transfer, one pass at a time.

use std::{
    any::Any,
    borrow::Borrow,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    Error, Result, Tensor,
    backend::{self, Backend, Memory, Owner, Pass, Replay, Wait},
    device::{DeviceKind, MemoryInfo},
    dtype::Element,
    group, host_memory,
    ops::{Call, attend},
};

/// The size of a cache line and of the widest vector.
const ALIGN: usize = 64;

/// Zeroed host memory, aligned to [`ALIGN`].
pub(crate) struct HostMemory {
    /// The allocation and its layout.
    block: Option<(NonNull<u8>, std::alloc::Layout)>,
    start: NonNull<u8>,
}

// SAFETY: the memory is reached only through a device's lock (`Host::lock`), which makes access exclusive.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// `sparse`: the memory will be used in few, scattered places, so that huge pages would waste memory.
    fn new(bytes: usize, device: &str, sparse: bool) -> Result<Self> {
        let dangling = std::ptr::without_provenance_mut::<u8>(ALIGN);
        if bytes == 0 {
            return Ok(HostMemory { block: None, start: NonNull::new(dangling).expect("64 is not null") });
        }
        let failed = || Error::OutOfMemory { device: device.to_string(), bytes };
        let align = if bytes < HUGE { ALIGN } else { HUGE };
        // With a larger alignment the allocator would touch every page to zero it. A cache's capacity is far larger
        // than its use, so the code requests an alignment of 16, for which zero pages are mapped lazily, and aligns the
        // start itself.
        let padded = bytes.checked_add(align).ok_or_else(failed)?;
        let layout = std::alloc::Layout::from_size_align(padded, 16).map_err(|_| failed())?;
        // SAFETY: the layout is not empty.
        let block = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or_else(failed)?;
        let skip = block.align_offset(align);
        // SAFETY: `skip` is less than `align`, and the block is `align` bytes longer than `bytes`.
        let start = unsafe { block.add(skip) };
        if !sparse {
            want_huge_pages(start, bytes);
        }
        Ok(HostMemory { block: Some((block, layout)), start })
    }
}

/// A huge page. Larger blocks are aligned to one and request huge pages: reading a cache or weights in pages of 4 KiB
/// is bound by address translation. The cost: the first access to a page takes 2 MiB, so a cache of large capacity
/// takes 2 MiB for each head as soon as it holds one token.
const HUGE: usize = 2 << 20;

/// Requests huge pages, for systems that provide them only on request. Without huge pages, everything works, but
/// slower.
#[cfg(target_os = "linux")]
fn want_huge_pages(start: NonNull<u8>, bytes: usize) {
    // The remainder keeps small pages, because most of a huge page would be unused.
    let whole = bytes / HUGE * HUGE;
    if whole > 0 {
        // SAFETY: whole pages within the block; the advice changes neither contents nor protection.
        unsafe { libc::madvise(start.as_ptr().cast(), whole, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn want_huge_pages(_: NonNull<u8>, _: usize) {}

/// Moves a range that stays in use into huge pages, including the rest of the pages at its ends. Does nothing for GPU
/// memory, or if the system does not support it.
pub(crate) fn move_to_huge_pages(tensor: &crate::Tensor) {
    for rank in group::storages(&*tensor.storage().memory) {
        move_to_huge_pages(&tensor.with_storage(Arc::clone(rank)));
    }
    #[cfg(target_os = "linux")]
    if tensor.storage().memory.host().is_some() {
        /// Since Linux 6.1.
        const MADV_COLLAPSE: i32 = 25;
        let start = tensor.host_ptr() as usize;
        let (first, end) = (start / HUGE * HUGE, (start + tensor.bytes()).next_multiple_of(HUGE));
        let pages = std::ptr::with_exposed_provenance_mut(first);
        // SAFETY: the advice changes neither contents nor protection, and fails for unmapped memory.
        unsafe { libc::madvise(pages, end - first, MADV_COLLAPSE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = tensor;
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Some((block, layout)) = self.block {
            // SAFETY: allocated in `new` with this layout, and freed once.
            unsafe { std::alloc::dealloc(block.as_ptr(), layout) }
        }
    }
}

/// Memory of another library.
struct Borrowed {
    start: NonNull<u8>,
    _owner: Owner,
}

// SAFETY: as for `HostMemory`; the caller of `borrow` keeps others from accessing it meanwhile.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

impl Memory for Borrowed {
    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.start)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Memory for HostMemory {
    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.start)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The executor of calls, in which the host devices differ.
pub(crate) trait HostExecutor: Send + Sync + 'static {
    fn kind(&self) -> DeviceKind;
    fn name(&self) -> String;
    /// Runs a validated call whose index buffers are validated, too, and which writes something. The caller gives
    /// exclusive access to the memory.
    fn run(&self, call: &Call) -> Result<()>;
    fn explain_attend(&self, call: &attend::Call) -> attend::Explanation;
}

/// A device in host memory. Its lock is held during every transfer and every pass. This makes writing through a shared
/// `&Tensor` sound, from any number of threads.
pub(crate) struct Host<E> {
    executor: E,
    lock: Mutex<()>,
    /// Emptied lists of committed passes. A decode step reuses one, and allocates nothing.
    spare: Mutex<Passes<E>>,
}

#[allow(clippy::vec_box, reason = "a pass is handed out in its box, and a new box would be an allocation")]
type Passes<E> = Vec<Box<HostPass<E>>>;

impl<E: HostExecutor> Host<E> {
    pub(crate) fn new(executor: E) -> Self {
        Host { executor, lock: Mutex::new(()), spare: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data of its own, so a panic elsewhere leaves nothing inconsistent.
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs calls in order. Each call's index buffers are checked just before it, because earlier calls may write them.
    fn run<C: Borrow<Call>>(&self, calls: impl IntoIterator<Item = C>) -> Result<()> {
        let _guard = self.lock();
        calls.into_iter().try_for_each(|call| {
            call.borrow().check_indices()?;
            if call.borrow().writes_nothing() {
                return Ok(());
            }
            self.executor.run(call.borrow())
        })
    }

    fn spare(&self) -> MutexGuard<'_, Passes<E>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<E: HostExecutor> Backend for Host<E> {
    fn kind(&self) -> DeviceKind {
        self.executor.kind()
    }

    fn name(&self) -> String {
        self.executor.name()
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        Ok(Box::new(HostMemory::new(bytes, self.kind().name(), false)?))
    }

    fn allocate_sparse(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        Ok(Box::new(HostMemory::new(bytes, self.kind().name(), true)?))
    }

    unsafe fn borrow(&self, start: NonNull<u8>, _bytes: usize, owner: Owner) -> Result<backend::MemoryAt> {
        Ok((Box::new(Borrowed { start, _owner: owner }), 0))
    }

    fn upload(&self, memory: &dyn Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        let _guard = self.lock();
        let start = memory.host().expect("host memory has an address");
        // SAFETY: the caller keeps `offset + len` within the allocation; the lock excludes every other access; the
        // source is a Rust slice, which cannot be part of the locked memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.as_ptr().add(offset), bytes.len()) }
        Ok(())
    }

    fn download(&self, memory: &dyn Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        let _guard = self.lock();
        let start = memory.host().expect("host memory has an address");
        // SAFETY: as in `upload`.
        unsafe { std::ptr::copy_nonoverlapping(start.as_ptr().add(offset), out.as_mut_ptr(), out.len()) }
        Ok(())
    }

    fn begin(self: Arc<Self>) -> Result<Box<dyn Pass>> {
        let spare = self.spare().pop();
        let mut pass = spare.unwrap_or_else(|| Box::new(HostPass { host: None, calls: Vec::new() }));
        pass.host = Some(self);
        Ok(pass)
    }

    fn capture(self: Arc<Self>, calls: Vec<Call>) -> Result<Box<dyn Replay>> {
        Ok(Box::new(HostGraph { host: self, calls }))
    }

    fn memory(&self) -> Result<MemoryInfo> {
        host_memory::info().ok_or_else(|| Error::Unsupported {
            op: "memory",
            device: "cpu",
            reason: format!("the free memory of {} is not known", std::env::consts::OS),
        })
    }

    /// Does nothing: the host's allocator manages its memory itself.
    fn trim(&self) -> Result<()> {
        Ok(())
    }

    fn explain_attend(&self, call: &attend::Call) -> attend::Explanation {
        let _guard = self.lock();
        self.executor.explain_attend(call)
    }
}

struct HostPass<E> {
    /// `None` while the pass is among the spare ones, which the device owns.
    host: Option<Arc<Host<E>>>,
    calls: Vec<Call>,
}

impl<E: HostExecutor> Pass for HostPass<E> {
    fn submit(&mut self, call: Call) -> Result<()> {
        self.calls.push(call);
        Ok(())
    }

    fn commit(mut self: Box<Self>) -> Result<Box<dyn Wait>> {
        let host = self.host.take().expect("a pass that is recorded has a device");
        let done = host.run(self.calls.drain(..));
        host.spare().push(self);
        done.map(|()| Box::new(Done) as Box<dyn Wait>)
    }
}

/// A pass that ran before `commit` returned.
struct Done;

impl Wait for Done {
    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }

    fn is_done(&self) -> bool {
        true
    }
}

struct HostGraph<E> {
    host: Arc<Host<E>>,
    calls: Vec<Call>,
}

impl<E: HostExecutor> Replay for HostGraph<E> {
    fn replay(&self) -> Result<Option<Box<dyn Wait>>> {
        self.host.run(&self.calls)?;
        Ok(None)
    }
}

/// Access to tensors in host memory, for code that runs under the device's lock: kernels and index checks.
impl Tensor {
    /// The address of the first element. A running call has tensors of one device: a group's tensors have been replaced
    /// by the rank's.
    pub(crate) fn host_ptr(&self) -> *mut u8 {
        let start = self.storage().memory.host().expect("a host device's tensor has an address");
        // SAFETY: a tensor's offset is within its storage.
        unsafe { start.as_ptr().add(self.byte_offset()) }
    }

    /// The elements.
    ///
    /// # Safety
    /// The device's lock is held, and nothing writes to the tensor while the slice lives.
    pub(crate) unsafe fn host_slice<E: Element>(&self) -> &[E] {
        debug_assert_eq!(self.dtype(), E::DTYPE);
        // SAFETY: the range is within the storage, aligned to the element size (offsets are multiples of it) and
        // initialised (zeroed at allocation); the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.host_ptr().cast::<E>(), self.elements()) }
    }

    /// The elements, mutable.
    ///
    /// # Safety
    /// The device's lock is held, and nothing else reads or writes the tensor while the slice lives.
    #[allow(clippy::mut_from_ref, reason = "the lock, not the borrow, makes it exclusive")]
    pub(crate) unsafe fn host_slice_mut<E: Element>(&self) -> &mut [E] {
        debug_assert_eq!(self.dtype(), E::DTYPE);
        // SAFETY: as in `host_slice`; the caller excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.host_ptr().cast::<E>(), self.elements()) }
    }

    /// The raw bytes, whatever the dtype.
    ///
    /// # Safety
    /// As for [`Tensor::host_slice`].
    #[allow(dead_code)]
    pub(crate) unsafe fn host_bytes(&self) -> &[u8] {
        // SAFETY: as in `host_slice`.
        unsafe { std::slice::from_raw_parts(self.host_ptr(), self.bytes()) }
    }
}
