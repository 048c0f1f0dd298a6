//! Devices: the handle, its kind, memory and kernels. `devices.rs` opens and lists them.

use std::{fmt, sync::Arc};

use crate::{Encoder, Error, Result, backend::Backend, ops::check};

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

impl Device {
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
    /// For a group, the minimum over its ranks, because tensors have one size on all of them.
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
