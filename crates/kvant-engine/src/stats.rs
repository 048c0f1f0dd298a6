//! What an engine counts.

use std::time::Duration;

/// Counts of an engine since its start, and its state now.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct EngineStats {
    /// Requests that run.
    pub running: usize,
    /// Requests that wait, preempted ones included.
    pub waiting: usize,
    /// Requests whose events nobody reads.
    pub paused: usize,
    /// Bytes of all pages.
    pub pages_bytes: usize,
    /// Bytes of pages in use, by requests or by the prefix cache.
    pub pages_used: usize,
    /// Bytes of pages that requests use, an estimate from their lengths.
    pub requests_used: usize,
    /// Bytes of pages in host memory.
    pub host_used: usize,
    /// Tokens of prompts that were looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Tokens of prompts that the prefix cache had.
    pub prefix_hits: u64,
    /// Requests that gave their pages back before they ended.
    pub preemptions: u64,
    /// Steps.
    pub steps: u64,
    /// Those of them that replayed a recorded pass: one token of each request.
    pub recorded_steps: u64,
    /// Steps that were started before the result of the one before was known.
    pub overlapped_steps: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Draft tokens that were tried, and those that were right.
    pub drafts: [u64; 2],
    /// Ended requests: by a stop id, stop string or grammar.
    pub finished_stop: u64,
    /// Ended requests: by length, context or pages.
    pub finished_length: u64,
    /// Ended requests: cancelled or drained.
    pub finished_cancelled: u64,
    /// Ended requests: failed.
    pub finished_failed: u64,
    /// Seconds from the submission of a request to its first token.
    pub time_to_first_token: Histogram,
    /// Seconds between two tokens of a request.
    pub inter_token: Histogram,
    /// Seconds from the submission of a request to its end.
    pub request_time: Histogram,
}

/// A histogram of seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    counts: [u64; Histogram::BOUNDS.len() + 1],
    sum: f64,
}

impl Histogram {
    /// The upper bounds of all buckets except the last, which has none.
    pub const BOUNDS: [f64; 18] =
        [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0];

    /// Counts a duration.
    pub(crate) fn add(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = Histogram::BOUNDS.partition_point(|&bound| bound < seconds);
        self.counts[bucket] += 1;
        self.sum += seconds;
    }

    /// For each bound, the durations up to it; and at the end, all.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let mut sum = 0;
        let bounds = Histogram::BOUNDS.into_iter().chain([f64::INFINITY]);
        bounds.zip(&self.counts).map(move |(bound, count)| {
            sum += count;
            (bound, sum)
        })
    }

    /// The number of durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum in seconds.
    pub fn sum(&self) -> f64 {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_include_their_bounds() {
        let mut histogram = Histogram::default();
        for milliseconds in [1, 2, 400_000] {
            histogram.add(Duration::from_millis(milliseconds));
        }
        let counts: Vec<(f64, u64)> = histogram.cumulative().collect();
        assert_eq!((counts[0], counts[1], counts[17].1, counts[18]), ((0.001, 1), (0.0025, 2), 2, (f64::INFINITY, 3)));
        assert_eq!((histogram.count(), histogram.sum()), (3, 400.003));
    }
}
