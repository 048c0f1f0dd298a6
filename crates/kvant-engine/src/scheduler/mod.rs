//! Decides what each step computes. A pure state machine without clock, device and threads.
//!
//! [`Scheduler::schedule`] returns the next step, and [`Scheduler::apply`] takes its result. A step can be scheduled
//! before the result of the previous one is known; its unknown tokens are [`StepPlan::SAMPLED`].
//!
//! Policy:
//!
//! - **Order**: requests are served in the order of arrival, where one level of priority counts like
//!   [`NewTask::PATIENCE`] steps. The position of a request in this order never changes, so no request waits forever.
//! - **Budget**: a step has a maximum number of tokens. Decoding requests come first, with one token each. Prompts
//!   share the rest in order. A prompt that does not fit leaves half of the rest to others, so that short prompts
//!   overtake long ones.
//! - **Admission**: a request starts if fewer than the maximum number of requests run, and the pages of its known
//!   tokens fit in addition to the pages reserved by running requests. It waits while another request computes a shared
//!   prefix, and while pages of its prefix are read from files.
//! - **Preemption**: when pages run out, the last request in the order releases its pages and waits again. The prefix
//!   cache keeps them until the memory is needed. The first request is never preempted.
//!
//! | file | contents |
//! |---|---|
//! | `plan.rs` | requests, steps, results |
//! | `task.rs` | the state of one request |
//! | `storage.rs` | the trait of the storage, for simulations |
//! | `pool.rs` | the storage in a [`kvant::KvPool`] |

mod plan;
mod pool;
mod storage;
mod task;

use std::collections::{BTreeMap, HashMap};

pub use plan::{EndReason, EndedTask, NewTask, PlanRow, RowResult, SchedulerCounts, SchedulerOptions, StepPlan};
pub use pool::{PoolStep, PoolStorage};
pub use storage::{Storage, StorageError};
use task::{QueueKey, Task};

/// Maximum incomplete prompts in a step before no more long ones start.
const MAX_PARTIAL: usize = 2;
/// Maximum waiting requests that a step considers.
const MAX_CANDIDATES: usize = 16;

/// Schedules requests according to the policy of the [module](self).
pub struct Scheduler<S: Storage> {
    storage: S,
    options: SchedulerOptions,
    /// In the order of service.
    running: Vec<Task<S::Sequence>>,
    waiting: BTreeMap<QueueKey, Task<S::Sequence>>,
    /// Paused requests that do not run.
    parked: BTreeMap<QueueKey, Task<S::Sequence>>,
    keys: HashMap<u64, QueueKey>,
    ended: Vec<EndedTask>,
    /// Whether no waiting request fits until a running one ends.
    is_full: bool,
    /// The sum of the memory reserved by running requests.
    committed: usize,
    counts: SchedulerCounts,
}

impl<S: Storage> Scheduler<S> {
    /// Creates a scheduler without requests.
    pub fn new(storage: S, options: SchedulerOptions) -> Scheduler<S> {
        Scheduler {
            storage,
            options,
            running: Vec::new(),
            waiting: BTreeMap::new(),
            parked: BTreeMap::new(),
            keys: HashMap::new(),
            ended: Vec::new(),
            is_full: false,
            committed: 0,
            counts: SchedulerCounts::default(),
        }
    }

    /// The storage.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// The storage.
    pub fn storage_mut(&mut self) -> &mut S {
        &mut self.storage
    }

    /// Counts since the start, and the current state.
    pub fn counts(&self) -> SchedulerCounts {
        let waiting = self.waiting.len() + self.parked.len();
        SchedulerCounts { running: self.running.len(), waiting, committed: self.committed, ..self.counts }
    }

    /// Adds a request. A request without tokens, or with the id of another request, is ignored.
    pub fn add(&mut self, new: NewTask) {
        if new.prompt.is_empty() || self.keys.contains_key(&new.id) {
            return;
        }
        let task = Task::new(new, self.counts.steps);
        self.keys.insert(task.id(), task.key);
        self.waiting.insert(task.key, task);
    }

    /// Removes a request and releases its pages. Returns whether it existed.
    pub fn cancel(&mut self, id: u64) -> bool {
        self.remove(id).is_some()
    }

    /// Pauses or resumes a request. A paused request keeps its pages until another one needs them.
    pub fn pause(&mut self, id: u64, is_paused: bool) {
        let Some(key) = self.keys.get(&id) else { return };
        if let Ok(index) = self.index(key) {
            self.running[index].is_paused = is_paused;
            return;
        }
        let (from, to) = match is_paused {
            true => (&mut self.waiting, &mut self.parked),
            false => (&mut self.parked, &mut self.waiting),
        };
        if let Some(mut task) = from.remove(key) {
            task.is_paused = is_paused;
            to.insert(*key, task);
        }
    }

    /// Proposes draft tokens that may follow the known tokens of a request. The next step tries them if its budget
    /// allows. If a scheduled step already samples the token at the first draft's position, that draft is skipped.
    /// After a step with drafts, the request has none until the result is known.
    pub fn propose(&mut self, id: u64, drafts: &[u32]) {
        if let Some(task) = self.task(id) {
            task.drafts.clear();
            task.drafts.extend_from_slice(drafts);
        }
    }

    /// Number of scheduled draws of a request whose tokens are not known yet.
    pub fn pending(&self, id: u64) -> usize {
        self.get(id).map_or(0, |task| task.pending)
    }

    /// Maximum drafts of a request in its next step, by its maximum length.
    pub fn draft_room(&self, id: u64) -> usize {
        self.get(id).map_or(0, |task| task.max_len.saturating_sub(task.tokens.len() + task.pending + 1))
    }

    /// The sequences of running requests, in the order of service.
    pub fn sequences_mut(&mut self) -> impl Iterator<Item = (u64, &mut S::Sequence)> {
        self.running.iter_mut().filter_map(|task| Some((task.id(), task.sequence.as_mut()?)))
    }

    /// Number of tokens of a request that the next step computes, without drafts.
    pub fn remaining(&self, id: u64) -> usize {
        self.get(id).map_or(0, Task::remaining)
    }

    /// The known tokens of a request.
    pub fn tokens(&self, id: u64) -> Option<&[u32]> {
        self.get(id).map(|task| &*task.tokens)
    }

    /// The tokens of a request that were found in the prefix cache when it first ran; `None` before.
    pub fn cached(&self, id: u64) -> Option<usize> {
        self.index(self.keys.get(&id)?).ok().and_then(|index| self.running[index].cached)
    }

    /// Returns the requests that have ended since the last call, in order.
    pub fn take_ended(&mut self) -> Vec<EndedTask> {
        std::mem::take(&mut self.ended)
    }

    /// Plans the next step. Returns `None` if there is no work now.
    ///
    /// # Errors
    /// The storage failed.
    pub fn schedule(&mut self) -> Result<Option<StepPlan<S::Step>>, StorageError> {
        self.keep_prefixes()?;
        let mut may_admit = true;
        // Limits the tokens of a request that runs alone and finds too few pages.
        let mut max = usize::MAX;
        // Limits the drafts of a request, which need pages, too.
        let mut max_drafts = self.storage.max_drafts();
        loop {
            let mut left = self.choose(max);
            let admitted = if may_admit { self.admit(&mut left)? } else { Vec::new() };
            let drafts = self.spend(left, max, max_drafts);
            if self.running.iter().all(|task| task.planned == 0) {
                return Ok(None);
            }
            for task in self.running.iter_mut().filter(|task| task.planned > 0) {
                let drafts = task.planned_drafts();
                task.sequence.iter_mut().for_each(|sequence| self.storage.hold(sequence, drafts));
            }
            let planned = self.running.iter_mut().filter(|task| task.planned > 0);
            let mut batch: Vec<_> = planned.filter_map(|task| Some((task.sequence.as_mut()?, task.planned))).collect();
            match self.storage.append(&mut batch) {
                Ok(step) => return Ok(Some(self.plan(step))),
                Err(StorageError::OutOfPages) => {}
                Err(error) => return Err(error),
            }
            // No request gives up its pages for drafts.
            if drafts > 0 && admitted.is_empty() {
                max_drafts = drafts / 2;
                continue;
            }
            max_drafts = 0;
            self.is_full = true;
            max = self.make_room(&admitted, max)?;
            // If the only running request has ended, others can start.
            may_admit = self.running.is_empty();
        }
    }

    /// Takes the result of the oldest scheduled step. Results of requests that have ended in the meantime are ignored.
    ///
    /// # Errors
    /// The storage failed.
    pub fn apply(&mut self, results: Vec<RowResult>) -> Result<(), StorageError> {
        // Results are in the order of the running requests.
        let mut next = 0;
        for result in results {
            let Some(&key) = self.keys.get(&result.id) else { continue };
            let follows = self.running.get(next).is_some_and(|task| task.key == key);
            let index = if follows { Some(next) } else { self.index(&key).ok() };
            next = index.map_or(next, |index| index + 1);
            let task = match index {
                Some(index) => self.running.get_mut(index),
                None => self.waiting.get_mut(&key).or_else(|| self.parked.get_mut(&key)),
            };
            let Some(task) = task else { continue };
            task.in_flight = task.in_flight.saturating_sub(1);
            if !result.tokens.is_empty() {
                task.pending = task.pending.saturating_sub(1);
                task.tokens.extend_from_slice(&result.tokens);
            }
            let follow = task.drafts.strip_prefix(&result.tokens[..]).map(<[u32]>::len);
            let passed = task.drafts.len() - follow.unwrap_or(0);
            task.drafts.drain(..passed);
            // A step with drafts is always the last one in flight of its request.
            if task.in_flight == 0 && std::mem::take(&mut task.is_drafting) {
                task.computed = task.computed.min(task.tokens.len() - 1);
                if let Some(sequence) = &mut task.sequence {
                    self.storage.truncate(sequence, task.computed)?;
                }
            }
            let is_full = task.tokens.len() >= task.max_len && task.computed >= task.prompt_len && task.in_flight == 0;
            let reason = match result.is_last {
                true => EndReason::Last,
                false if is_full => EndReason::Length,
                false => continue,
            };
            next = next.saturating_sub(usize::from(index.is_some()));
            if let Some(task) = self.remove(result.id) {
                self.keep(&task)?;
                self.ended.push(EndedTask { id: result.id, reason });
            }
        }
        Ok(())
    }

    fn index(&self, key: &QueueKey) -> Result<usize, usize> {
        self.running.binary_search_by_key(key, |task| task.key)
    }

    fn get(&self, id: u64) -> Option<&Task<S::Sequence>> {
        let key = self.keys.get(&id)?;
        let running = self.index(key).ok().map(|index| &self.running[index]);
        running.or_else(|| self.waiting.get(key)).or_else(|| self.parked.get(key))
    }

    fn task(&mut self, id: u64) -> Option<&mut Task<S::Sequence>> {
        let key = self.keys.get(&id)?;
        match self.index(key) {
            Ok(index) => Some(&mut self.running[index]),
            Err(_) => self.waiting.get_mut(key).or_else(|| self.parked.get_mut(key)),
        }
    }

    /// Removes a request and returns it.
    fn remove(&mut self, id: u64) -> Option<Task<S::Sequence>> {
        let key = self.keys.remove(&id)?;
        if let Ok(index) = self.index(&key) {
            self.is_full = false;
            return Some(self.running.remove(index));
        }
        self.waiting.remove(&key).or_else(|| self.parked.remove(&key))
    }

    /// Keeps the prefixes that earlier steps have computed, and recomputes the reserved memory. A step begins with it.
    ///
    /// # Errors
    /// The storage failed.
    pub fn keep_prefixes(&mut self) -> Result<(), StorageError> {
        let page = self.storage.page_tokens();
        self.committed = 0;
        for task in &mut self.running {
            task.reserved = self.storage.need(task.foreseen(page)).saturating_sub(task.shared);
            self.committed = self.committed.saturating_add(task.reserved);
            let is_new = task.kept < task.prompt_len && task.kept < task.computed && task.computed <= task.tokens.len();
            if let (true, Some(salt), Some(sequence)) = (is_new, &task.salt, &task.sequence) {
                self.storage.keep(salt, sequence, &task.tokens[..task.computed], task.kept)?;
                task.kept = task.computed;
            }
        }
        Ok(())
    }

    /// Keeps all computed tokens of a request.
    fn keep(&mut self, task: &Task<S::Sequence>) -> Result<(), StorageError> {
        match (&task.salt, &task.sequence) {
            (Some(salt), Some(sequence)) if task.computed <= task.tokens.len() => {
                self.storage.keep(salt, sequence, &task.tokens[..task.computed], task.kept)
            }
            _ => Ok(()),
        }
    }

    /// Plans at most `max` tokens of each running request. Returns the rest of the budget.
    fn choose(&mut self, max: usize) -> usize {
        let mut left = self.options.step_tokens;
        let mut prompts = 0;
        for task in &mut self.running {
            task.planned = usize::from(task.is_decoding());
            left -= task.planned;
            prompts += usize::from(task.planned == 0 && task.remaining() > 0);
        }
        let mut others = prompts + self.waiting.len();
        for task in self.running.iter_mut().filter(|task| task.planned == 0 && task.remaining() > 0) {
            others -= 1;
            task.planned = task.up_to_stop(share(task.remaining().min(max), left, others));
            left -= task.planned;
        }
        left
    }

    /// Spends the rest of the budget: first on prompts in order, then on up to `max_drafts` drafts of each request.
    /// Returns the maximum number of drafts that a request has.
    fn spend(&mut self, mut left: usize, max: usize, max_drafts: usize) -> usize {
        for task in self.running.iter_mut().filter(|task| task.planned > 0 && !task.is_decoding()) {
            let more = (task.remaining().min(max) - task.planned.min(max)).min(left);
            let more = task.up_to_stop(task.planned + more) - task.planned;
            task.planned += more;
            left -= more;
        }
        let mut most = 0;
        for task in self.running.iter_mut().filter(|task| task.planned > 0) {
            let drafts = task.next_drafts().len().min(left).min(max_drafts).min(max - task.planned.min(max));
            task.planned += drafts;
            left -= drafts;
            most = drafts.max(most);
        }
        most
    }

    /// Starts waiting requests with the rest of the budget. Returns the started ones, in order.
    fn admit(&mut self, left: &mut usize) -> Result<Vec<QueueKey>, StorageError> {
        let mut admitted = Vec::new();
        let mut partial =
            self.running.iter().filter(|task| task.planned > 0 && task.planned < task.remaining()).count();
        let candidates: Vec<QueueKey> = self.waiting.keys().take(MAX_CANDIDATES).copied().collect();
        for key in candidates {
            while (self.running.len() >= self.options.sequences || self.is_full) && self.park_one()? {}
            if self.running.is_empty() {
                self.is_full = false;
            }
            if *left == 0 || self.running.len() >= self.options.sequences || self.is_full {
                break;
            }
            let task = &self.waiting[&key];
            let is_long = partial >= MAX_PARTIAL && task.tokens.len() > *left;
            if task.pending > 0 || is_long {
                continue;
            }
            if self.awaits_pages(key)? {
                continue;
            }
            let sequence = self.find(key)?;
            let found = self.storage.len(&sequence);
            if self.computes_prefix_of(&self.waiting[&key], found) {
                continue;
            }
            if !self.fits(key, found)? {
                self.is_full = true;
                break;
            }
            let count = self.start(key, sequence, *left);
            *left -= count;
            admitted.push(key);
            partial += usize::from(self.index(&key).is_ok_and(|index| count < self.running[index].remaining()));
        }
        Ok(admitted)
    }

    /// Whether pages of a waiting request's prefix are being read.
    fn awaits_pages(&mut self, key: QueueKey) -> Result<bool, StorageError> {
        let Some(task) = self.waiting.get_mut(&key) else { return Ok(false) };
        // Pages that were evicted before the request could start are not read again and again.
        let (Some(salt), true) = (&task.salt, task.may_find() && task.prefetched < task.tokens.len()) else {
            return Ok(false);
        };
        let (pages, is_reading) = self.storage.prefetch(salt, &task.tokens[..task.tokens.len() - 1])?;
        task.prefetched += pages;
        Ok(is_reading)
    }

    /// Looks up the prefix of a waiting request in the cache.
    fn find(&mut self, key: QueueKey) -> Result<S::Sequence, StorageError> {
        let task = &self.waiting[&key];
        match &task.salt {
            // At least one token must be computed, as its logits are needed.
            Some(salt) if task.may_find() => self.storage.find(salt, &task.tokens[..task.tokens.len() - 1]),
            _ => Ok(self.storage.empty()),
        }
    }

    /// Whether a running request computes pages that a waiting one needs beyond its `found` tokens.
    fn computes_prefix_of(&self, waiting: &Task<S::Sequence>, found: usize) -> bool {
        let page = self.storage.page_tokens();
        let computes = |task: &&Task<S::Sequence>| task.kept < task.prompt_len && task.planned > 0;
        let alike = |task: &&Task<S::Sequence>| task.salt.is_some() && task.salt == waiting.salt;
        if !waiting.may_find() {
            return false;
        }
        self.running.iter().filter(computes).filter(alike).any(|task| {
            let prompt = &task.tokens[..task.prompt_len];
            let common = prompt.iter().zip(&waiting.tokens).take_while(|(a, b)| a == b).count() / page * page;
            common > found && common > task.kept
        })
    }

    /// Whether the memory for a waiting request is available. Paused requests release theirs for it.
    fn fits(&mut self, key: QueueKey, found: usize) -> Result<bool, StorageError> {
        let page = self.storage.page_tokens();
        let need = self.storage.need(self.waiting[&key].foreseen(page));
        let need = need.saturating_sub(self.storage.spared(found));
        loop {
            let fits = self.committed.saturating_add(need) <= self.storage.capacity();
            if fits || self.running.is_empty() {
                return Ok(true);
            }
            if !self.park_one()? {
                return Ok(false);
            }
        }
    }

    /// Starts a waiting request with the tokens found in the cache. Returns the number of tokens planned for it.
    fn start(&mut self, key: QueueKey, sequence: S::Sequence, left: usize) -> usize {
        let others = self.waiting.len() - 1;
        let Some(mut task) = self.waiting.remove(&key) else { return 0 };
        let (page, found) = (self.storage.page_tokens(), self.storage.len(&sequence));
        if task.cached.is_none() && task.salt.is_some() {
            self.counts.prefix_queries += task.tokens.len() as u64;
            self.counts.prefix_hits += found as u64;
        }
        task.cached.get_or_insert(found.min(task.prompt_len));
        (task.computed, task.kept, task.sequence) = (found, found, Some(sequence));
        task.shared = self.storage.spared(found);
        task.reserved = self.storage.need(task.foreseen(page)).saturating_sub(task.shared);
        self.committed = self.committed.saturating_add(task.reserved);
        task.stops = task.salt.as_ref().map_or_else(Vec::new, |salt| self.storage.stops(salt, &task.tokens));
        let count = task.up_to_stop(share(task.remaining(), left, others));
        task.planned = count;
        if let Err(index) = self.index(&key) {
            self.running.insert(index, task);
        }
        count
    }

    /// Releases the pages of the last running request that is paused. Returns whether one exists.
    fn park_one(&mut self) -> Result<bool, StorageError> {
        match self.running.iter().rposition(|task| task.is_paused) {
            Some(index) => {
                self.is_full = false;
                self.preempt(index).map(|()| true)
            }
            None => Ok(false),
        }
    }

    /// Makes room for a step that found too few pages. Returns the maximum number of tokens to plan for a request.
    fn make_room(&mut self, admitted: &[QueueKey], max: usize) -> Result<usize, StorageError> {
        if self.park_one()? {
            return Ok(max);
        }
        if !admitted.is_empty() && self.running.len() > 1 {
            // The admitted requests have computed nothing yet. One can stay if it is alone.
            let stays = usize::from(admitted.len() == self.running.len());
            for key in &admitted[stays..] {
                if let Ok(index) = self.index(key) {
                    self.send_back(index);
                }
            }
            return Ok(max);
        }
        if self.running.len() > 1 {
            self.preempt(self.running.len() - 1)?;
            return Ok(max);
        }
        let planned = self.running.first().map_or(0, |task| task.planned);
        if planned > 1 {
            return Ok(planned / 2);
        }
        let last = self.running.first().map(Task::id);
        if let Some(task) = last.and_then(|id| self.remove(id)) {
            self.ended.push(EndedTask { id: task.id(), reason: EndReason::OutOfPages });
        }
        Ok(max)
    }

    /// Preempts a running request: its pages are released, and its tokens are computed again. The prefix cache keeps
    /// the pages if it can.
    fn preempt(&mut self, index: usize) -> Result<(), StorageError> {
        self.counts.preemptions += 1;
        let task = &self.running[index];
        if let (Some(salt), Some(sequence), true) = (&task.salt, &task.sequence, task.computed <= task.tokens.len()) {
            self.storage.keep(salt, sequence, &task.tokens[..task.computed], task.kept)?;
        }
        self.send_back(index);
        Ok(())
    }

    /// Moves a running request back to the queue.
    fn send_back(&mut self, index: usize) {
        let mut task = self.running.remove(index);
        self.committed = self.committed.saturating_sub(task.reserved);
        (task.computed, task.kept, task.planned, task.reserved, task.shared) = (0, 0, 0, 0, 0);
        (task.sequence, task.is_drafting) = (None, false);
        task.drafts.clear();
        let to = if task.is_paused { &mut self.parked } else { &mut self.waiting };
        to.insert(task.key, task);
    }

    /// The plan of a step whose pages have been allocated.
    fn plan(&mut self, step: S::Step) -> StepPlan<S::Step> {
        self.counts.steps += 1;
        let mut plan = StepPlan { step, tokens: Vec::new(), rows: Vec::with_capacity(self.running.len()) };
        for task in self.running.iter_mut().filter(|task| task.planned > 0) {
            let row = task.plan(&mut plan.tokens, StepPlan::<S::Step>::SAMPLED);
            plan.rows.push(row);
        }
        plan
    }
}

/// The number of tokens to plan for a prompt with `remaining` tokens: all if they fit into `left`, or half of `left` if
/// other requests need some.
fn share(remaining: usize, left: usize, others: usize) -> usize {
    if remaining <= left || others == 0 { remaining.min(left) } else { left.div_ceil(2) }
}
