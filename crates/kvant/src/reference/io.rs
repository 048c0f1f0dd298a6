//! Conversion of tensors to f64 and back, and the vectors of a cache layer.
//!
//! Everything here runs within `HostExecutor::run`: the device's lock is held, and no slice of one call outlives the
//! function that made it.

use half::{bf16, f16};

use super::seal;
use crate::{
    Codec, DType, KvLayer, Planes, Tensor,
    codec::{self, Encoded},
    dtype::{Element, Float},
    layer::RowPlace,
};

/// The elements of a float tensor.
pub(super) fn load(tensor: &Tensor) -> Vec<f64> {
    load_range(tensor, 0..tensor.elements())
}

/// A range of elements of a float tensor.
pub(super) fn load_range(tensor: &Tensor, range: std::ops::Range<usize>) -> Vec<f64> {
    fn widen<E: Float>(tensor: &Tensor, range: std::ops::Range<usize>) -> Vec<f64> {
        // SAFETY: the lock is held, and nothing writes while the slice lives.
        let all = unsafe { tensor.host_slice::<E>() };
        all[range].iter().map(|&x| f64::from(x.to_f32())).collect()
    }
    match tensor.dtype() {
        DType::F32 => widen::<f32>(tensor, range),
        DType::F16 => widen::<f16>(tensor, range),
        DType::BF16 => widen::<bf16>(tensor, range),
        DType::U32 | DType::U8 => unreachable!("validation requires a float dtype"),
    }
}

/// The elements of a u32 tensor.
pub(super) fn load_u32(tensor: &Tensor) -> Vec<u32> {
    // SAFETY: the lock is held, and nothing writes while the slice lives.
    unsafe { tensor.host_slice::<u32>() }.to_vec()
}

/// A range of elements of a u8 tensor.
pub(super) fn load_u8(tensor: &Tensor, range: std::ops::Range<usize>) -> Vec<u8> {
    // SAFETY: the lock is held, and nothing writes while the slice lives.
    let all = unsafe { tensor.host_slice::<u8>() };
    all[range].to_vec()
}

/// Writes elements without conversion, from index `start` on.
pub(super) fn store_raw<E: Element>(tensor: &Tensor, start: usize, values: &[E]) {
    // SAFETY: the lock is held, and this is the only slice of the tensor.
    let out = unsafe { tensor.host_slice_mut::<E>() };
    out[start..start + values.len()].copy_from_slice(values);
}

/// Rounds f64 values to a float tensor.
pub(super) fn store(tensor: &Tensor, values: &[f64]) {
    store_range(tensor, 0, values);
}

/// Rounds f64 values to elements of a float tensor, from index `start` on.
pub(super) fn store_range(tensor: &Tensor, start: usize, values: &[f64]) {
    match tensor.dtype() {
        DType::F32 => store_raw(tensor, start, &values.iter().map(|&x| x as f32).collect::<Vec<_>>()),
        DType::F16 => store_raw(tensor, start, &values.iter().map(|&x| round_f16(x)).collect::<Vec<_>>()),
        DType::BF16 => store_raw(tensor, start, &values.iter().map(|&x| round_bf16(x)).collect::<Vec<_>>()),
        DType::U32 | DType::U8 => unreachable!("validation requires a float dtype"),
    }
}

/// Copies `len` elements from one tensor to another of the same dtype, bit for bit.
pub(super) fn copy_elements(from: &Tensor, from_start: usize, to: &Tensor, to_start: usize, len: usize) {
    fn copy<E: Element>(from: &Tensor, from_start: usize, to: &Tensor, to_start: usize, len: usize) {
        // SAFETY: the lock is held, and nothing writes while the slice lives.
        let values = unsafe { from.host_slice::<E>() }[from_start..from_start + len].to_vec();
        store_raw(to, to_start, &values);
    }
    // Only the size matters: bits are copied.
    match from.dtype() {
        DType::F32 => copy::<f32>(from, from_start, to, to_start, len),
        DType::F16 => copy::<f16>(from, from_start, to, to_start, len),
        DType::BF16 => copy::<bf16>(from, from_start, to, to_start, len),
        DType::U32 => copy::<u32>(from, from_start, to, to_start, len),
        DType::U8 => copy::<u8>(from, from_start, to, to_start, len),
    }
}

/// Nearest f16, ties to even, in one rounding.
pub(crate) fn round_f16(x: f64) -> f16 {
    f16::from_f32(round_to(x, 11, -14, f64::from(f16::MAX)))
}

/// Nearest bf16, ties to even, in one rounding.
pub(super) fn round_bf16(x: f64) -> bf16 {
    bf16::from_f32(round_to(x, 8, -126, f64::from(bf16::MAX)))
}

/// Rounds to `precision` significant bits, to fewer below 2^`min_exponent`, and to infinity beyond `max`. The result
/// fits f32 exactly.
fn round_to(x: f64, precision: i32, min_exponent: i32, max: f64) -> f32 {
    if !x.is_finite() {
        return x as f32;
    }
    let exponent = ((x.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(min_exponent);
    let unit = 2f64.powi(exponent - (precision - 1));
    let rounded = (x / unit).round_ties_even() * unit;
    if rounded.abs() > max { f32::INFINITY.copysign(x as f32) } else { rounded as f32 }
}

/// The index of the first element of a row in a plane with `per_row` elements per row.
pub(super) fn first_element(plane: &Tensor, place: RowPlace, per_row: usize) -> usize {
    place.bytes / plane.dtype().size() + place.row * per_row
}

/// Decodes a vector of a side of the layer; `keep_rotated` leaves a quantised one in the rotated basis.
pub(super) fn load_vector(layer: &KvLayer, planes: &Planes, place: RowPlace, keep_rotated: bool) -> Vec<f64> {
    let dim = layer.spec().head_dim;
    let range = |plane: &Tensor, per_row: usize| {
        let first = first_element(plane, place, per_row);
        first..first + per_row
    };
    let Codec::TurboQuant(tq) = planes.codec() else {
        return load_range(&planes.low, range(&planes.low, dim));
    };
    let (low, high) = codec::plane_bytes(tq.bits, dim).expect("the layer checked its codec");
    let blocks = dim.div_ceil(codec::BLOCK);
    let low = load_u8(&planes.low, range(&planes.low, low));
    let high = planes.high.as_ref().map_or(Vec::new(), |plane| load_u8(plane, range(plane, high)));
    let norms = load_range(norms_plane(planes), range(norms_plane(planes), blocks));
    let mut encoded = Encoded { indices: vec![0; dim], norms: norms.iter().map(|&n| n as f32).collect() };
    codec::unpack(tq.bits, &low, &high, &mut encoded.indices).expect("the planes have the lengths of their codec");
    let decoded = codec::decode_rotated(tq, &encoded);
    let mut y = decoded.expect("the layer checked its codec, and unpacked indices are within the codebook");
    if let Some(mean) = seal::of_vector(layer, planes, place) {
        y.iter_mut().zip(mean.rotated()).for_each(|(y, mean)| *y += mean);
    }
    if keep_rotated { y } else { super::hadamard(&y, true).expect("the layer checked its codec") }
}

/// Encodes a vector into a row of a side of the layer. The means of its page are already stored.
pub(super) fn store_vector(layer: &KvLayer, planes: &Planes, place: RowPlace, x: &[f64]) {
    let Codec::TurboQuant(tq) = planes.codec() else {
        return store_range(&planes.low, first_element(&planes.low, place, x.len()), x);
    };
    let encoded = match seal::of_vector(layer, planes, place) {
        Some(mean) => codec::encode_around(tq, &mean, x),
        None => codec::encode(tq, x),
    };
    let encoded = encoded.expect("the layer checked its codec");
    let (low, high) = codec::plane_bytes(tq.bits, x.len()).expect("the layer checked its codec");
    let (mut low, mut high) = (vec![0; low], vec![0; high]);
    codec::pack(tq.bits, &encoded.indices, &mut low, &mut high).expect("the planes have the lengths of their codec");
    store_raw(&planes.low, first_element(&planes.low, place, low.len()), &low);
    if let Some(plane) = &planes.high {
        store_raw(plane, first_element(plane, place, high.len()), &high);
    }
    let norms = norms_plane(planes);
    let values: Vec<f64> = encoded.norms.iter().map(|&norm| norm.into()).collect();
    store_range(norms, first_element(norms, place, values.len()), &values);
}

fn norms_plane(planes: &Planes) -> &Tensor {
    planes.norms.as_ref().expect("quantised planes have norms")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rounding_is_single_and_to_even() {
        // Slightly above a tie: rounding to f32 first would make it a tie, which then rounds down to even.
        let above_tie = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(round_f16(above_tie).to_f64(), 1.0 + 2f64.powi(-10));
        assert_eq!(round_f16(1.0 + 2f64.powi(-11)).to_f64(), 1.0);
        assert_eq!(round_bf16(1.0 + 2f64.powi(-8) + 2f64.powi(-45)).to_f64(), 1.0 + 2f64.powi(-7));
        assert_eq!(round_f16(65519.99), f16::MAX);
        assert_eq!(round_f16(65520.0), f16::INFINITY);
        assert_eq!(round_f16(-1e300), f16::NEG_INFINITY);
        assert_eq!(round_f16(2f64.powi(-25)).to_bits(), 0);
        assert_eq!(round_f16(2f64.powi(-25) * 1.001).to_bits(), 1);
        assert_eq!(round_f16(-0.0).to_bits(), 0x8000);
        assert!(round_f16(f64::NAN).is_nan() && round_bf16(f64::NAN).is_nan());
        assert_eq!(round_bf16(f64::from(f32::MAX)), bf16::INFINITY);
    }

    proptest! {
        /// For f32 inputs, `half` rounds only once, which makes it an oracle.
        #[test]
        fn rounding_agrees_with_half(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assume!(!x.is_nan());
            prop_assert_eq!(round_f16(x.into()).to_bits(), f16::from_f32(x).to_bits());
            prop_assert_eq!(round_bf16(x.into()).to_bits(), bf16::from_f32(x).to_bits());
        }
    }
}
