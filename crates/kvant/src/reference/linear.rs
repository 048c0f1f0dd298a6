use super::{
    blocks::{dequantise_blocks, dequantise_floats},
    check_len, io,
};
use crate::{
    DType, Error, Result,
    ops::linear::{Call, OwnedWeight},
};

/// One row of an affine matrix: `codes` is its bit stream, with a scale and a bias per `group` inputs.
#[derive(Clone, Copy, Debug)]
pub struct AffineRow<'a> {
    /// Code i is bits i·bits .. (i + 1)·bits, counted from the lowest bit of the first word.
    pub codes: &'a [u32],
    /// One per group.
    pub scales: &'a [f64],
    /// One per group.
    pub biases: &'a [f64],
    /// Bits of a code.
    pub bits: u32,
    /// Inputs that share a scale and a bias.
    pub group: usize,
}

/// The weights of an affine row: scale · code + bias.
///
/// # Errors
/// `Shape` if the lengths of the parts do not match, `Value` for 0 bits or more than 32.
pub fn dequantise(row: AffineRow) -> Result<Vec<f64>> {
    let op = "dequantise";
    // With 0 bits, no codes would match any number of inputs.
    if !(1..=32).contains(&row.bits) {
        return Err(Error::Value { op, arg: "bits", expected: "1 to 32".to_string(), got: row.bits.to_string() });
    }
    let overflow = Error::Overflow { op, arg: "scales" };
    let inputs = row.scales.len().checked_mul(row.group).filter(|n| n.checked_mul(32).is_some()).ok_or(overflow)?;
    check_len(op, "biases", row.scales.len(), row.biases.len())?;
    check_len(op, "codes", (inputs * row.bits as usize).div_ceil(32), row.codes.len())?;
    let bit = |at: usize| row.codes[at / 32] >> (at % 32) & 1;
    let code = |i: usize| (0..row.bits as usize).map(|b| bit(i * row.bits as usize + b) << b).sum::<u32>();
    let weight = |i: usize| row.scales[i / row.group] * f64::from(code(i)) + row.biases[i / row.group];
    Ok((0..inputs).map(weight).collect())
}

/// alpha · W·x, where `weight` holds one row of `x.len()` inputs per output.
///
/// # Errors
/// `Shape` if the weight is not a whole number of rows.
pub fn linear(x: &[f64], weight: &[f64], alpha: f64) -> Result<Vec<f64>> {
    let rows = weight.len().checked_div(x.len()).unwrap_or(0);
    check_len("linear", "weight", rows * x.len(), weight.len())?;
    let dot = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
    Ok(weight.chunks(x.len().max(1)).map(|row| alpha * dot(row)).collect())
}

/// Dequantises `rows` rows of a weight from row `first` on. Rows are counted across experts.
pub(super) fn load_rows(weight: &OwnedWeight, inputs: usize, first: usize, rows: usize) -> Vec<f64> {
    let (codes, scales, biases, bits, group) = match weight {
        OwnedWeight::Dense(w) => return io::load_range(w, first * inputs..(first + rows) * inputs),
        OwnedWeight::Blocks { data, format } => {
            let bytes = inputs / format.block_inputs() * format.block_bytes();
            let blocks = io::load_u8(data, first * bytes..(first + rows) * bytes);
            return dequantise_blocks(*format, &blocks).expect("validation compared the lengths");
        }
        OwnedWeight::Floats { codes, scales, format } => {
            let (row, groups) = (inputs * format.bits() / 8, inputs / format.group());
            let words = first * row..(first + rows) * row;
            let codes = match codes.dtype() {
                DType::U8 => io::load_u8(codes, words),
                // SAFETY: the device's lock is held, and nothing writes to the codes while the slice lives.
                _ => bytemuck::cast_slice(unsafe { codes.host_slice::<u32>() })[words].to_vec(),
            };
            let scales = io::load_u8(scales, first * groups..(first + rows) * groups);
            return dequantise_floats(*format, &codes, &scales).expect("validation compared the lengths");
        }
        OwnedWeight::Affine { codes, scales, biases, bits, group } => (codes, scales, biases, *bits, *group),
    };
    let (words, groups) = (inputs * bits as usize / 32, inputs / group);
    // SAFETY: the device's lock is held, and nothing writes to the codes while the slice lives.
    let codes = unsafe { codes.host_slice::<u32>() };
    let scales = io::load_range(scales, first * groups..(first + rows) * groups);
    let biases = io::load_range(biases, first * groups..(first + rows) * groups);
    let row = |i: usize| {
        dequantise(AffineRow {
            codes: &codes[(first + i) * words..(first + i + 1) * words],
            scales: &scales[i * groups..(i + 1) * groups],
            biases: &biases[i * groups..(i + 1) * groups],
            bits,
            group,
        })
        .expect("validation compared the lengths")
    };
    (0..rows).flat_map(row).collect()
}

pub(crate) fn run(call: &Call) {
    let (outputs, inputs) = (call.dims.outputs, call.dims.inputs);
    let x = io::load(&call.x);
    let experts = match &call.experts {
        Some(ids) => io::load_u32(ids),
        None => vec![0; call.rows],
    };
    let mut out = vec![0.0; call.rows * outputs];
    // Empty sums are zero, for any number of empty matrices.
    let matrices = if inputs == 0 { 0 } else { call.dims.experts };
    for expert in 0..matrices {
        let rows: Vec<usize> = (0..call.rows).filter(|&row| experts[row] as usize == expert).collect();
        if rows.is_empty() {
            continue;
        }
        let weight = load_rows(&call.weight, inputs, expert * outputs, outputs);
        for row in rows {
            let source = row / call.rows_per_input;
            let y = linear(&x[source * inputs..(source + 1) * inputs], &weight, call.alpha.into())
                .expect("whole rows were loaded");
            out[row * outputs..(row + 1) * outputs].copy_from_slice(&y);
        }
    }
    io::store(&call.out, &out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_bit_codes_cross_words() {
        let wanted: Vec<u32> = (0..32).map(|i| (i * 11 + 5) % 64).collect();
        let mut codes = [0u32; 6];
        for (i, code) in wanted.iter().enumerate() {
            for b in 0..6 {
                codes[(i * 6 + b) / 32] |= (code >> b & 1) << ((i * 6 + b) % 32);
            }
        }
        let row = AffineRow { codes: &codes, scales: &[0.5], biases: &[-3.0], bits: 6, group: 32 };
        let expected: Vec<f64> = wanted.iter().map(|&c| 0.5 * f64::from(c) - 3.0).collect();
        assert_eq!(dequantise(row).unwrap(), expected);
        assert!(dequantise(AffineRow { codes: &codes[1..], ..row }).is_err());
        assert!(dequantise(AffineRow { biases: &[], ..row }).is_err());
        assert!(dequantise(AffineRow { bits: 33, ..row }).is_err());
        assert!(dequantise(AffineRow { bits: 0, codes: &[], group: 1 << 58, ..row }).is_err());
        assert!(dequantise(AffineRow { group: usize::MAX, ..row }).is_err());
    }
}
