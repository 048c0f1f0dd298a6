//! Exponentials and sums in f32, as loops that compilers vectorise: no branches or calls, independent lanes.

/// Independent sums of a block.
const LANES: usize = 16;
/// Numbers that are summed in f32. Block sums are added in f64.
pub const BLOCK: usize = 1024;

/// A power of e: eˣ = scale · (1 + r + rest), as in Cephes' `expf`. `scale` is a power of two, |r| ≤ ln 2 / 2, and
/// `rest` is r² times a polynomial.
struct Power {
    scale: f32,
    r: f32,
    rest: f32,
}

impl Power {
    /// x is clamped to at least −87. Above 88, the result may be infinite. NaN stays NaN.
    #[inline(always)]
    fn of(x: f32) -> Power {
        // Adding this number rounds to an integer in the low bits of the sum.
        const ROUND: f32 = 12_582_912.0;
        // ln 2 in two parts. Products of the first part with small integers are exact.
        const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
        const TAYLOR: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
        let x = x.clamp(-87.0, 89.0);
        let shifted = x * std::f32::consts::LOG2_E + ROUND;
        let n = shifted - ROUND;
        let r = x - n * LN_2[0] - n * LN_2[1];
        let series = TAYLOR.into_iter().fold(0.0, |sum, factor| sum * r + factor);
        let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1f32.to_bits()));
        Power { scale, r, rest: series * r * r }
    }
}

/// eˣ, with x clamped to at least −87. Above 88, the result may be infinite.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let Power { scale, r, rest } = Power::of(x);
    scale * (1.0 + (r + rest))
}

/// e⁻ˣ − 1 + x without cancellation. Below x = −60 the result is infinite, so that its product with the minimum of
/// [`exp`] is not mistaken for a small number.
#[inline(always)]
pub fn excess(x: f32) -> f32 {
    let Power { scale, r, rest } = Power::of(-x);
    // Near 0, scale is 1 and r is −x: only `rest` does not cancel.
    let others = if scale == 1.0 { 0.0 } else { scale * (1.0 + r) - 1.0 + x };
    if x < -60.0 { f32::INFINITY } else { scale * rest + others }
}

/// Σ term(aᵢ, bᵢ, cᵢ) over slices of equal length.
#[inline(always)]
pub fn sum([a, b, c]: [&[f32]; 3], term: impl Fn(f32, f32, f32) -> f32) -> f64 {
    let blocks = a.chunks(BLOCK).zip(b.chunks(BLOCK)).zip(c.chunks(BLOCK));
    blocks.map(|((a, b), c)| f64::from(block_sum([a, b, c], &term))).sum()
}

#[inline(always)]
fn block_sum([a, b, c]: [&[f32]; 3], term: &impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((a, a_end), (b, b_end), (c, c_end)) = (a.as_chunks(), b.as_chunks(), c.as_chunks());
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        let (a, b, c): (&[f32; LANES], &[f32; LANES], &[f32; LANES]) = (a, b, c);
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane += term(a[i], b[i], c[i]);
        }
    }
    let end = a_end.iter().zip(b_end).zip(c_end).map(|((&a, &b), &c)| term(a, b, c));
    lanes.into_iter().chain(end).sum()
}

/// The index of the first maximum. NaN counts as larger than all numbers, so that it is visible.
pub fn argmax(values: &[f32]) -> usize {
    let beats = |a: f32, b: f32| a > b || (a.is_nan() && !b.is_nan());
    let first =
        |values: &[f32]| (0..values.len()).fold(0, |best, i| if beats(values[i], values[best]) { i } else { best });
    let largest: Vec<f32> = values.chunks(BLOCK).map(largest).collect();
    let block = first(&largest) * BLOCK;
    block + first(&values[block..values.len().min(block + BLOCK)])
}

/// The maximum, or NaN if any value is NaN.
fn largest(values: &[f32]) -> f32 {
    // `f32::max` would ignore NaN.
    let larger = |a: f32, b: f32| if (b > a) | b.is_nan() { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, end) = values.as_chunks::<LANES>();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane = larger(*lane, x));
    }
    lanes.iter().chain(end).fold(f32::NEG_INFINITY, |max, &x| larger(max, x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_equal_f64_powers() {
        for i in -8600..8800 {
            let x = i as f32 / 100.0;
            let error = f64::from(exp(x)) / f64::from(x).exp() - 1.0;
            assert!(error.abs() < 3e-7, "{x}: {error:e}");
        }
        assert_eq!((exp(0.0), exp(90.0)), (1.0, f32::INFINITY));
        assert!(exp(f32::NEG_INFINITY) < 2e-38 && exp(f32::NAN).is_nan());
    }

    #[test]
    fn an_excess_does_not_cancel() {
        for i in 0..4000 {
            // Magnitudes from 1e-9 to 60, of both signs.
            let x = (1e-9 * 1.0065f64.powi(i)).min(60.0) as f32;
            for x in [x, -x] {
                let wide = f64::from(x);
                // exp(−x) − 1 + x = (exp(−x) − 1) + x; exp_m1 is exact to 1e-16.
                let want = if wide.abs() < 1e-4 {
                    wide * wide * (0.5 - wide / 6.0 + wide * wide / 24.0)
                } else {
                    (-wide).exp_m1() + wide
                };
                let error = f64::from(excess(x)) / want - 1.0;
                assert!(error.abs() < 3e-6, "{x}: {error:e}");
            }
        }
        assert_eq!((excess(0.0), excess(200.0)), (0.0, 199.0));
        assert_eq!((excess(-60.1), excess(-200.0)), (f32::INFINITY, f32::INFINITY));
        assert!(excess(f32::NAN).is_nan());
    }

    #[test]
    fn sums_have_every_term_once() {
        for len in [0, 1, 15, 16, 17, 1023, 1024, 1025, 5000] {
            let numbers: Vec<f32> = (0..len).map(|i| (i % 7) as f32).collect();
            let want: f64 = numbers.iter().map(|&x| f64::from(x * x + 1.0)).sum();
            assert_eq!(sum([&numbers, &numbers, &vec![1.0; len]], |a, b, c| a * b + c), want);
        }
    }

    #[test]
    fn the_first_largest_is_found_everywhere() {
        let mut values = vec![-1.0; 2500];
        assert_eq!(argmax(&values), 0);
        for at in [0, 1, 15, 1023, 1024, 2047, 2048, 2499] {
            values.fill(-1.0);
            (values[at], values[2499]) = (2.0, 2.0);
            assert_eq!(argmax(&values), at);
            values[at] = f32::NAN;
            assert_eq!(argmax(&values), at);
        }
        assert_eq!(argmax(&[f32::NEG_INFINITY; 3]), 0);
    }
}
