//! The checks that operations share. Every error names the operation and the argument.

use crate::{DType, Device, Error, Result, Tensor};

/// Checks that the tensor has exactly these dimensions; the error message uses their names.
pub(crate) fn shape(op: &'static str, arg: &'static str, tensor: &Tensor, dims: &[(&str, usize)]) -> Result<()> {
    dims_are(op, arg, tensor.shape(), dims)
}

/// As [`shape`], for dimensions without a tensor.
pub(crate) fn dims_are(op: &'static str, arg: &'static str, got: &[usize], dims: &[(&str, usize)]) -> Result<()> {
    if got.iter().copied().eq(dims.iter().map(|d| d.1)) {
        return Ok(());
    }
    let named: Vec<String> = dims.iter().map(|(name, n)| format!("{name} {n}").trim_start().to_string()).collect();
    Err(Error::Shape { op, arg, expected: format!("[{}]", named.join(", ")), got: got.to_vec() })
}

/// Returns the tensor's dimensions if it has `N` of them.
pub(crate) fn rank<const N: usize>(
    op: &'static str,
    arg: &'static str,
    tensor: &Tensor,
    names: [&str; N],
) -> Result<[usize; N]> {
    rank_of(op, arg, tensor.shape(), names)
}

/// As [`rank`], for dimensions without a tensor.
pub(crate) fn rank_of<const N: usize>(
    op: &'static str,
    arg: &'static str,
    got: &[usize],
    names: [&str; N],
) -> Result<[usize; N]> {
    let expected = || format!("[{}]", names.join(", "));
    got.try_into().map_err(|_| Error::Shape { op, arg, expected: expected(), got: got.to_vec() })
}

pub(crate) fn dtype(op: &'static str, arg: &'static str, tensor: &Tensor, want: DType) -> Result<()> {
    if tensor.dtype() == want {
        return Ok(());
    }
    Err(Error::DType { op, arg, expected: want.name(), got: tensor.dtype() })
}

/// Checks that the dtype is f32, f16 or bf16.
pub(crate) fn float(op: &'static str, arg: &'static str, tensor: &Tensor) -> Result<()> {
    if tensor.dtype().is_float() {
        return Ok(());
    }
    Err(Error::DType { op, arg, expected: "f32, f16 or bf16", got: tensor.dtype() })
}

/// Checks that the tensor is on the device.
pub(crate) fn device(op: &'static str, arg: &'static str, tensor: &Tensor, device: &Device) -> Result<()> {
    if tensor.device() == device {
        return Ok(());
    }
    let (expected, got) = (device.to_string(), tensor.device().to_string());
    Err(Error::WrongDevice { op, arg, expected, got })
}

pub(crate) fn positive(op: &'static str, arg: &'static str, value: usize) -> Result<()> {
    value_is(op, arg, value > 0, "at least 1", value)
}

pub(crate) fn at_most(op: &'static str, arg: &'static str, value: usize, limit: usize) -> Result<()> {
    value_is(op, arg, value <= limit, format_args!("at most {limit}"), value)
}

/// Checks a softcap. A GPU may flush a smaller cap, or the quotients x / cap of a larger one, to zero, which would make
/// tanh(x / cap) wrong.
pub(crate) fn cap(op: &'static str, arg: &'static str, value: f32) -> Result<()> {
    value_is(op, arg, (f32::MIN_POSITIVE..=1e30).contains(&value), "1.2e-38 to 1e30", value)
}

pub(crate) fn finite(op: &'static str, arg: &'static str, value: f32) -> Result<()> {
    value_is(op, arg, value.is_finite(), "finite", value)
}

/// Returns a `Value` error unless `ok`.
pub(crate) fn value_is(
    op: &'static str,
    arg: &'static str,
    ok: bool,
    expected: impl std::fmt::Display,
    got: impl std::fmt::Display,
) -> Result<()> {
    if ok {
        return Ok(());
    }
    Err(Error::Value { op, arg, expected: expected.to_string(), got: got.to_string() })
}

/// Checks that every element of a u32 index buffer in host memory is below `limit`.
///
/// # Safety
/// The caller holds the device's lock.
pub(crate) unsafe fn indices_below(op: &'static str, arg: &'static str, tensor: &Tensor, limit: usize) -> Result<()> {
    // SAFETY: passed on to the caller.
    for (index, &got) in unsafe { tensor.host_slice::<u32>() }.iter().enumerate() {
        if got as usize >= limit {
            return Err(Error::OutOfRange { op, arg, index, got: got.into(), limit: limit as u64 });
        }
    }
    Ok(())
}
