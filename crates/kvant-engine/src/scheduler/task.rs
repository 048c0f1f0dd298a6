//! The state of one request in the scheduler.

use std::{ops::Range, sync::Arc};

use super::{NewTask, PlanRow};

/// The place of a request in the order of service: a time in steps, and its number. Smaller ones are served first.
///
/// It never changes. A request is therefore overtaken only by those of higher priority that arrive in the steps that
/// their priority is worth.
pub(super) type QueueKey = (i64, u64);

/// A request. `S` is its sequence of the storage.
///
/// `computed` tokens chase the `tokens`: keys and values exist for the first, and a token is drawn when they have
/// caught up.
#[derive(Debug)]
pub(super) struct Task<S> {
    pub key: QueueKey,
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// The most tokens, prompt included.
    pub most: usize,
    pub salt: Option<Arc<[u8]>>,
    pub sequence: Option<S>,
    /// Tokens whose keys and values exist, or are computed by a step that has been planned.
    pub computed: usize,
    /// Draws that have been planned and whose tokens are not known yet.
    pub pending: usize,
    /// Planned steps whose results are not known yet.
    pub in_flight: usize,
    /// The latest planned step has drafts: what can follow is unknown until the result is there.
    pub is_drafting: bool,
    /// Tokens that may follow the last known one.
    pub drafts: Vec<u32>,
    pub is_paused: bool,
    /// Tokens that the prefix cache has kept.
    pub kept: usize,
    /// Memory that the request may take, without the pages that it found.
    pub reserved: usize,
    /// Memory of the pages that it found.
    pub shared: usize,
    /// The tokens of the prompt whose results are needed.
    pub wanted: Range<usize>,
    /// Tokens of the prompt whose results have been planned.
    pub scored: usize,
    /// Tokens that it found when it first ran.
    pub cached: Option<usize>,
    /// Tokens of the step that is being planned.
    pub planned: usize,
}

impl<S> Task<S> {
    pub fn new(new: NewTask, now: u64) -> Task<S> {
        let key = (i64::try_from(now).unwrap_or(i64::MAX) - i64::from(new.priority) * NewTask::PATIENCE, new.id);
        let prompt_len = new.prompt.len();
        Task {
            key,
            prompt_len,
            most: prompt_len.saturating_add(new.max_tokens),
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
            planned: 0,
        }
    }

    pub fn id(&self) -> u64 {
        self.key.1
    }

    /// Whether it may begin with a prefix that was computed before: not if results of such tokens are needed.
    pub fn may_find(&self) -> bool {
        self.wanted.is_empty() || self.wanted.start + 1 >= self.prompt_len
    }

    /// Tokens that can be computed now, the one that the previous step draws included.
    pub fn remaining(&self) -> usize {
        let is_full = self.pending > 0 && self.tokens.len() + self.pending >= self.most;
        if self.is_paused || self.is_drafting || self.pending > 1 || is_full {
            return 0;
        }
        self.tokens.len() + self.pending - self.computed
    }

    /// Whether one token catches up with all that are known.
    pub fn is_decoding(&self) -> bool {
        self.computed >= self.prompt_len && self.remaining() == 1
    }

    /// Whether a token is drawn when all tokens have been computed.
    pub fn draws(&self) -> bool {
        self.tokens.len() + self.pending < self.most
    }

    /// Tokens that memory is needed for when the request starts: all that are known, and some more.
    pub fn foreseen(&self, ahead: usize) -> usize {
        (self.tokens.len() + self.pending).saturating_add(ahead).min(self.most.max(self.tokens.len()))
    }

    /// The drafts for the next step. Those in the place of pending tokens are skipped.
    pub fn next_drafts(&self) -> &[u32] {
        let drafts = self.drafts.get(self.pending..).unwrap_or(&[]);
        let most = if self.is_decoding() { self.most.saturating_sub(self.tokens.len() + self.pending + 1) } else { 0 };
        &drafts[..drafts.len().min(most)]
    }

    /// Appends the tokens of the planned step, and moves on as if it had run. `sampled` stands for a token that is not
    /// known yet.
    pub fn plan(&mut self, tokens: &mut Vec<u32>, sampled: u32) -> PlanRow {
        let (position, known, first) = (self.computed, self.tokens.len(), tokens.len());
        let end = position + self.planned;
        tokens.extend_from_slice(&self.tokens[position.min(known)..end.min(known)]);
        // Beyond the known ones: a token that is being drawn, then drafts.
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
