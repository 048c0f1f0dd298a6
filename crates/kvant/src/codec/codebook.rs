use super::codebook_table::{HALF_2, HALF_3, HALF_4, HALF_5, HALF_6, HALF_8};
use crate::{Error, Result};

/// The centroids of the Lloyd–Max quantiser of N(0, 1) with 2^`bits` levels, ascending and symmetric. `bits` is one of
/// [`BITS`](super::BITS). `examples/codebooks.rs` computes the optimal values; they are rounded to f32.
///
/// # Errors
/// `Value` for another number of bits.
pub fn centroids(bits: u32) -> Result<&'static [f32]> {
    static C2: [f32; 4] = all_centroids(&HALF_2);
    static C3: [f32; 8] = all_centroids(&HALF_3);
    static C4: [f32; 16] = all_centroids(&HALF_4);
    static C5: [f32; 32] = all_centroids(&HALF_5);
    static C6: [f32; 64] = all_centroids(&HALF_6);
    static C8: [f32; 256] = all_centroids(&HALF_8);
    select(bits, [&C2, &C3, &C4, &C5, &C6, &C8])
}

/// The 2^`bits` − 1 thresholds between the [`centroids`]: midpoints of the exact centroids, rounded to f32. The
/// middle threshold is 0.
///
/// # Errors
/// `Value` for another number of bits.
pub fn thresholds(bits: u32) -> Result<&'static [f32]> {
    static T2: [f32; 3] = all_thresholds(&HALF_2);
    static T3: [f32; 7] = all_thresholds(&HALF_3);
    static T4: [f32; 15] = all_thresholds(&HALF_4);
    static T5: [f32; 31] = all_thresholds(&HALF_5);
    static T6: [f32; 63] = all_thresholds(&HALF_6);
    static T8: [f32; 255] = all_thresholds(&HALF_8);
    select(bits, [&T2, &T3, &T4, &T5, &T6, &T8])
}

/// The [`centroids`], repeated to fill 16 entries. Vector lookups use four index bits or more, so the bits above a 2-
/// or 3-bit index need no masking.
pub(crate) fn lookup_table(bits: u32) -> Result<&'static [f32]> {
    static REPEATED_2: [f32; 16] = repeated(&all_centroids::<2, 4>(&HALF_2));
    static REPEATED_3: [f32; 16] = repeated(&all_centroids::<4, 8>(&HALF_3));
    match bits {
        2 => Ok(&REPEATED_2),
        3 => Ok(&REPEATED_3),
        _ => centroids(bits),
    }
}

const fn repeated<const N: usize>(table: &[f32; N]) -> [f32; 16] {
    let mut all = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        all[i] = table[i % N];
        i += 1;
    }
    all
}

/// The index of z: the number of ascending `thresholds` below z, at most 255.
///
/// This is the nearest centroid; at a tie the lower one, for NaN index 0. The comparison in f32 defines an index: given
/// the same z, every device finds the same index.
#[inline]
pub fn nearest(z: f32, thresholds: &[f32]) -> u8 {
    thresholds.partition_point(|&t| z > t).min(255) as u8
}

fn select(bits: u32, [b2, b3, b4, b5, b6, b8]: [&'static [f32]; 6]) -> Result<&'static [f32]> {
    match bits {
        2 => Ok(b2),
        3 => Ok(b3),
        4 => Ok(b4),
        5 => Ok(b5),
        6 => Ok(b6),
        8 => Ok(b8),
        _ => Err(Error::Value {
            op: "codebook",
            arg: "bits",
            expected: super::BITS_TEXT.to_string(),
            got: bits.to_string(),
        }),
    }
}

const fn all_centroids<const HALF: usize, const ALL: usize>(half: &[f64; HALF]) -> [f32; ALL] {
    let mut all = [0.0; ALL];
    let mut i = 0;
    while i < HALF {
        all[HALF + i] = half[i] as f32;
        all[HALF - 1 - i] = -half[i] as f32;
        i += 1;
    }
    all
}

const fn all_thresholds<const HALF: usize, const ALL: usize>(half: &[f64; HALF]) -> [f32; ALL] {
    let mut all = [0.0; ALL];
    let mut i = 1;
    while i < HALF {
        let t = ((half[i - 1] + half[i]) / 2.0) as f32;
        all[HALF - 1 + i] = t;
        all[HALF - 1 - i] = -t;
        i += 1;
    }
    all
}

/// The program that made the table, to compare its numbers.
#[cfg(test)]
#[path = "../../examples/codebooks.rs"]
mod generator;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::BITS;

    fn half(bits: u32) -> &'static [f64] {
        match bits {
            2 => &HALF_2,
            3 => &HALF_3,
            4 => &HALF_4,
            5 => &HALF_5,
            6 => &HALF_6,
            _ => &HALF_8,
        }
    }

    /// Moments 0, 1 and 2 of N(0, 1) over [a, b] by Simpson's rule, which the generator does not use.
    fn moments(a: f64, b: f64) -> [f64; 3] {
        let n = 2 * ((b - a) / 4e-4).ceil() as usize;
        let h = (b - a) / n as f64;
        let mut sum = [0.0; 3];
        for i in 0..=n {
            let weight = if i == 0 || i == n { 1.0 } else { [2.0, 4.0][i % 2] };
            let x = a + h * i as f64;
            let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
            for (power, sum) in sum.iter_mut().enumerate() {
                *sum += weight * h / 3.0 * density * x.powi(power as i32);
            }
        }
        sum
    }

    /// The bounds and centroid of each cell in the positive half.
    fn cells(half: &[f64]) -> impl Iterator<Item = (f64, f64, f64)> {
        (0..half.len()).map(|i| {
            let left = if i == 0 { 0.0 } else { (half[i - 1] + half[i]) / 2.0 };
            let right = half.get(i + 1).map_or(half[i] + 10.0, |next| (half[i] + next) / 2.0);
            (left, right, half[i])
        })
    }

    #[test]
    fn every_centroid_is_the_mean_of_its_cell() {
        for bits in BITS {
            for (left, right, c) in cells(half(bits)) {
                let [mass, mean, _] = moments(left, right);
                assert!((mean / mass - c).abs() < 1e-12, "{bits} bits: {c} is not {}", mean / mass);
            }
        }
    }

    #[test]
    fn the_generator_gives_the_table() {
        for bits in BITS {
            let computed = generator::lloyd_max(half(bits).len());
            assert!(computed.iter().zip(half(bits)).all(|(a, b)| (a - b).abs() < 1e-13), "{bits} bits");
        }
    }

    #[test]
    fn mean_squared_error_is_the_optimum() {
        let optima = [(2, 0.1175), (3, 3.454e-2), (4, 9.501e-3), (5, 2.505e-3), (6, 6.44e-4), (8, 4.12e-5)];
        for (bits, expected) in optima {
            let mse: f64 = cells(half(bits))
                .map(|(left, right, c)| {
                    let [m0, m1, m2] = moments(left, right);
                    2.0 * (m2 - 2.0 * c * m1 + c * c * m0)
                })
                .sum();
            // Half a unit of the last digit given.
            assert!((mse / expected - 1.0).abs() < 1.3e-3, "{bits} bits: {mse:e}");
        }
    }

    #[test]
    fn tables_are_ascending_symmetric_and_interleaved() {
        for bits in BITS {
            let (c, t) = (centroids(bits).unwrap(), thresholds(bits).unwrap());
            assert_eq!((c.len(), t.len()), (1 << bits, (1 << bits) - 1));
            assert_eq!(t[t.len() / 2].to_bits(), 0f32.to_bits());
            for i in 0..t.len() {
                assert!(c[i] < t[i] && t[i] < c[i + 1]);
                assert_eq!(t[i], -t[t.len() - 1 - i]);
                let middle = (f64::from(c[i]) + f64::from(c[i + 1])) / 2.0;
                assert!((f64::from(t[i]) - middle).abs() <= f64::from(f32::EPSILON) * middle.abs());
            }
            assert!(c.iter().zip(c.iter().rev()).all(|(a, b)| *a == -b));
        }
        for bits in [0, 1, 7, 9, u32::MAX] {
            assert!(centroids(bits).is_err() && thresholds(bits).is_err());
        }
    }

    #[test]
    fn nearest_takes_the_lower_index_at_a_tie() {
        for bits in BITS {
            let (c, t) = (centroids(bits).unwrap(), thresholds(bits).unwrap());
            for (i, &c) in c.iter().enumerate() {
                assert_eq!(usize::from(nearest(c, t)), i);
            }
            for (i, &threshold) in t.iter().enumerate() {
                assert_eq!(usize::from(nearest(threshold, t)), i);
                assert_eq!(usize::from(nearest(threshold.next_up(), t)), i + 1);
            }
            assert_eq!(nearest(f32::NAN, t), 0);
            assert_eq!(nearest(f32::NEG_INFINITY, t), 0);
            assert_eq!(usize::from(nearest(f32::INFINITY, t)), t.len());
        }
    }
}
