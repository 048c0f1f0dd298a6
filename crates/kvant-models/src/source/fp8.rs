//! Weights in 8-bit floats (E4M3) with a scale per matrix, per output or per block. No kernel supports them: they are
//! converted to bf16, rounded to nearest, as in transformers.

use half::bf16;
use kvant::{DType, Device};

use super::{Destination, Form, packed::one_matrix, quantization::BlockSize};
use crate::{
    Error, Result,
    parallel::{self, PIECE},
    safetensors::Checkpoint,
};

pub(super) const DTYPE: &str = "F8_E4M3";

/// One matrix and its scale.
pub(super) struct Fp8<'a> {
    pub checkpoint: &'a Checkpoint,
    pub module: &'a str,
    pub block: BlockSize,
}

/// The block of weights that share a scale.
struct Scales {
    numbers: Vec<f32>,
    per_row: usize,
    block: BlockSize,
}

impl Fp8<'_> {
    /// The form of a matrix of `shape`, read from the headers.
    pub(super) fn form(&self, shape: &[usize]) -> Result<Form> {
        let name = format!("{}.weight", self.module);
        let info = self.checkpoint.info(&name).ok_or_else(|| Error::MissingTensor { name: name.clone() })?;
        if info.shape != shape {
            return Err(Error::TensorShape { name, expected: shape.to_vec(), got: info.shape.clone() });
        }
        let [outputs, inputs] = one_matrix(&name, shape)?;
        self.block_of(outputs, inputs)?;
        Ok(Form::Dense(DType::BF16))
    }

    /// The name of the scale: `weight_scale_inv` in DeepSeek's files, although it multiplies as well.
    fn scale(&self) -> Result<String> {
        let names = ["weight_scale_inv", "weight_scale"].map(|part| format!("{}.{part}", self.module));
        let found = names.iter().find(|name| self.checkpoint.contains(name)).cloned();
        found.ok_or_else(|| Error::MissingTensor { name: names[1].clone() })
    }

    /// The block size implied by the shape of the scales.
    fn block_of(&self, outputs: usize, inputs: usize) -> Result<BlockSize> {
        let name = self.scale()?;
        let info = self.checkpoint.info(&name).expect("`scale` found it");
        if !info.dtype().is_some_and(DType::is_float) {
            return Err(Error::TensorDType { name, expected: "F32, F16 or BF16", got: info.dtype.clone() });
        }
        let blocks = [outputs.div_ceil(self.block.outputs), inputs.div_ceil(self.block.inputs)];
        match info.shape[..] {
            [] | [1] | [1, 1] => Ok(BlockSize { outputs, inputs }),
            [rows] | [rows, 1] if rows == outputs => Ok(BlockSize { outputs: 1, inputs }),
            [rows, columns] if [rows, columns] == blocks => Ok(self.block),
            _ => Err(Error::TensorShape { name, expected: blocks.to_vec(), got: info.shape.clone() }),
        }
    }

    /// Reads a matrix into bf16 `[outputs, inputs]`.
    pub(super) fn read(&self, to: &Destination) -> Result<()> {
        let (outputs, inputs) = (to.shape()[0], to.shape()[1]);
        let block = self.block_of(outputs, inputs)?;
        let numbers = self.checkpoint.read(&self.scale()?, &Device::cpu())?.to_f32()?;
        let scales = Scales { numbers, per_row: inputs.div_ceil(block.inputs.max(1)), block };
        let values: Vec<f32> = (0..=u8::MAX).map(e4m3).collect();
        let name = format!("{}.weight", self.module);
        let step = (PIECE / inputs.max(1)).clamp(1, outputs.max(1));
        parallel::for_each(
            outputs.div_ceil(step),
            to.devices(),
            Default::default,
            |(bytes, rows): &mut (Vec<u8>, Vec<bf16>), number| {
                let first = number * step;
                bytes.resize(step.min(outputs - first) * inputs, 0);
                self.checkpoint.read_bytes(&name, (first * inputs) as u64, bytes)?;
                rows.clear();
                for (output, row) in (first..).zip(bytes.chunks_exact(inputs.max(1))) {
                    let scaled = row.iter().zip(scales.of_row(output));
                    rows.extend(scaled.map(|(&code, scale)| bf16::from_f32(values[usize::from(code)] * scale)));
                }
                to.write_at(first * inputs * DType::BF16.size(), bytemuck::cast_slice(rows))
            },
        )
    }
}

impl Scales {
    /// The scale of each weight of a row.
    fn of_row(&self, output: usize) -> impl Iterator<Item = f32> + '_ {
        let row = output / self.block.outputs.max(1) * self.per_row;
        (0..).map(move |input| self.numbers[row + input / self.block.inputs.max(1)])
    }
}

/// Decodes a code: a sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinities.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 0x7F) {
        (_, 0x7F) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_e4m3() {
        assert_eq!(
            [0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xFE, 0x80].map(e4m3),
            [0.0, 2f32.powi(-9), 7.0 * 2f32.powi(-9), 2f32.powi(-6), 1.0, 448.0, -448.0, 0.0]
        );
        assert!(e4m3(0x7F).is_nan() && e4m3(0xFF).is_nan() && e4m3(0x80).is_sign_negative());
    }
}
