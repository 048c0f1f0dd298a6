use crate::{Result, reference::hadamard};

/// The mean of the vectors of a page, of one KV head and side, as the page stores it: rotated, in 8 bits per coordinate
/// and a scale.
///
/// Centred codecs store vectors minus this mean. Any mean decodes; the closer it is to the vectors, the smaller is the
/// error. `docs/codec.md` specifies which mean a write chooses.
#[derive(Clone, Debug, PartialEq)]
pub struct PageMean {
    /// One per coordinate of the rotated mean, from −127 to 127.
    pub codes: Vec<i8>,
    /// Coordinate = scale · code.
    pub scale: f32,
}

/// The largest code of a mean.
pub(crate) const MEAN_LEVELS: f32 = 127.0;

impl PageMean {
    /// A mean of zeros, for vectors of `dim` coordinates.
    pub fn zero(dim: usize) -> PageMean {
        PageMean { codes: vec![0; dim], scale: 0.0 }
    }

    /// The mean of vectors of `dim` coordinates. Vectors that are not finite, or whose squared length overflows f32,
    /// are skipped. The mean of no vectors is zero.
    ///
    /// # Errors
    /// `Value` if the rotation does not support `dim`; `Shape` for a vector of another length.
    ///
    /// # Example
    /// ```
    /// use kvant::codec::PageMean;
    /// let vectors = [vec![5.0; 16], vec![7.0; 16]];
    /// let mean = PageMean::of(16, vectors.iter().map(Vec::as_slice))?;
    /// let length: f64 = mean.rotated().iter().map(|m| m * m).sum::<f64>().sqrt();
    /// assert!((length - 24.0).abs() < 0.2); // six in each of 16 coordinates
    /// # Ok::<(), kvant::Error>(())
    /// ```
    pub fn of<'a>(dim: usize, vectors: impl IntoIterator<Item = &'a [f64]>) -> Result<PageMean> {
        // The rotation is linear: the mean is rotated once.
        Ok(PageMean::nearest(&hadamard(&mean(dim, vectors)?, false)?))
    }

    /// As [`PageMean::of`], for vectors that are already rotated, such as those stored in another page.
    ///
    /// # Errors
    /// As [`PageMean::of`].
    pub fn of_rotated<'a>(dim: usize, vectors: impl IntoIterator<Item = &'a [f64]>) -> Result<PageMean> {
        crate::Codec::tq_centred(8).validate("page_mean", "dim", dim)?;
        Ok(PageMean::nearest(&mean(dim, vectors)?))
    }

    fn nearest(rotated: &[f64]) -> PageMean {
        let largest = rotated.iter().fold(0f64, |largest, m| largest.max(m.abs()));
        let scale = (largest / f64::from(MEAN_LEVELS)) as f32;
        if scale == 0.0 {
            return PageMean::zero(rotated.len());
        }
        let code = |m: &f64| (m / f64::from(scale)).round_ties_even().clamp(-127.0, 127.0) as i8;
        PageMean { codes: rotated.iter().map(code).collect(), scale }
    }

    /// The coordinates of the rotated mean.
    pub fn rotated(&self) -> Vec<f64> {
        self.codes.iter().map(|&code| f64::from(self.scale) * f64::from(code)).collect()
    }
}

/// Whether a vector is finite and its squared length is within f32.
pub(super) fn is_storable(x: &[f64]) -> bool {
    // Also false for NaN.
    x.iter().map(|x| x * x).sum::<f64>() <= f64::from(f32::MAX)
}

/// The mean of the storable vectors; zeros if none is storable.
fn mean<'a>(dim: usize, vectors: impl IntoIterator<Item = &'a [f64]>) -> Result<Vec<f64>> {
    let (mut sum, mut count) = (vec![0.0; dim], 0u32);
    for x in vectors {
        if x.len() != dim {
            let (op, arg, got) = ("page_mean", "vectors", vec![x.len()]);
            return Err(crate::Error::Shape { op, arg, expected: format!("[{dim}]"), got });
        }
        if is_storable(x) {
            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
            count += 1;
        }
    }
    Ok(sum.iter().map(|sum| sum / f64::from(count.max(1))).collect())
}
