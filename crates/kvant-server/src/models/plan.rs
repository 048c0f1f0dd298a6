//! Decides which model is loaded next and which one is unloaded. It has no clock, threads or models.
//!
//! Requests acquire a model and later release it. A model that is not loaded is queued. The first of the queue is
//! loaded when it fits. Otherwise models are unloaded: first idle ones, the least recently requested first. If these do
//! not suffice, models in use are closed: new requests for them wait in the queue, and they are unloaded when their
//! last request has ended. A model therefore waits only for running requests, never for later ones.

use std::{collections::VecDeque, mem};

/// The state of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Out,
    Loading,
    Loaded,
    Unloading,
}

/// An action that a change requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// The request with this ticket uses the model from now on.
    Grant { model: usize, ticket: u64 },
    /// [`Plan::loaded`] or [`Plan::failed`] must follow.
    Load(usize),
    /// [`Plan::unloaded`] must follow.
    Unload(usize),
}

/// The models, and the requests that use or await them.
#[derive(Debug)]
pub(super) struct Plan {
    /// Maximum bytes of all models that are loaded, or are being loaded or unloaded.
    limit: usize,
    models: Vec<Slot>,
    /// Models with waiting requests, in order of arrival. The one being loaded is not included.
    queue: VecDeque<usize>,
    /// Models that are being unloaded to make room for the first of the queue.
    closing: Vec<usize>,
    tickets: u64,
}

#[derive(Debug)]
struct Slot {
    bytes: usize,
    phase: Phase,
    /// Requests that use the model.
    users: usize,
    /// Tickets of the waiting requests.
    waiting: Vec<u64>,
    /// The latest granted ticket.
    latest: u64,
    /// The model is loaded and cannot serve any more requests.
    is_broken: bool,
}

impl Plan {
    /// Creates a plan in which no model is loaded. `bytes` gives the size of each model, at most `limit`.
    pub fn new(limit: usize, bytes: impl IntoIterator<Item = usize>) -> Plan {
        let mut plan = Plan { limit, models: Vec::new(), queue: VecDeque::new(), closing: Vec::new(), tickets: 0 };
        bytes.into_iter().for_each(|bytes| plan.add(bytes));
        plan
    }

    /// One more model, of at most `limit` bytes. It is not loaded.
    pub fn add(&mut self, bytes: usize) {
        let waiting = Vec::new();
        self.models.push(Slot { bytes, phase: Phase::Out, users: 0, waiting, latest: 0, is_broken: false });
    }

    /// Whether a request gets a model immediately.
    pub fn is_open(&self, model: usize) -> bool {
        let slot = &self.models[model];
        slot.phase == Phase::Loaded && !slot.is_broken && !self.closing.contains(&model)
    }

    /// Requests that wait for a model.
    pub fn waiting(&self, model: usize) -> usize {
        self.models[model].waiting.len()
    }

    /// Bytes of all models that are not unloaded.
    pub fn bytes(&self) -> usize {
        self.models.iter().filter(|slot| slot.phase != Phase::Out).map(|slot| slot.bytes).sum()
    }

    /// Requests a model. Returns the ticket of the request.
    pub fn ask(&mut self, model: usize) -> (u64, Vec<Effect>) {
        self.tickets += 1;
        let slot = &mut self.models[model];
        slot.waiting.push(self.tickets);
        if slot.phase != Phase::Loading && !self.queue.contains(&model) {
            self.queue.push_back(model);
        }
        (self.tickets, self.settle())
    }

    /// Cancels a waiting request.
    pub fn cancel(&mut self, model: usize, ticket: u64) -> Vec<Effect> {
        self.models[model].waiting.retain(|&waiting| waiting != ticket);
        self.settle()
    }

    /// Ends the use of a model by one request.
    pub fn release(&mut self, model: usize) -> Vec<Effect> {
        let users = &mut self.models[model].users;
        *users = users.saturating_sub(1);
        self.settle()
    }

    pub fn loaded(&mut self, model: usize) -> Vec<Effect> {
        self.models[model].phase = Phase::Loaded;
        let mut effects = self.grant(model);
        effects.extend(self.settle());
        effects
    }

    /// Records that a load has failed. Returns the tickets of the waiting requests.
    pub fn failed(&mut self, model: usize) -> (Vec<u64>, Vec<Effect>) {
        self.models[model].phase = Phase::Out;
        (mem::take(&mut self.models[model].waiting), self.settle())
    }

    pub fn unloaded(&mut self, model: usize) -> Vec<Effect> {
        let slot = &mut self.models[model];
        (slot.phase, slot.is_broken) = (Phase::Out, false);
        self.settle()
    }

    /// Records that a loaded model cannot serve any more requests. It is unloaded, and loaded again on demand.
    pub fn retire(&mut self, model: usize) -> Vec<Effect> {
        let slot = &mut self.models[model];
        slot.is_broken = slot.phase == Phase::Loaded;
        self.settle()
    }

    /// Removes all waiting requests, so that nothing is loaded or unloaded. Returns their tickets.
    pub fn clear(&mut self) -> Vec<u64> {
        self.queue.clear();
        self.closing.clear();
        self.models.iter_mut().flat_map(|slot| mem::take(&mut slot.waiting)).collect()
    }

    fn settle(&mut self) -> Vec<Effect> {
        let models = &self.models;
        self.queue.retain(|&model| !models[model].waiting.is_empty());
        let next = self.queue.iter().copied().find(|&model| self.models[model].phase == Phase::Out);
        self.closing = next.map_or_else(Vec::new, |next| self.victims(next));
        let (open, rest) = self.queue.iter().copied().partition::<Vec<_>, _>(|&model| self.is_open(model));
        self.queue = rest.into();
        let mut effects: Vec<Effect> = open.into_iter().flat_map(|model| self.grant(model)).collect();
        effects.extend(self.work(next));
        effects
    }

    /// Loads or unloads one model at a time.
    fn work(&mut self, next: Option<usize>) -> Option<Effect> {
        if self.models.iter().any(|slot| matches!(slot.phase, Phase::Loading | Phase::Unloading)) {
            return None;
        }
        let is_idle = |slot: &Slot| slot.phase == Phase::Loaded && slot.users == 0;
        let broken = self.models.iter().position(|slot| slot.is_broken && is_idle(slot));
        let victim = || self.closing.iter().copied().find(|&model| is_idle(&self.models[model]));
        if let Some(model) = broken.or_else(victim) {
            self.models[model].phase = Phase::Unloading;
            return Some(Effect::Unload(model));
        }
        let next = next.filter(|&next| self.models[next].bytes <= self.limit.saturating_sub(self.bytes()))?;
        self.models[next].phase = Phase::Loading;
        self.queue.retain(|&model| model != next);
        Some(Effect::Load(next))
    }

    /// The models to unload to make room for another one.
    fn victims(&self, next: usize) -> Vec<usize> {
        let has_phase = |phase| move |slot: &&Slot| slot.phase == phase;
        // The free room is known only after a pending load has succeeded or failed.
        if self.models.iter().any(|slot| slot.phase == Phase::Loading) {
            return Vec::new();
        }
        let leaving: usize = self.models.iter().filter(has_phase(Phase::Unloading)).map(|slot| slot.bytes).sum();
        let mut used = self.bytes() - leaving;
        let mut loaded: Vec<usize> =
            (0..self.models.len()).filter(|&model| self.models[model].phase == Phase::Loaded).collect();
        // Only grants change the order, so a closed model remains the one to unload.
        loaded.sort_by_key(|&model| (self.models[model].users > 0, self.models[model].latest));
        let room = self.limit.saturating_sub(self.models[next].bytes);
        let leaves = |model: &usize| {
            let is_full = used > room;
            used -= if is_full { self.models[*model].bytes } else { 0 };
            is_full
        };
        loaded.into_iter().take_while(leaves).collect()
    }

    /// Grants a model to the requests that wait for it.
    fn grant(&mut self, model: usize) -> Vec<Effect> {
        let slot = &mut self.models[model];
        let tickets = mem::take(&mut slot.waiting);
        slot.users += tickets.len();
        slot.latest = tickets.iter().copied().fold(slot.latest, u64::max);
        tickets.into_iter().map(|ticket| Effect::Grant { model, ticket }).collect()
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
