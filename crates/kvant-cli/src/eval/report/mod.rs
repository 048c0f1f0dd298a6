//! `kvant eval --report`: measures cache types by position and by layer, and writes a page with plots.
//!
//! The folder gets `report.html`, which needs no other file, and `report.json` with the data of its plots.
//! `measurements.part` keeps measurements until both are there.

mod page;
mod plots;

use std::path::{Path, PathBuf};

use kvant::Codec;
use kvant_models::{CacheCodecs, KvCodec};
use serde::{Deserialize, Serialize};

use super::{
    EvalLine,
    measure::Measurement,
    progress::Progress,
    resume::{self, ResumeFile},
    score::Score,
};
use crate::{Result, args::Kv};

/// Parts of a window that divergences are averaged over.
const PARTS: usize = 16;
/// Caches that advance through the text together.
const TOGETHER: usize = 8;

#[derive(clap::Args)]
pub struct ReportArgs {
    /// Write report.html and report.json to a folder: quality against bytes, by position, and of each layer alone. A
    /// report that was stopped continues
    #[arg(long, value_name = "DIR", conflicts_with = "budget")]
    pub report: Option<PathBuf>,
}

/// The data of the plots.
#[derive(Serialize)]
pub struct ReportData {
    /// Model, device and text.
    subject: String,
    /// Of all windows.
    tokens: usize,
    /// The longest window.
    window_tokens: usize,
    caches: Vec<CacheData>,
    layers: LayerData,
}

/// One cache type.
#[derive(Clone, Serialize, Deserialize)]
pub struct CacheData {
    #[serde(flatten)]
    pub line: EvalLine,
    /// Mean divergence in each part of a window, in order; parts of equal length.
    pub kl_by_position: Vec<f64>,
}

/// What each layer costs: the divergence if only its keys, or only its values, are quantised.
#[derive(Serialize)]
pub struct LayerData {
    /// The cache type of the quantised side; the others are f32.
    kv: String,
    keys: Vec<f64>,
    values: Vec<f64>,
}

/// The cache types of a report: those of `kv`, or f16 and TurboQuant with the means of pages where there are any.
fn caches(kv: &[Kv], measurement: &Measurement) -> Vec<Kv> {
    if !kv.is_empty() {
        return kv.to_vec();
    }
    let bits = || kvant::codec::BITS.into_iter().rev();
    let centred = bits().map(Codec::tq_centred).filter(|_| measurement.has_page_means());
    let codecs = [Codec::F16].into_iter().chain(bits().map(Codec::tq)).chain(centred);
    codecs.map(|codec| Kv::from(KvCodec::from(codec))).collect()
}

/// Measures, writes the report, and returns the lines of its cache types.
pub fn run(folder: &Path, kv: &[Kv], measurement: &Measurement, subject: &str) -> Result<Vec<EvalLine>> {
    std::fs::create_dir_all(folder).map_err(|error| format!("--report: {}: {error}", folder.display()))?;
    let caches = caches(kv, measurement);
    let codec = if measurement.has_page_means() { Codec::tq_centred(4) } else { Codec::tq(4) };
    let sides = sides(codec, measurement);
    let mut known = ResumeFile::open(folder.join("measurements.part"), subject)?;
    let all: Vec<Kv> = caches.iter().chain(&sides).cloned().collect();
    let mut measured = measure(&all, measurement, &mut known)?;
    let alone: Vec<f64> = measured.split_off(caches.len()).iter().map(|data| data.line.kl_mean).collect();
    let every_other = |first: usize| alone.iter().copied().skip(first).step_by(2).collect();
    let data = ReportData {
        subject: subject.to_string(),
        tokens: measurement.tokens(),
        window_tokens: measurement.windows.first().map_or(0, |window| window.len()),
        caches: measured,
        layers: LayerData { kv: codec.to_string(), keys: every_other(0), values: every_other(1) },
    };
    resume::replace(&folder.join("report.json"), &(serde_json::to_string_pretty(&data)? + "\n"))?;
    resume::replace(&folder.join("report.html"), &page::html(&data)?)?;
    known.remove()?;
    Ok(data.caches.into_iter().map(|data| data.line).collect())
}

/// Keys of the first layer alone in `codec`, its values, keys of the second, ….
fn sides(codec: Codec, measurement: &Measurement) -> Vec<Kv> {
    let exact = KvCodec::from(Codec::F32);
    let layers = measurement.model.decoder().cache_layers();
    let alone = |side: usize| {
        let mut all = vec![exact; layers];
        all[side / 2] =
            if side.is_multiple_of(2) { KvCodec { k: codec, ..exact } } else { KvCodec { v: codec, ..exact } };
        let names: Vec<String> = all.iter().map(KvCodec::to_string).collect();
        Kv { name: names.join(","), codecs: CacheCodecs::PerLayer(all.into()) }
    };
    (0..2 * layers).map(alone).collect()
}

/// The data of cache types, as far as the file does not know them. A file of types per layer may have changed.
fn measure(all: &[Kv], measurement: &Measurement, known: &mut ResumeFile<CacheData>) -> Result<Vec<CacheData>> {
    let key = |kv: &Kv| format!("{kv} {:?}", kv.codecs);
    let new: Vec<&Kv> = all.iter().filter(|kv| known.get(&key(kv)).is_none()).collect();
    let mut progress = Progress::new("", new.len().div_ceil(TOGETHER) * measurement.tokens());
    for some in new.chunks(TOGETHER) {
        let pools = some.iter().map(|kv| measurement.pool(&kv.codecs)).collect::<kvant_models::Result<Vec<_>>>()?;
        let scores = measurement.scores(&pools, &mut progress)?;
        for ((kv, pool), score) in some.iter().zip(pools).zip(scores) {
            let line = EvalLine::new(kv, pool.spec(), &score);
            let kl_by_position = by_position(&score, measurement);
            if !line.kl_mean.is_finite() {
                return Err(format!("the divergence with {kv} is not a number").into());
            }
            known.add(&key(kv), CacheData { line, kl_by_position })?;
        }
    }
    progress.finish();
    Ok(all.iter().filter_map(|kv| known.get(&key(kv)).cloned()).collect())
}

/// Mean divergences in parts of windows. A part that no window reaches has 0.
fn by_position(score: &Score, measurement: &Measurement) -> Vec<f64> {
    let longest = measurement.windows.first().map_or(0, |window| window.len() - 1);
    let parts = PARTS.min(longest.max(1));
    let mut sums = vec![(0.0, 0usize); parts];
    let mut divergences = score.divergences().iter();
    for window in &measurement.windows {
        for (position, divergence) in divergences.by_ref().take(window.len() - 1).enumerate() {
            let (sum, count) = &mut sums[position * parts / longest];
            *sum += divergence;
            *count += 1;
        }
    }
    sums.into_iter().map(|(sum, count)| sum / count.max(1) as f64).collect()
}
