//! Weights of compressed-tensors in the format `pack-quantized` (w4a16, w8a16): codes in words, as MLX packs them, with
//! a scale and an optional zero point per group of inputs. They are converted to affine matrices without loss.

use half::{bf16, f16};
use kvant::{DType, Device};

use super::{Destination, Form};
use crate::{Error, Result, safetensors::Checkpoint};

/// The tensors of one module.
pub(super) struct Packed<'a> {
    pub checkpoint: &'a Checkpoint,
    pub module: &'a str,
}

/// The destination of a matrix: codes, scales, biases.
pub(super) type AffineParts<'a> = [&'a Destination<'a>; 3];

impl Packed<'_> {
    /// Whether a module is packed.
    pub(super) fn has(checkpoint: &Checkpoint, module: &str) -> bool {
        checkpoint.contains(&format!("{module}.weight_packed"))
    }

    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.module)
    }

    /// The form of a matrix of `shape`, read from the headers.
    pub(super) fn form(&self, shape: &[usize]) -> Result<Form> {
        let [outputs, inputs] = one_matrix(&self.name("weight_packed"), shape)?;
        let indices = self.name("weight_g_idx");
        if self.checkpoint.contains(&indices) {
            let reason = "groups of inputs that are not consecutive (`actorder`) have no kernel".to_string();
            return Err(Error::Unsupported { what: format!("tensor `{indices}`"), reason });
        }
        let bits = self.bits(outputs, inputs)?;
        let (group, dtype) = self.groups(outputs, inputs)?;
        if !self.is_symmetric() {
            let expected = [(outputs * bits as usize).div_ceil(32), self.file_groups(outputs, inputs)?];
            self.expect("weight_zero_point", "I32", &expected)?;
        }
        // A product of a scale and a zero point has more digits than a 16-bit scale.
        let dtype = if self.is_symmetric() { dtype } else { DType::F32 };
        Ok(Form::Affine { bits, group, dtype })
    }

    fn is_symmetric(&self) -> bool {
        !self.checkpoint.contains(&self.name("weight_zero_point"))
    }

    /// Bits per code, derived from the words of a row.
    fn bits(&self, outputs: usize, inputs: usize) -> Result<u32> {
        let name = self.name("weight_packed");
        let info = self.checkpoint.info(&name).ok_or_else(|| Error::MissingTensor { name: name.clone() })?;
        let bits = [2, 4, 8].into_iter().find(|bits| info.shape == [outputs, (inputs * bits).div_ceil(32)]);
        let Some(bits) = bits.filter(|_| inputs.is_multiple_of(32)) else {
            let (expected, got) = (vec![outputs, (inputs * 4).div_ceil(32)], info.shape.clone());
            return Err(Error::TensorShape { name, expected, got });
        };
        self.expect("weight_packed", "I32", &info.shape)?;
        Ok(bits as u32)
    }

    /// The number of groups in a row of the file.
    fn file_groups(&self, outputs: usize, inputs: usize) -> Result<usize> {
        let name = self.name("weight_scale");
        let info = self.checkpoint.info(&name).ok_or_else(|| Error::MissingTensor { name: name.clone() })?;
        match info.shape[..] {
            [rows, groups] if rows == outputs && groups > 0 && inputs.is_multiple_of(groups) => Ok(groups),
            _ => Err(Error::TensorShape { name, expected: vec![outputs, inputs / 128], got: info.shape.clone() }),
        }
    }

    /// A group size that kernels support and that divides the file's, and the dtype of scales.
    fn groups(&self, outputs: usize, inputs: usize) -> Result<(usize, DType)> {
        let name = self.name("weight_scale");
        let of_file = inputs / self.file_groups(outputs, inputs)?;
        let Some(group) = [128, 64, 32].into_iter().find(|&group| of_file.is_multiple_of(group)) else {
            let reason = format!("its groups have {of_file} inputs, and kernels need a multiple of 32");
            return Err(Error::Unsupported { what: format!("tensor `{name}`"), reason });
        };
        let info = self.checkpoint.info(&name).expect("file_groups found it");
        let dtype = info.dtype().filter(|dtype| dtype.is_float()).ok_or_else(|| Error::TensorDType {
            name,
            expected: "F32, F16 or BF16",
            got: info.dtype.clone(),
        })?;
        Ok((group, dtype))
    }

    fn expect(&self, part: &str, dtype: &'static str, shape: &[usize]) -> Result<()> {
        let name = self.name(part);
        let info = self.checkpoint.info(&name).ok_or_else(|| Error::MissingTensor { name: name.clone() })?;
        if info.shape != shape {
            return Err(Error::TensorShape { name, expected: shape.to_vec(), got: info.shape.clone() });
        }
        if info.dtype != dtype {
            return Err(Error::TensorDType { name, expected: dtype, got: info.dtype.clone() });
        }
        Ok(())
    }

    /// Reads a matrix in the form returned by [`Packed::form`].
    pub(super) fn read(&self, bits: u32, group: usize, [codes, scales, biases]: AffineParts) -> Result<()> {
        self.checkpoint.read_raw(&self.name("weight_packed"), codes)?;
        let (outputs, per_row) = (scales.shape()[0], scales.shape()[1]);
        let of_file = self.checkpoint.read(&self.name("weight_scale"), &Device::cpu())?.to_f32()?;
        let file_groups = of_file.len() / outputs.max(1);
        // The file's groups can be longer, for example a whole row.
        let repeats = per_row / file_groups.max(1);
        debug_assert_eq!(repeats * file_groups * group, per_row * group);
        let zeros = self.zero_points(bits, outputs, file_groups)?;
        let (mut all_scales, mut all_biases) = (Vec::new(), Vec::new());
        for (scale, zero) in of_file.iter().zip(zeros) {
            let bias = -scale * zero as f32;
            let fits = scales.dtype() != DType::F16 || bias.abs() <= f16::MAX.to_f32();
            if scale.is_finite() && !(bias.is_finite() && fits) {
                let expected = "scales whose products with the zero point fit their dtype";
                return Err(Error::TensorValue { name: self.name("weight_scale"), expected, got: scale.to_string() });
            }
            all_scales.extend(std::iter::repeat_n(*scale, repeats));
            all_biases.extend(std::iter::repeat_n(bias, repeats));
        }
        write_as(scales, &all_scales)?;
        write_as(biases, &all_biases)
    }

    /// The code of zero in each group. Without zero points, it is the middle code.
    fn zero_points(&self, bits: u32, outputs: usize, groups: usize) -> Result<Vec<u32>> {
        if self.is_symmetric() {
            return Ok(vec![1 << (bits - 1); outputs * groups]);
        }
        // Packed along the outputs: a word has the zero points of a group in consecutive rows.
        let name = self.name("weight_zero_point");
        let rows = (outputs * bits as usize).div_ceil(32);
        let mut bytes = vec![0; rows * groups * 4];
        self.checkpoint.read_bytes(&name, 0, &mut bytes)?;
        let per_word = 32 / bits as usize;
        let zero = |output: usize, g: usize| {
            let at = (output / per_word * groups + g) * 4;
            let word = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            word >> (output % per_word * bits as usize) & ((1 << bits) - 1)
        };
        Ok((0..outputs).flat_map(|output| (0..groups).map(move |g| (output, g))).map(|(o, g)| zero(o, g)).collect())
    }
}

/// The outputs and inputs of a module. These formats store each expert's matrix separately.
pub(super) fn one_matrix(name: &str, shape: &[usize]) -> Result<[usize; 2]> {
    shape.try_into().map_err(|_| Error::Unsupported {
        what: format!("tensor `{name}`"),
        reason: "the matrices of all experts in one tensor have other formats".to_string(),
    })
}

/// Writes numbers in the dtype of the tensor.
fn write_as(to: &Destination, numbers: &[f32]) -> Result<()> {
    let bytes: Vec<u8> = match to.dtype() {
        DType::F16 => numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        DType::BF16 => numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    to.write_at(0, &bytes)
}
