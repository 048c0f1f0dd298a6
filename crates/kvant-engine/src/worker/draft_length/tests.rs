//! Simulations with planted acceptance and planted times.

use super::*;

/// Maximum drafts.
const MAX: usize = 8;

/// Seconds of a step by rows, and of a drafter's pass.
#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    step: fn(usize) -> f64,
    proposal: f64,
}

/// Weights dominate; passes are recorded for some sizes.
const GPU: Model =
    Model { name: "GPU", step: |rows| 0.01 + 0.00004 * rows.next_multiple_of(8) as f64, proposal: 0.0006 };
/// Each row costs.
const CPU: Model = Model { name: "CPU", step: |rows| 0.01 + 0.004 * rows as f64, proposal: 0.0015 };
/// A row costs as much as a step.
const STEEP: Model = Model { name: "steep", step: |rows| 0.01 * rows as f64, proposal: 0.002 };

pub(in crate::worker) struct Random(pub u64);

impl Random {
    /// A number from 0 to 1.
    pub fn share(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as f64 / (1u64 << 31) as f64
    }

    /// A measurement: noise of ±5 %, and interruptions.
    fn measured(&mut self, seconds: f64) -> f64 {
        let factor = if self.share() < 0.02 { 4.0 } else { 0.95 + 0.1 * self.share() };
        seconds * factor
    }
}

/// Requests whose drafts are right with planted shares.
struct Simulation {
    model: Model,
    is_drafter: bool,
    shares: Vec<f64>,
    lengths: DraftLengths,
    own: Vec<Acceptance>,
    random: Random,
}

impl Simulation {
    fn new(model: Model, is_drafter: bool, shares: Vec<f64>) -> Simulation {
        let mut lengths = DraftLengths::new(shares.len() * (1 + MAX));
        let mut random = Random(7);
        for rows in [1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 512].into_iter().filter(|&rows| rows <= lengths.max_rows) {
            // The minimum of some repetitions.
            lengths.steps.set(rows, (0..3).map(|_| random.measured((model.step)(rows))).fold(f64::MAX, f64::min));
        }
        let own = vec![Acceptance::default(); shares.len()];
        Simulation { model, is_drafter, shares, lengths, own, random }
    }

    fn class(&self) -> Class {
        if self.is_drafter { Class::drafter() } else { Class::lookup(2) }
    }

    /// Runs steps. Returns tokens, seconds, and drafts.
    fn run(&mut self, steps: usize) -> (f64, f64, usize) {
        let (mut tokens, mut seconds, mut drafts) = (0.0, 0.0, 0);
        let (class, batch) = (self.class(), self.shares.len());
        for _ in 0..steps {
            let offer = |acceptance| Offer { acceptance, class, skipped: 0, available: MAX };
            let mut offers: Vec<Offer> = self.own.iter_mut().map(offer).collect();
            let chosen = self.lengths.choose(batch, batch, &mut offers);
            let rows = batch + chosen.iter().sum::<usize>();
            let depth = chosen.iter().copied().max().unwrap_or(0);
            let (step, proposal) = ((self.model.step)(rows), if self.is_drafter { self.model.proposal } else { 0.0 });
            seconds += step + proposal * depth as f64;
            self.lengths.steps.record(rows, self.random.measured(step));
            if self.is_drafter && depth > 0 {
                self.lengths.proposals.record(depth, self.random.measured(proposal * depth as f64));
            }
            for (index, &count) in chosen.iter().enumerate() {
                drafts += count;
                tokens += 1.0;
                // The text shows whether a lookup without drafts was right.
                let seen = if self.is_drafter { count } else { count.max(1) };
                for depth in 0..seen {
                    let is_right = self.random.share() < self.shares[index];
                    self.lengths.observe(&mut self.own[index], class.after(depth), is_right);
                    if !is_right {
                        break;
                    }
                    tokens += f64::from(u8::from(depth < count));
                }
            }
        }
        (tokens, seconds, drafts)
    }

    /// Tokens per second without drafts, and with the best fixed numbers of them.
    fn bounds(&self) -> (f64, f64) {
        let batch = self.shares.len();
        let mut all: Vec<(f64, usize)> = Vec::new();
        for share in &self.shares {
            all.extend((1..=MAX).map(|depth| (share.powi(depth as i32), depth)));
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        let none = batch as f64 / (self.model.step)(batch);
        let mut best = none;
        for max in 1..=MAX {
            let proposal = if self.is_drafter { self.model.proposal * max as f64 } else { 0.0 };
            let mut tokens = batch as f64;
            for ((share, _), count) in all.iter().filter(|(_, depth)| *depth <= max).zip(1..) {
                tokens += share;
                best = f64::max(best, tokens / ((self.model.step)(batch + count) + proposal));
            }
        }
        (none, best)
    }
}

/// Never below 0.97 of no drafts, and near the best numbers for the planted shares and times.
#[test]
fn lengths_are_near_the_optimum() {
    for model in [GPU, CPU, STEEP] {
        for is_drafter in [false, true] {
            for batch in [1, 2, 4, 16, 64] {
                for shares in [&[0.8][..], &[0.6], &[0.3], &[0.0], &[0.9, 0.1]] {
                    let all = shares.iter().copied().cycle().take(batch).collect();
                    let mut simulation = Simulation::new(model, is_drafter, all);
                    let (none, best) = simulation.bounds();
                    let steps = 400 + 1600 / batch;
                    let (tokens, seconds, _) = simulation.run(steps);
                    let rate = tokens / seconds;
                    let case = format!("{}, drafter {is_drafter}, batch {batch}, {shares:?}", model.name);
                    println!("{case}: {:.3} of none, {:.3} of the best {:.2}", rate / none, rate / best, best / none);
                    assert!(rate > 0.97 * none, "{case}: {:.3} of no drafts", rate / none);
                    assert!(rate > 0.9 * best, "{case}: {:.3} of the best", rate / best);
                }
            }
        }
    }
}

/// A short text gains and loses little from the prior.
#[test]
fn a_first_text_loses_little() {
    for (model, shares) in [(GPU, 0.0), (CPU, 0.0), (STEEP, 0.0)] {
        for is_drafter in [false, true] {
            let mut simulation = Simulation::new(model, is_drafter, vec![shares]);
            let (none, _) = simulation.bounds();
            let (tokens, seconds, drafts) = simulation.run(100);
            let share = tokens / seconds / none;
            assert!(share > 0.95, "{}, drafter {is_drafter}: {share:.3}, {drafts} drafts", model.name);
        }
    }
}

/// A first draft that is wrong does not end drafts that pay: the 27B hybrid's times on an H200.
#[test]
fn a_first_wrong_draft_ends_nothing() {
    let step = |rows: usize| {
        [0.00508, 0.00664, 0.00713, 0.00722, 0.00773][rows.min(5) - 1] + 0.0002 * rows.saturating_sub(5) as f64
    };
    let model = Model { name: "hybrid", step, proposal: 0.00042 };
    let mut total = 0.0;
    let runs = 40;
    for seed in 0..runs {
        let mut simulation = Simulation::new(model, true, vec![0.0]);
        simulation.random = Random(seed);
        simulation.run(1);
        simulation.shares = vec![0.6];
        let (none, best) = simulation.bounds();
        assert!(best > 1.2 * none);
        let (tokens, seconds, _) = simulation.run(150);
        total += tokens / seconds / best;
    }
    let share = total / runs as f64;
    assert!(share > 0.93, "{share:.3}");
}

/// Acceptance that changes is noticed, up and down, even without drafts.
#[test]
fn lengths_follow_the_text() {
    for (model, is_drafter) in [(GPU, true), (CPU, true), (CPU, false)] {
        let mut simulation = Simulation::new(model, is_drafter, vec![0.0]);
        simulation.run(500);
        for share in [0.9, 0.0, 0.9] {
            simulation.shares = vec![share];
            let (none, best) = simulation.bounds();
            simulation.run(400);
            let (tokens, seconds, drafts) = simulation.run(1000);
            let rate = tokens / seconds;
            assert!(rate > 0.97 * none && rate > 0.9 * best, "{}: {share}: {:.3}, {drafts}", model.name, rate / best);
        }
    }
}

/// A wrong time of a step that never runs is corrected, since drafts are tried at times.
#[test]
fn wrong_times_are_corrected() {
    let mut simulation = Simulation::new(GPU, false, vec![0.9]);
    (2..9).for_each(|rows| simulation.lengths.steps.set(rows, 0.03));
    simulation.run(2000);
    let (_, best) = simulation.bounds();
    let (tokens, seconds, _) = simulation.run(500);
    assert!(tokens / seconds > 0.9 * best, "{:.3}", tokens / seconds / best);
}

#[test]
fn drafts_fit_into_the_step() {
    let mut lengths = DraftLengths::new(6);
    lengths.steps.set(1, 1.0);
    lengths.steps.set(6, 1.0);
    let mut own = vec![Acceptance::default(); 4];
    own.iter_mut().for_each(|own| (0..20).for_each(|_| lengths.observe(own, Class::drafter(), true)));
    let offer = |acceptance| Offer { acceptance, class: Class::drafter(), skipped: 0, available: MAX };
    let mut offers: Vec<Offer> = own.iter_mut().map(offer).collect();
    assert_eq!(lengths.choose(4, 4, &mut offers).iter().sum::<usize>(), 2);
    assert_eq!(lengths.choose(6, 4, &mut offers), [0; 4]);
    assert!(lengths.choose(9, 4, &mut []).is_empty());
}

/// Tokens that are being sampled count as predictions: drafts after an improbable one are improbable.
#[test]
fn drafts_after_skipped_predictions() {
    let mut lengths = DraftLengths::new(64);
    [1, 2, 4, 8].into_iter().for_each(|rows| lengths.steps.set(rows, 1.0 + 0.2 * rows as f64));
    let mut own = Acceptance::default();
    for _ in 0..50 {
        lengths.observe(&mut own, Class::lookup(2), false);
        lengths.observe(&mut own, Class::lookup(3), true);
    }
    let mut choose = |length, skipped| {
        let offer = Offer { acceptance: &mut own, class: Class::lookup(length), skipped, available: 4 };
        lengths.credit = -1.0;
        lengths.choose(1, 1, &mut [offer])[0]
    };
    assert_eq!((choose(2, 1), choose(2, 0)), (0, 0));
    assert!(choose(3, 0) > 0 && choose(3, 1) > 0);
}
