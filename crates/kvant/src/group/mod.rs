//! Groups of devices: a device whose calls run on several devices of one kind, its ranks.
//!
//! A tensor of a group has memory of one shape on every rank. A pass runs on all ranks, each on its own memory. A
//! [`Call`] is recorded once. [`Call::for_rank`] replaces its tensors by plain tensors of the rank's device, so kernels
//! do not depend on groups. Only collectives (`ops/all_reduce.rs`, `all_gather.rs`, `merge_attention.rs`) read other
//! ranks' memory.
//!
//! Each rank has a thread for a pass; the caller's is one of them. A lock orders passes and transfers, so that all
//! ranks run them in one order. A rank that fails or panics ends the pass of all ranks with its error: ranks that wait
//! for it in a collective stop waiting (`meeting.rs`). The next pass is not affected.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use crate::{
    Device, Error, Result,
    backend::{Backend, Memory, Pass, Replay, Transfer, Wait},
    cpu::ThreadPool,
    device::{DeviceKind, KernelReport, MemoryInfo},
    ops::{Call, attend, check},
    tensor::Storage,
};

mod exchange;
mod meeting;
mod rank;

pub(crate) use exchange::Exchange;
pub(crate) use meeting::Meeting;
pub(crate) use rank::{Peers, Rank, RankTensors, rank_tensors};

const NAME: &str = "group";

/// The largest number of ranks.
pub(crate) const MAX_RANKS: usize = 64;

/// A device that runs every call on all its ranks.
pub(crate) struct Group {
    ranks: Vec<Rank>,
    devices: Vec<Device>,
    /// One thread per rank: all ranks of a pass run at the same time.
    threads: ThreadPool,
    meeting: Arc<Meeting>,
    /// The memory through which GPUs exchange data; `None` in host memory, and with one rank.
    exchange: Option<Arc<Exchange>>,
    /// Held while the ranks get a pass or a transfer.
    turn: Mutex<()>,
}

/// The groups that are in use. A device is in at most one group, because two groups that share a device could deadlock.
static GROUPS: Mutex<Vec<Weak<Group>>> = Mutex::new(Vec::new());

/// The device of a group; see [`Device::group`].
pub(crate) fn open(devices: &[Device]) -> Result<Device> {
    check_ranks(devices)?;
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.retain(|group| group.strong_count() > 0);
    for group in groups.iter().filter_map(Weak::upgrade) {
        if group.devices == devices {
            return Ok(Device::from_backend(group));
        }
        if let Some(shared) = devices.iter().find(|device| group.devices.contains(device)) {
            let (expected, got) = ("devices of no other group".to_string(), format!("{shared}, of {}", group.name()));
            return Err(Error::Value { op: NAME, arg: "devices", expected, got });
        }
    }
    let group = Arc::new(Group::new(devices)?);
    groups.push(Arc::downgrade(&group));
    Ok(Device::from_backend(group))
}

fn check_ranks(devices: &[Device]) -> Result<()> {
    let fits = (1..=MAX_RANKS).contains(&devices.len());
    check::value_is(NAME, "devices", fits, format_args!("1 to {MAX_RANKS} devices"), devices.len())?;
    let kind = devices[0].kind();
    for (index, device) in devices.iter().enumerate() {
        let is_group = !device.backend().ranks().is_empty();
        check::value_is(NAME, "devices", !is_group, "no groups", device)?;
        check::value_is(NAME, "devices", device.kind() == kind, format_args!("of one kind, {kind}"), device)?;
        let is_new = !devices[..index].contains(device);
        check::value_is(NAME, "devices", is_new, "different devices", format_args!("{device} twice"))?;
    }
    if kind == DeviceKind::Metal && devices.len() > 1 {
        let reason = "Metal devices have no collectives".to_string();
        return Err(Error::Unsupported { op: NAME, device: "metal", reason });
    }
    Ok(())
}

impl Group {
    fn new(devices: &[Device]) -> Result<Group> {
        let threads = ThreadPool::new(devices.len());
        if threads.threads() < devices.len() {
            return Err(fault(devices, "the system has no thread for each rank".to_string()));
        }
        let meeting = Arc::new(Meeting::new(devices.len()));
        let has_exchange = devices.len() > 1 && devices[0].kind() == DeviceKind::Cuda;
        let exchange = has_exchange.then(|| Exchange::open(devices)).transpose()?.map(Arc::new);
        let rank = |(index, device): (usize, &Device)| Rank::new(index, device, &meeting, exchange.as_ref());
        let ranks = devices.iter().enumerate().map(rank).collect();
        Ok(Group { ranks, devices: devices.to_vec(), threads, meeting, exchange, turn: Mutex::new(()) })
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data of its own.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts or runs the work of all ranks at the same time. Returns the error of a rank that fails.
    fn together<T: Send>(&self, run: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
        let _turn = self.turn();
        self.check()?;
        self.meeting.start();
        let done: Vec<Mutex<Option<T>>> = self.ranks.iter().map(|_| Mutex::new(None)).collect();
        let failure = Mutex::new(None);
        self.threads.run(self.ranks.len(), |rank| {
            match catch_unwind(AssertUnwindSafe(|| run(rank))).unwrap_or_else(|panic| Err(self.panicked(rank, &*panic)))
            {
                Ok(value) => {
                    *done[rank].lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
                    self.meeting.leave();
                }
                // The first failure counts: later ones are ranks that leave a collective because of it.
                Err(error) if self.meeting.abort() => {
                    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                }
                Err(error) => tracing::debug!(rank, %error, "a rank follows the one that failed"),
            }
        });
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            // Kernels of other ranks may wait for this one.
            self.exchange.iter().for_each(|exchange| exchange.fail());
            return Err(error);
        }
        let done: Option<Vec<T>> =
            done.into_iter().map(|value| value.into_inner().unwrap_or_else(PoisonError::into_inner)).collect();
        done.ok_or_else(|| fault(&self.devices, "a rank has not run".to_string()))
    }

    /// Prepares the work of each rank. Rank 0 is first, so that the other ranks reuse its compiled kernels.
    fn prepare<T>(&self, mut run: impl FnMut(usize) -> Result<T>) -> Result<Vec<T>> {
        (0..self.ranks.len()).map(&mut run).collect()
    }

    /// # Errors
    /// `DeviceFault` once the group cannot be used again.
    fn check(&self) -> Result<()> {
        self.exchange.as_ref().map_or(Ok(()), |exchange| exchange.check())
    }

    fn panicked(&self, rank: usize, panic: &(dyn Any + Send)) -> Error {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        fault(&self.devices[rank..=rank], format!("rank {rank} panicked: {}", text.unwrap_or("without a message")))
    }

    fn allocate_with(&self, allocate: impl Fn(&dyn Backend) -> Result<Box<dyn Memory>>) -> Result<Box<dyn Memory>> {
        let storage =
            |device: &Device| Ok(Arc::new(Storage { device: device.clone(), memory: allocate(&**device.backend())? }));
        let ranks = self.devices.iter().map(storage).collect::<Result<_>>()?;
        Ok(Box::new(GroupMemory { ranks }))
    }

    /// The memory of rank 0, for contents that are equal on all ranks.
    fn first<'a>(&self, memory: &'a dyn Memory) -> Result<&'a Storage> {
        let first = storages(memory).first();
        first.map(|storage| &**storage).ok_or_else(|| fault(&self.devices, "memory of another device".to_string()))
    }
}

/// The error of a device of a group.
fn fault(devices: &[Device], reason: String) -> Error {
    let device = devices.first().map_or_else(|| NAME.to_string(), Device::to_string);
    Error::DeviceFault { device, reason }
}

/// Memory of every rank, of one size. The host sees none of it: a rank's memory is used through a tensor of the rank.
struct GroupMemory {
    ranks: Vec<Arc<Storage>>,
}

/// The memory of each rank; none for memory of a plain device.
pub(crate) fn storages(memory: &dyn Memory) -> &[Arc<Storage>] {
    memory.as_any().downcast_ref::<GroupMemory>().map_or(&[], |memory| &memory.ranks)
}

impl Memory for GroupMemory {
    fn host(&self) -> Option<NonNull<u8>> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Backend for Group {
    fn kind(&self) -> DeviceKind {
        self.devices[0].kind()
    }

    fn name(&self) -> String {
        format!("{}, {} ranks", self.devices[0].name(), self.devices.len())
    }

    fn ranks(&self) -> &[Device] {
        &self.devices
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        self.allocate_with(|rank| rank.allocate(bytes))
    }

    fn allocate_sparse(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        self.allocate_with(|rank| rank.allocate_sparse(bytes))
    }

    fn upload(&self, memory: &dyn Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        let _turn = self.turn();
        storages(memory).iter().try_for_each(|rank| rank.device.backend().upload(&*rank.memory, offset, bytes))
    }

    fn download(&self, memory: &dyn Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        let _turn = self.turn();
        let first = self.first(memory)?;
        first.device.backend().download(&*first.memory, offset, out)?;
        self.check()
    }

    fn start_download(&self, memory: &dyn Memory, offset: usize, bytes: usize) -> Result<Option<Box<dyn Transfer>>> {
        let _turn = self.turn();
        let first = self.first(memory)?;
        let started = first.device.backend().start_download(&*first.memory, offset, bytes)?;
        let exchange = self.exchange.clone();
        Ok(started.map(|transfer| Box::new(GroupTransfer { transfer, exchange }) as Box<dyn Transfer>))
    }

    fn begin(self: Arc<Self>) -> Result<Box<dyn Pass>> {
        let passes = self.devices.iter().map(|rank| rank.backend().clone().begin()).collect::<Result<_>>()?;
        Ok(Box::new(GroupPass { group: self, passes, differs: false }))
    }

    fn capture(self: Arc<Self>, calls: Vec<Call>) -> Result<Box<dyn Replay>> {
        let ranks = self.prepare(|rank| {
            let calls = calls.iter().map(|call| call.for_rank(&self.ranks[rank])).collect::<Result<_>>()?;
            self.devices[rank].backend().clone().capture(calls)
        })?;
        let ranks = ranks.into_iter().map(Mutex::new).collect();
        Ok(Box::new(GroupReplay { group: self, ranks }))
    }

    /// The minimum over the ranks, because tensors have one size on all of them.
    fn memory(&self) -> Result<MemoryInfo> {
        let mut least: Option<MemoryInfo> = None;
        for device in &self.devices {
            let MemoryInfo { total, free, held } = device.memory()?;
            let before = least.unwrap_or(MemoryInfo { total, free, held });
            least = Some(MemoryInfo {
                total: total.min(before.total),
                free: free.min(before.free),
                held: held.min(before.held),
            });
        }
        least.ok_or_else(|| fault(&self.devices, "a group without ranks".to_string()))
    }

    fn trim(&self) -> Result<()> {
        self.devices.iter().try_for_each(Device::trim)
    }

    fn kernels(&self) -> Vec<KernelReport> {
        self.devices[0].kernels()
    }

    fn explain_attend(&self, call: &attend::Call) -> attend::Explanation {
        let mut call = call.clone();
        call.move_to(&self.ranks[0]);
        self.devices[0].backend().explain_attend(&call)
    }
}

struct GroupPass {
    group: Arc<Group>,
    passes: Vec<Box<dyn Pass>>,
    /// Whether only some ranks have recorded a call. They would wait for the other ranks.
    differs: bool,
}

impl Pass for GroupPass {
    fn submit(&mut self, call: Call) -> Result<()> {
        let calls: Vec<Call> = self.group.ranks.iter().map(|rank| call.for_rank(rank)).collect::<Result<_>>()?;
        for (rank, (pass, call)) in self.passes.iter_mut().zip(calls).enumerate() {
            let recorded = pass.submit(call);
            self.differs |= recorded.is_err() && rank > 0;
            recorded?;
        }
        Ok(())
    }

    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>> {
        let GroupPass { group, mut passes, differs } = *self;
        if differs {
            return Err(fault(&group.devices, "an operation could not be recorded on all ranks".to_string()));
        }
        group.prepare(|rank| passes[rank].prepare())?;
        let passes: Vec<_> = passes.into_iter().map(|pass| Mutex::new(Some(pass))).collect();
        let waits = group.together(|rank| match take(&passes[rank]) {
            Some(pass) => pass.commit(),
            None => Err(fault(&group.devices, "a rank ran twice".to_string())),
        })?;
        Ok(Box::new(GroupWait { waits, exchange: group.exchange.clone() }))
    }
}

fn take<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

struct GroupReplay {
    group: Arc<Group>,
    ranks: Vec<Mutex<Box<dyn Replay>>>,
}

impl Replay for GroupReplay {
    fn replay(&self) -> Result<Option<Box<dyn Wait>>> {
        let waits =
            self.group.together(|rank| self.ranks[rank].lock().unwrap_or_else(PoisonError::into_inner).replay())?;
        let waits: Vec<Box<dyn Wait>> = waits.into_iter().flatten().collect();
        let exchange = self.group.exchange.clone();
        Ok((!waits.is_empty()).then(|| Box::new(GroupWait { waits, exchange }) as Box<dyn Wait>))
    }
}

/// The committed work of all ranks.
struct GroupWait {
    waits: Vec<Box<dyn Wait>>,
    exchange: Option<Arc<Exchange>>,
}

impl Wait for GroupWait {
    /// Waits for all ranks, even if one has failed.
    fn wait(self: Box<Self>) -> Result<()> {
        self.waits.into_iter().map(Wait::wait).fold(Ok(()), Result::and)?;
        self.exchange.map_or(Ok(()), |exchange| exchange.check())
    }

    fn is_done(&self) -> bool {
        self.waits.iter().all(|wait| wait.is_done())
    }
}

/// A download from rank 0.
struct GroupTransfer {
    transfer: Box<dyn Transfer>,
    exchange: Option<Arc<Exchange>>,
}

impl Transfer for GroupTransfer {
    fn finish(self: Box<Self>, out: &mut [u8]) -> Result<()> {
        self.transfer.finish(out)?;
        self.exchange.map_or(Ok(()), |exchange| exchange.check())
    }

    fn is_done(&self) -> bool {
        self.transfer.is_done()
    }
}

#[cfg(test)]
mod tests;
