use super::io;
use crate::{Result, codec::signs, ops::hadamard::Call};

/// The rotation y = H_D·(s ⊙ x)/√D, or its inverse x = s ⊙ (H_D·y)/√D.
///
/// H_D is the Sylvester matrix: entry (i, j) is (−1)^n, with n the number of ones in i AND j. s are the [`signs`].
///
/// # Errors
/// `Value` unless D is a power of two, 2 to 4096.
pub fn hadamard(x: &[f64], inverse: bool) -> Result<Vec<f64>> {
    let dim = x.len();
    let signs = signs(dim)?;
    let flip = |x: &mut [f64]| x.iter_mut().zip(signs).for_each(|(x, &s)| *x *= f64::from(s));
    let mut y = x.to_vec();
    if !inverse {
        flip(&mut y);
    }
    // H_2n = [[H_n, H_n], [H_n, −H_n]]: log D rounds of sums and differences.
    let mut half = 1;
    while half < dim {
        for block in y.chunks_mut(2 * half) {
            let (a, b) = block.split_at_mut(half);
            for (a, b) in a.iter_mut().zip(b) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let scale = (dim as f64).sqrt().recip();
    y.iter_mut().for_each(|y| *y *= scale);
    if inverse {
        flip(&mut y);
    }
    Ok(y)
}

pub(crate) fn run(call: &Call) {
    let x = io::load(&call.x);
    let rows = x.chunks(call.dim).flat_map(|row| hadamard(row, call.inverse).expect("validation checked D"));
    let out: Vec<f64> = rows.collect();
    io::store(&call.out, &out);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vector of pseudo-random numbers.
    fn vector(dim: usize) -> Vec<f64> {
        (0..dim).map(|i| ((i * i + 7 * i + 3) as f64).sin() * (1.0 + (i % 5) as f64)).collect()
    }

    #[test]
    fn the_rotation_equals_the_matrix_product() {
        for dim in [2, 8, 64, 512] {
            let (x, signs) = (vector(dim), signs(dim).unwrap());
            let y = hadamard(&x, false).unwrap();
            for (i, y) in y.iter().enumerate() {
                let entry = |j: usize| if (i & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
                let sum: f64 = (0..dim).map(|j| entry(j) * f64::from(signs[j]) * x[j]).sum();
                assert!((sum / (dim as f64).sqrt() - y).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn the_inverse_restores_and_lengths_are_preserved() {
        for dim in (1..=12).map(|log2| 1 << log2) {
            let x = vector(dim);
            let y = hadamard(&x, false).unwrap();
            let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!((norm(&x) / norm(&y) - 1.0).abs() < 1e-12);
            let back = hadamard(&y, true).unwrap();
            assert!(x.iter().zip(&back).all(|(a, b)| (a - b).abs() < 1e-12));
        }
        assert!(hadamard(&[0.0; 12], false).is_err());
        assert!(hadamard(&[], true).is_err());
    }
}
