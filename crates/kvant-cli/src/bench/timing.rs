//! Repeats a call for a given time.

use std::time::{Duration, Instant};

use crate::result::Result;

/// Calls before the measurement, which wake up threads and allocate scratch memory.
const WARM_UP: usize = 3;
/// Minimum measured calls, regardless of the time.
const MIN_CALLS: usize = 3;
/// Maximum measured calls; a median needs no more.
const MAX_CALLS: usize = 100_000;

/// The time of a call, in microseconds.
pub struct Timing {
    pub median_us: f64,
    pub min_us: f64,
}

/// Measures `call`, which gets a running index to select its buffers.
pub fn repeat(budget: Duration, call: impl FnMut(usize) -> Result) -> Result<Timing> {
    repeat_within(budget, (WARM_UP, MIN_CALLS, MAX_CALLS), call)
}

/// Like [`repeat`], with the numbers of calls before the measurement, and minimum and maximum during it.
pub fn repeat_within(
    budget: Duration,
    (warm_up, min, max): (usize, usize, usize),
    mut call: impl FnMut(usize) -> Result,
) -> Result<Timing> {
    for i in 0..warm_up {
        call(i)?;
    }
    let mut times = Times::default();
    while times.count() < min || (times.count() < max && times.go_on(budget)) {
        let index = warm_up + times.count();
        times.add(|| call(index))?;
    }
    Ok(times.timing())
}

/// The time of one call, in microseconds.
pub fn once(call: impl FnOnce() -> Result) -> Result<f64> {
    let mut times = Times::default();
    times.add(call)?;
    Ok(times.timing().min_us)
}

/// The times of calls.
#[derive(Default)]
pub struct Times {
    /// In microseconds.
    times: Vec<f64>,
    first: Option<Instant>,
}

impl Times {
    /// Runs and measures a call.
    pub fn add(&mut self, call: impl FnOnce() -> Result) -> Result {
        let before = Instant::now();
        self.first.get_or_insert(before);
        call()?;
        self.times.push(before.elapsed().as_secs_f64() * 1e6);
        Ok(())
    }

    pub fn count(&self) -> usize {
        self.times.len()
    }

    /// Whether the first call was less than the budget ago.
    pub fn go_on(&self, budget: Duration) -> bool {
        self.count() < MAX_CALLS && self.first.is_none_or(|first| first.elapsed() < budget)
    }

    /// The statistics of at least one call.
    pub fn timing(&self) -> Timing {
        let mut times = self.times.clone();
        times.sort_by(f64::total_cmp);
        let at = |index: usize| times.get(index).copied().unwrap_or(f64::NAN);
        Timing { median_us: at(times.len() / 2), min_us: at(0) }
    }
}

/// The duration of `--seconds`.
pub fn budget(seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("--seconds must be a duration, got {seconds}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_the_time_of_a_call() {
        let mut calls = 0;
        let timing = repeat(Duration::from_millis(30), |i| {
            assert_eq!(i, calls);
            calls += 1;
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        })
        .unwrap();
        assert!(timing.min_us >= 2000.0 && timing.median_us >= timing.min_us);
        assert!((MIN_CALLS + WARM_UP..=WARM_UP + 16).contains(&calls), "{calls} calls");
    }

    #[test]
    fn an_error_ends_it() {
        assert!(repeat(Duration::from_secs(3600), |i| if i == 5 { Err("enough".into()) } else { Ok(()) }).is_err());
    }
}
