//! Memory that several GPUs access.

use std::{
    ptr::{NonNull, null_mut},
    sync::Arc,
};

use cudarc::driver::sys as cu;

use super::driver::{CudaDevice, CudaMemory, DriverError, driver, fault};
use crate::{Error, Result};

impl CudaDevice {
    /// The driver's index of the device.
    pub(super) fn number(&self) -> usize {
        usize::try_from(self.device).unwrap_or(0)
    }

    /// Lets other GPUs access all memory of the pool, including later allocations.
    ///
    /// # Errors `Unsupported` if the GPUs cannot access each other; `DeviceFault`.
    pub(super) fn share_with(&self, others: &[usize]) -> Result<()> {
        let _entered = self.enter().map_err(fault)?;
        for &other in others {
            let mut access = 0;
            let number = i32::try_from(other).map_err(fault)?;
            // SAFETY: the function fills `access`.
            unsafe { driver!(cuDeviceCanAccessPeer(&mut access, number, self.device)) }.map_err(fault)?;
            if access == 0 {
                let reason = format!("GPU {other} cannot access the memory of GPU {}", self.number());
                return Err(Error::Unsupported { op: "group", device: "cuda", reason });
            }
            // SAFETY: all zeros are a valid value of the struct.
            let mut desc: cu::CUmemAccessDesc = unsafe { std::mem::zeroed() };
            desc.location.type_ = cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
            desc.location.id = number;
            desc.flags = cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            // SAFETY: the pool is alive; the count of descriptions is 1.
            unsafe { driver!(cuMemPoolSetAccess(self.pool, &desc, 1)) }.map_err(fault)?;
        }
        Ok(())
    }

    /// Zeroed host memory, which kernels of all GPUs access at the host's address. It is never freed: a kernel may
    /// still read it.
    pub(super) fn allocate_host(self: &Arc<Self>, bytes: usize) -> std::result::Result<CudaMemory, DriverError> {
        let _entered = self.enter()?;
        let (mut host, mut address) = (null_mut(), 0);
        let flags = cu::CU_MEMHOSTALLOC_PORTABLE | cu::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the functions fill both; the memory has at least `bytes` bytes and is not shared yet.
        unsafe {
            driver!(cuMemHostAlloc(&mut host, bytes.max(1), flags))?;
            host.cast::<u8>().write_bytes(0, bytes.max(1));
            driver!(cuMemHostGetDevicePointer_v2(&mut address, host, 0))?;
        }
        Ok(CudaMemory { address, bytes, host: NonNull::new(host.cast()), borrow: None, gpu: self.clone() })
    }
}
