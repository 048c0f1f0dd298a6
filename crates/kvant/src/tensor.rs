//! Dense row-major tensors on a device.

use std::{any::Any, ptr::NonNull, sync::Arc};

use safetensors::{Dtype, SafeTensors};

use crate::{
    DType, Device, Error, Result,
    backend::Memory,
    dtype::{Element, Float},
    group,
    ops::check,
};

/// The largest number of dimensions of a tensor.
pub const MAX_RANK: usize = 4;

/// Up to [`MAX_RANK`] dimensions, stored inline.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Shape {
    dims: [usize; MAX_RANK],
    rank: usize,
}

impl Shape {
    fn new(dims: &[usize]) -> Result<Self> {
        if dims.len() > MAX_RANK {
            return Err(Error::Shape {
                op: "tensor",
                arg: "shape",
                expected: format!("at most {MAX_RANK} dimensions"),
                got: dims.to_vec(),
            });
        }
        let mut all = [1; MAX_RANK];
        all[..dims.len()].copy_from_slice(dims);
        Ok(Shape { dims: all, rank: dims.len() })
    }

    fn as_slice(&self) -> &[usize] {
        &self.dims[..self.rank]
    }
}

/// The number of elements of a shape, or an error if it overflows.
pub(crate) fn element_count(shape: &[usize]) -> Result<usize> {
    shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or(Error::Overflow { op: "tensor", arg: "shape" })
}

/// The number of bytes of a shape. The overflow check counts dimensions of zero as one, so that no product of some of
/// the dimensions overflows.
fn byte_count(shape: &[usize], dtype: DType) -> Result<usize> {
    let bytes = shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d.max(1)));
    let bytes = bytes.ok_or(Error::Overflow { op: "tensor", arg: "shape" })?;
    Ok(if shape.contains(&0) { 0 } else { bytes })
}

/// Memory of one device, shared by the tensors that view it.
pub(crate) struct Storage {
    pub(crate) device: Device,
    pub(crate) memory: Box<dyn Memory>,
}

/// A contiguous, row-major array on a [`Device`].
///
/// Cloning is cheap and shares the memory; [`Tensor::rows`] makes a view of some rows. Operations write through
/// `&Tensor`. The encoder orders them: an operation sees the writes of the operations before it.
///
/// A tensor of a group ([`Device::group`]) has memory of this shape on every rank. Uploads go to all ranks, downloads
/// read rank 0; [`Tensor::on_rank`] is the tensor of one rank.
///
/// ```
/// use kvant::{Device, Tensor};
/// let x = Tensor::from_slice(&Device::cpu(), &[1f32, 2., 3., 4., 5., 6.], &[3, 2])?;
/// assert_eq!(x.rows(1..3)?.to_vec::<f32>()?, [3., 4., 5., 6.]);
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    dtype: DType,
    shape: Shape,
    /// Bytes from the start of the storage; a multiple of the element size.
    offset: usize,
}

impl Tensor {
    /// Allocates a tensor of zeros.
    ///
    /// # Errors
    /// `Overflow` if the size in bytes, with dimensions of zero counted as one, does not fit `usize`; `OutOfMemory`;
    /// `Shape` for more than [`MAX_RANK`] dimensions.
    pub fn zeros(device: &Device, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let bytes = byte_count(shape, dtype)?;
        let shape = Shape::new(shape)?;
        let memory = device.backend().allocate(bytes)?;
        let storage = Arc::new(Storage { device: device.clone(), memory });
        Ok(Tensor { storage, dtype, shape, offset: 0 })
    }

    /// As [`Tensor::zeros`], for memory that will be used only in parts.
    pub(crate) fn sparse(device: &Device, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let bytes = byte_count(shape, dtype)?;
        let shape = Shape::new(shape)?;
        let memory = device.backend().allocate_sparse(bytes)?;
        let storage = Arc::new(Storage { device: device.clone(), memory });
        Ok(Tensor { storage, dtype, shape, offset: 0 })
    }

    /// Uses memory of another library in place, without a copy. `owner` keeps it alive, and is dropped with the last
    /// tensor of this memory. On the CPU, the reference device, and CUDA, where `start` is an address of the device.
    ///
    /// On CUDA the owner's drop waits for passes and transfers that may use the memory, except for passes ordered with
    /// a stream ([`Encoder::order_with`](crate::Encoder::order_with)).
    ///
    /// ```
    /// use kvant::{DType, Device, Tensor};
    /// let mut numbers = vec![1f32, 2.0, 3.0];
    /// let start = std::ptr::NonNull::new(numbers.as_mut_ptr()).unwrap().cast();
    /// // SAFETY: the vector has three numbers, the tensor owns it, and a move leaves its elements in place.
    /// let x = unsafe { Tensor::from_raw(&Device::cpu(), DType::F32, &[3], start, Box::new(numbers)) }?;
    /// assert_eq!(x.to_vec::<f32>()?, [1.0, 2.0, 3.0]);
    /// # Ok::<(), kvant::Error>(())
    /// ```
    ///
    /// # Safety
    /// - From `start` on, as many bytes as `shape` and `dtype` have are initialised, and stay valid until `owner` is
    ///   dropped. On CUDA they are memory of this GPU, with the rest of the 16-byte unit of the last byte.
    /// - Nobody accesses these bytes during a transfer of the tensor or a pass that has recorded it; other threads may
    ///   read them if neither writes. Work in a stream that is ordered with the pass is before or after it.
    /// - On CUDA, if passes are ordered with a stream, memory that `owner` frees is reused in the order of this stream.
    /// - Tensors of overlapping memory are not arguments of one operation if it writes to one of them: overlaps are
    ///   not detected.
    ///
    /// # Errors
    /// `Value` if `start` is not aligned for the dtype; `Unsupported` for other devices; `Overflow`, `Shape` as
    /// [`Tensor::zeros`].
    pub unsafe fn from_raw(
        device: &Device,
        dtype: DType,
        shape: &[usize],
        start: NonNull<u8>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Tensor> {
        let bytes = byte_count(shape, dtype)?;
        let shape = Shape::new(shape)?;
        let is_aligned = start.addr().get().is_multiple_of(dtype.size());
        check::value_is(
            "from_raw",
            "start",
            is_aligned,
            format_args!("aligned for {dtype}"),
            format_args!("{start:?}"),
        )?;
        // SAFETY: the contract is passed on to the caller.
        let (memory, offset) = unsafe { device.backend().borrow(start, bytes, owner) }?;
        let storage = Arc::new(Storage { device: device.clone(), memory });
        Ok(Tensor { storage, dtype, shape, offset })
    }

    /// Uploads `data`, whose length must be the product of `shape`.
    ///
    /// # Errors
    /// As [`Tensor::zeros`]; `Shape` for another length.
    pub fn from_slice<E: Element>(device: &Device, data: &[E], shape: &[usize]) -> Result<Tensor> {
        Self::from_bytes(device, E::DTYPE, shape, bytemuck::cast_slice(data))
    }

    /// Uploads little-endian bytes, whose number must match `shape` and `dtype`.
    ///
    /// # Errors
    /// As [`Tensor::zeros`]; `Shape` for another number of bytes.
    pub fn from_bytes(device: &Device, dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<Tensor> {
        if byte_count(shape, dtype)? != bytes.len() {
            return Err(Error::Shape {
                op: "tensor",
                arg: "data",
                expected: format!("{shape:?} elements of {dtype}"),
                got: vec![bytes.len() / dtype.size()],
            });
        }
        let tensor = Tensor::zeros(device, dtype, shape)?;
        device.backend().upload(&*tensor.storage.memory, 0, bytes)?;
        Ok(tensor)
    }

    /// Uploads the bytes of each rank of a group: `bytes` is called with 0, 1, … [`Device::ranks`] − 1, and its result
    /// dropped before the next call. On a device that is no group, rank 0 is the only one.
    ///
    /// ```
    /// use kvant::{CpuOptions, DType, Device, Error, Tensor};
    /// let one = || Device::cpu_with(CpuOptions { threads: Some(1), ..CpuOptions::default() });
    /// let group = Device::group(&[one()?, one()?])?;
    /// let halves = [[1u8, 2], [3, 4]];
    /// let x = Tensor::from_rank_bytes(&group, DType::U8, &[2], |rank| Ok::<_, Error>(halves[rank]))?;
    /// assert_eq!(x.on_rank(1)?.to_vec::<u8>()?, [3, 4]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `bytes`; as [`Tensor::zeros`]; `Value` for another number of bytes.
    pub fn from_rank_bytes<B: AsRef<[u8]>, E: From<Error>>(
        device: &Device,
        dtype: DType,
        shape: &[usize],
        mut bytes: impl FnMut(usize) -> std::result::Result<B, E>,
    ) -> std::result::Result<Tensor, E> {
        let tensor = Tensor::zeros(device, dtype, shape)?;
        for rank in 0..device.ranks() {
            tensor.on_rank(rank)?.write_bytes(bytes(rank)?.as_ref())?;
        }
        Ok(tensor)
    }

    /// The tensor of a rank of a group: on the rank's device, it shares the rank's memory. The only rank of a device
    /// that is no group is 0.
    ///
    /// # Errors
    /// `Value` for a rank that is not below [`Device::ranks`].
    pub fn on_rank(&self, rank: usize) -> Result<Tensor> {
        let (op, ranks) = ("on_rank", self.device().ranks());
        check::value_is(op, "rank", rank < ranks, format_args!("below the {ranks} of {}", self.device()), rank)?;
        Ok(match group::storages(&*self.storage.memory).get(rank) {
            Some(storage) => self.with_storage(Arc::clone(storage)),
            None => self.clone(),
        })
    }

    /// This tensor in other memory of the same size.
    pub(crate) fn with_storage(&self, storage: Arc<Storage>) -> Tensor {
        Tensor { storage, ..self.clone() }
    }

    /// Uploads the tensor `name` of a safetensors file. `file` has the bytes of the whole file, for example mapped into
    /// memory.
    ///
    /// ```no_run
    /// use kvant::{Device, Tensor};
    /// let file = std::fs::read("model.safetensors").unwrap();
    /// let weight = Tensor::from_safetensors(&Device::default(), &file, "model.norm.weight")?;
    /// # Ok::<(), kvant::Error>(())
    /// ```
    ///
    /// # Errors
    /// `File` for bytes that are not a safetensors file, a name that is not in it, or a dtype other than F32, F16,
    /// BF16, U32 and U8; as [`Tensor::zeros`].
    pub fn from_safetensors(device: &Device, file: &[u8], name: &str) -> Result<Tensor> {
        let error = |reason: String| Error::File { path: "safetensors".to_string(), reason };
        let tensors = SafeTensors::deserialize(file).map_err(|reason| error(reason.to_string()))?;
        let tensor = tensors.tensor(name).map_err(|reason| error(format!("{name:?}: {reason}")))?;
        let dtype = match tensor.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            Dtype::U32 => DType::U32,
            Dtype::U8 => DType::U8,
            other => return Err(error(format!("{name:?} must be F32, F16, BF16, U32 or U8, got {other:?}"))),
        };
        Self::from_bytes(device, dtype, tensor.shape(), tensor.data())
    }

    /// Overwrites the tensor with `data` of the same dtype and length, after committed work has finished.
    ///
    /// Operations that an [`Encoder`](crate::Encoder) has recorded and not committed read the new data. Commit first
    /// if they must read the old data.
    ///
    /// # Errors
    /// `DType` or `Shape` for data that does not match; `DeviceFault`.
    pub fn write<E: Element>(&self, data: &[E]) -> Result<()> {
        self.expect_element::<E>("write")?;
        if data.len() != self.elements() {
            return Err(Error::Shape {
                op: "write",
                arg: "data",
                expected: format!("{:?}", self.shape()),
                got: vec![data.len()],
            });
        }
        self.write_bytes(bytemuck::cast_slice(data))
    }

    /// Overwrites the tensor with little-endian bytes; their number must be [`Tensor::bytes`]. As [`Tensor::write`],
    /// it waits for committed work only.
    ///
    /// # Errors
    /// `Value` for another number of bytes; `DeviceFault`.
    pub fn write_bytes(&self, data: &[u8]) -> Result<()> {
        if data.len() != self.bytes() {
            return Err(Error::Value {
                op: "write",
                arg: "data",
                expected: format!("{} bytes", self.bytes()),
                got: format!("{} bytes", data.len()),
            });
        }
        self.device().backend().upload(&*self.storage.memory, self.offset, data)
    }

    /// Downloads the elements; `E` must match the dtype. Waits for committed work. Operations that an
    /// [`Encoder`](crate::Encoder) has recorded and not committed have not run.
    ///
    /// # Errors
    /// `DType` for another element type; `DeviceFault`.
    pub fn to_vec<E: Element>(&self) -> Result<Vec<E>> {
        self.expect_element::<E>("to_vec")?;
        let mut out = vec![E::zeroed(); self.elements()];
        self.read_bytes(bytemuck::cast_slice_mut(&mut out))?;
        Ok(out)
    }

    /// Downloads the raw bytes into `out`, whose length must be [`Tensor::bytes`]. Waits like [`Tensor::to_vec`].
    ///
    /// # Errors
    /// `Value` for another number of bytes; `DeviceFault`.
    pub fn read_bytes(&self, out: &mut [u8]) -> Result<()> {
        if out.len() != self.bytes() {
            return Err(Error::Value {
                op: "read",
                arg: "out",
                expected: format!("{} bytes", self.bytes()),
                got: format!("{} bytes", out.len()),
            });
        }
        self.device().backend().download(&*self.storage.memory, self.offset, out)
    }

    /// Downloads the elements of a floating-point tensor, converted to f32.
    ///
    /// # Errors
    /// `DType` for an integer tensor; `DeviceFault`.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        fn widen<E: Float>(t: &Tensor) -> Result<Vec<f32>> {
            Ok(t.to_vec::<E>()?.into_iter().map(E::to_f32).collect())
        }
        match self.dtype {
            DType::F32 => self.to_vec::<f32>(),
            DType::F16 => widen::<half::f16>(self),
            DType::BF16 => widen::<half::bf16>(self),
            got => Err(Error::DType { op: "to_f32", arg: "self", expected: "f32, f16 or bf16", got }),
        }
    }

    /// Returns rows `range` of the first dimension as a view of the same memory.
    ///
    /// # Errors
    /// `Value` for a range beyond the rows, or for a tensor without dimensions.
    pub fn rows(&self, range: std::ops::Range<usize>) -> Result<Tensor> {
        // A tensor without dimensions has no rows, so even an empty range is out of bounds.
        let rows = self.shape().first().copied();
        if rows.is_none_or(|rows| range.start > range.end || range.end > rows) {
            return Err(Error::Value {
                op: "rows",
                arg: "range",
                expected: format!("within 0..{}", rows.unwrap_or(0)),
                got: format!("{range:?}"),
            });
        }
        let row_bytes = self.bytes().checked_div(rows.unwrap_or(0)).unwrap_or(0);
        let mut view = self.clone();
        view.shape.dims[0] = range.end - range.start;
        view.offset += range.start * row_bytes;
        Ok(view)
    }

    /// The elements of `dtype` from byte `at` of this tensor to its end, as one dimension.
    ///
    /// # Errors
    /// `Value` if `at` is beyond the end or not aligned for the dtype.
    pub(crate) fn typed_from(&self, at: usize, dtype: DType) -> Result<Tensor> {
        let fits = at <= self.bytes() && (self.offset + at).is_multiple_of(dtype.size());
        if !fits {
            return Err(Error::Value {
                op: "tensor",
                arg: "at",
                expected: format!("aligned and at most {}", self.bytes()),
                got: at.to_string(),
            });
        }
        let shape = Shape::new(&[(self.bytes() - at) / dtype.size()])?;
        Ok(Tensor { dtype, shape, offset: self.offset + at, ..self.clone() })
    }

    /// Returns the same elements with another shape of the same size.
    ///
    /// # Errors
    /// `Shape` for another number of elements.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor> {
        if byte_count(shape, self.dtype)? != self.bytes() {
            return Err(Error::Shape {
                op: "reshape",
                arg: "shape",
                expected: format!("{} elements", self.elements()),
                got: shape.to_vec(),
            });
        }
        Ok(Tensor { shape: Shape::new(shape)?, ..self.clone() })
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        self.shape.as_slice()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device that holds the memory.
    pub fn device(&self) -> &Device {
        &self.storage.device
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// The number of bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// Bytes from the start of the shared memory to the first element.
    pub fn byte_offset(&self) -> usize {
        self.offset
    }

    pub(crate) fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    fn expect_element<E: Element>(&self, op: &'static str) -> Result<()> {
        if self.dtype == E::DTYPE {
            return Ok(());
        }
        Err(Error::DType { op, arg: "self", expected: E::DTYPE.name(), got: self.dtype })
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({}{:?} on {})", self.dtype, self.shape(), self.device())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use safetensors::tensor::TensorView;

    use super::*;

    #[test]
    fn from_raw_uses_memory_in_place_and_drops_its_owner() {
        let owner = Arc::new(vec![1f32, 2.0, 3.0, 4.0].into_boxed_slice());
        let start = NonNull::from(&owner[0]).cast::<u8>();
        let raw = |device: &Device, start, shape: &[usize], owner: &Arc<Box<[f32]>>| {
            // SAFETY: the four numbers live as long as their owner, and only this test accesses them.
            unsafe { Tensor::from_raw(device, DType::F32, shape, start, Box::new(Arc::clone(owner))) }
        };
        let device = Device::cpu();
        let x = raw(&device, start, &[2, 2], &owner).unwrap();
        let view = x.rows(1..2).unwrap();
        drop(x);
        assert_eq!((view.to_vec::<f32>().unwrap(), Arc::strong_count(&owner)), (vec![3.0, 4.0], 2));
        drop(view);
        assert_eq!(Arc::strong_count(&owner), 1);
        // SAFETY: within the four numbers.
        let error = raw(&device, unsafe { start.add(2) }, &[1], &owner).unwrap_err().to_string();
        assert!(error.contains("from_raw: `start` must be aligned for f32"), "{error}");
        assert!(matches!(raw(&device, start, &[1; 5], &owner), Err(Error::Shape { .. })));
        let group = Device::group(&[Device::cpu_with(crate::CpuOptions::default()).unwrap()]).unwrap();
        assert!(matches!(raw(&group, start, &[4], &owner), Err(Error::Unsupported { .. })));
    }

    /// A pass that has recorded the tensor keeps the owner until it has run, or is discarded.
    #[test]
    fn passes_keep_the_owners_of_memory() {
        let device = Device::cpu();
        let y = Tensor::zeros(&device, DType::F32, &[4]).unwrap();
        for commits in [true, false] {
            let owner = Arc::new(vec![1f32, 2.0, 3.0, 4.0].into_boxed_slice());
            let mut enc = device.encoder().unwrap();
            {
                let start = NonNull::from(&owner[0]).cast::<u8>();
                // SAFETY: the four numbers live as long as their owner, and only this test accesses them.
                let x = unsafe { Tensor::from_raw(&device, DType::F32, &[4], start, Box::new(Arc::clone(&owner))) };
                crate::ops::softcap(&mut enc, &crate::ops::Softcap::new(&x.unwrap(), 1e6, &y)).unwrap();
            }
            assert_eq!(Arc::strong_count(&owner), 2);
            if commits {
                enc.commit().unwrap().wait().unwrap();
                assert!((y.to_vec::<f32>().unwrap()[3] - 4.0).abs() < 1e-3);
            } else {
                drop(enc);
            }
            assert_eq!(Arc::strong_count(&owner), 1);
        }
    }

    /// Streams are CUDA's.
    #[test]
    fn passes_of_the_cpu_have_no_stream() {
        let order = |enc: &mut crate::Encoder| {
            // SAFETY: the devices have no streams.
            let error = unsafe { enc.order_with(std::ptr::null_mut()) }.unwrap_err();
            assert!(matches!(error, Error::Unsupported { op: "order_with", .. }), "{error}");
        };
        let group = Device::reference_group(2).unwrap();
        for device in [Device::cpu(), Device::reference(), group] {
            order(&mut device.encoder().unwrap());
            let captured = crate::Encoder::capture(&device, |enc| {
                order(enc);
                Ok(())
            });
            captured.unwrap().replay().unwrap().wait().unwrap();
        }
    }

    #[test]
    fn from_safetensors_finds_tensors_and_rejects_bad_files() {
        let values = [1.0f32, -2.5, 3.0, 0.0, 7.0, 9.0];
        let views = HashMap::from([
            ("a", TensorView::new(Dtype::F32, vec![3, 2], bytemuck::cast_slice(&values)).unwrap()),
            ("long", TensorView::new(Dtype::I64, vec![1], &[0; 8]).unwrap()),
            ("deep", TensorView::new(Dtype::U8, vec![1; 5], &[3]).unwrap()),
            ("empty", TensorView::new(Dtype::BF16, vec![0, 4], &[]).unwrap()),
        ]);
        let file = safetensors::serialize(views, None).unwrap();
        let device = Device::cpu();
        let read = |file: &[u8], name: &str| Tensor::from_safetensors(&device, file, name);
        let tensor = read(&file, "a").unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (DType::F32, &[3, 2][..]));
        assert_eq!(tensor.to_vec::<f32>().unwrap(), values);
        assert_eq!(read(&file, "empty").unwrap().shape(), [0, 4]);
        assert!(matches!(read(&file, "deep"), Err(Error::Shape { .. })));
        for (file, name, text) in [
            (&file[..], "b", "\"b\""),
            (&file, "long", "got I64"),
            (&file[..file.len() - 1], "a", "safetensors: "),
            (&file[..5], "a", "safetensors: "),
            (&[0xff; 64], "a", "safetensors: "),
        ] {
            let error = read(file, name).unwrap_err();
            assert!(matches!(error, Error::File { .. }) && error.to_string().contains(text), "{name}: {error}");
        }
    }
}
