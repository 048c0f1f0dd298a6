//! Opening and listing devices.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use crate::{CpuOptions, Device, Result, cpu, cuda, device::DeviceKind, group, host::Host, metal, reference};

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

    /// Searches these folders, too, for NVIDIA's compiler and cuBLASLt, before those of a CUDA toolkit: Python packages
    /// have them in `site-packages/nvidia/*/lib`. Call it before a GPU is opened. On Linux; elsewhere, and without the
    /// feature `cuda`, it has no effect.
    pub fn search_cuda_libraries(folders: Vec<PathBuf>) {
        cuda::search_in(folders);
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

    /// A [group](Device::group) of reference devices: every operation and every collective in plain f64 loops. Every
    /// call returns a new group.
    ///
    /// # Errors
    /// `Value` for no rank or too many.
    pub fn reference_group(ranks: usize) -> Result<Device> {
        let ranks = ranks.min(group::MAX_RANKS + 1);
        let rank = |_| Device::from_backend(Arc::new(Host::new(reference::Reference)));
        Device::group(&(0..ranks).map(rank).collect::<Vec<_>>())
    }

    /// A group of devices of one kind, its ranks: one device that runs every call on all of them.
    ///
    /// A tensor of the group has memory on each rank, all of one shape ([`Tensor`](crate::Tensor)). A pass runs on all
    /// ranks at the same time, each on its own memory. Contents may differ: a rank can hold its part of a weight, or of
    /// the heads of a cache. Only [`all_reduce`](crate::ops::all_reduce()), [`all_gather`](crate::ops::all_gather())
    /// and [`merge_attention`](crate::ops::merge_attention()) access other ranks. Everything else, such as pools and
    /// graphs, works as on one device.
    ///
    /// If a rank fails in a pass, the pass of all ranks fails, with its error. On the CPU the group can be used
    /// again.
    ///
    /// While a group of these devices, in this order, is in use, every call returns that group. The devices can also be
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
#[cfg(test)]
mod tests {
    use std::{fmt, sync::Mutex};

    use tracing::{Event, Level, Metadata, Subscriber, field, span};

    use super::*;
    use crate::device::not_built;

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
