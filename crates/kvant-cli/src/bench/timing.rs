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
pub fn repeat(budget: Duration, mut call: impl FnMut(usize) -> Result) -> Result<Timing> {
    for i in 0..WARM_UP {
        call(i)?;
    }
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < FEWEST || (times.len() < MOST && start.elapsed() < budget) {
        let before = Instant::now();
        call(WARM_UP + times.len())?;
        times.push(before.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(Timing { median_us: times[times.len() / 2], min_us: times[0] })
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
