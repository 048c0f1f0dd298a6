//! Chooses the number of drafts of each request in a step.
//!
//! A step over the last tokens of all requests and over some drafts gives each request one token, and one more for each
//! accepted draft. [`DraftLengths::choose`] maximises the expected tokens per second of the batch:
//!
//! - **Acceptance**: predictions have [classes](Class): the length of a match, or the depth of a drafter's prediction.
//!   Each request counts how often predictions of each class were right. So does the engine for all requests; its
//!   shares are the prior of a new request. Every prediction is counted, whether a step has verified it or the text has
//!   simply reached it. So lookup without drafts still learns.
//! - **Times**: of steps by rows, and of a drafter's proposals by depth ([`StepTimes`]).
//!
//! The most probable drafts come first, over all requests. A draft is never more probable than the one before it, so
//! the first n of them are the beginnings of some requests' drafts; n is the best one for the measured times.
//!
//! Times and acceptance of drafts that are never tried would stay wrong for ever. So one request at times gets one
//! draft more than chosen, which costs at most [`PROBE_SHARE`] of the time.

use super::step_times::StepTimes;

/// Classes of each source.
const CLASSES: usize = 16;
/// Share of the time for drafts that are tried to learn.
const PROBE_SHARE: f64 = 0.015;
/// Minimum gain in tokens per second over steps without drafts: estimates have errors.
const MIN_GAIN: f64 = 1.02;
/// Drafts with less probability are never worth a row.
const MIN_PROBABILITY: f32 = 0.02;
/// Weight of the latest observation in a share, of a request and of the engine.
const FORGETS: f32 = 0.07;
const SHARED_FORGETS: f32 = 0.01;
/// Weights of priors in observations: of the engine's estimate for a request, and of the first estimates. One wrong
/// draft must not end all of them, because drafts are rarely tried without a gain.
const PRIOR: f32 = 4.0;
const SHARED_PRIOR: f32 = 8.0;
/// Shares of the first class before any observation.
const FIRST_LOOKUP: f32 = 0.3;
const FIRST_DRAFTER: f32 = 0.7;
/// Assumed time of a drafter's pass over a step's, before the first proposal.
const DRAFTER_SHARE: f64 = 0.1;

/// Predictions of a class are right about equally often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class {
    is_drafter: bool,
    index: usize,
}

impl Class {
    /// The token after an earlier occurrence of the last `length` tokens.
    pub fn lookup(length: usize) -> Class {
        Class { is_drafter: false, index: length }
    }

    /// A drafter's prediction of the next token.
    pub fn drafter() -> Class {
        Class { is_drafter: true, index: 0 }
    }

    /// The class of the prediction `tokens` later. If a match of n tokens predicts a token correctly, the next
    /// prediction has a match of n + 1.
    pub fn after(self, tokens: usize) -> Class {
        Class { index: self.index + tokens, ..self }
    }

    fn place(self) -> usize {
        usize::from(self.is_drafter) * CLASSES + self.index.min(CLASSES - 1)
    }
}

/// How often predictions of each class are right, with decaying weights.
#[derive(Clone, Debug, Default)]
pub(super) struct Acceptance {
    classes: [Share; 2 * CLASSES],
    /// The number of the step that last tried a draft more than chosen.
    probed: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    right: f32,
    tried: f32,
}

impl Share {
    fn add(&mut self, is_right: bool, forgets: f32) {
        self.right += f32::from(u8::from(is_right)) - forgets * self.right;
        self.tried += 1.0 - forgets * self.tried;
    }

    /// The share of right predictions, with `weight` observations of a prior.
    fn estimate(self, prior: f32, weight: f32) -> f32 {
        (self.right + weight * prior) / (self.tried + weight)
    }
}

/// The drafts that a request offers for a step.
pub(super) struct Offer<'a> {
    pub acceptance: &'a mut Acceptance,
    /// The class of the first prediction.
    pub class: Class,
    /// Predictions before the first draft: tokens that are already being sampled. Drafts after wrong ones are lost.
    pub skipped: usize,
    /// Maximum drafts.
    pub available: usize,
}

/// The engine's knowledge about drafts.
pub(super) struct DraftLengths {
    shared: Acceptance,
    /// Times of steps by rows.
    pub steps: StepTimes,
    /// Times of a drafter's proposals by depth.
    pub proposals: StepTimes,
    /// Maximum rows of a step.
    max_rows: usize,
    /// Seconds that may be spent to learn.
    credit: f64,
    /// Number of choices.
    count: u64,
}

/// A draft: its probability to be accepted, its request's offer, and its depth.
struct Draft {
    probability: f32,
    offer: usize,
    depth: usize,
    is_drafter: bool,
}

/// The best number of drafts so far.
struct Best {
    tokens_per_second: f64,
    seconds: f64,
    count: usize,
    /// Maximum depth of a drafter's drafts.
    depth: usize,
}

impl DraftLengths {
    pub fn new(max_rows: usize) -> DraftLengths {
        let (shared, steps, proposals) = (Acceptance::default(), StepTimes::new(), StepTimes::new());
        DraftLengths { shared, steps, proposals, max_rows, credit: 0.0, count: 0 }
    }

    /// Counts a prediction of a request as right or wrong.
    pub fn observe(&mut self, own: &mut Acceptance, class: Class, is_right: bool) {
        own.classes[class.place()].add(is_right, FORGETS);
        self.shared.classes[class.place()].add(is_right, SHARED_FORGETS);
    }

    /// Whether a prediction of a class is more probable than that of another one.
    pub fn is_better(&self, own: &Acceptance, class: Class, than: Class) -> bool {
        let shared = self.shared_estimates();
        let estimate = |class: Class| own.classes[class.place()].estimate(shared[class.place()], PRIOR);
        estimate(class) > estimate(than)
    }

    /// Returns the number of drafts of each offer. The step has `rows` rows and samples `tokens` tokens without any.
    pub fn choose(&mut self, rows: usize, tokens: usize, offers: &mut [Offer]) -> Vec<usize> {
        let mut chosen = vec![0; offers.len()];
        let left = self.max_rows.saturating_sub(rows);
        if left == 0 || offers.is_empty() {
            return chosen;
        }
        let drafts = self.drafts(offers);
        let times: Vec<f64> = (rows..=rows + left.min(drafts.len())).map(|rows| self.seconds(rows)).collect();
        let best = self.best(&drafts, &times, tokens);
        let mut others = Vec::new();
        let (mut count, mut depth) = (0, 0);
        for draft in drafts {
            if count < best.count && (!draft.is_drafter || draft.depth <= best.depth) {
                count += 1;
                chosen[draft.offer] = draft.depth;
                depth = depth.max(if draft.is_drafter { draft.depth } else { 0 });
            } else {
                others.push(draft);
            }
        }
        self.credit += PROBE_SHARE * best.seconds;
        if let Some(probe) = self.probe(&others, &chosen, offers).filter(|_| count < left) {
            let depth = depth.max(if probe.is_drafter { probe.depth } else { 0 });
            let seconds = self.seconds(rows + count + 1) + self.proposal_seconds(depth, times[0]);
            let cost = (seconds - best.seconds).max(0.0);
            // Enough for one at a time.
            self.credit = self.credit.min(cost.max(PROBE_SHARE * best.seconds));
            if self.credit >= cost {
                self.credit -= cost;
                self.count += 1;
                chosen[probe.offer] = probe.depth;
                offers[probe.offer].acceptance.probed = self.count;
            }
        }
        chosen
    }

    /// The next draft of the request that has not had a draft more than chosen for the longest time.
    fn probe<'d>(&self, others: &'d [Draft], chosen: &[usize], offers: &[Offer]) -> Option<&'d Draft> {
        let next = others.iter().filter(|draft| draft.depth == chosen[draft.offer] + 1);
        next.min_by_key(|draft| offers[draft.offer].acceptance.probed)
    }

    /// All drafts, the most probable first.
    fn drafts(&self, offers: &[Offer]) -> Vec<Draft> {
        let shared = self.shared_estimates();
        let mut drafts = Vec::new();
        for (index, offer) in offers.iter().enumerate() {
            let mut probability = 1.0;
            for position in 0..offer.skipped + offer.available {
                let place = offer.class.after(position).place();
                probability *= offer.acceptance.classes[place].estimate(shared[place], PRIOR);
                let depth = (position + 1).saturating_sub(offer.skipped);
                // The first one may be tried to learn.
                if depth > 1 && probability < MIN_PROBABILITY {
                    break;
                }
                if depth > 0 {
                    drafts.push(Draft { probability, offer: index, depth, is_drafter: offer.class.is_drafter });
                }
            }
        }
        drafts.sort_by(|a, b| b.probability.total_cmp(&a.probability).then(a.depth.cmp(&b.depth)));
        drafts
    }

    /// The engine's shares. The prior of a class is the one before it.
    fn shared_estimates(&self) -> [f32; 2 * CLASSES] {
        let mut shares = [0.0; 2 * CLASSES];
        for (place, share) in self.shared.classes.iter().enumerate() {
            let prior = match place {
                0 => FIRST_LOOKUP,
                CLASSES => FIRST_DRAFTER,
                _ => shares[place - 1],
            };
            shares[place] = share.estimate(prior, SHARED_PRIOR);
        }
        shares
    }

    /// The number of drafts with the largest rate. `times`: of the step by its number of drafts.
    fn best(&self, drafts: &[Draft], times: &[f64], tokens: usize) -> Best {
        let none = Best { tokens_per_second: tokens as f64 / times[0], seconds: times[0], count: 0, depth: 0 };
        let min = MIN_GAIN * none.tokens_per_second;
        let mut best = none;
        let deepest = drafts.iter().filter(|draft| draft.is_drafter).map(|draft| draft.depth).max().unwrap_or(0);
        for depth in 0..=deepest {
            let proposal = self.proposal_seconds(depth, times[0]);
            let within = drafts.iter().filter(|draft| !draft.is_drafter || draft.depth <= depth);
            let mut expected = tokens as f64;
            for ((draft, time), count) in within.zip(&times[1..]).zip(1..) {
                expected += f64::from(draft.probability);
                let seconds = time + proposal;
                let tokens_per_second = expected / seconds;
                if tokens_per_second > best.tokens_per_second.max(min) {
                    best = Best { tokens_per_second, seconds, count, depth };
                }
            }
        }
        best
    }

    /// The time of a step.
    fn seconds(&self, rows: usize) -> f64 {
        self.steps.estimate(rows).unwrap_or(3.0 + rows as f64)
    }

    /// The time of proposals of a drafter. `step`: the time of a step without drafts.
    fn proposal_seconds(&self, depth: usize, step: f64) -> f64 {
        match depth {
            0 => 0.0,
            depth => self.proposals.estimate(depth).unwrap_or(DRAFTER_SHARE * step * depth as f64),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
