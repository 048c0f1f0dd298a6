use super::{BLOCK, Codec, Norm, PageMean, TurboQuant, centroids, nearest, page_mean::is_storable, thresholds};
use crate::{
    Error, Result,
    reference::{hadamard, round_f16},
};

/// One vector in TurboQuant form, before its indices are [packed](super::pack).
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    /// One per coordinate of the rotated vector, below 2^bits.
    pub indices: Vec<u8>,
    /// One per block of min(D, [`BLOCK`]) coordinates. Norms of a centred codec are representable in f16.
    pub norms: Vec<f32>,
}

/// Encodes one vector. This function is the definition that every kernel is tested against.
///
/// 1. The vector is rotated (y = [`hadamard`] of x) and cut into blocks of B = min(D, [`BLOCK`]) coordinates.
/// 2. For each block, n = ‖y‖/(√B·scale). Coordinate j gets the index of the centroid [`nearest`] to yⱼ/n.
/// 3. The block stores a norm, so that coordinate = norm · centroid. [`Norm`] selects which number is stored;
///    `Norm::Rms` stores n.
///
/// A block of zeros has norm 0. A vector that is not finite, or whose squared length overflows f32, gets index 0
/// everywhere and NaN norms; it does not affect other vectors.
///
/// A centred codec encodes around a mean of zeros here; [`encode_around`] takes the mean of a page.
///
/// y and n are f64 here. A kernel computes them in f32, so that a coordinate next to a threshold may get the
/// neighbouring index.
///
/// # Errors
/// `Value` if [`Codec`] does not support the codec's parameters or the length.
///
/// # Example
/// ```
/// use kvant::{Codec, codec};
/// let Codec::TurboQuant(tq) = Codec::tq(8) else { unreachable!() };
/// let x: Vec<f64> = (0..64).map(|i| f64::from(i).sin()).collect();
/// let back = codec::decode(tq, &codec::encode(tq, &x)?)?;
/// let error: f64 = x.iter().zip(&back).map(|(a, b)| (a - b).powi(2)).sum();
/// let energy: f64 = x.iter().map(|a| a * a).sum();
/// assert!(error / energy < 1e-4);
/// # Ok::<(), kvant::Error>(())
/// ```
pub fn encode(tq: TurboQuant, x: &[f64]) -> Result<Encoded> {
    Codec::TurboQuant(tq).validate("encode", "x", x.len())?;
    if !is_storable(x) {
        return Ok(not_storable(x.len()));
    }
    encode_rotated(tq, &hadamard(x, false)?)
}

/// Encodes one vector minus the mean of its page: as [`encode`], with y = rotated vector − mean. Norms are rounded to
/// f16; norms above 65504 become infinite. A y that is not finite, or whose squared length overflows f32, gets index 0
/// everywhere and NaN norms.
///
/// # Errors
/// `Value` if the codec is not centred, as [`encode`], or if the mean has another length.
pub fn encode_around(tq: TurboQuant, mean: &PageMean, x: &[f64]) -> Result<Encoded> {
    Codec::TurboQuant(tq).validate("encode", "x", x.len())?;
    check_mean(tq, mean, x.len())?;
    let y: Vec<f64> = hadamard(x, false)?.iter().zip(mean.rotated()).map(|(y, mean)| y - mean).collect();
    if is_storable(&y) { encode_rotated(tq, &y) } else { Ok(not_storable(x.len())) }
}

/// The encoding of a vector that is not finite.
fn not_storable(dim: usize) -> Encoded {
    Encoded { indices: vec![0; dim], norms: vec![f32::NAN; dim.div_ceil(BLOCK)] }
}

/// Checks that the mean has `dim` coordinates and that the codec is centred.
fn check_mean(tq: TurboQuant, mean: &PageMean, dim: usize) -> Result<()> {
    let refuse = |arg, expected: String, got: String| Err(Error::Value { op: "codec", arg, expected, got });
    if !tq.centred {
        return refuse("tq", "a centred codec".to_string(), Codec::TurboQuant(tq).to_string());
    }
    if mean.codes.len() != dim {
        return refuse("mean", format!("of {dim} coordinates"), mean.codes.len().to_string());
    }
    Ok(())
}

fn encode_rotated(tq: TurboQuant, y: &[f64]) -> Result<Encoded> {
    let (centroids, thresholds) = (centroids(tq.bits)?, thresholds(tq.bits)?);
    let mut encoded = Encoded { indices: Vec::with_capacity(y.len()), norms: Vec::new() };
    for y in y.chunks(BLOCK) {
        let squares: f64 = y.iter().map(|y| y * y).sum();
        let n = (squares / y.len() as f64).sqrt() / f64::from(tq.scale);
        let z = |y: f64| if n > 0.0 { (y / n) as f32 } else { 0.0 };
        let indices: Vec<u8> = y.iter().map(|&y| nearest(z(y), thresholds)).collect();
        let norm = stored_norm(tq.norm, n, y, &indices, centroids);
        encoded.norms.push(if tq.centred { round_f16(norm).to_f32() } else { norm as f32 });
        encoded.indices.extend(indices);
    }
    Ok(encoded)
}

/// The norm that is stored for a block.
fn stored_norm(norm: Norm, n: f64, y: &[f64], indices: &[u8], centroids: &[f32]) -> f64 {
    if n == 0.0 {
        return 0.0;
    }
    let (mut yc, mut cc, mut yy) = (0.0, 0.0, 0.0);
    for (&y, &index) in y.iter().zip(indices) {
        let c = f64::from(centroids[usize::from(index)]);
        yc += y * c;
        cc += c * c;
        yy += y * y;
    }
    match norm {
        Norm::Rms => n,
        Norm::LeastSquares => yc / cc,
        Norm::Unbiased => yy / yc,
    }
}

/// Decodes a vector without undoing the rotation: norm · centroid. For a centred codec, this is the vector minus its
/// page's mean.
///
/// # Errors
/// `Value` if the lengths do not match the codec, or if an index is beyond the codebook.
pub fn decode_rotated(tq: TurboQuant, encoded: &Encoded) -> Result<Vec<f64>> {
    let dim = encoded.indices.len();
    Codec::TurboQuant(tq).validate("decode", "indices", dim)?;
    let centroids = centroids(tq.bits)?;
    let refuse =
        |arg, expected: String, got: usize| Err(Error::Value { op: "decode", arg, expected, got: got.to_string() });
    if encoded.norms.len() != dim.div_ceil(BLOCK) {
        return refuse("norms", format!("{} blocks", dim.div_ceil(BLOCK)), encoded.norms.len());
    }
    if let Some(&index) = encoded.indices.iter().find(|&&index| usize::from(index) >= centroids.len()) {
        return refuse("indices", format!("below {}", centroids.len()), index.into());
    }
    let coordinate =
        |(j, &index): (usize, &u8)| f64::from(encoded.norms[j / BLOCK]) * f64::from(centroids[usize::from(index)]);
    Ok(encoded.indices.iter().enumerate().map(coordinate).collect())
}

/// Decodes a vector and undoes the rotation.
///
/// # Errors
/// As [`decode_rotated`].
pub fn decode(tq: TurboQuant, encoded: &Encoded) -> Result<Vec<f64>> {
    hadamard(&decode_rotated(tq, encoded)?, true)
}

/// Decodes a vector around the mean of its page, and undoes the rotation.
///
/// # Errors
/// As [`decode_rotated`]; `Value` if the codec is not centred, or if the mean has another length.
pub fn decode_around(tq: TurboQuant, mean: &PageMean, encoded: &Encoded) -> Result<Vec<f64>> {
    check_mean(tq, mean, encoded.indices.len())?;
    let y = decode_rotated(tq, encoded)?;
    hadamard(&y.iter().zip(mean.rotated()).map(|(y, mean)| y + mean).collect::<Vec<_>>(), true)
}
