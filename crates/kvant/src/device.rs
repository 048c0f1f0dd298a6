//! Devices: opening and listing them.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use crate::{Encoder, Error, Result, backend::Backend, cpu, cuda, group, host::Host, metal, ops::check, reference};

pub use crate::cpu::{CpuOptions, SimdLevel};

/// The kinds of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// Apple GPUs.
    Metal,
    /// NVIDIA GPUs.
    Cuda,
    /// The host's processor.
    Cpu,
    /// The reference: plain f64 loops on the host. Slow, and the definition of correct.
    Reference,
}

impl DeviceKind {
    /// The lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceKind::Metal => "metal",
            DeviceKind::Cuda => "cuda",
            DeviceKind::Cpu => "cpu",
            DeviceKind::Reference => "reference",
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A place where tensors live and operations run. Cloning is cheap; clones are equal.
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn Backend>,
}

/// A kernel, as a device's compiler accepted or rejected it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelReport {
    /// The file and the kernel.
    pub name: String,
    /// The constants that it is specialised for.
    pub constants: String,
    /// Maximum threads of a threadgroup.
    pub threads: usize,
    /// Bytes of threadgroup memory that the kernel declares itself.
    pub threadgroup_bytes: usize,
    /// The compiler's message, if it rejected the kernel.
    pub refusal: Option<String>,
}

/// The memory of a device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// All memory that programs can use.
    pub total: usize,
    /// Memory that any program can still allocate.
    pub free: usize,
    /// Freed memory of tensors that the device keeps for new ones. Other programs cannot use it; [`Device::trim`]
    /// returns it to the system.
    pub held: usize,
}

/// An entry of [`Device::list`].
#[non_exhaustive]
pub struct DeviceEntry {
    /// The kind of device.
    pub kind: DeviceKind,
    /// The number of the device among devices of its kind; 0 except with several NVIDIA GPUs.
    pub index: usize,
    /// The device, or the reason why it is not available.
    pub device: Result<Device>,
}

impl Device {
    /// Every device, best kind first, with the reason for each kind that is not available.
    ///
    /// ```
    /// for entry in kvant::Device::list() {
    ///     match entry.device {
    ///         Ok(device) => println!("{device}"),
    ///         Err(reason) => println!("{}: {reason}", entry.kind),
    ///     }
    /// }
    /// ```
    pub fn list() -> Vec<DeviceEntry> {
        let entry = |kind, index, device| DeviceEntry { kind, index, device };
        let gpus = (0..cuda::count().max(1)).map(|index| entry(DeviceKind::Cuda, index, Device::cuda(index)));
        let others = [DeviceKind::Cpu, DeviceKind::Reference].map(|kind| entry(kind, 0, Device::open(kind)));
        [entry(DeviceKind::Metal, 0, metal::open())].into_iter().chain(gpus).chain(others).collect()
    }

    /// Opens the device of a kind; for several NVIDIA GPUs, the first. Every call that succeeds returns the same
    /// device; after a failure the next call tries again.
    ///
    /// # Errors
    /// `NoDevice` with the reason.
    pub fn open(kind: DeviceKind) -> Result<Device> {
        match kind {
            DeviceKind::Metal => metal::open(),
            DeviceKind::Cuda => Device::cuda(0),
            DeviceKind::Cpu => Ok(Device::cpu()),
            DeviceKind::Reference => Ok(Device::reference()),
        }
    }

    /// Opens an NVIDIA GPU, by its number. Every call for a number that succeeds returns the same device.
    ///
    /// # Errors
    /// `NoDevice` with the reason.
    ///
    /// ```
    /// match kvant::Device::cuda(1) {
    ///     Ok(second) => println!("{second}: {} bytes are free", second.memory()?.free),
    ///     Err(reason) => println!("no second GPU: {reason}"),
    /// }
    /// # Ok::<(), kvant::Error>(())
    /// ```
    pub fn cuda(index: usize) -> Result<Device> {
        cuda::open(index)
    }

    /// The CPU with its best instruction set and all its cores. Every call returns the same device.
    pub fn cpu() -> Device {
        static CPU: OnceLock<Device> = OnceLock::new();
        CPU.get_or_init(|| Device::cpu_with(CpuOptions::default()).expect("the default options fit every machine"))
            .clone()
    }

    /// A separate CPU device with a given number of threads or instruction set.
    ///
    /// # Errors
    /// `Value` for zero or too many threads, or for an instruction set that this machine lacks.
    pub fn cpu_with(options: CpuOptions) -> Result<Device> {
        Ok(Device::from_backend(Arc::new(Host::new(cpu::Cpu::new(options)?))))
    }

    /// The reference device: every operation in plain f64 loops. Every call returns the same device.
    pub fn reference() -> Device {
        static REFERENCE: OnceLock<Device> = OnceLock::new();
        REFERENCE.get_or_init(|| Device::from_backend(Arc::new(Host::new(reference::Reference)))).clone()
    }

    /// A group of devices of one kind, its ranks: one device that runs every call on all of them.
    ///
    /// A tensor of the group has memory on each rank, all of one shape ([`Tensor`](crate::Tensor)). A pass runs on all
    /// ranks at the same time, each on its own memory. Contents may differ: a rank can hold its part of a weight, or of
    /// the heads of a cache. Only [`all_reduce`](crate::ops::all_reduce()) and
    /// [`all_gather`](crate::ops::all_gather()) see other ranks. Everything else, such as pools and graphs, works as on
    /// one device.
    ///
    /// If a rank fails in a pass, the pass of all ranks fails, with its error. On the CPU the group can be used
    /// again.
    ///
    /// While a group of these devices, in this order, is in use, every call returns that one. The devices can also be
    /// used alone. Metal has groups of one device only.
    ///
    /// ```
    /// use kvant::{CpuOptions, DType, Device, Tensor};
    /// let half = || Device::cpu_with(CpuOptions { threads: Some(1), ..CpuOptions::default() });
    /// let group = Device::group(&[half()?, half()?])?;
    /// assert_eq!(group.ranks(), 2);
    /// let x = Tensor::from_slice(&group, &[1f32, 2.], &[2])?; // on both
    /// assert_eq!(x.on_rank(1)?.to_vec::<f32>()?, [1., 2.]);
    /// # Ok::<(), kvant::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Value` without devices, for more than 64, for a device that is a group, of another kind, named twice, or in
    /// another group; `Unsupported` for Metal; `DeviceFault`; on CUDA also `OutOfMemory`.
    pub fn group(devices: &[Device]) -> Result<Device> {
        group::open(devices)
    }

    /// The number of ranks of a group; 1 for another device.
    pub fn ranks(&self) -> usize {
        self.backend.ranks().len().max(1)
    }

    /// A rank of a group, as a device. The only rank of another device is the device itself, rank 0.
    ///
    /// # Errors
    /// `Value` for a rank that is not below [`Device::ranks`].
    pub fn rank(&self, rank: usize) -> Result<Device> {
        let (ranks, count) = (self.backend.ranks(), self.ranks());
        check::value_is("rank", "rank", rank < count, format_args!("below the {count} of {self}"), rank)?;
        Ok(ranks.get(rank).unwrap_or(self).clone())
    }

    /// Starts recording operations.
    pub fn encoder(&self) -> Result<Encoder> {
        Encoder::new(self)
    }

    /// The kind of device.
    pub fn kind(&self) -> DeviceKind {
        self.backend.kind()
    }

    /// The device's name for humans.
    pub fn name(&self) -> String {
        self.backend.name()
    }

    /// The device's total, free and held memory. In a Linux container with a limit, the limit bounds the CPU's memory.
    /// For a group, the least of its ranks: tensors have one size on all of them.
    ///
    /// # Errors
    /// `Unsupported` for the CPU of systems other than Linux; `DeviceFault`.
    pub fn memory(&self) -> Result<MemoryInfo> {
        self.backend.memory()
    }

    /// The kernels that the device has compiled or rejected so far. The list is empty except for Metal devices of a
    /// Mac.
    pub fn kernels(&self) -> Vec<KernelReport> {
        self.backend.kernels()
    }

    /// Returns memory that the device keeps for new tensors to the system, after all committed work has finished.
    ///
    /// # Errors
    /// `DeviceFault`.
    pub fn trim(&self) -> Result<()> {
        self.backend.trim()
    }

    pub(crate) fn from_backend(backend: Arc<dyn Backend>) -> Device {
        Device { backend }
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }
}

impl Default for Device {
    /// Opens Metal on a Mac, CUDA if a GPU, its driver and NVRTC are present, otherwise the CPU.
    ///
    /// The reason why a GPU cannot be used is logged: as a warning on a Mac and if NVIDIA's driver is installed,
    /// otherwise at debug level.
    fn default() -> Self {
        let gpus = [(DeviceKind::Metal, metal::is_expected()), (DeviceKind::Cuda, cuda::is_expected())];
        first_of(gpus.into_iter().map(|(kind, expected)| (Device::open(kind), expected))).unwrap_or_else(Device::cpu)
    }
}

/// Returns the first available device, and logs why each earlier one is not available: as a warning if it was expected.
fn first_of(devices: impl IntoIterator<Item = (Result<Device>, bool)>) -> Option<Device> {
    devices.into_iter().find_map(|(device, expected)| {
        match &device {
            Err(reason) if expected => tracing::warn!("a GPU is not used: {reason}"),
            Err(reason) => tracing::debug!("no such GPU: {reason}"),
            Ok(_) => {}
        }
        device.ok()
    })
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.backend, &other.backend)
    }
}

impl Eq for Device {}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.kind(), self.name())
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error of a backend that this build does not contain.
pub(crate) fn not_built(kind: DeviceKind, reason: &str) -> Result<Device> {
    Err(Error::NoDevice { kind, reason: reason.to_string() })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tracing::{Event, Level, Metadata, Subscriber, field, span};

    use super::*;

    /// Stores the level and text of every event.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<(Level, String)>>>);

    impl Subscriber for Log {
        fn enabled(&self, _: &Metadata) -> bool {
            true
        }
        fn new_span(&self, _: &span::Attributes) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, event: &Event) {
            let mut text = String::new();
            event.record(&mut |field: &field::Field, value: &dyn fmt::Debug| text += &format!("{field}: {value:?}; "));
            self.0.lock().unwrap().push((*event.metadata().level(), text));
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }

    /// If the CPU replaces a GPU that is present, the log has the reason.
    #[test]
    fn an_unused_gpu_is_logged() {
        let missing = |kind, reason| not_built(kind, reason);
        let log = Log::default();
        let found = tracing::subscriber::with_default(log.clone(), || {
            first_of([
                (missing(DeviceKind::Metal, "no Mac"), false),
                (missing(DeviceKind::Cuda, "NVRTC is missing"), true),
                (Ok(Device::reference()), true),
                (missing(DeviceKind::Cuda, "never asked"), true),
            ])
        });
        assert_eq!(found, Some(Device::reference()));
        let log = log.0.lock().unwrap();
        let [(Level::DEBUG, metal), (Level::WARN, cuda)] = &log[..] else { panic!("{log:?}") };
        assert!(metal.contains("no Mac") && cuda.contains("NVRTC is missing"), "{log:?}");
        assert!(first_of([]).is_none());
    }
}
