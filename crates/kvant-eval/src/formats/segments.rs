//! Formats that store segments: the vectors of a head at 128 positions, `[128, dim]`.

use super::{floats::f16, rotation};

/// Positions of a segment.
pub const SEGMENT: usize = 128;
/// Numbers in KIVI that share a scale and a zero point.
const GROUP: usize = 32;
/// Passes in which KVarN balances rows and columns.
const PASSES: usize = 16;

/// KIVI: groups of one coordinate at 32 positions for keys, of 32 coordinates of a vector for values. Each group is
/// stored as integers between its minimum and maximum.
pub fn kivi(segment: &mut [f64], dim: usize, bits: u32, is_keys: bool) {
    let mut group = [0.0; GROUP];
    for first in 0..segment.len() / GROUP {
        // The index of the first number of a group, and the stride between its numbers.
        let (start, step) = if is_keys { (first / dim * GROUP * dim + first % dim, dim) } else { (first * GROUP, 1) };
        group.iter_mut().enumerate().for_each(|(i, x)| *x = segment[start + i * step]);
        let (min, scale) = range(&group, bits, 1e-8);
        for (i, &x) in group.iter().enumerate() {
            segment[start + i * step] = code(x, min, scale, bits) * f16(scale) + f16(min);
        }
    }
}

/// KVarN: rotated vectors whose rows and columns are divided by factors that equalise their deviations. Each row is
/// stored as integers between its minimum and maximum. Rows are coordinates for keys, positions for values.
pub fn kvarn(segment: &mut [f64], dim: usize, bits: u32, is_keys: bool) {
    rotation::rotate(segment, dim, dim);
    let mut matrix = Segment::new(segment, dim);
    if is_keys {
        matrix = matrix.transposed();
    }
    let (of_rows, of_columns) = matrix.balance();
    for (row, of_row) in of_rows.iter().enumerate() {
        let numbers: Vec<f64> = matrix.row(row).iter().zip(&of_columns).map(|(x, c)| x / c / of_row).collect();
        let (min, scale) = range(&numbers, bits, 1e-10);
        let (stored_scale, stored_min) = (f16(of_row * scale), f16(of_row * min));
        for ((to, x), of_column) in matrix.row_mut(row).iter_mut().zip(numbers).zip(&of_columns) {
            *to = (code(x, min, scale, bits) * stored_scale + stored_min) * f16(*of_column);
        }
    }
    if is_keys {
        matrix = matrix.transposed();
    }
    segment.copy_from_slice(&matrix.numbers);
    rotation::rotate(segment, dim, dim);
}

/// The minimum, and the step of the integers between minimum and maximum.
fn range(numbers: &[f64], bits: u32, min_scale: f64) -> (f64, f64) {
    let bounds = numbers.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), &x| (a.min(x), b.max(x)));
    (bounds.0, ((bounds.1 - bounds.0) / levels(bits)).max(min_scale))
}

fn code(x: f64, min: f64, scale: f64, bits: u32) -> f64 {
    ((x - min) / scale).round_ties_even().clamp(0.0, levels(bits))
}

fn levels(bits: u32) -> f64 {
    f64::from((1u32 << bits) - 1)
}

struct Segment {
    numbers: Vec<f64>,
    columns: usize,
}

impl Segment {
    fn new(numbers: &[f64], columns: usize) -> Segment {
        Segment { numbers: numbers.to_vec(), columns }
    }

    fn rows(&self) -> usize {
        self.numbers.len() / self.columns
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.numbers[row * self.columns..][..self.columns]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f64] {
        &mut self.numbers[row * self.columns..][..self.columns]
    }

    fn transposed(&self) -> Segment {
        let (rows, columns) = (self.rows(), self.columns);
        let numbers = (0..rows * columns).map(|i| self.numbers[i % rows * columns + i / rows]).collect();
        Segment { numbers, columns: rows }
    }

    /// Divides the numbers by the factors of their row and column.
    fn scaled(&self, of_rows: &[f64], of_columns: &[f64]) -> Segment {
        let at = |i: usize| self.numbers[i] / of_columns[i % self.columns] / of_rows[i / self.columns];
        Segment { numbers: (0..self.numbers.len()).map(at).collect(), columns: self.columns }
    }

    /// The standard deviation of each row.
    fn deviations(&self) -> Vec<f64> {
        let deviation = |row: &[f64]| {
            let mean = row.iter().sum::<f64>() / row.len() as f64;
            (row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (row.len() - 1).max(1) as f64).sqrt()
        };
        (0..self.rows()).map(|row| deviation(self.row(row))).collect()
    }

    /// The factors of rows and columns from the pass with the smallest imbalance.
    fn balance(&self) -> (Vec<f64>, Vec<f64>) {
        let mut logs = [vec![0.0; self.rows()], vec![0.0; self.columns]];
        let factors = |logs: &[f64]| logs.iter().map(|log| log.exp()).collect::<Vec<f64>>();
        let mut best = (factors(&logs[0]), factors(&logs[1]));
        let mut min = self.imbalance();
        for _ in 0..PASSES {
            for side in [1, 0] {
                let now = self.scaled(&factors(&logs[0]), &factors(&logs[1]));
                let deviations = if side == 0 { now.deviations() } else { now.transposed().deviations() };
                for (log, deviation) in logs[side].iter_mut().zip(deviations) {
                    *log = (*log + deviation.clamp(1e-3, 1e3).ln()).clamp(-0.3, 10.0);
                }
            }
            let (of_rows, of_columns) = (factors(&logs[0]), factors(&logs[1]));
            let imbalance = self.scaled(&of_rows, &of_columns).imbalance();
            if imbalance <= min {
                (min, best) = (imbalance, (of_rows, of_columns));
            }
        }
        best
    }

    /// The ratio of the maximum to the minimum deviation, summed over rows and columns.
    fn imbalance(&self) -> f64 {
        let ratio = |deviations: Vec<f64>| {
            let greatest = deviations.iter().copied().fold(0.0, f64::max);
            greatest / deviations.iter().copied().fold(f64::INFINITY, f64::min).max(1e-8)
        };
        ratio(self.deviations()) + ratio(self.transposed().deviations())
    }
}
