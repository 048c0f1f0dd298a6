//! The Hadamard rotation, without signs.

/// Rotates vectors of `dim` coordinates in place, in blocks of `block` coordinates, or of the largest power of two that
/// divides `dim` if that is smaller. The rotation is its own inverse.
pub fn rotate(vectors: &mut [f64], dim: usize, block: usize) {
    let block = block.min(1 << dim.trailing_zeros());
    for x in vectors.chunks_exact_mut(block) {
        let mut half = 1;
        while half < block {
            for pair in x.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
            }
            half *= 2;
        }
        let factor = (block as f64).sqrt();
        x.iter_mut().for_each(|x| *x /= factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_is_its_own_inverse() {
        let x: Vec<f64> = (0..96).map(|i| f64::from(i).sin()).collect();
        for (dim, block) in [(32, 32), (96, 96), (96, 64), (8, 64)] {
            let mut y = x.clone();
            rotate(&mut y, dim, block);
            assert!(x.iter().zip(&y).any(|(x, y)| (x - y).abs() > 0.1));
            let length = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
            assert!((length(&x) / length(&y) - 1.0).abs() < 1e-12);
            rotate(&mut y, dim, block);
            assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() < 1e-12));
        }
        // Row 1 of the 4 × 4 matrix: + − + −.
        let mut y = [0.0, 1.0, 0.0, 0.0];
        rotate(&mut y, 4, 4);
        assert_eq!(y, [0.5, -0.5, 0.5, -0.5]);
    }
}
