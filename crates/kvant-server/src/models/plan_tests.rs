//! Simulations of requests, loads and failures that check the invariants after each event.

use super::*;

/// Random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }
}

/// A model of the expected state, independent of the plan.
struct World {
    plan: Plan,
    limit: usize,
    bytes: Vec<usize>,
    /// Models that are loaded, or are being loaded or unloaded.
    resident: Vec<bool>,
    broken: Vec<bool>,
    users: Vec<usize>,
    /// Waiting tickets and their models.
    waiting: Vec<(u64, usize)>,
    /// The latest granted ticket of each model.
    latest: Vec<u64>,
    /// The pending load or unload.
    work: Option<Effect>,
    loads: usize,
}

impl World {
    fn new(limit: usize, bytes: &[usize]) -> World {
        let (plan, count) = (Plan::new(limit, bytes.iter().copied()), bytes.len());
        World {
            plan,
            limit,
            bytes: bytes.to_vec(),
            resident: vec![false; count],
            broken: vec![false; count],
            users: vec![0; count],
            waiting: Vec::new(),
            latest: vec![0; count],
            work: None,
            loads: 0,
        }
    }

    fn ask(&mut self, model: usize) -> u64 {
        let (ticket, effects) = self.plan.ask(model);
        self.waiting.push((ticket, model));
        self.run(effects);
        ticket
    }

    fn cancel(&mut self, index: usize) {
        let (ticket, model) = self.waiting.remove(index);
        let effects = self.plan.cancel(model, ticket);
        self.run(effects);
    }

    fn release(&mut self, model: usize) {
        self.users[model] -= 1;
        let effects = self.plan.release(model);
        self.run(effects);
    }

    fn retire(&mut self, model: usize) {
        self.broken[model] |= self.plan.models[model].phase == Phase::Loaded;
        let effects = self.plan.retire(model);
        self.run(effects);
    }

    /// Ends the pending load or unload.
    fn finish(&mut self, succeeds: bool) {
        let effects = match self.work.take() {
            Some(Effect::Load(model)) if succeeds => self.plan.loaded(model),
            Some(Effect::Load(model)) => {
                let (tickets, effects) = self.plan.failed(model);
                let mut expected: Vec<u64> =
                    self.waiting.iter().filter(|(_, of)| *of == model).map(|(ticket, _)| *ticket).collect();
                expected.sort_unstable();
                assert_eq!(tickets, expected, "all that wait learn of the failure");
                self.waiting.retain(|(_, of)| *of != model);
                self.resident[model] = false;
                effects
            }
            Some(Effect::Unload(model)) => {
                (self.resident[model], self.broken[model]) = (false, false);
                self.plan.unloaded(model)
            }
            _ => return,
        };
        self.run(effects);
    }

    fn run(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Grant { model, ticket } => {
                    let at = self.waiting.iter().position(|&waiting| waiting == (ticket, model));
                    self.waiting.remove(at.expect("a ticket is granted once, and not after its end"));
                    assert!(self.resident[model] && !self.broken[model]);
                    self.users[model] += 1;
                    self.latest[model] = self.latest[model].max(ticket);
                    continue;
                }
                Effect::Load(model) => {
                    assert!(!self.resident[model], "a model is loaded once");
                    assert!(self.waiting.iter().any(|(_, of)| *of == model), "nobody waits for it");
                    self.resident[model] = true;
                    self.loads += 1;
                }
                Effect::Unload(model) => self.check_unload(model),
            }
            assert_eq!(self.work.replace(effect), None, "one at a time");
        }
        let used: usize = (0..self.bytes.len()).filter(|&of| self.resident[of]).map(|of| self.bytes[of]).sum();
        assert_eq!(used, self.plan.bytes());
        assert!(used <= self.limit, "{used} of {}", self.limit);
    }

    fn check_unload(&self, model: usize) {
        assert!(self.resident[model]);
        assert_eq!(self.users[model], 0, "a model with requests is not put out");
        if self.broken[model] {
            return;
        }
        assert!(self.waiting.iter().any(|(_, of)| !self.resident[*of]), "nobody needs the room");
        let is_loading = |of: usize| self.work == Some(Effect::Load(of));
        for other in (0..self.bytes.len()).filter(|&of| self.resident[of] && !self.broken[of] && !is_loading(of)) {
            let is_idle = self.users[other] == 0;
            assert!(!is_idle || self.latest[model] <= self.latest[other], "the least recently used one leaves first");
        }
    }
}

#[test]
fn random_requests_loads_and_failures() {
    for seed in 1..=300 {
        let mut random = Random(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(seed));
        let limit = 10 + random.below(20);
        let bytes: Vec<usize> = (0..2 + random.below(5)).map(|_| 1 + random.below(limit)).collect();
        let mut world = World::new(limit, &bytes);
        for _ in 0..400 {
            let model = random.below(bytes.len());
            match random.below(10) {
                0..=2 => drop(world.ask(model)),
                3..=5 if world.users[model] > 0 => world.release(model),
                6 if !world.waiting.is_empty() => world.cancel(random.below(world.waiting.len())),
                7..=8 => world.finish(random.below(8) > 0),
                9 if random.below(10) == 0 => world.retire(model),
                _ => {}
            }
        }
        // If requests end and loads succeed, no request waits forever.
        for _ in 0..200 {
            world.finish(true);
            for model in 0..bytes.len() {
                while world.users[model] > 0 {
                    world.release(model);
                }
            }
        }
        assert_eq!((&world.waiting[..], &world.work), (&[][..], &None), "seed {seed}");
    }
}

/// A model in constant use does not keep another one out.
#[test]
fn a_busy_model_makes_room() {
    let mut world = World::new(10, &[6, 6]);
    world.ask(0);
    world.finish(true);
    world.ask(1);
    // Model 0 always has a running request: a new one arrives before the old one ends.
    for _ in 0..3 {
        world.ask(0);
    }
    assert_eq!((world.users[0], world.waiting.len()), (1, 4));
    world.release(0);
    assert_eq!(world.work, Some(Effect::Unload(0)));
    world.finish(true);
    world.finish(true);
    assert_eq!((world.users[1], world.waiting.len()), (1, 3));
    // Model 0 is loaded again in its turn.
    world.release(1);
    world.finish(true);
    world.finish(true);
    assert_eq!((world.users[0], world.waiting.len(), world.loads), (3, 0, 3));
}

#[test]
fn a_cancelled_request_reopens_the_closed_model() {
    let mut world = World::new(10, &[6, 6]);
    world.ask(0);
    world.finish(true);
    world.ask(1);
    world.ask(0);
    assert_eq!(world.waiting.len(), 2);
    world.cancel(0);
    assert_eq!((world.users[0], world.waiting.len(), &world.work), (2, 0, &None));
}

#[test]
fn requests_at_once_load_a_model_once() {
    let mut world = World::new(10, &[6, 4]);
    let tickets: Vec<u64> = (0..5).map(|_| world.ask(0)).collect();
    assert_eq!((tickets, world.plan.waiting(0)), ((1..=5).collect(), 5));
    world.finish(true);
    assert_eq!((world.loads, world.users[0]), (1, 5));
}

#[test]
fn the_last_client_may_leave_during_the_load() {
    let mut world = World::new(10, &[6, 6]);
    world.ask(0);
    world.cancel(0);
    world.finish(true);
    assert_eq!((world.plan.models[0].phase, world.users[0]), (Phase::Loaded, 0));
    world.ask(0);
    assert_eq!((world.loads, world.users[0]), (1, 1));
}

#[test]
fn no_request_waits_after_the_end() {
    let mut world = World::new(10, &[6, 6]);
    world.ask(0);
    world.finish(true);
    let waiting = world.ask(1);
    assert_eq!(world.plan.clear(), [waiting]);
    world.waiting.clear();
    world.release(0);
    assert_eq!((world.work, world.plan.models[0].phase), (None, Phase::Loaded));
}
