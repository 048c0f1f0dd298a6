//! The state of one request in the scheduler.

use std::{ops::Range, sync::Arc};

use super::{NewTask, PlanRow};

/// The position of a request in the order of service: a time in steps, and its id. Smaller keys are served first.
///
/// The key never changes. A request is therefore overtaken only by requests of higher priority that arrive within the
/// steps that their priority is worth.
pub(super) type QueueKey = (i64, u64);

/// A request. `S` is its sequence in the storage.
///
/// The keys and values of the first `computed` of the `tokens` exist. A token is sampled when all are computed.
#[derive(Debug)]
pub(super) struct Task<S> {
    pub key: QueueKey,
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Maximum tokens, including the prompt.
    pub max_len: usize,
    pub salt: Option<Arc<[u8]>>,
    pub sequence: Option<S>,
    /// Tokens whose keys and values exist, or are computed by a planned step.
    pub computed: usize,
    /// Planned draws whose tokens are not known yet.
    pub pending: usize,
    /// Planned steps whose results are not known yet.
    pub in_flight: usize,
    /// Whether the latest planned step has drafts. The next position is then unknown until its result is known.
    pub is_drafting: bool,
    /// Draft tokens after the last known token.
    pub drafts: Vec<u32>,
    pub is_paused: bool,
    /// Tokens kept in the prefix cache.
    pub kept: usize,
    /// Memory that the request may need, without the pages found in the cache.
    pub reserved: usize,
    /// Memory of the pages found in the cache.
    pub shared: usize,
    /// The tokens of the prompt whose results are needed.
    pub wanted: Range<usize>,
    /// Tokens of the prompt whose results have been planned.
    pub scored: usize,
    /// Tokens found in the cache when the request first ran.
    pub cached: Option<usize>,
    /// Pages of its prefix that came from files.
    pub prefetched: usize,
    /// Tokens planned for the current step.
    pub planned: usize,
    /// The positions where a step ends, in increasing order.
    pub stops: Vec<usize>,
}

impl<S> Task<S> {
    pub fn new(new: NewTask, now: u64) -> Task<S> {
        let key = (i64::try_from(now).unwrap_or(i64::MAX) - i64::from(new.priority) * NewTask::PATIENCE, new.id);
        let prompt_len = new.prompt.len();
        Task {
            key,
            prompt_len,
            max_len: prompt_len.saturating_add(new.max_tokens),
            tokens: new.prompt,
            salt: new.salt,
            sequence: None,
            computed: 0,
            pending: 0,
            in_flight: 0,
            is_drafting: false,
            drafts: Vec::new(),
            is_paused: false,
            kept: 0,
            reserved: 0,
            shared: 0,
            wanted: new.wanted,
            scored: 0,
            cached: None,
            prefetched: 0,
            planned: 0,
            stops: Vec::new(),
        }
    }

    pub fn id(&self) -> u64 {
        self.key.1
    }

    /// Whether the request can begin with a cached prefix: not if results of its tokens are needed.
    pub fn may_find(&self) -> bool {
        self.wanted.is_empty() || self.wanted.start + 1 >= self.prompt_len
    }

    /// Tokens that can be computed now, including one that the previous step samples.
    pub fn remaining(&self) -> usize {
        let is_full = self.pending > 0 && self.tokens.len() + self.pending >= self.max_len;
        if self.is_paused || self.is_drafting || self.pending > 1 || is_full {
            return 0;
        }
        self.tokens.len() + self.pending - self.computed
    }

    /// The number of tokens, at most `count`, up to the next stop.
    pub fn up_to_stop(&self, count: usize) -> usize {
        let next = self.stops.iter().find(|&&stop| stop > self.computed);
        next.map_or(count, |stop| count.min(stop - self.computed))
    }

    /// Whether only one token remains to compute.
    pub fn is_decoding(&self) -> bool {
        self.computed >= self.prompt_len && self.remaining() == 1
    }

    /// Whether a token is sampled when all tokens are computed.
    pub fn draws(&self) -> bool {
        self.tokens.len() + self.pending < self.max_len
    }

    /// Tokens to reserve memory for at the start: all known ones, and `ahead` more.
    pub fn foreseen(&self, ahead: usize) -> usize {
        (self.tokens.len() + self.pending).saturating_add(ahead).min(self.max_len.max(self.tokens.len()))
    }

    /// The drafts for the next step. They follow its token, and are empty unless the step computes one token, the last
    /// one of a generated text. Drafts at positions of pending tokens are skipped.
    pub fn next_drafts(&self) -> &[u32] {
        let drafts = self.drafts.get(self.pending..).unwrap_or(&[]);
        let may_draft = self.is_decoding() && self.planned > 0;
        let max = if may_draft { self.max_len.saturating_sub(self.tokens.len() + self.pending + 1) } else { 0 };
        &drafts[..drafts.len().min(max)]
    }

    /// The drafts of the planned step, which are its last tokens.
    pub fn planned_drafts(&self) -> usize {
        self.planned.saturating_sub(self.remaining())
    }

    /// Appends the tokens of the planned step and advances the state as if the step had run. `sampled` is the
    /// placeholder for an unknown token.
    pub fn plan(&mut self, tokens: &mut Vec<u32>, sampled: u32) -> PlanRow {
        let (position, known, first) = (self.computed, self.tokens.len(), tokens.len());
        let end = position + self.planned;
        tokens.extend_from_slice(&self.tokens[position.min(known)..end.min(known)]);
        // After the known tokens: a pending token, then drafts.
        let beyond = end.saturating_sub(known);
        let drafts = beyond.saturating_sub(self.pending);
        tokens.extend(std::iter::repeat_n(sampled, beyond - drafts));
        tokens.extend_from_slice(&self.next_drafts()[..drafts]);
        let draws = if end >= known + self.pending && self.draws() { 1 + drafts } else { 0 };
        let tokens = first..tokens.len();
        let mut logits = tokens.end - draws..tokens.end;
        if !self.wanted.is_empty() {
            let scored = self.scored.max(position).max(self.wanted.start)..end.min(self.wanted.end);
            if !scored.is_empty() {
                let last = if draws > 0 { end } else { scored.end };
                logits = first + scored.start - position..first + last - position;
                self.scored = scored.end;
            }
        }
        self.computed = end;
        self.in_flight += 1;
        self.is_drafting = drafts > 0;
        self.pending += usize::from(draws > 0);
        PlanRow { id: self.id(), position, tokens, logits, draws }
    }
}
