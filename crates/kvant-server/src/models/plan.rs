//! Decides which model is loaded next and which one leaves. It knows neither clock, threads nor models.
//!
//! Requests ask for a model and use it until they release it. A model that is not loaded is put in a queue. The first
//! one of the queue is loaded when there is room for it. Otherwise models leave: idle ones first, those that were asked
//! for least recently. If these do not suffice, models in use are closed: new requests for them wait in the queue, and
//! they leave when their last request has ended. So no model waits for longer than the requests that run.

use std::{collections::VecDeque, mem};

/// Where a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Out,
    Loading,
    Loaded,
    Unloading,
}

/// An action that follows from a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// The request of a ticket uses the model from now on.
    Grant { model: usize, ticket: u64 },
    /// [`Plan::loaded`] or [`Plan::failed`] must follow.
    Load(usize),
    /// [`Plan::unloaded`] must follow.
    Unload(usize),
}

/// The models, and the requests that use them and wait for them.
#[derive(Debug)]
pub(super) struct Plan {
    /// Maximum bytes of all models that are loaded, or are being loaded or unloaded.
    limit: usize,
    models: Vec<Slot>,
    /// Models with waiting requests, except one that is being loaded. The first came first.
    queue: VecDeque<usize>,
    /// Models that leave to make room for the first one of the queue.
    closing: Vec<usize>,
    tickets: u64,
}

#[derive(Debug)]
struct Slot {
    bytes: usize,
    phase: Phase,
    /// Requests that use it.
    users: usize,
    /// The tickets of requests that wait for it.
    waiting: Vec<u64>,
    /// The latest ticket that was granted.
    latest: u64,
    /// It is loaded and can serve no more requests.
    is_broken: bool,
}

impl Plan {
    /// No model is loaded. Each of `bytes` is that of a model, at most `limit`.
    pub fn new(limit: usize, bytes: impl IntoIterator<Item = usize>) -> Plan {
        let slot =
            |bytes| Slot { bytes, phase: Phase::Out, users: 0, waiting: Vec::new(), latest: 0, is_broken: false };
        let models = bytes.into_iter().map(slot).collect();
        Plan { limit, models, queue: VecDeque::new(), closing: Vec::new(), tickets: 0 }
    }

    /// Whether a request gets a model at once.
    pub fn is_open(&self, model: usize) -> bool {
        let slot = &self.models[model];
        slot.phase == Phase::Loaded && !slot.is_broken && !self.closing.contains(&model)
    }

    /// Requests that wait for a model.
    pub fn waiting(&self, model: usize) -> usize {
        self.models[model].waiting.len()
    }

    /// Bytes of the models that are not out.
    pub fn bytes(&self) -> usize {
        self.models.iter().filter(|slot| slot.phase != Phase::Out).map(|slot| slot.bytes).sum()
    }

    /// A request asks for a model. Returns its ticket.
    pub fn ask(&mut self, model: usize) -> (u64, Vec<Effect>) {
        self.tickets += 1;
        let slot = &mut self.models[model];
        slot.waiting.push(self.tickets);
        if slot.phase != Phase::Loading && !self.queue.contains(&model) {
            self.queue.push_back(model);
        }
        (self.tickets, self.settle())
    }

    /// A request does not wait any longer.
    pub fn cancel(&mut self, model: usize, ticket: u64) -> Vec<Effect> {
        self.models[model].waiting.retain(|&waiting| waiting != ticket);
        self.settle()
    }

    /// A request does not use a model any longer.
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

    /// A model could not be loaded. Returns the tickets of the requests that have waited for it.
    pub fn failed(&mut self, model: usize) -> (Vec<u64>, Vec<Effect>) {
        self.models[model].phase = Phase::Out;
        (mem::take(&mut self.models[model].waiting), self.settle())
    }

    pub fn unloaded(&mut self, model: usize) -> Vec<Effect> {
        let slot = &mut self.models[model];
        (slot.phase, slot.is_broken) = (Phase::Out, false);
        self.settle()
    }

    /// A loaded model can serve no more requests: it leaves, and is loaded again when it is asked for.
    pub fn retire(&mut self, model: usize) -> Vec<Effect> {
        let slot = &mut self.models[model];
        slot.is_broken = slot.phase == Phase::Loaded;
        self.settle()
    }

    /// Nobody waits any longer, so that nothing is loaded or unloaded. Returns all tickets.
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

    /// Loads or unloads a model, one at a time.
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

    /// The models that leave to make room for another one.
    fn victims(&self, next: usize) -> Vec<usize> {
        let has_phase = |phase| move |slot: &&Slot| slot.phase == phase;
        // The result of a load decides about the room.
        if self.models.iter().any(|slot| slot.phase == Phase::Loading) {
            return Vec::new();
        }
        let leaving: usize = self.models.iter().filter(has_phase(Phase::Unloading)).map(|slot| slot.bytes).sum();
        let mut used = self.bytes() - leaving;
        let mut loaded: Vec<usize> =
            (0..self.models.len()).filter(|&model| self.models[model].phase == Phase::Loaded).collect();
        // Grants alone change the order: a model that is closed stays the one that leaves.
        loaded.sort_by_key(|&model| (self.models[model].users > 0, self.models[model].latest));
        let room = self.limit.saturating_sub(self.models[next].bytes);
        let leaves = |model: &usize| {
            let is_full = used > room;
            used -= if is_full { self.models[*model].bytes } else { 0 };
            is_full
        };
        loaded.into_iter().take_while(leaves).collect()
    }

    /// Lets the requests that wait for a model use it.
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
