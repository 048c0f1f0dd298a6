//! Arrays of other libraries as tensors, in place, by the DLPack protocol.

use std::{
    ffi::{CStr, c_void},
    ptr::NonNull,
    slice,
};

use kvant::{DType, Device, Tensor};
use pyo3::{PyResult, exceptions::PyNotImplementedError, ffi, prelude::*};

use crate::error;

const FRESH: &CStr = c"dltensor";
const TAKEN: &CStr = c"used_dltensor";

/// DLPack's `kDLCPU`.
const CPU: i32 = 1;
/// The largest alignment of an element.
const ALIGN: usize = 8;

#[repr(C)]
struct ManagedTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// Owns a tensor of DLPack, whose memory it frees.
struct Owned(NonNull<ManagedTensor>);

// SAFETY: DLPack's deleters may be called from any thread.
unsafe impl Send for Owned {}
// SAFETY: nothing is read through a shared reference.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the tensor was taken out of its capsule, so this is its only owner, which calls the deleter once.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}

/// The array as a tensor of the CPU. It shares the array's memory, which other code must not change during a call.
///
/// # Errors
/// `NotImplementedError` for another device; `ValueError` for an array that is not contiguous, has another dtype or too
/// many dimensions; errors of the array's `__dlpack__`.
pub fn tensor(array: &Bound<'_, PyAny>, arg: &str, device: &Device) -> PyResult<Tensor> {
    let capsule = array.call_method0("__dlpack__")?;
    // SAFETY: the lock is held, and the name is a C string. An error sets Python's exception.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), FRESH.as_ptr()) };
    let Some(managed) = NonNull::new(managed.cast::<ManagedTensor>()) else {
        return Err(PyErr::fetch(array.py()));
    };
    // SAFETY: as above. A capsule of this name no longer owns its tensor.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), TAKEN.as_ptr()) } != 0 {
        return Err(PyErr::fetch(array.py()));
    }
    let owned = Owned(managed);
    // SAFETY: a capsule of this name has such a tensor, which `owned` keeps.
    let managed = unsafe { managed.as_ref() };
    if managed.device_type != CPU {
        let message = format!("`{arg}` must be on the CPU: kvant does not use tensors of other devices in place yet");
        return Err(PyNotImplementedError::new_err(message));
    }
    let dtype = dtype(managed, arg)?;
    let rank = usize::try_from(managed.ndim).unwrap_or_default();
    let dims = |start: *const i64| match rank {
        0 => &[][..],
        // SAFETY: DLPack has an element for each dimension.
        _ => unsafe { slice::from_raw_parts(start, rank) },
    };
    let shape = dims(managed.shape).iter().map(|&dim| usize::try_from(dim)).collect::<Result<Vec<_>, _>>();
    let shape = shape.map_err(error::value)?;
    if !managed.strides.is_null() && !is_contiguous(&shape, dims(managed.strides)) {
        return Err(error::value(format!("`{arg}` must be contiguous")));
    }
    let start = match NonNull::new(managed.data.cast::<u8>()) {
        // SAFETY: the offset is within the array's memory.
        Some(start) => unsafe { start.add(managed.byte_offset as usize) },
        // An empty array may have no memory.
        None => NonNull::without_provenance(ALIGN.try_into().expect("not zero")),
    };
    // SAFETY: the array has elements of this shape and dtype there, and `owned` keeps them. Each array is one argument
    // of one call. Threads that write to the array during the call are the caller's error, as with numpy.
    unsafe { Tensor::from_raw(device, dtype, &shape, start, Box::new(owned)) }.map_err(error::kvant)
}

fn dtype(managed: &ManagedTensor, arg: &str) -> PyResult<DType> {
    match (managed.code, managed.bits, managed.lanes) {
        (2, 32, 1) => Ok(DType::F32),
        (2, 16, 1) => Ok(DType::F16),
        (4, 16, 1) => Ok(DType::BF16),
        (1, 8, 1) => Ok(DType::U8),
        (1, 32, 1) => Ok(DType::U32),
        _ => Err(error::value(format!("`{arg}` must be float32, float16, bfloat16, uint8 or uint32"))),
    }
}

/// Whether rows follow one another. Strides of dimensions of size 1 have no meaning.
fn is_contiguous(shape: &[usize], strides: &[i64]) -> bool {
    let mut expected = 1i64;
    let fits = |(&dim, &stride): (&usize, &i64)| {
        let fits = dim == 1 || stride == expected;
        expected = expected.saturating_mul(dim as i64);
        fits
    };
    shape.contains(&0) || shape.iter().zip(strides).rev().all(fits)
}
