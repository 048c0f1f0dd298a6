//! The CUDA backend: not built yet.

use crate::{Device, Result, device::DeviceKind, device::not_built};

pub(crate) fn open() -> Result<Device> {
    not_built(DeviceKind::Cuda, "this version of kvant has no CUDA backend")
}
