use std::ops::Range;

use super::{Codec, TurboQuant, centroids, decode_rotated, encode, plane_bits, unpack};
use crate::{Error, Planes, Result, Tensor, codec::BLOCK, reference::hadamard};

/// TurboQuant's statistics of the vectors of one head.
///
/// z are the rotated coordinates before quantisation: divided by their block's root mean square, times the codec's
/// scale. The codebook is optimal for the normal distribution; `kurtosis` measures how far z is from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadStats {
    /// The number of vectors.
    pub vectors: usize,
    /// The number of vectors that are not finite. The other statistics exclude them.
    pub non_finite: usize,
    /// The root mean square of z: the codec's scale, or less if some blocks are zero.
    pub rms: f64,
    /// The mean of z⁴ over the square of the mean of z²: 3 for a normal distribution, 0 without any z.
    pub kurtosis: f64,
    /// The share of z beyond the outermost centroids.
    pub clip_fraction: f64,
    /// Σ‖x − decoded‖² / Σ‖x‖²; 0 without any x.
    pub distortion: f64,
}

/// Measures how well TurboQuant stores a tensor `[T, H, D]` (one entry per head) or `[T, D]` (one entry). The tensor
/// is f32, f16 or bf16, on any device; the computation runs on the host.
///
/// # Errors
/// `Shape` for another rank, `DType` for another dtype, `Value` for a D that the codec does not support,
/// `OutOfMemory`.
pub fn stats(x: &Tensor, tq: TurboQuant) -> Result<Vec<HeadStats>> {
    let (heads, dim) = match *x.shape() {
        [_, heads, dim] => (heads, dim),
        [_, dim] => (1, dim),
        _ => {
            return Err(Error::Shape {
                op: "stats",
                arg: "x",
                expected: "[T, H, D] or [T, D]".to_string(),
                got: x.shape().to_vec(),
            });
        }
    };
    Codec::TurboQuant(tq).validate("stats", "x", dim)?;
    let mut sums = Vec::new();
    let bytes = heads.saturating_mul(size_of::<Sums>());
    sums.try_reserve_exact(heads).map_err(|_| Error::OutOfMemory { device: "the host".to_string(), bytes })?;
    sums.resize(heads, Sums::default());
    for (row, x) in x.to_f32()?.chunks(dim).enumerate() {
        let x: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        sums[row % heads].add(tq, &x)?;
    }
    Ok(sums.iter().map(Sums::stats).collect())
}

#[derive(Clone, Default)]
struct Sums {
    vectors: usize,
    non_finite: usize,
    coordinates: f64,
    z2: f64,
    z4: f64,
    clipped: f64,
    error: f64,
    signal: f64,
}

impl Sums {
    fn add(&mut self, tq: TurboQuant, x: &[f64]) -> Result<()> {
        self.vectors += 1;
        let encoded = encode(tq, x)?;
        if encoded.norms.iter().any(|n| n.is_nan()) {
            self.non_finite += 1;
            return Ok(());
        }
        let outermost = centroids(tq.bits)?.last().copied().map_or(0.0, f64::from);
        // The rotation preserves lengths, so the error can be measured in the rotated basis.
        let (y, decoded) = (hadamard(x, false)?, decode_rotated(tq, &encoded)?);
        for (y, decoded) in y.chunks(BLOCK).zip(decoded.chunks(BLOCK)) {
            let squares: f64 = y.iter().map(|y| y * y).sum();
            let n = (squares / y.len() as f64).sqrt() / f64::from(tq.scale);
            for (y, decoded) in y.iter().zip(decoded) {
                let z = if n > 0.0 { y / n } else { 0.0 };
                self.coordinates += 1.0;
                self.z2 += z * z;
                self.z4 += z.powi(4);
                self.clipped += f64::from(u8::from(z.abs() > outermost));
                self.error += (y - decoded).powi(2);
                self.signal += y * y;
            }
        }
        Ok(())
    }

    fn stats(&self) -> HeadStats {
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        HeadStats {
            vectors: self.vectors,
            non_finite: self.non_finite,
            rms: ratio(self.z2, self.coordinates).sqrt(),
            kurtosis: ratio(self.z4 * self.coordinates, self.z2 * self.z2),
            clip_fraction: ratio(self.clipped, self.coordinates),
            distortion: ratio(self.error, self.signal),
        }
    }
}

/// The codebook indices of vectors `rows` of a quantised side, one per byte, D per vector, for every packing and
/// device. Use it to compare the stored codes of two devices.
///
/// # Errors
/// `Value` for dense planes or rows that do not exist.
pub fn indices(planes: &Planes, rows: Range<usize>) -> Result<Vec<u8>> {
    let Codec::TurboQuant(tq) = planes.codec() else {
        let (expected, got) = ("quantised".to_string(), planes.codec().to_string());
        return Err(Error::Value { op: "indices", arg: "planes", expected, got });
    };
    let low: Vec<u8> = planes.low.rows(rows.clone())?.to_vec()?;
    let high: Vec<u8> = planes.high.as_ref().map_or(Ok(Vec::new()), |high| high.rows(rows)?.to_vec())?;
    // Every row is a whole number of bytes in each plane, so all rows unpack like one long row.
    let low_bits = plane_bits(tq.bits).map_or(8, |(low, _)| low as usize);
    let mut indices = vec![0; low.len() * 8 / low_bits];
    unpack(tq.bits, &low, &high, &mut indices)?;
    Ok(indices)
}
