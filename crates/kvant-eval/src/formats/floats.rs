//! Rounds to small floating-point formats.

/// Rounds to a float with `mantissa` bits of mantissa and the minimum exponent `min_exponent`; ties to even.
fn round(x: f64, mantissa: i32, min_exponent: i32) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let step = 2f64.powi(exponent.max(min_exponent) - mantissa);
    (x / step).round_ties_even() * step
}

/// Rounds to f16. Overflows to infinity.
pub fn f16(x: f64) -> f64 {
    let rounded = round(x, 10, -14);
    if rounded.abs() > 65504.0 { f64::INFINITY.copysign(x) } else { rounded }
}

/// Rounds to e4m3. Saturates.
pub fn e4m3(x: f64) -> f64 {
    round(x, 3, -6).clamp(-448.0, 448.0)
}

/// Rounds to e2m1. Saturates.
pub fn e2m1(x: f64) -> f64 {
    round(x, 1, 0).clamp(-6.0, 6.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_round_to_nearest() {
        let e2m1s: Vec<f64> = [0.0, 0.24, 0.26, 0.75, 1.25, 1.26, 2.5, 3.6, 5.0, 100.0].map(e2m1).into();
        assert_eq!(e2m1s, [0.0, 0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 4.0, 4.0, 6.0]);
        assert_eq!([17.0, 17.1, -1e9, 0.0019, 0.0009].map(e4m3), [16.0, 18.0, -448.0, 0.001953125, 0.0]);
        assert_eq!(f16(0.1), 0.0999755859375);
        assert_eq!(
            [65519.0, 65520.0, -1e9, 3e-8, 2e-8].map(f16),
            [65504.0, f64::INFINITY, f64::NEG_INFINITY, 2f64.powi(-24), 0.0]
        );
        assert!(f16(f64::NAN).is_nan() && e4m3(f64::NAN).is_nan());
    }
}
