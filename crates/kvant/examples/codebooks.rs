//! Generates `src/codec/codebook_table.rs`: the Lloyd–Max quantisers of N(0, 1) with 4, 8, 16, 32, 64 and 256
//! levels.
//!
//! ```text
//! cargo run -p kvant --example codebooks > crates/kvant/src/codec/codebook_table.rs
//! ```
//!
//! A Lloyd–Max quantiser (Max 1960, Lloyd 1982) is the fixed point of two conditions: each threshold is the midpoint
//! of its centroids, and each centroid is the mean of the density over its cell. For a log-concave density, the fixed
//! point is unique. The optimum is symmetric, so the unknowns are the positive centroids c₁ < … < cₙ; threshold 0 is
//! 0. Newton's method finds them: every equation involves a centroid and its two neighbours, so a step is one
//! tridiagonal solve.
//!
//! Precision: with 256 levels, the equations amplify an error in a cell's mean several thousand times. Every integral
//! is therefore computed relative to the cell's own centroid, from gaps between centroids, and never as a difference
//! of two distribution functions.

/// Points and weights of a Gauss–Legendre rule on [-1, 1].
struct Gauss(Vec<(f64, f64)>);

impl Gauss {
    /// The rule with `n` points: the roots of the Legendre polynomial, by Newton's method.
    fn new(n: usize) -> Gauss {
        let rule = (0..n).map(|i| {
            let mut x = (std::f64::consts::PI * (i as f64 + 0.75) / (n as f64 + 0.5)).cos();
            loop {
                let (p, dp) = legendre(n, x);
                let step = p / dp;
                x -= step;
                if step.abs() < 1e-15 {
                    return (x, 2.0 / ((1.0 - x * x) * dp * dp));
                }
            }
        });
        Gauss(rule.collect())
    }

    /// ∫ f over [a, b], in panels narrow enough for the densities here; f gives two integrands at once.
    fn integrate(&self, a: f64, b: f64, f: impl Fn(f64) -> [f64; 2]) -> [f64; 2] {
        let panels = ((b - a) / 0.25).ceil().max(1.0);
        let half = (b - a) / panels / 2.0;
        let mut sum = [0.0; 2];
        for panel in 0..panels as usize {
            let middle = a + half * (2 * panel + 1) as f64;
            for &(x, weight) in &self.0 {
                let [f0, f1] = f(middle + half * x);
                sum[0] += weight * half * f0;
                sum[1] += weight * half * f1;
            }
        }
        sum
    }
}

/// The Legendre polynomial of degree n and its derivative.
fn legendre(n: usize, x: f64) -> (f64, f64) {
    let (mut before, mut p) = (1.0, x);
    for k in 2..=n {
        let k = k as f64;
        (before, p) = (p, ((2.0 * k - 1.0) * x * p - (k - 1.0) * before) / k);
    }
    (p, n as f64 * (x * p - before) / (x * x - 1.0))
}

/// A starting point: centroids at equal steps of the distribution with density φ^⅓ (Bennett 1948), that is N(0, 3).
fn start(n: usize) -> Vec<f64> {
    let step = 1e-4;
    let density = |x: f64| (-x * x / 6.0).exp();
    let total: f64 = (0..100_000).map(|i| density((i as f64 + 0.5) * step)).sum();
    let (mut x, mut sum) = (0.0, 0.0);
    let quantile = |i: usize| {
        while sum < total * (i as f64 + 0.5) / n as f64 {
            sum += density(x + 0.5 * step);
            x += step;
        }
        x
    };
    (0..n).map(quantile).collect()
}

/// The positive half of the Lloyd–Max centroids of N(0, 1) with `2 * n` levels, ascending.
pub fn lloyd_max(n: usize) -> Vec<f64> {
    let gauss = Gauss::new(16);
    let mut c = start(n);
    for _ in 0..100 {
        let (mut below, mut diagonal, mut above, mut residual) =
            (vec![0.0; n], vec![0.0; n], vec![0.0; n], vec![0.0; n]);
        for i in 0..n {
            // The cell reaches from c - left to c + right. Beyond 9 standard deviations from an outermost centroid
            // above 1, the density is below f64's precision.
            let left = if i == 0 { c[0] } else { (c[i] - c[i - 1]) / 2.0 };
            let right = if i == n - 1 { 9.0 } else { (c[i + 1] - c[i]) / 2.0 };
            // φ(c + u) / φ(c)
            let density = |u: f64| (-u * (c[i] + u / 2.0)).exp();
            let [mass, moment] = gauss.integrate(-left, right, |u| [density(u), u * density(u)]);
            let mean = moment / mass;
            residual[i] = -mean;
            // The derivatives: of the mean by either threshold, and of a threshold by its centroids, one half.
            let by_left = if i == 0 { 0.0 } else { 0.5 * density(-left) * (mean + left) / mass };
            let by_right = if i == n - 1 { 0.0 } else { 0.5 * density(right) * (right - mean) / mass };
            below[i] = by_left;
            diagonal[i] = by_left + by_right - 1.0;
            above[i] = by_right;
        }
        let step = solve_tridiagonal(&below, diagonal, &above, residual);
        let mut largest = 0f64;
        for (c, step) in c.iter_mut().zip(&step) {
            *c += step;
            largest = largest.max(step.abs());
        }
        if largest < 1e-15 {
            break;
        }
    }
    c
}

/// Solves a diagonally dominant tridiagonal system by elimination.
fn solve_tridiagonal(below: &[f64], mut diagonal: Vec<f64>, above: &[f64], mut right: Vec<f64>) -> Vec<f64> {
    let n = right.len();
    for i in 1..n {
        let factor = below[i] / diagonal[i - 1];
        diagonal[i] -= factor * above[i - 1];
        right[i] -= factor * right[i - 1];
    }
    for i in (0..n).rev() {
        let next = if i + 1 < n { above[i] * right[i + 1] } else { 0.0 };
        right[i] = (right[i] - next) / diagonal[i];
    }
    right
}

#[allow(dead_code, reason = "the test that includes this file needs the numbers only")]
fn main() {
    println!("// Generated by `cargo run -p kvant --example codebooks`. Do not edit.\n");
    for bits in [2, 3, 4, 5, 6, 8] {
        let half = lloyd_max(1 << (bits - 1));
        println!("/// The positive centroids of the Lloyd–Max quantiser of N(0, 1) with {} levels.", 2 * half.len());
        println!("#[rustfmt::skip]");
        println!("pub(super) const HALF_{bits}: [f64; {}] = [", half.len());
        for line in half.chunks(6) {
            let numbers: Vec<String> = line.iter().map(|c| format!("{c:.14},")).collect();
            println!("    {}", numbers.join(" "));
        }
        println!("];{}", if bits == 8 { "" } else { "\n" });
    }
}
