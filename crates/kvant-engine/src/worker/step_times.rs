//! Measured times by size: of passes by rows, or of proposals by depth.

/// Share by which a known time follows a new measurement.
const RATE: f64 = 0.03;
/// Share by which all times follow a new measurement: lengths of texts and clocks of processors change all of them.
const LEVEL_RATE: f64 = 0.1;
/// Measurements after which a time is known.
const KNOWN: u32 = 8;
/// Maximum logarithm of a measurement over its estimate: outliers count little.
const MAX_EXCESS: f64 = 0.2;
/// Share by which a known time follows a much shorter measurement. Interruptions make steps longer, never shorter, so
/// the estimate was wrong.
const FALL_RATE: f64 = 0.3;
/// Without a second size, the share of a time that is proportional to the size.
const PROPORTIONAL: f64 = 0.25;

/// A table of times: a level, which every measurement changes, and the ratio of each size to it.
#[derive(Debug)]
pub(super) struct StepTimes {
    level: f64,
    /// In increasing order of size.
    points: Vec<Point>,
}

#[derive(Debug)]
struct Point {
    size: usize,
    /// The time over the level.
    ratio: f64,
    /// Number of measurements, up to [`KNOWN`].
    count: u32,
}

impl StepTimes {
    pub fn new() -> StepTimes {
        StepTimes { level: 1.0, points: Vec::new() }
    }

    /// Sets the time of a size from a measurement without disturbance.
    pub fn set(&mut self, size: usize, seconds: f64) {
        if seconds > 0.0 && seconds.is_finite() {
            let (ratio, count) = (seconds / self.level, KNOWN);
            match self.index(size) {
                Ok(index) => self.points[index] = Point { size, ratio, count },
                Err(index) => self.points.insert(index, Point { size, ratio, count }),
            }
        }
    }

    /// Refines the table by the time of a step. The first step of an unknown size is ignored: it may have compiled
    /// kernels.
    pub fn record(&mut self, size: usize, seconds: f64) {
        if seconds <= 0.0 || !seconds.is_finite() {
            return;
        }
        let index = match self.index(size) {
            Ok(index) => index,
            Err(index) => {
                let ratio = self.estimate(size).unwrap_or(0.0) / self.level;
                return self.points.insert(index, Point { size, ratio, count: 0 });
            }
        };
        let Point { ratio, count, .. } = &mut self.points[index];
        if *ratio == 0.0 {
            *ratio = seconds / self.level;
        }
        let excess = (seconds / (self.level * *ratio)).ln();
        if *count < KNOWN {
            // The first measurements correct a guess.
            *ratio *= (excess.min(if *count == 0 { f64::MAX } else { MAX_EXCESS }) / f64::from(*count + 1)).exp();
            *count += 1;
        } else if excess < -MAX_EXCESS {
            *ratio *= (FALL_RATE * excess).exp();
        } else {
            let excess = excess.min(MAX_EXCESS);
            *ratio *= (RATE * excess).exp();
            self.level *= (LEVEL_RATE * excess).exp();
        }
    }

    /// Whether the time of a size has been measured.
    pub fn is_known(&self, size: usize) -> bool {
        self.index(size).is_ok_and(|index| self.points[index].count > 0)
    }

    /// The time of a size in seconds, interpolated between measured sizes. `None` before the first measurement.
    pub fn estimate(&self, size: usize) -> Option<f64> {
        let ratio = match self.index(size) {
            Ok(index) => self.points[index].ratio,
            Err(index) => self.ratio_between(size, index),
        };
        (ratio > 0.0).then_some(self.level * ratio)
    }

    /// The ratio of a size without measurements. `index`: the first larger size.
    fn ratio_between(&self, size: usize, index: usize) -> f64 {
        let known = |index: usize| self.points.get(index).filter(|point| point.ratio > 0.0);
        let (below, above) = (index.checked_sub(1).and_then(known), known(index));
        match (below, above) {
            (Some(a), Some(b)) => {
                let share = (size - a.size) as f64 / (b.size - a.size) as f64;
                a.ratio + share * (b.ratio - a.ratio)
            }
            (Some(last), None) => {
                let proportional = last.ratio / last.size.max(1) as f64;
                // Over the last doubling of the size: neighbours differ by noise.
                let earlier = self.points[..index].iter().rev().find(|point| 2 * point.size <= last.size + 1);
                let slope = earlier.filter(|point| point.size < last.size && point.ratio > 0.0).map(|point| {
                    ((last.ratio - point.ratio) / (last.size - point.size) as f64).clamp(0.0, proportional)
                });
                last.ratio + slope.unwrap_or(PROPORTIONAL * proportional) * (size - last.size) as f64
            }
            (None, Some(first)) => {
                let share = size as f64 / first.size as f64;
                first.ratio * (1.0 - PROPORTIONAL + PROPORTIONAL * share)
            }
            (None, None) => 0.0,
        }
    }

    fn index(&self, size: usize) -> Result<usize, usize> {
        self.points.binary_search_by_key(&size, |point| point.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(times: &StepTimes, size: usize, seconds: f64, tolerance: f64) {
        let got = times.estimate(size).unwrap();
        assert!((got / seconds - 1.0).abs() < tolerance, "{size}: {got}, not {seconds}");
    }

    #[test]
    fn sizes_between_measured_ones() {
        let mut times = StepTimes::new();
        assert_eq!(times.estimate(3), None);
        times.set(4, 8.0);
        near(&times, 4, 8.0, 1e-9);
        // A quarter is proportional.
        near(&times, 8, 10.0, 1e-9);
        near(&times, 2, 7.0, 1e-9);
        times.set(1, 2.0);
        near(&times, 3, 6.0, 1e-9);
        near(&times, 6, 12.0, 1e-9);
        // Larger steps do not become faster.
        times.set(8, 7.0);
        near(&times, 10, 7.0, 1e-9);
        times.set(8, f64::NAN);
        near(&times, 8, 7.0, 1e-9);
    }

    #[test]
    fn outliers_and_compilation_change_little() {
        let mut times = StepTimes::new();
        times.set(1, 0.01);
        times.record(2, 5.0);
        assert!(times.estimate(2).unwrap() < 0.02);
        for step in 0..100 {
            times.record(1, if step % 20 == 7 { 0.2 } else { 0.01 });
            times.record(2, if step % 25 == 3 { 0.3 } else { 0.012 });
        }
        near(&times, 1, 0.01, 0.06);
        near(&times, 2, 0.012, 0.06);
    }

    /// Longer texts slow all steps down: sizes that do not run become slower, too.
    #[test]
    fn all_sizes_follow_the_level() {
        let mut times = StepTimes::new();
        [1, 2, 4, 8].into_iter().for_each(|size| times.set(size, 0.01 + 0.001 * size as f64));
        (0..200).for_each(|_| times.record(1, 2.0 * 0.011));
        near(&times, 1, 0.022, 0.01);
        assert!(times.estimate(8).unwrap() > 0.018 * 1.35, "{times:?}");
        // Sizes that run again become exact.
        (0..200).for_each(|_| times.record(8, 2.0 * 0.018));
        near(&times, 8, 0.036, 0.01);
    }
}
