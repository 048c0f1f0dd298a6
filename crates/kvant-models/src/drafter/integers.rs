//! Integer tensors of checkpoints.

use crate::{Error, Result, safetensors::Checkpoint};

/// Reads a vector of `len` integers, I64 or I32.
///
/// # Errors
/// `MissingTensor`, `TensorShape`, `TensorDType`, `File`.
pub(super) fn read(checkpoint: &Checkpoint, name: &str, len: usize) -> Result<Vec<i64>> {
    let info = checkpoint.info(name).ok_or_else(|| Error::MissingTensor { name: name.to_string() })?;
    if info.shape != [len] {
        return Err(Error::TensorShape { name: name.to_string(), expected: vec![len], got: info.shape.clone() });
    }
    let width = match info.dtype.as_str() {
        "I64" => 8,
        "I32" => 4,
        other => {
            let got = other.to_string();
            return Err(Error::TensorDType { name: name.to_string(), expected: "I64 or I32", got });
        }
    };
    // The header's bytes match the shape.
    let mut bytes = vec![0; len * width];
    checkpoint.read_bytes(name, 0, &mut bytes)?;
    let of_bytes = |bytes: &[u8]| match bytes.try_into() {
        Ok(bytes) => i64::from_le_bytes(bytes),
        Err(_) => bytes.try_into().map(i32::from_le_bytes).unwrap_or_default().into(),
    };
    Ok(bytes.chunks_exact(width).map(of_bytes).collect())
}
