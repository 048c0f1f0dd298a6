//! Devices: what there is, and why the rest is not.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use crate::{Encoder, Error, Result, backend::Backend, cpu, cuda, host::Host, metal, reference};

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
    /// Plain f64 loops on the host: slow, and the definition of correct.
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

/// A place where tensors live and operations run. Cloning is cheap; clones are the same device.
#[derive(Clone)]
pub struct Device {
    backend: Arc<dyn Backend>,
}

/// A line of [`Device::list`].
pub struct DeviceEntry {
    /// The kind of device.
    pub kind: DeviceKind,
    /// The device, or why there is none.
    pub device: Result<Device>,
}

impl Device {
    /// Every kind of device, best first, with the reason for the absent ones.
    pub fn list() -> Vec<DeviceEntry> {
        [DeviceKind::Metal, DeviceKind::Cuda, DeviceKind::Cpu, DeviceKind::Reference]
            .into_iter()
            .map(|kind| DeviceEntry { kind, device: Device::open(kind) })
            .collect()
    }

    /// The device of a kind, or `NoDevice` with the reason.
    pub fn open(kind: DeviceKind) -> Result<Device> {
        match kind {
            DeviceKind::Metal => metal::open(),
            DeviceKind::Cuda => cuda::open(),
            DeviceKind::Cpu => Ok(Device::cpu()),
            DeviceKind::Reference => Ok(Device::reference()),
        }
    }

    /// The CPU with the best instructions it has and all its cores; always the same device.
    pub fn cpu() -> Device {
        static CPU: OnceLock<Device> = OnceLock::new();
        CPU.get_or_init(|| Device::cpu_with(CpuOptions::default()).expect("the default options fit every machine"))
            .clone()
    }

    /// A CPU device of its own, with a given number of threads or instruction set.
    ///
    /// # Errors
    /// `Value` for zero or absurdly many threads, or an instruction set that this machine lacks.
    pub fn cpu_with(options: CpuOptions) -> Result<Device> {
        Ok(Device::from_backend(Arc::new(Host::new(cpu::Cpu::new(options)?))))
    }

    /// The reference device: every operation in plain f64 loops; always the same device.
    pub fn reference() -> Device {
        static REFERENCE: OnceLock<Device> = OnceLock::new();
        REFERENCE.get_or_init(|| Device::from_backend(Arc::new(Host::new(reference::Reference)))).clone()
    }

    /// Starts recording operations.
    pub fn encoder(&self) -> Result<Encoder> {
        Encoder::new(self)
    }

    /// The kind of device.
    pub fn kind(&self) -> DeviceKind {
        self.backend.kind()
    }

    /// What a person calls it.
    pub fn name(&self) -> String {
        self.backend.name()
    }

    pub(crate) fn from_backend(backend: Arc<dyn Backend>) -> Device {
        Device { backend }
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }
}

impl Default for Device {
    /// Metal on a Mac, CUDA where there are a GPU, its driver and NVRTC, else the CPU. What kept it from a GPU is logged: as a
    /// warning where there seems to be one (on a Mac; where NVIDIA's driver is installed), else for debugging.
    fn default() -> Self {
        for (kind, expected) in [(DeviceKind::Metal, metal::is_expected()), (DeviceKind::Cuda, cuda::is_expected())] {
            match Device::open(kind) {
                Ok(device) => return device,
                Err(reason) if expected => tracing::warn!(%reason, "the GPU is not used"),
                Err(reason) => tracing::debug!(%reason, "no such GPU"),
            }
        }
        Device::cpu()
    }
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

/// The answer of a backend that this build does not contain.
pub(crate) fn not_built(kind: DeviceKind, reason: &str) -> Result<Device> {
    Err(Error::NoDevice { kind, reason: reason.to_string() })
}
