use std::sync::OnceLock;

use crate::{Error, Result};

/// Log2 of the largest dimension of the rotation.
const MAX_LOG2: usize = 12;

/// The fixed ±1 vector s of the rotation y = H_D·(s ⊙ x)/√D, for D a power of two from 2 to 4096.
///
/// Sign j of dimension D is the top bit of one SplitMix64 output (Steele et al. 2014): with z = (D·2³² + j +
/// 1)·0x9E3779B97F4A7C15 mod 2⁶⁴, mixed as in [`sign_is_negative`], the sign is −1 if bit 63 is set. The computation
/// uses only integers, so that every device gets the same vector.
///
/// # Errors
/// `Value` for any other dimension.
pub fn signs(dim: usize) -> Result<&'static [f32]> {
    static TABLES: [OnceLock<Vec<f32>>; MAX_LOG2 + 1] = [const { OnceLock::new() }; MAX_LOG2 + 1];
    if !dim.is_power_of_two() || !(2..=1 << MAX_LOG2).contains(&dim) {
        return Err(Error::Value {
            op: "signs",
            arg: "dim",
            expected: "a power of two from 2 to 4096".to_string(),
            got: dim.to_string(),
        });
    }
    let build = || (0..dim).map(|j| if sign_is_negative(dim, j) { -1.0 } else { 1.0 }).collect();
    Ok(TABLES[dim.ilog2() as usize].get_or_init(build))
}

/// Whether sign `j` of dimension `dim` is −1.
pub fn sign_is_negative(dim: usize, j: usize) -> bool {
    let counter = ((dim as u64) << 32).wrapping_add(j as u64).wrapping_add(1);
    let mut z = counter.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)) >> 63 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_dimensions_are_refused() {
        for dim in [0, 1, 3, 96, 4095, 8192, usize::MAX] {
            assert!(matches!(signs(dim), Err(Error::Value { .. })), "{dim}");
        }
    }

    #[test]
    fn signs_are_fixed_and_balanced() {
        for dim in (1..=MAX_LOG2).map(|log2| 1 << log2) {
            let signs = signs(dim).unwrap();
            assert_eq!(signs.len(), dim);
            assert!(signs.iter().all(|s| s.abs() == 1.0));
            // Within four standard deviations of a fair coin.
            let sum: f32 = signs.iter().sum();
            assert!(sum.abs() <= 4.0 * (dim as f32).sqrt(), "{dim}: {sum}");
        }
    }

    /// A change would make every stored cache unreadable.
    #[test]
    fn signs_of_64_never_change() {
        let bits = signs(64).unwrap().iter().rev().fold(0u64, |bits, &s| bits << 1 | u64::from(s < 0.0));
        assert_eq!(bits, 0xfece_a184_511c_01cf);
    }
}
