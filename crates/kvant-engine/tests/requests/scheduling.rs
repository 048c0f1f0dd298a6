//! Measures the cost of scheduling.

use std::time::{Duration, Instant};

use crate::common::model;
use kvant_engine::scheduler::{NewTask, PoolStorage, RowResult, Scheduler, SchedulerOptions};
use kvant_models::{BatchDecoder, PoolOptions};

const ROWS: usize = 64;
const STEPS: usize = 400;

/// The scheduler's time in steps of 64 rows: planning with pages and page tables, and applying the result. The model
/// does not run.
struct Costs {
    schedule: Vec<Duration>,
    apply: Vec<Duration>,
}

/// Requests decode after prompts of `prompt` tokens; `waiting` more requests wait. Each gets `drafts` drafts, and one
/// of them is accepted.
fn costs(prompt: usize, waiting: u64, drafts: usize) -> Costs {
    let model = model();
    let longest = prompt + 2 * STEPS + 10;
    let pool = model.new_pool(&PoolOptions { sequences: 2 * ROWS, longest, ..PoolOptions::default() }).unwrap();
    let rows = ROWS * (1 + drafts);
    let decoder = BatchDecoder::new(&model, &pool, rows).unwrap();
    let storage = PoolStorage::new(pool, 2048, true).with_decoder(decoder, 1 + drafts);
    let mut scheduler = Scheduler::new(storage, SchedulerOptions::new(ROWS, 2048));
    for id in 0..ROWS as u64 + waiting {
        let tokens = (0..prompt as u32).map(|index| (index + id as u32) % 1000).collect();
        scheduler.add(NewTask::new(id, tokens, longest));
    }
    let mut costs = Costs { schedule: Vec::new(), apply: Vec::new() };
    while costs.apply.len() < STEPS {
        let started = Instant::now();
        let plan = scheduler.schedule().unwrap().unwrap();
        let planned = started.elapsed();
        let is_decoding = plan.rows.len() == ROWS && plan.rows.iter().all(|row| row.tokens.len() == 1 + drafts);
        let result = |row: &kvant_engine::scheduler::PlanRow| {
            let drafts = &plan.tokens[row.tokens.end - row.draws.saturating_sub(1)..row.tokens.end];
            let right = drafts.iter().copied().take(1);
            RowResult { id: row.id, tokens: right.chain([7]).take(row.draws).collect(), is_last: false }
        };
        let results: Vec<RowResult> = plan.rows.iter().map(result).collect();
        let started = Instant::now();
        scheduler.apply(results).unwrap();
        let applied = started.elapsed();
        assert_eq!(scheduler.take_ended(), []);
        if drafts > 0 {
            (0..ROWS as u64).for_each(|id| scheduler.propose(id, &[5; 8][..drafts]));
        }
        if is_decoding {
            costs.schedule.push(planned);
            costs.apply.push(applied);
        }
    }
    costs
}

/// Prints the medians, and checks the limit of 20 µs per step:
/// `cargo test -p kvant-engine --test requests -- --ignored --nocapture scheduling`.
#[test]
#[ignore = "measures"]
fn a_step_of_64_rows_is_scheduled_in_20_microseconds() {
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_nanos() as f64 / 1e3
    };
    let mut decode: f64 = 0.0;
    for (name, prompt, waiting, drafts) in [
        ("decode at 100 tokens", 100, 0, 0),
        ("decode at 1000 tokens", 1000, 0, 0),
        ("decode at 100 tokens, 200 requests wait", 100, 200, 0),
        ("two drafts each at 100 tokens", 100, 0, 2),
    ] {
        let mut costs = costs(prompt, waiting, drafts);
        let both: &mut Vec<Duration> = &mut costs.schedule.iter().zip(&costs.apply).map(|(a, b)| *a + *b).collect();
        let both = median(both);
        let (schedule, apply) = (median(&mut costs.schedule), median(&mut costs.apply));
        println!("{name}: {both:.1} us a step: schedule {schedule:.1}, apply {apply:.1}");
        if drafts == 0 {
            decode = decode.max(both);
        }
    }
    assert!(decode < 20.0, "{decode:.1} us");
}
