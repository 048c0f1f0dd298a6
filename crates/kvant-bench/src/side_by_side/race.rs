//! Contenders take turns, so that other load on the machine affects all of them.

use std::time::{Duration, Instant};

use kvant_bench::Result;

/// One of several contenders that do the same work.
pub struct Contender<'a> {
    /// What its line is called.
    pub name: String,
    /// Bytes that one piece of work must read at the least; 0 where that says nothing.
    pub bytes: usize,
    /// Does some pieces of work, and says how many.
    work: Box<dyn FnMut() -> Result<usize> + 'a>,
}

impl<'a> Contender<'a> {
    /// `work` does some pieces of work (one call, or a graph of several) and returns how many.
    pub fn new(name: impl Into<String>, bytes: usize, work: impl FnMut() -> Result<usize> + 'a) -> Contender<'a> {
        Contender { name: name.into(), bytes, work: Box::new(work) }
    }

    /// One piece of work a call.
    pub fn each(name: impl Into<String>, bytes: usize, mut work: impl FnMut() -> Result + 'a) -> Contender<'a> {
        Contender::new(name, bytes, move || work().map(|()| 1))
    }
}

/// How long a race takes.
#[derive(Clone, Copy)]
pub struct Rounds {
    /// How often each takes its turn; the median counts.
    pub count: usize,
    /// The least that a turn lasts.
    pub turn: Duration,
}

/// Before a turn. Threads of the contender before may spin for some milliseconds after their work.
const PAUSE: Duration = Duration::from_millis(12);

/// The median of each contender's turns, in microseconds a piece of work.
pub fn race(contenders: &mut [Contender], rounds: Rounds) -> Result<Vec<f64>> {
    let mut times = vec![Vec::new(); contenders.len()];
    for _ in 0..rounds.count {
        for (contender, times) in contenders.iter_mut().zip(&mut times) {
            std::thread::sleep(PAUSE);
            (contender.work)()?; // wakes threads, makes scratch memory
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
