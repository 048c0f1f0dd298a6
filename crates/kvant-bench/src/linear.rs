//! Matrix products, with dense and with quantised weights.

use kvant::{DType, Device, Tensor, ops};

use crate::{Result, data, writing::cast};

/// The storage format of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Dense floats.
    Dense(DType),
    /// MLX's affine quantisation in groups of 64, with bf16 scales and biases.
    Affine {
        /// Bits of a code: 4, 6 or 8.
        bits: u32,
    },
    /// A block format of GGUF files.
    Blocks(ops::BlockFormat),
}

/// Inputs that share a scale.
const GROUP: usize = 64;

impl Storage {
    /// Bytes of a matrix.
    pub fn bytes(self, outputs: usize, inputs: usize) -> usize {
        match self {
            Storage::Dense(dtype) => outputs * inputs * dtype.size(),
            Storage::Affine { bits } => outputs * (inputs * bits as usize / 8 + inputs / GROUP * 4),
            Storage::Blocks(format) => outputs * inputs / format.block_inputs() * format.block_bytes(),
        }
    }
}

impl std::fmt::Display for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Storage::Dense(dtype) => write!(f, "{dtype}"),
            Storage::Affine { bits } => write!(f, "affine {bits} bit"),
            Storage::Blocks(format) => write!(f, "{format}"),
        }
    }
}

enum Matrix {
    Dense(Tensor),
    Affine { codes: Tensor, scales: Tensor, biases: Tensor, bits: u32 },
    Blocks(Tensor, ops::BlockFormat),
}

/// Multiplies `tokens` rows of `inputs` numbers by each matrix in turn.
pub struct Linear {
    device: Device,
    x: Tensor,
    out: Tensor,
    matrices: Vec<Matrix>,
    next: usize,
}

impl Linear {
    /// Makes `copies` matrices with equal contents.
    pub fn new(
        device: &Device,
        (tokens, outputs, inputs): (usize, usize, usize),
        storage: Storage,
        copies: usize,
    ) -> Result<Linear> {
        let matrices = (0..copies).map(|_| matrix(device, storage, outputs, inputs)).collect::<Result<_>>()?;
        Ok(Linear {
            device: device.clone(),
            x: data::tensor(device, &[tokens, inputs], 1)?,
            out: Tensor::zeros(device, DType::F32, &[tokens, outputs])?,
            matrices,
            next: 0,
        })
    }

    /// Runs one call, with the next matrix.
    pub fn call(&mut self) -> Result {
        let weight = match &self.matrices[self.next % self.matrices.len()] {
            Matrix::Dense(weight) => ops::Weight::Dense(weight),
            Matrix::Blocks(data, format) => ops::Blocks::new(data, *format).into(),
            Matrix::Affine { codes, scales, biases, bits } => {
                ops::Weight::Affine(ops::Affine { codes, scales, biases, bits: *bits, group: GROUP })
            }
        };
        self.next += 1;
        let mut enc = self.device.encoder()?;
        ops::linear(&mut enc, &ops::Linear::new(&self.x, weight, &self.out))?;
        Ok(enc.commit()?.wait()?)
    }
}

fn matrix(device: &Device, storage: Storage, outputs: usize, inputs: usize) -> Result<Matrix> {
    let bits = match storage {
        Storage::Affine { bits } => bits,
        Storage::Dense(dtype) => {
            return Ok(Matrix::Dense(cast(device, dtype, &data::normal(outputs * inputs, 2), &[outputs, inputs])?));
        }
        Storage::Blocks(format) => {
            // Without bits that make a scale infinite or subnormal.
            let bytes = storage.bytes(outputs, inputs);
            let mut data: Vec<u8> =
                (0..bytes as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 24) as u8 & 0x7B | 8).collect();
            if format == ops::BlockFormat::MXFP4 {
                // Products with a small power of two would be subnormal, too.
                data.iter_mut().step_by(format.block_bytes()).for_each(|exponent| *exponent = 120);
            }
            let data = Tensor::from_slice(device, &data, &[outputs, bytes / outputs.max(1)])?;
            return Ok(Matrix::Blocks(data, format));
        }
    };
    // Any codes: the time does not depend on them. Scales and biases are in the range of usual weights.
    let words = outputs * inputs * bits as usize / 32;
    let codes: Vec<u32> = (0..words as u32).map(|i| i.wrapping_mul(0x9e37_79b9) ^ (i >> 3)).collect();
    let groups = [outputs, inputs / GROUP];
    let constant = |x: f32| cast(device, DType::BF16, &vec![x; outputs * inputs / GROUP], &groups);
    Ok(Matrix::Affine {
        codes: Tensor::from_slice(device, &codes, &[outputs, inputs * bits as usize / 32])?,
        scales: constant(0.01)?,
        biases: constant(-0.08)?,
        bits,
    })
}
