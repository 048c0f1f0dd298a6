//! Runs contenders in turns, so that other load on the machine affects all of them.

use std::time::{Duration, Instant};

use kvant_bench::Result;

/// One of several contenders that do the same work.
pub struct Contender<'a> {
    /// The name of its line.
    pub name: String,
    /// Minimum bytes that one unit of work must read; 0 if this is not meaningful.
    pub bytes: usize,
    /// Does some units of work, and returns their number.
    work: Box<dyn FnMut() -> Result<usize> + 'a>,
}

impl<'a> Contender<'a> {
    /// `work` does some units of work (one call, or a graph of several) and returns their number.
    pub fn new(name: impl Into<String>, bytes: usize, work: impl FnMut() -> Result<usize> + 'a) -> Contender<'a> {
        Contender { name: name.into(), bytes, work: Box::new(work) }
    }

    /// A contender with one unit of work per call.
    pub fn each(name: impl Into<String>, bytes: usize, mut work: impl FnMut() -> Result + 'a) -> Contender<'a> {
        Contender::new(name, bytes, move || work().map(|()| 1))
    }
}

/// The duration of a race.
#[derive(Clone, Copy)]
pub struct Rounds {
    /// Turns of each contender; the median counts.
    pub count: usize,
    /// Minimum duration of a turn.
    pub turn: Duration,
}

/// The pause before a turn. Threads of the previous contender may spin for some milliseconds after their work.
const PAUSE: Duration = Duration::from_millis(12);

/// The median of each contender's turns, in microseconds per unit of work.
pub fn race(contenders: &mut [Contender], rounds: Rounds) -> Result<Vec<f64>> {
    let mut times = vec![Vec::new(); contenders.len()];
    for _ in 0..rounds.count {
        for (contender, times) in contenders.iter_mut().zip(&mut times) {
            std::thread::sleep(PAUSE);
            (contender.work)()?; // wakes threads, allocates scratch memory
            let (start, mut pieces) = (Instant::now(), 0);
            while pieces == 0 || start.elapsed() < rounds.turn {
                pieces += (contender.work)()?;
            }
            times.push(start.elapsed().as_secs_f64() * 1e6 / pieces as f64);
        }
    }
    Ok(times.into_iter().map(median).collect())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
