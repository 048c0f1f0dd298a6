//! How well cache types predict a text.

use serde::{Deserialize, Serialize};

use crate::{Result, cache_type::CacheType, measure::Measurement, progress::Progress, row::Row, score::Score};

/// The results of a cache type.
#[derive(Clone, Serialize, Deserialize)]
pub struct EvalLine {
    pub kv: String,
    /// Number of predictions.
    pub tokens: usize,
    pub nats_per_token: f64,
    pub perplexity: f64,
    pub kl_mean: f64,
    pub kl_p99: f64,
    pub top1_agreement: f64,
    pub bytes_per_token: usize,
}

/// Measures cache types.
pub fn measure(kv: &[CacheType], measurement: &Measurement) -> Result<Vec<EvalLine>> {
    let mut progress = Progress::new("", measurement.tokens());
    let scores = measurement.scores(kv, &mut progress)?;
    progress.finish();
    kv.iter().zip(&scores).map(|(kv, score)| EvalLine::new(kv, measurement, score)).collect()
}

impl EvalLine {
    pub fn new(kv: &CacheType, measurement: &Measurement, score: &Score) -> Result<EvalLine> {
        Ok(EvalLine {
            kv: kv.to_string(),
            tokens: score.tokens(),
            nats_per_token: score.nats_per_token(),
            perplexity: score.nats_per_token().exp(),
            kl_mean: score.kl_mean(),
            kl_p99: score.kl_p99(),
            top1_agreement: score.top1_agreement(),
            bytes_per_token: kv.bytes_per_token(&measurement.spec(&kv.codecs())?, measurement.longest()),
        })
    }
}

impl Row for EvalLine {
    const HEADER: &str = "kv           tokens   nats/token  perplexity   KL mean    KL p99     top-1     bytes/token";

    fn row(&self) -> String {
        format!(
            "{:<11} {:>7}   {:>10.5}  {:>10.4}  {:>8.2e}  {:>8.2e}  {:>7.3} %  {:>12}",
            self.kv,
            self.tokens,
            self.nats_per_token,
            self.perplexity,
            self.kl_mean,
            self.kl_p99,
            self.top1_agreement * 100.0,
            self.bytes_per_token
        )
    }
}
