//! Measures an engine without and with drafts. A planted share of them is accepted.
//!
//! The line of a case has tokens per second of both engines and their ratio, and the ratio of a model of cost: the
//! tokens of a step of the second engine, over the time of passes of as many rows as its steps have. The model has
//! neither attention nor the drafter's time.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kvant_engine::{Engine, EngineOptions, EngineRequest, EngineStats};
use kvant_models::{BatchDecoder, Model, PoolOptions, Tokenizer};
use serde::Serialize;

use super::parts::{Ids, Parts, pool_options};
use crate::{args::Kv, output, result::Result};

/// Maximum tokens of a text after the prompt: for the first steps, and for each second of measurement.
const FIRST_TOKENS: usize = 512;
const TOKENS_PER_SECOND: usize = 1500;
/// Maximum time to record passes before the measurement.
const WARM_UP: Duration = Duration::from_secs(30);
/// Tokens of each text before the measurement: numbers of drafts adapt, and passes are recorded.
const WARM: u64 = 64;
/// Runs of a pass for the model of cost.
const RUNS: usize = 10;

/// A case: sequences, tokens in their prompts, and maximum drafts.
pub struct DraftCase {
    pub sequences: usize,
    pub context: usize,
    pub drafts: usize,
    /// The probability that a draft after accepted ones is accepted. `None`: what the model samples decides.
    pub acceptance: Option<f32>,
}

#[derive(Serialize)]
struct DraftLine {
    op: &'static str,
    device: String,
    kv: String,
    sequences: usize,
    context: usize,
    drafts: usize,
    acceptance: Option<f32>,
    tokens_per_second_without: f64,
    tokens_per_second: f64,
    ratio: f64,
    model_ratio: f64,
    /// Rows of a step and sequence, and tokens that it gives.
    rows: f64,
    tokens: f64,
    /// The share of rows with drafts that accepted a draft, by the draft's position.
    accepted_at: Vec<f64>,
}

/// The measurement of an engine.
struct DraftRates {
    tokens_per_second: f64,
    /// Rows and tokens of a step and sequence.
    rows: f64,
    tokens: f64,
    accepted_at: Vec<f64>,
}

impl Parts<'_> {
    /// Measures cases with equal sequences and prompts. Their engine without drafts is measured once.
    pub fn drafts(&self, kv: &Kv, cases: &[DraftCase]) -> Result {
        let Some(first) = cases.first() else { return Ok(()) };
        let options = pool_options(kv, first.sequences, first.context + self.max_tokens(first));
        let drafts = cases.iter().map(|case| case.drafts).max().unwrap_or(0);
        if !self.has_room(&PoolOptions { drafts, ..options })? {
            return Ok(());
        }
        let without = self.engine(kv, first, 0)?.tokens_per_second;
        cases.iter().try_for_each(|case| self.with_drafts(kv, case, without))
    }

    /// Maximum tokens of a text after its prompt.
    fn max_tokens(&self, case: &DraftCase) -> usize {
        let room = self.model.max_length().unwrap_or(usize::MAX).saturating_sub(case.context);
        room.min(FIRST_TOKENS + (self.budget.as_secs_f64() * TOKENS_PER_SECOND as f64) as usize)
    }

    fn with_drafts(&self, kv: &Kv, case: &DraftCase, without: f64) -> Result {
        let with = self.engine(kv, case, case.drafts)?;
        let line = DraftLine {
            op: "drafts",
            device: self.report.device.to_string(),
            kv: kv.to_string(),
            sequences: case.sequences,
            context: case.context,
            drafts: case.drafts,
            acceptance: case.acceptance,
            tokens_per_second_without: output::round3(without),
            tokens_per_second: output::round3(with.tokens_per_second),
            ratio: output::round3(with.tokens_per_second / without),
            model_ratio: output::round3(self.model_ratio(case, &with)?),
            rows: output::round3(with.rows),
            tokens: output::round3(with.tokens),
            accepted_at: with.accepted_at.into_iter().map(output::round3).collect(),
        };
        if self.report.json { output::json_line(&line) } else { output::text(&line.people()) }
    }

    /// Runs requests of random prompts until the time is over or the first one ends.
    fn engine(&self, kv: &Kv, case: &DraftCase, drafts: usize) -> Result<DraftRates> {
        let DraftCase { sequences, context, acceptance, .. } = *case;
        self.model.device().trim()?;
        let most = self.max_tokens(case);
        let options = EngineOptions::default().codecs(kv.codecs.clone()).context(context + most).sequences(sequences);
        let steps = self.model.pass_tokens().max(sequences * (1 + drafts) + 1);
        let options = options
            .step_tokens(steps)
            .drafts(drafts)
            .planted_acceptance(acceptance)
            .prefix_cache(false)
            .warm_up(WARM_UP);
        let engine = Engine::start(self.model.clone(), Arc::new(numbers(self.model)?), options.unread(usize::MAX))?;
        let mut ids = Ids(4);
        let requests = (0..sequences).map(|_| {
            let request = EngineRequest::new(ids.take(self.model, context)).max_tokens(most).stop_ids(Vec::new());
            engine.submit(request)
        });
        let responses = requests.collect::<std::result::Result<Vec<_>, _>>()?;
        let wait = |until: &dyn Fn(&EngineStats) -> bool| -> Result<(EngineStats, Instant)> {
            loop {
                let stats = engine.stats();
                if until(&stats) || stats.finished_length > 0 {
                    return Ok((stats, Instant::now()));
                }
                if stats.finished_failed > 0 {
                    return Err("a request has failed: the log has the reason".into());
                }
                thread::sleep(Duration::from_micros(200));
            }
        };
        let (first, started) = wait(&|stats| stats.generated_tokens >= WARM * sequences as u64)?;
        let (last, ended) = wait(&|_| started.elapsed() >= self.budget)?;
        drop(responses);
        engine.close().map_err(|_| "the engine has other handles")?;
        let number = |of: &dyn Fn(&EngineStats) -> u64| (of(&last) - of(&first)) as f64;
        let steps = number(&|stats| stats.steps).max(1.0) * sequences as f64;
        let tokens = number(&|stats| stats.generated_tokens);
        let rows = number(&|stats| stats.drafts.rows).max(1.0);
        let accepted = |position: usize| number(&|stats| stats.drafts.accepted_at[position]) / rows;
        Ok(DraftRates {
            tokens_per_second: tokens / (ended - started).as_secs_f64(),
            rows: 1.0 + number(&|stats| stats.drafts.tokens) / steps,
            tokens: tokens / steps,
            accepted_at: (0..drafts).map(accepted).collect(),
        })
    }

    /// The ratio of a model of cost: tokens per time of the passes of all weights.
    fn model_ratio(&self, case: &DraftCase, with: &DraftRates) -> Result<f64> {
        let pool = self.model.new_pool(&PoolOptions { longest: 1, ..PoolOptions::default() })?;
        let rows = (case.sequences as f64 * with.rows).round() as usize;
        let mut decoder = BatchDecoder::new(self.model, &pool, rows.max(case.sequences))?;
        let without = decoder.measure(case.sequences, RUNS)?.as_secs_f64();
        Ok(with.tokens * without / decoder.measure(rows.max(case.sequences), RUNS)?.as_secs_f64())
    }
}

impl DraftLine {
    fn people(&self) -> String {
        let planted = self.acceptance.map_or(String::new(), |share| format!(" {share}"));
        let accepted: Vec<String> = self.accepted_at.iter().map(|share| format!("{:.0}", 100.0 * share)).collect();
        format!(
            "{:<12} {:<9} {:>9} {:>8} {:.1} -> {:.1} tokens/s: {:.2} x (cost of passes alone: {:.2} x), {:.2} rows and {:.2} \
             tokens per step, accepted by position: {} %\n",
            format!("drafts{planted}"),
            self.kv,
            self.sequences,
            self.context,
            self.tokens_per_second_without,
            self.tokens_per_second,
            self.ratio,
            self.model_ratio,
            self.rows,
            self.tokens,
            accepted.join(" "),
        )
    }
}

/// A tokenizer whose tokens are numbers: models of random weights have none.
fn numbers(model: &Model) -> Result<Tokenizer> {
    let vocabulary: serde_json::Map<String, serde_json::Value> =
        (0..model.vocab_size()).map(|id| (id.to_string(), id.into())).collect();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"},
    });
    Ok(Tokenizer::parse(json.to_string().as_bytes())?)
}
