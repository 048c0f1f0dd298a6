//! One function per format: replaces the numbers of a block by the values that the format returns.

use super::floats::{e2m1, e4m3, f16};

/// The number of largest magnitude.
fn extreme(x: &[f64]) -> f64 {
    x.iter().copied().fold(0.0, |max: f64, x| if x.abs() > max.abs() || x.is_nan() { x } else { max })
}

/// x/d, or 0 for a block of zeros.
fn over(x: f64, d: f64) -> f64 {
    if d == 0.0 { 0.0 } else { x / d }
}

pub fn q8_0(x: &mut [f64]) {
    let d = extreme(x).abs() / 127.0;
    x.iter_mut().for_each(|x| *x = over(*x, d).round() * f16(d));
}

pub fn q4_0(x: &mut [f64]) {
    let d = extreme(x) / -8.0;
    x.iter_mut().for_each(|x| *x = ((over(*x, d) + 8.5).floor().clamp(0.0, 15.0) - 8.0) * f16(d));
}

/// The table of iq4_nl.
const IQ4: [f64; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

/// The scale that selects the indices maps the number of largest magnitude to −127. The stored scale minimises the
/// error weighted by squares.
pub fn iq4_nl(x: &mut [f64]) {
    let d = extreme(x) / IQ4[0];
    let nearest = |x: f64| IQ4[IQ4.windows(2).take_while(|pair| x > (pair[0] + pair[1]) / 2.0).count()];
    let q: Vec<f64> = x.iter().map(|&x| nearest(over(x, d))).collect();
    let sums = x.iter().zip(&q).fold((0.0, 0.0), |(qx, qq), (x, q)| (qx + x * x * q * x, qq + x * x * q * q));
    let d = f16(over(sums.0, sums.1));
    x.iter_mut().zip(q).for_each(|(x, q)| *x = q * d);
}

/// The end of the range with the larger magnitude is exact, except for rounding of the bias.
pub fn mlx4(x: &mut [f64]) {
    const LEVELS: f64 = 15.0;
    let (min, max) = x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), &x| (a.min(x), b.max(x)));
    let is_min = min.abs() > max.abs();
    let (edge, sign) = if is_min { (min, 1.0) } else { (max, -1.0) };
    let mut scale = sign * ((max - min) / LEVELS).max(1e-7);
    let mut bias = 0.0;
    let steps = (edge / scale).round_ties_even();
    if steps != 0.0 {
        (scale, bias) = (edge / steps, edge);
    }
    x.iter_mut().for_each(|x| {
        let code = ((*x - bias) / scale).round_ties_even().clamp(0.0, LEVELS);
        *x = code * f16(scale) + f16(bias);
    });
}

pub fn fp8(x: &mut [f64]) {
    x.iter_mut().for_each(|x| *x = e4m3(*x));
}

/// A block whose scale rounds to 0 becomes zeros.
pub fn nvfp4(x: &mut [f64]) {
    let scale = e4m3(extreme(x).abs() / 6.0);
    x.iter_mut().for_each(|x| *x = e2m1(over(*x, scale)) * scale);
}
