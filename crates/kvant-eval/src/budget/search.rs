//! Chooses a codec for the keys and the values of each layer.
//!
//! 1. Each side of each layer is measured alone in every codec, with all others exact. Divergences are roughly
//!    additive, so this table predicts the divergence of any choice.
//! 2. Starting from the widest codecs, the side whose narrowing costs the smallest divergence per bit is narrowed until
//!    the budget is met.
//! 3. This choice and all uniform ones within the budget are measured. The best one is refined: the exchanges with the
//!    largest predicted gain are measured and the best is kept, as long as it lowers the divergence.

use crate::Result;

/// The codec of each side, in the order keys and values of the first layer, of the second, …. `None` is an exact cache.
pub type Assignment = Vec<Option<usize>>;

/// Exchanges that are measured together.
const TOGETHER: usize = 8;
/// Consecutive measurements of [`TOGETHER`] exchanges without improvement that end the search.
const PATIENCE: usize = 2;
/// Maximum exchanges that are kept.
const MAX_ROUNDS: usize = 16;

/// The subject of a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Phase {
    /// One side at a time.
    Sides,
    /// Choices within the budget.
    Choices,
    /// Exchanges of the best choice so far.
    Exchanges,
}

/// The divergences of some assignments.
pub type Measure<'a> = dyn FnMut(Phase, &[Assignment]) -> Result<Vec<f64>> + 'a;

/// The input of the search.
pub struct Search {
    /// Bits of each codec, rising.
    pub bits: Vec<f64>,
    /// Coordinates per token of each side, as in [`Assignment`].
    pub coordinates: Vec<usize>,
    /// Maximum mean bits per coordinate.
    pub budget: f64,
}

/// A measured choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The codec of each side.
    pub widths: Vec<usize>,
    /// Its measured divergence.
    pub divergence: f64,
}

/// The best choice, and the best uniform one.
pub struct Found {
    pub best: Choice,
    pub uniform: Choice,
}

impl Search {
    /// Finds the best choice.
    ///
    /// # Errors
    /// As `measure` and [`Search::check`].
    pub fn run(&self, measure: &mut Measure) -> Result<Found> {
        self.check()?;
        let table = self.table(measure)?;
        let uniform = self.uniform();
        let predicted = self.narrow(&table);
        let choices: Vec<Vec<usize>> = uniform.iter().cloned().chain([predicted]).collect();
        let mut measured = self.measure(Phase::Choices, &choices, measure)?;
        let best = min_divergence(&measured);
        measured.pop();
        let uniform = min_divergence(&measured);
        Ok(Found { best: self.refine(best, &table, measure)?, uniform })
    }

    /// Rejects a budget that no choice meets.
    pub fn check(&self) -> Result {
        let narrowest = self.bits.first().copied().unwrap_or(f64::NAN);
        // This comparison also rejects NaN.
        if self.budget.partial_cmp(&narrowest).is_none_or(|order| order.is_lt()) {
            return Err(format!(
                "--budget must be at least the narrowest type's {narrowest} bits, got {}",
                self.budget
            )
            .into());
        }
        Ok(())
    }

    /// Bits per coordinate.
    pub fn mean_bits(&self, widths: &[usize]) -> f64 {
        let bits: f64 = widths.iter().zip(&self.coordinates).map(|(&w, &n)| self.bits[w] * n as f64).sum();
        bits / self.coordinates.iter().sum::<usize>() as f64
    }

    fn fits(&self, widths: &[usize]) -> bool {
        self.mean_bits(widths) <= self.budget + 1e-9
    }

    fn sides(&self) -> usize {
        self.coordinates.len()
    }

    /// Measures the divergence of each side alone in each codec. Made monotonic: a narrower codec never has a smaller
    /// divergence.
    fn table(&self, measure: &mut Measure) -> Result<Vec<Vec<f64>>> {
        let alone = |side: usize, codec: usize| {
            let mut assignment = vec![None; self.sides()];
            assignment[side] = Some(codec);
            assignment
        };
        let codecs = self.bits.len();
        let all: Vec<Assignment> = (0..self.sides() * codecs).map(|i| alone(i / codecs, i % codecs)).collect();
        let mut table: Vec<Vec<f64>> = measure(Phase::Sides, &all)?.chunks(codecs).map(<[f64]>::to_vec).collect();
        for row in &mut table {
            for codec in (1..codecs).rev() {
                row[codec - 1] = row[codec - 1].max(row[codec]);
            }
        }
        Ok(table)
    }

    /// The maximal uniform pairs of codecs: widening either side would exceed the budget.
    fn uniform(&self) -> Vec<Vec<usize>> {
        let pair = |k, v| (0..self.sides()).map(|side| if side % 2 == 0 { k } else { v }).collect::<Vec<usize>>();
        let fits = |k: usize, v: usize| k < self.bits.len() && v < self.bits.len() && self.fits(&pair(k, v));
        let pairs = (0..self.bits.len()).flat_map(|k| (0..self.bits.len()).map(move |v| (k, v)));
        pairs.filter(|&(k, v)| fits(k, v) && !fits(k + 1, v) && !fits(k, v + 1)).map(|(k, v)| pair(k, v)).collect()
    }

    /// Narrows sides from the widest codecs until the budget is met, then widens sides if the budget allows.
    fn narrow(&self, table: &[Vec<f64>]) -> Vec<usize> {
        let mut widths = vec![self.bits.len() - 1; self.sides()];
        while !self.fits(&widths) {
            let narrower = (0..self.sides()).flat_map(|side| (0..widths[side]).map(move |codec| (side, codec)));
            let rate = |&(side, codec): &(usize, usize)| {
                let bits = (self.bits[widths[side]] - self.bits[codec]) * self.coordinates[side] as f64;
                (table[side][codec] - table[side][widths[side]]) / bits
            };
            let Some((side, codec)) = narrower.min_by(|a, b| rate(a).total_cmp(&rate(b))) else { break };
            widths[side] = codec;
        }
        while let Some(wider) = self.exchanges(&widths, table).into_iter().find(|(change, _)| *change < 0.0) {
            widths = wider.1;
        }
        widths
    }

    /// Choices with one wider side and, if the budget requires it, one narrower side, with the predicted change of the
    /// divergence; best first.
    fn exchanges(&self, widths: &[usize], table: &[Vec<f64>]) -> Vec<(f64, Vec<usize>)> {
        let change = |to: &[usize]| -> f64 {
            (0..self.sides()).map(|side| table[side][to[side]] - table[side][widths[side]]).sum()
        };
        let mut found = Vec::new();
        for wider in (0..self.sides()).filter(|&side| widths[side] + 1 < self.bits.len()) {
            let mut to = widths.to_vec();
            to[wider] += 1;
            if self.fits(&to) {
                found.push((change(&to), to));
                continue;
            }
            for narrower in (0..self.sides()).filter(|&side| side != wider) {
                let mut to = to.clone();
                while to[narrower] > 0 && !self.fits(&to) {
                    to[narrower] -= 1;
                }
                if self.fits(&to) {
                    found.push((change(&to), to));
                }
            }
        }
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        found
    }

    fn refine(&self, mut best: Choice, table: &[Vec<f64>], measure: &mut Measure) -> Result<Choice> {
        let mut seen = vec![best.widths.clone()];
        for _ in 0..MAX_ROUNDS {
            let exchanges = self.exchanges(&best.widths, table).into_iter().map(|(_, widths)| widths);
            let new: Vec<Vec<usize>> = exchanges.filter(|widths| !seen.contains(widths)).collect();
            let mut better = None;
            for some in new.chunks(TOGETHER).take(PATIENCE) {
                seen.extend(some.iter().cloned());
                let candidate = min_divergence(&self.measure(Phase::Exchanges, some, measure)?);
                if candidate.divergence < best.divergence {
                    better = Some(candidate);
                    break;
                }
            }
            let Some(better) = better else { break };
            best = better;
        }
        Ok(best)
    }

    fn measure(&self, phase: Phase, choices: &[Vec<usize>], measure: &mut Measure) -> Result<Vec<Choice>> {
        let all: Vec<Assignment> = choices.iter().map(|widths| widths.iter().copied().map(Some).collect()).collect();
        let divergences = measure(phase, &all)?;
        let choices = choices.iter().cloned().zip(divergences);
        Ok(choices.map(|(widths, divergence)| Choice { widths, divergence }).collect())
    }
}

/// The choice with the smallest divergence; the first among equal ones. `choices` is not empty.
fn min_divergence(choices: &[Choice]) -> Choice {
    let min = choices.iter().min_by(|a, b| a.divergence.total_cmp(&b.divergence));
    min.expect("the narrowest codecs fit").clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BITS: [f64; 6] = [2.0, 3.0, 4.0, 5.0, 6.0, 8.0];

    /// Each bit divides the divergence of a side by four; sides interact weakly.
    fn divergence(sensitivity: &[f64], assignment: &Assignment) -> f64 {
        let of_side =
            |(codec, scale): (&Option<usize>, &f64)| codec.map_or(0.0, |codec| scale * 0.25f64.powf(BITS[codec]));
        let sum: f64 = assignment.iter().zip(sensitivity).map(of_side).sum();
        sum * (1.0 + sum)
    }

    fn run(search: &Search, sensitivity: &[f64]) -> Found {
        search.run(&mut |_, all| Ok(all.iter().map(|one| divergence(sensitivity, one)).collect())).unwrap()
    }

    /// The minimum divergence over all choices within the budget.
    fn exhaustive(search: &Search, sensitivity: &[f64]) -> f64 {
        let sides = search.sides() as u32;
        let choice = |number: usize| (0..sides).map(|i| number / 6usize.pow(i) % 6).collect::<Vec<_>>();
        let fitting = (0..6usize.pow(sides)).map(choice).filter(|widths| search.fits(widths));
        let divergences = fitting.map(|widths| divergence(sensitivity, &widths.into_iter().map(Some).collect()));
        divergences.min_by(f64::total_cmp).unwrap()
    }

    #[test]
    fn finds_the_best_choice_of_small_models() {
        for (seed, budget) in (0..40).zip([2.0, 2.5, 3.5, 3.7, 4.0, 5.3, 7.9, 8.0].into_iter().cycle()) {
            // Sensitivities over four orders of magnitude, and layers of different sizes.
            let sensitivity: Vec<f64> =
                (0..6).map(|i| 10f64.powf(f64::from((seed * 7 + i * i * 5) % 13) / 3.0 - 3.0)).collect();
            let coordinates = vec![512, 512, 512, 512, 256 << (seed % 3), 256 << (seed % 3)];
            let search = Search { bits: BITS.to_vec(), coordinates, budget };
            let found = run(&search, &sensitivity);
            assert!(search.fits(&found.best.widths), "{budget}: {found:?}", found = found.best);
            let (best, min) = (found.best.divergence, exhaustive(&search, &sensitivity));
            assert!(best <= 1.1 * min, "{seed}, {budget}: {best:e} instead of {min:e}");
            assert!(best <= found.uniform.divergence);
        }
    }

    #[test]
    fn equal_sides_get_equal_widths() {
        let search = Search { bits: BITS.to_vec(), coordinates: vec![64; 4], budget: 4.0 };
        assert_eq!(run(&search, &[1.0; 4]).best.widths, [2; 4]);
    }

    #[test]
    fn a_budget_below_every_codec_is_refused() {
        for budget in [1.9, -1.0, f64::NAN] {
            let search = Search { bits: BITS.to_vec(), coordinates: vec![64; 4], budget };
            let error = search.run(&mut |_, _| unreachable!("nothing to measure")).err().unwrap();
            assert!(error.to_string().contains("at least the narrowest type's 2 bits"), "{error}");
        }
    }
}
