//! Arrays of other libraries as tensors, in place, by the DLPack protocol.

use std::{
    ffi::{CStr, c_void},
    ptr::NonNull,
    slice,
};

use kvant::{DType, Device, Encoder, Tensor};
use pyo3::{
    PyResult, ffi,
    prelude::*,
    types::{PyCapsule, PyDict},
};

use crate::error;

const FRESH: &CStr = c"dltensor";
const TAKEN: &CStr = c"used_dltensor";

/// DLPack's `kDLCPU`.
const CPU: i32 = 1;
/// DLPack's `kDLCUDA`.
const CUDA: i32 = 2;
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

impl Owned {
    fn fields(&self) -> &ManagedTensor {
        // SAFETY: a capsule of DLPack's name has such a tensor, which this keeps.
        unsafe { self.0.as_ref() }
    }
}

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

/// Where arrays are, and for a GPU the stream in whose order other code uses them.
#[derive(Clone)]
pub struct Place {
    pub device: Device,
    /// The number of the GPU, and a `CUstream`.
    gpu: Option<(usize, usize)>,
}

impl Place {
    /// `gpu`: the number of a GPU and a stream of its primary context, which must exist during calls. None is the CPU.
    pub fn new(gpu: Option<(usize, usize)>) -> PyResult<Place> {
        let device = match gpu {
            Some((number, _)) => Device::cuda(number).map_err(error::kvant)?,
            None => Device::cpu(),
        };
        Ok(Place { device, gpu })
    }

    /// This place with another stream.
    pub fn with_stream(&self, stream: usize) -> Place {
        Place { device: self.device.clone(), gpu: self.gpu.map(|(number, _)| (number, stream)) }
    }

    pub fn is_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// The array as a tensor. It shares the array's memory, which other code must not change during a call.
    ///
    /// # Errors
    /// `ValueError` for another device, an array that is not contiguous, has another dtype or too many dimensions;
    /// errors of the array's `__dlpack__`.
    pub fn tensor(&self, array: &Bound<'_, PyAny>, arg: &str) -> PyResult<Tensor> {
        self.view(self.take(array)?, arg)
    }

    /// The array at an address of this place's device as a tensor, whose memory the caller keeps.
    ///
    /// # Safety
    /// The contract of [`Tensor::from_raw`]: the array is contiguous, of this dtype and shape, and valid until no pass
    /// uses it.
    pub unsafe fn tensor_at(&self, address: usize, dtype: DType, shape: &[usize]) -> PyResult<Tensor> {
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(address));
        let start = start.ok_or_else(|| error::value("an address must not be 0"))?;
        // SAFETY: passed on to the caller.
        unsafe { Tensor::from_raw(&self.device, dtype, shape, start, Box::new(())) }.map_err(error::kvant)
    }

    /// Runs the operations of `record`: on a GPU in the order of the stream, without waiting.
    pub fn run(&self, record: impl FnOnce(&mut Encoder) -> kvant::Result<()>) -> kvant::Result<()> {
        let mut enc = self.device.encoder()?;
        if let Some((_, stream)) = self.gpu {
            // SAFETY: `new` and `with_stream` are given streams of this GPU that exist during the call.
            unsafe { enc.order_with(std::ptr::without_provenance_mut(stream)) }?;
        }
        record(&mut enc)?;
        let pass = enc.commit()?;
        // The CPU has finished. A GPU reports its failures with the next transfer.
        if self.is_gpu() { Ok(()) } else { pass.wait() }
    }

    /// Takes the array's tensor of DLPack. A capsule is taken as it is.
    fn take(&self, array: &Bound<'_, PyAny>) -> PyResult<Owned> {
        let capsule = match array.cast::<PyCapsule>() {
            Ok(capsule) => capsule.clone().into_any(),
            // The pass is ordered with the stream, so that the producer need not do it.
            Err(_) if self.is_gpu() => {
                let options = PyDict::new(array.py());
                options.set_item("stream", -1)?;
                array.call_method("__dlpack__", (), Some(&options))?
            }
            Err(_) => array.call_method0("__dlpack__")?,
        };
        // SAFETY: the lock is held, and the name is a C string. An error sets Python's exception.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), FRESH.as_ptr()) };
        let Some(managed) = NonNull::new(managed.cast::<ManagedTensor>()) else {
            return Err(PyErr::fetch(array.py()));
        };
        // SAFETY: as above. A capsule of this name no longer owns its tensor.
        if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), TAKEN.as_ptr()) } != 0 {
            return Err(PyErr::fetch(array.py()));
        }
        Ok(Owned(managed))
    }

    fn view(&self, owned: Owned, arg: &str) -> PyResult<Tensor> {
        let fields = owned.fields();
        let dtype = dtype(fields, arg)?;
        let expected = self.gpu.map_or((CPU, 0), |(number, _)| (CUDA, number as i32));
        if (fields.device_type, if fields.device_type == CPU { 0 } else { fields.device_id }) != expected {
            return Err(error::value(format!("`{arg}` must be on {}", self.name())));
        }
        let rank = usize::try_from(fields.ndim).unwrap_or_default();
        let dims = |start: *const i64| match rank {
            0 => &[][..],
            // SAFETY: DLPack has an element for each dimension.
            _ => unsafe { slice::from_raw_parts(start, rank) },
        };
        let shape = dims(fields.shape).iter().map(|&dim| usize::try_from(dim)).collect::<Result<Vec<_>, _>>();
        let shape = shape.map_err(error::value)?;
        if !fields.strides.is_null() && !is_contiguous(&shape, dims(fields.strides)) {
            return Err(error::value(format!("`{arg}` must be contiguous")));
        }
        let start = match NonNull::new(fields.data.cast::<u8>()) {
            // SAFETY: the offset is within the array's memory.
            Some(start) => unsafe { start.add(fields.byte_offset as usize) },
            // An empty array may have no memory.
            None => NonNull::without_provenance(ALIGN.try_into().expect("not zero")),
        };
        // SAFETY: the array has elements of this shape and dtype there, and `owned` keeps them; allocators of GPUs pad
        // memory to 16 bytes and more. Each array is one argument of one call. Threads that write to the array during
        // the call are the caller's error, as with numpy. Passes are in the order of the caller's stream.
        unsafe { Tensor::from_raw(&self.device, dtype, &shape, start, Box::new(owned)) }.map_err(error::kvant)
    }

    fn name(&self) -> String {
        self.gpu.map_or("the CPU".to_string(), |(number, _)| format!("GPU {number}"))
    }
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
