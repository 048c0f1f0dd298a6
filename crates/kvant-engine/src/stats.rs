//! Statistics of an engine.

use std::time::Duration;

use crate::EngineOptions;

/// Counts since the start of an engine, and its current state.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct EngineStats {
    /// Running requests.
    pub running: usize,
    /// Waiting requests, including preempted ones.
    pub waiting: usize,
    /// Requests paused because their events are not read.
    pub paused: usize,
    /// Bytes of all pages.
    pub pages_bytes: usize,
    /// Maximum running requests.
    pub max_running: usize,
    /// Positions per page.
    pub page_tokens: usize,
    /// Maximum full pages of one long text: positions of layers with windows, and recurrent states, are not counted.
    pub pages: usize,
    /// Bytes of pages in use by requests or the prefix cache.
    pub pages_used: usize,
    /// Bytes of recurrent states in use by requests or the prefix cache, part of `pages_used`.
    pub states_used: usize,
    /// Bytes of pages in use by requests, estimated from their lengths.
    pub requests_used: usize,
    /// Bytes of pages in host memory.
    pub host_used: usize,
    /// Bytes of stored pages in [`EngineOptions::page_files`](crate::EngineOptions::page_files), of all engines.
    pub stored: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found in the prefix cache.
    pub prefix_hits: u64,
    /// Preemptions: running requests whose pages were taken back.
    pub preemptions: u64,
    /// Steps.
    pub steps: u64,
    /// Steps that replayed a recorded pass: few tokens of each request.
    pub recorded_steps: u64,
    /// Steps that started before the result of the previous one was known.
    pub overlapped_steps: u64,
    /// Prompt tokens computed.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Maximum drafts of a request in a step.
    pub max_drafts: usize,
    /// Drafts that steps have verified.
    pub drafts: DraftCounts,
    /// Requests ended by a stop id, stop string or grammar.
    pub finished_stop: u64,
    /// Requests ended by length, context or pages.
    pub finished_length: u64,
    /// Requests cancelled or drained.
    pub finished_cancelled: u64,
    /// Failed requests.
    pub finished_failed: u64,
    /// Seconds from the submission of a request to its first token.
    pub time_to_first_token: Histogram,
    /// Seconds between two tokens of a request.
    pub inter_token: Histogram,
    /// Seconds from the submission of a request to its end.
    pub request_time: Histogram,
    /// Seconds from the submission of a request to its first step.
    pub queue_time: Histogram,
    /// Seconds from the first step of a request to its first token.
    pub prefill_time: Histogram,
    /// Seconds from the first token of a request to its last one.
    pub decode_time: Histogram,
    /// Tokens of the prompts of requests.
    pub prompt_lengths: Histogram<Tokens>,
    /// Tokens of the texts of requests that have ended.
    pub text_lengths: Histogram<Tokens>,
}

/// Counts of verified drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DraftCounts {
    /// Rows with drafts: one per request and step.
    pub rows: u64,
    /// Draft tokens.
    pub tokens: u64,
    /// Accepted draft tokens.
    pub accepted: u64,
    /// Accepted draft tokens by their position among the drafts of a row.
    pub accepted_at: [u64; EngineOptions::MAX_DRAFTS],
}

impl DraftCounts {
    /// Counts a row.
    pub(crate) fn add(&mut self, tokens: usize, accepted: usize) {
        self.rows += 1;
        self.tokens += tokens as u64;
        self.accepted += accepted as u64;
        self.accepted_at.iter_mut().take(accepted).for_each(|count| *count += 1);
    }
}

/// The unit of a [`Histogram`].
pub trait Unit: Clone + std::fmt::Debug + Default + PartialEq {
    /// The upper bounds of all buckets except the last, which is unbounded.
    const BOUNDS: [f64; 18];
}

/// Seconds, from a millisecond to five minutes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seconds;

/// Token counts, in powers of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens;

impl Unit for Seconds {
    const BOUNDS: [f64; 18] =
        [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0];
}

impl Unit for Tokens {
    const BOUNDS: [f64; 18] = [
        1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0,
        65536.0, 131072.0,
    ];
}

/// A histogram; of seconds by default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram<U: Unit = Seconds> {
    counts: [u64; 19],
    sum: f64,
    unit: std::marker::PhantomData<U>,
}

impl Histogram {
    /// Adds a duration.
    pub(crate) fn add(&mut self, duration: Duration) {
        self.count_value(duration.as_secs_f64());
    }
}

impl Histogram<Tokens> {
    /// Adds a number of tokens.
    pub(crate) fn add_tokens(&mut self, tokens: usize) {
        self.count_value(tokens as f64);
    }
}

impl<U: Unit> Histogram<U> {
    fn count_value(&mut self, value: f64) {
        self.counts[U::BOUNDS.partition_point(|&bound| bound < value)] += 1;
        self.sum += value;
    }

    /// For each bound, the number of values up to it; the last entry counts all values.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let mut sum = 0;
        let bounds = U::BOUNDS.into_iter().chain([f64::INFINITY]);
        bounds.zip(&self.counts).map(move |(bound, count)| {
            sum += count;
            (bound, sum)
        })
    }

    /// The number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of the values.
    pub fn sum(&self) -> f64 {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_are_counted_by_position() {
        let mut drafts = DraftCounts::default();
        [(4, 3), (2, 0), (1, 1), (32, 32)].into_iter().for_each(|(tokens, accepted)| drafts.add(tokens, accepted));
        assert_eq!((drafts.rows, drafts.tokens, drafts.accepted), (4, 39, 36));
        assert_eq!((&drafts.accepted_at[..4], drafts.accepted_at[31]), (&[3, 2, 2, 1][..], 1));
    }

    #[test]
    fn buckets_include_their_bounds() {
        let mut histogram = Histogram::default();
        for milliseconds in [1, 2, 400_000] {
            histogram.add(Duration::from_millis(milliseconds));
        }
        let counts: Vec<(f64, u64)> = histogram.cumulative().collect();
        assert_eq!((counts[0], counts[1], counts[17].1, counts[18]), ((0.001, 1), (0.0025, 2), 2, (f64::INFINITY, 3)));
        assert_eq!((histogram.count(), histogram.sum()), (3, 400.003));
        let mut lengths = Histogram::<Tokens>::default();
        [0, 1, 2, 3, 500_000].into_iter().for_each(|tokens| lengths.add_tokens(tokens));
        let counts: Vec<(f64, u64)> = lengths.cumulative().collect();
        assert_eq!((counts[0], counts[1], counts[2].1, counts[17].1), ((1.0, 2), (2.0, 3), 4, 4));
        assert_eq!((lengths.count(), lengths.sum()), (5, 500_006.0));
    }
}
