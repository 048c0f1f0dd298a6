//! Messages on standard error, and the progress of an evaluation: on terminals, one line that is overwritten.

use std::{
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

use kvant_models::untrusted;

use crate::Result;

/// The time between two updates.
const INTERVAL: Duration = Duration::from_millis(200);

pub struct Progress {
    label: &'static str,
    total: usize,
    done: usize,
    started: Instant,
    /// `None` if standard error is not a terminal.
    last_shown: Option<Instant>,
}

impl Progress {
    /// Creates the progress of `total` tokens. The line starts with `label`.
    pub fn new(label: &'static str, total: usize) -> Progress {
        let now = Instant::now();
        Progress { label, total, done: 0, started: now, last_shown: std::io::stderr().is_terminal().then_some(now) }
    }

    /// Counts tokens.
    pub fn add(&mut self, tokens: usize) {
        self.done += tokens;
        if self.last_shown.is_some_and(|last| last.elapsed() >= INTERVAL) {
            self.last_shown = Some(Instant::now());
            // Progress is optional: a closed standard error is ignored.
            let line = line(self.done, self.total, self.started.elapsed());
            let _ = show(&format!("{}{line}", self.label));
        }
    }

    /// Removes the line.
    pub fn finish(self) {
        if self.last_shown.is_some() {
            let _ = show("");
        }
    }
}

/// Writes a message for the user to standard error.
pub fn note(text: &str) -> Result {
    let mut err = std::io::stderr().lock();
    if err.is_terminal() {
        err.write_all(untrusted::text(text).as_bytes())?;
    } else {
        err.write_all(text.as_bytes())?;
    }
    Ok(err.flush()?)
}

/// Replaces the current line of a terminal at standard error.
fn show(line: &str) -> Result {
    let mut err = std::io::stderr().lock();
    write!(err, "\r\x1b[K{}", untrusted::line(line))?;
    Ok(err.flush()?)
}

fn line(done: usize, total: usize, elapsed: Duration) -> String {
    let left = elapsed.as_secs_f64() / done.max(1) as f64 * total.saturating_sub(done) as f64;
    format!("{done}/{total} tokens, {left:.0} s left")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remaining_time_follows_the_rate_so_far() {
        assert_eq!(line(64, 256, Duration::from_secs(10)), "64/256 tokens, 30 s left");
        assert_eq!(line(0, 256, Duration::ZERO), "0/256 tokens, 0 s left");
        assert_eq!(line(256, 256, Duration::from_secs(40)), "256/256 tokens, 0 s left");
    }
}
