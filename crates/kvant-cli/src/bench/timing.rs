//! Repeats a call for a given time.

use std::time::{Duration, Instant};

use crate::Result;

/// Calls before the measurement, in which threads wake up and scratch memory is allocated.
const WARM_UP: usize = 3;
/// The smallest number of measured calls, regardless of the time.
const FEWEST: usize = 3;
/// The largest number of measured calls; a median needs no more.
const MOST: usize = 100_000;

/// The time of a call, in microseconds.
pub struct Timing {
    pub median_us: f64,
    pub min_us: f64,
}

/// Measures `call`, which gets a running number to select its buffers.
pub fn repeat(budget: Duration, call: impl FnMut(usize) -> Result) -> Result<Timing> {
    repeat_within(budget, (WARM_UP, FEWEST, MOST), call)
}

/// As [`repeat`], with the numbers of calls before the measurement, and in it at least and at most.
pub fn repeat_within(
    budget: Duration,
    (warm_up, fewest, most): (usize, usize, usize),
    mut call: impl FnMut(usize) -> Result,
) -> Result<Timing> {
    for i in 0..warm_up {
        call(i)?;
    }
    let mut times = Times::default();
    while times.count() < fewest || (times.count() < most && times.go_on(budget)) {
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

    /// Whether time is left since the first call.
    pub fn go_on(&self, budget: Duration) -> bool {
        self.count() < MOST && self.first.is_none_or(|first| first.elapsed() < budget)
    }

    /// Of at least one call.
    pub fn timing(&self) -> Timing {
        let mut times = self.times.clone();
        times.sort_by(f64::total_cmp);
        let at = |index: usize| times.get(index).copied().unwrap_or(f64::NAN);
        Timing { median_us: at(times.len() / 2), min_us: at(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_what_a_call_takes() {
        let mut calls = 0;
        let timing = repeat(Duration::from_millis(30), |i| {
            assert_eq!(i, calls);
            calls += 1;
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        })
        .unwrap();
        assert!(timing.min_us >= 2000.0 && timing.median_us >= timing.min_us);
        assert!((FEWEST + WARM_UP..=WARM_UP + 16).contains(&calls), "{calls} calls");
    }

    #[test]
    fn an_error_ends_it() {
        assert!(repeat(Duration::from_secs(3600), |i| if i == 5 { Err("enough".into()) } else { Ok(()) }).is_err());
    }
}
