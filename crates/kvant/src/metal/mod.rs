//! The Metal backend: not built yet.

use crate::{Device, Result, device::DeviceKind, device::not_built};

pub(crate) fn open() -> Result<Device> {
    not_built(DeviceKind::Metal, "this version of kvant has no Metal backend")
}
