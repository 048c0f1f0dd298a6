//! Simulations of the scheduler: arrivals, cancellations, pauses, preemptions, chunks, drafts and prefix hits do not
//! change the output of a request.

mod memory;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use kvant_engine::scheduler::{EndReason, NewTask, PlanRow, Scheduler, SchedulerOptions, StepPlan};
use memory::{Pages, STOP, StepPages, accept, solo};
use proptest::prelude::*;

/// Random numbers: SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % limit.max(1) as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

#[derive(Clone, Copy, Debug)]
struct Load {
    requests: usize,
    pages: usize,
    page_tokens: usize,
    sequences: usize,
    step_tokens: usize,
    longest_prompt: usize,
    longest_answer: usize,
    /// Requests per 100 steps.
    arrivals: usize,
    /// In percent of requests.
    cancelled: usize,
    paused: usize,
    drafted: usize,
    /// Whether the model has recurrent states.
    has_states: bool,
    /// Steps that are planned before the result of the first one is known.
    depth: usize,
    seed: u64,
}

const LOAD: Load = Load {
    requests: 5000,
    pages: 64,
    page_tokens: 8,
    sequences: 8,
    step_tokens: 40,
    longest_prompt: 60,
    longest_answer: 30,
    arrivals: 60,
    cancelled: 5,
    paused: 5,
    drafted: 20,
    has_states: false,
    depth: 1,
    seed: 1,
};

/// A live request.
struct Live {
    prompt: Vec<u32>,
    max_tokens: usize,
    output: Vec<u32>,
    arrived: u64,
    /// The step by which it must have ended, if it is never paused and no request of higher priority arrives.
    deadline: u64,
    cancel_at: Option<u64>,
    pause: Option<(u64, u64)>,
    scores: Option<Vec<bool>>,
}

struct Simulation {
    load: Load,
    random: Random,
    pages: Pages,
    scheduler: Scheduler<Pages>,
    live: HashMap<u64, Live>,
    planned: VecDeque<StepPlan<StepPages>>,
    /// The tokens that the latest step has sampled.
    drawn: HashMap<u64, u32>,
    step: u64,
    next: u64,
    ended: usize,
    documents: Vec<Vec<u32>>,
    /// The total work of all requests that have arrived, after each step.
    arrived_work: u64,
    work_by_step: Vec<u64>,
    seen: Seen,
}

/// The steps in which requests of the highest priority can overtake one of the lowest: 4 levels apart.
const MAX_OVERTAKING: u64 = 4 * NewTask::PATIENCE as u64;

/// Events that a simulation must have covered to be meaningful.
#[derive(Debug, Default)]
struct Seen {
    out_of_pages: usize,
    finished: usize,
    drafts_right: usize,
    max_running: usize,
    /// Tokens found in the prefix cache by requests with recurrent states.
    hybrid_hits: u64,
    hybrid_drafts_right: usize,
}

impl Simulation {
    fn new(load: Load) -> Simulation {
        let mut random = Random(load.seed);
        let documents = (0..12).map(|_| {
            let len = random.below(load.longest_prompt);
            (0..len).map(|_| random.below(40) as u32).collect()
        });
        let documents = documents.collect();
        let pages = Pages::new(load.pages, load.page_tokens, load.has_states);
        let scheduler = Scheduler::new(pages.clone(), SchedulerOptions::new(load.sequences, load.step_tokens));
        Simulation {
            load,
            random,
            pages,
            scheduler,
            live: HashMap::new(),
            planned: VecDeque::new(),
            drawn: HashMap::new(),
            step: 0,
            next: 0,
            ended: 0,
            documents,
            arrived_work: 0,
            work_by_step: Vec::new(),
            seen: Seen::default(),
        }
    }

    fn run(mut self) -> Seen {
        while self.ended < self.load.requests {
            self.arrive();
            self.disturb();
            self.plan();
            while self.planned.len() >= self.load.depth.max(1) || !self.planned.is_empty() && self.random.chance(20) {
                self.execute();
            }
            self.step += 1;
            self.check();
        }
        while !self.planned.is_empty() {
            self.execute();
        }
        let counts = self.scheduler.counts();
        assert_eq!((counts.running, counts.waiting, self.live.len()), (0, 0, 0));
        self.pages.check_unused();
        assert!(counts.prefix_hits <= counts.prefix_queries);
        if self.load.has_states {
            (self.seen.hybrid_hits, self.seen.hybrid_drafts_right) = (counts.prefix_hits, self.seen.drafts_right);
        }
        self.seen
    }

    fn arrive(&mut self) {
        let mut count = self.load.arrivals / 100 + usize::from(self.random.chance(self.load.arrivals % 100));
        // Bursts of requests.
        if self.random.below(200) == 0 {
            count += self.random.below(40);
        }
        for _ in 0..count.min(self.load.requests - self.next as usize) {
            let (random, load) = (&mut self.random, &self.load);
            let document = &self.documents[random.below(self.documents.len())];
            let mut prompt = document[..document.len().min(random.below(load.longest_prompt))].to_vec();
            let max = if random.chance(3) { load.longest_prompt * 4 } else { 20 };
            let more = 1 + random.below(max);
            prompt.extend((0..more).map(|_| random.below(40) as u32));
            let max_tokens = if random.chance(2) { 0 } else { 1 + random.below(load.longest_answer) };
            let priority = if random.chance(10) { random.below(5) as i8 - 2 } else { 0 };
            let salt = match random.below(10) {
                0 => None,
                1 => Some(Arc::from(&b"another"[..])),
                _ => Some(Arc::default()),
            };
            let all = prompt.len();
            // Prompt tokens whose results are needed: all except the last, all, or the last.
            let (wanted, max_tokens) = match random.below(12) {
                0 => (0..all - 1, max_tokens),
                1 => (0..all, 0),
                2 => (all - 1..all, 0),
                _ => (0..0, max_tokens),
            };
            let id = self.next;
            let new = NewTask::new(id, prompt.clone(), max_tokens).priority(priority).salt(salt).wanted(wanted.clone());
            let until = |random: &mut Random| 1 + random.below(100) as u64;
            let cancel_at = random.chance(load.cancelled).then(|| self.step + until(random));
            let pause = random.chance(load.paused).then(|| {
                let at = self.step + until(random);
                (at, at + until(random))
            });
            // Each step works for the first request in the order. A request therefore waits only for the work of
            // requests that can precede it; preempted work is repeated.
            let work = |prompt: &[u32], max_tokens: usize| (prompt.len() + 2 * max_tokens) as u64 * 4;
            let before: u64 = self.live.values().map(|live| work(&live.prompt, live.max_tokens)).sum();
            let own = work(&prompt, max_tokens);
            let deadline = self.step + 5000 + before + own;
            self.arrived_work += own;
            let scores = (!wanted.is_empty()).then(|| (0..wanted.end).map(|at| at < wanted.start).collect());
            let live =
                Live { prompt, max_tokens, output: Vec::new(), arrived: self.step, deadline, cancel_at, pause, scores };
            self.live.insert(id, live);
            self.scheduler.add(new);
            self.next += 1;
        }
    }

    fn disturb(&mut self) {
        let step = self.step;
        let cancelled: Vec<u64> =
            self.live.iter().filter(|(_, live)| live.cancel_at == Some(step)).map(|(id, _)| *id).collect();
        for id in cancelled {
            assert!(self.scheduler.cancel(id));
            assert!(!self.scheduler.cancel(id));
            self.live.remove(&id);
            self.ended += 1;
        }
        for (&id, live) in &self.live {
            if let Some((from, to)) = live.pause
                && (from == step || to == step)
            {
                self.scheduler.pause(id, from == step);
            }
        }
        if self.load.drafted > 0 {
            for (&id, live) in &self.live {
                if self.random.chance(self.load.drafted) {
                    // Correct drafts, sometimes with an error.
                    let mut drafts = solo(&live.prompt, live.output.len() + 1 + self.random.below(6));
                    drafts.drain(..live.output.len().min(drafts.len()));
                    if let (true, Some(last)) = (self.random.chance(50), drafts.last_mut()) {
                        *last ^= 1;
                    }
                    self.scheduler.propose(id, &drafts);
                }
            }
        }
    }

    fn plan(&mut self) {
        let plan = self.scheduler.schedule().expect("this storage never fails");
        self.collect_ended();
        let Some(plan) = plan else {
            // An engine without a step waits for new requests.
            let waits = self.live.iter().find(|(_, live)| live.pause.is_none());
            assert!(waits.is_none() || !self.planned.is_empty(), "request {:?} waits", waits.map(|(id, _)| id));
            return;
        };
        assert!(plan.tokens.len() <= self.load.step_tokens.max(self.load.sequences + 1), "budget");
        assert!(plan.rows.len() <= self.load.sequences);
        assert_eq!(plan.rows.len(), plan.step.lists.len());
        let mut at = 0;
        for row in &plan.rows {
            assert_eq!(row.tokens.start, at, "rows follow one another");
            assert!(row.tokens.end > at && row.draws <= row.tokens.len());
            assert!(row.logits.start >= row.tokens.start && row.logits.end <= row.tokens.end);
            at = row.tokens.end;
            assert!(row.draws == 0 || row.logits.start <= row.drawn().start && row.logits.end == row.tokens.end);
            assert!(row.draws <= 1 || row.tokens.len() == row.draws, "tokens before drafts are computed again");
            self.score(row);
        }
        assert_eq!(at, plan.tokens.len());
        self.seen.max_running = self.seen.max_running.max(plan.rows.len());
        self.planned.push_back(plan);
    }

    fn score(&mut self, row: &PlanRow) {
        let Some(scores) = self.live.get_mut(&row.id).and_then(|live| live.scores.as_mut()) else { return };
        for index in row.logits.clone() {
            if let Some(score) = scores.get_mut(row.position + index - row.tokens.start) {
                *score = true;
            }
        }
    }

    fn execute(&mut self) {
        let Some(plan) = self.planned.pop_front() else { return };
        let results = self.pages.run(&plan, &self.drawn);
        self.drawn.clear();
        let mut applied = Vec::new();
        for (row, draws) in results {
            let result = accept(&row, &plan.tokens, &draws);
            self.seen.drafts_right += result.tokens.len().saturating_sub(1);
            if let Some(&token) = result.tokens.last() {
                self.drawn.insert(row.id, token);
            }
            if let Some(live) = self.live.get_mut(&row.id) {
                live.output.extend(&result.tokens);
            }
            applied.push(result);
        }
        self.scheduler.apply(applied).expect("this storage never fails");
        self.collect_ended();
    }

    fn collect_ended(&mut self) {
        for ended in self.scheduler.take_ended() {
            let live = self.live.remove(&ended.id).expect("a request ends once");
            let expected = solo(&live.prompt, live.max_tokens);
            let context = (ended.id, ended.reason);
            match ended.reason {
                EndReason::Last => assert!(live.output == expected && live.output.last() == Some(&STOP), "{context:?}"),
                EndReason::Length => {
                    assert!(live.output == expected && live.output.len() == live.max_tokens, "{context:?}");
                }
                EndReason::OutOfPages => {
                    self.seen.out_of_pages += 1;
                    assert!(expected.starts_with(&live.output), "{context:?}");
                    let need = live.prompt.len() + live.output.len() + 1;
                    assert!(need > (self.load.pages - 1) * self.load.page_tokens, "{context:?}");
                }
            }
            if let (Some(scores), true) = (live.scores, ended.reason != EndReason::OutOfPages) {
                assert!(scores.iter().all(|&scored| scored), "{context:?}");
            }
            self.seen.finished += usize::from(ended.reason != EndReason::OutOfPages);
            self.ended += 1;
        }
    }

    fn check(&mut self) {
        self.pages.check();
        self.work_by_step.push(self.arrived_work);
        if !self.step.is_multiple_of(16) {
            return;
        }
        // Later requests of higher priority.
        let work = |step: u64| self.work_by_step[(step as usize).min(self.work_by_step.len() - 1)];
        let after = |live: &Live| work(live.arrived + MAX_OVERTAKING) - work(live.arrived.saturating_sub(1));
        let late = self.live.iter().find(|(_, live)| live.pause.is_none() && live.deadline + after(live) < self.step);
        if let Some((id, live)) = late {
            panic!("request {id} of step {} has not ended at step {}", live.arrived, self.step);
        }
    }
}

/// The loads of the long simulation.
fn loads() -> Vec<Load> {
    let mut loads = Vec::new();
    for depth in [1, 2] {
        for seed in 0..2 {
            let load = Load { depth, seed: seed * 7 + depth as u64, ..LOAD };
            loads.extend([
                load,
                // Very few pages: constant preemption, and requests that never fit.
                Load { pages: 24, arrivals: 25, ..load },
                // Prompts are computed in single tokens.
                Load { step_tokens: 9, arrivals: 25, ..load },
                // Very low load, and a load with all features at once.
                Load { arrivals: 5, ..load },
                Load { arrivals: 10_000, drafted: 0, ..load },
                Load { sequences: 1, step_tokens: 64, arrivals: 8, ..load },
                Load { sequences: 32, step_tokens: 256, pages: 200, arrivals: 300, page_tokens: 16, ..load },
                Load { cancelled: 60, paused: 40, ..load },
                Load { has_states: true, ..load },
                Load { has_states: true, pages: 24, step_tokens: 9, arrivals: 25, ..load },
            ]);
        }
    }
    loads
}

fn simulate(requests: usize) {
    let loads = loads();
    let each = requests / loads.len();
    let mut total = Seen::default();
    let mut ahead = 0;
    for load in loads {
        let seen = Simulation::new(Load { requests: each, ..load }).run();
        ahead += if load.depth > 1 { seen.drafts_right } else { 0 };
        total.finished += seen.finished;
        total.out_of_pages += seen.out_of_pages;
        total.hybrid_hits += seen.hybrid_hits;
        total.hybrid_drafts_right += seen.hybrid_drafts_right;
        total.drafts_right += seen.drafts_right;
        total.max_running = total.max_running.max(seen.max_running);
    }
    assert!(total.finished > requests / 2 && total.out_of_pages > 0 && total.drafts_right > 1000, "{total:?}");
    assert!(total.hybrid_hits > 1000 && total.hybrid_drafts_right > 1000, "{total:?}");
    assert_eq!(total.max_running, 32);
    assert!(ahead > 1000 && ahead < total.drafts_right, "{ahead} of {} drafts accepted at depth 2", total.drafts_right);
}

#[test]
fn outputs_equal_those_of_single_requests() {
    let all = std::env::var("KVANT_TEST_SCOPE").is_ok_and(|scope| scope == "all");
    simulate(if all { 1_000_000 } else { 100_000 });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_load(
        pages in 8usize..80,
        page_bits in 0u32..5,
        sequences in 1usize..20,
        step_tokens in 2usize..100,
        longest_prompt in 1usize..100,
        longest_answer in 1usize..40,
        arrivals in 1usize..300,
        (cancelled, paused, drafted) in (0usize..50, 0usize..50, 0usize..50),
        (depth, has_states) in (1usize..3, any::<bool>()),
        seed in any::<u64>(),
    ) {
        let load = Load {
            requests: 200, pages, page_tokens: 1 << page_bits, sequences, step_tokens, longest_prompt, longest_answer,
            arrivals, cancelled, paused, drafted, has_states, depth, seed,
        };
        Simulation::new(load).run();
    }
}
