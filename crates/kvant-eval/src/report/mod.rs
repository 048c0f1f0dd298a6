//! `kvant eval --report`: measures cache types by position, by layer and in long contexts, and writes a page of plots.
//!
//! The folder gets a self-contained `report.html`, and `report.json` with the data of its plots. `measurements.part`
//! keeps measurements until both are written.

mod data;
mod page;
mod pages;
mod plots;

use std::path::{Path, PathBuf};

use kvant::Codec;
use kvant_models::{CacheCodecs, KvCodec};
use serde::{Deserialize, Serialize};

use self::data::{AnswerData, CacheData, CacheNeedles, LayerData, NeedleData, PageData, ReportData, SideNumbers};
use crate::{
    Result,
    answers::{AnswerLine, Answers},
    cache_type::CacheType,
    files::replace,
    formats::Format,
    kv::Kv,
    measure::Measurement,
    needles::{self, Needles, Retrieved},
    prediction::EvalLine,
    progress::Progress,
    resume::ResumeFile,
    score::Score,
};

/// Number of parts of a window over which divergences are averaged.
const PARTS: usize = 16;
/// Maximum caches that are evaluated together.
const TOGETHER: usize = 8;

#[derive(clap::Args)]
pub struct ReportArgs {
    /// Write report.html and report.json to a folder: quality against bytes, by position, and of each layer alone; the
    /// energy in the means of pages; and retrieval of needles in a long context. An interrupted report continues
    #[arg(long, value_name = "DIR", conflicts_with = "budget")]
    pub report: Option<PathBuf>,
}

/// A result of a long measurement.
#[derive(Clone, Serialize, Deserialize)]
enum Known {
    Cache(CacheData),
    Pages(Option<PageData>),
    Needles(Retrieved),
    Answers(Vec<AnswerLine>),
}

/// The cache types of a report: the given ones, or by default f16, TurboQuant with and without sealed pages, and the
/// formats of other software that can store the model's vectors.
fn caches(kv: &[CacheType], measurement: &Measurement) -> Vec<CacheType> {
    if !kv.is_empty() {
        return kv.to_vec();
    }
    let bits = || kvant::codec::BITS.into_iter().rev();
    let codecs = [Codec::F16].into_iter().chain(bits().map(Codec::tq)).chain(bits().map(Codec::tq_centred));
    let peers = Format::PEERS.into_iter().map(CacheType::Format);
    let own = codecs.map(|codec| CacheType::from(KvCodec::from(codec)));
    own.chain(peers.filter(|peer| peer.check(measurement.model).is_ok())).collect()
}

/// Measures, writes the report, and returns the lines of its cache types.
pub fn run(
    folder: &Path,
    kv: &[CacheType],
    measurement: &Measurement,
    needles: &[Needles],
    answers: Option<&Answers>,
    subject: &str,
) -> Result<Vec<EvalLine>> {
    std::fs::create_dir_all(folder).map_err(|error| format!("--report: {}: {error}", folder.display()))?;
    let caches = caches(kv, measurement);
    let bits = 4;
    let codec = Codec::tq_centred(bits);
    let mut known = ResumeFile::open(folder.join("measurements.part"), subject)?;
    let all: Vec<CacheType> = caches.iter().cloned().chain(sides(codec, measurement)).collect();
    let mut measured = measure(&all, measurement, &mut known)?;
    let alone: Vec<f64> = measured.split_off(caches.len()).iter().map(|data| data.line.kl_mean).collect();
    let every_other = |first: usize| alone.iter().copied().skip(first).step_by(2).collect();
    let data = ReportData {
        subject: subject.to_string(),
        tokens: measurement.tokens(),
        window_tokens: measurement.longest(),
        caches: measured,
        layers: LayerData { kv: codec.to_string(), kl: SideNumbers { keys: every_other(0), values: every_other(1) } },
        pages: measure_pages(bits, measurement, &mut known)?,
        needles: needles.iter().map(|of| measure_needles(of, &caches, &mut known)).collect::<Result<_>>()?,
        answers: answers.map(|answers| measure_answers(answers, &caches, &mut known)).transpose()?,
    };
    replace(&folder.join("report.json"), &[serde_json::to_string_pretty(&data)?.as_bytes(), b"\n"])?;
    replace(&folder.join("report.html"), &[page::html(&data)?.as_bytes()])?;
    known.remove()?;
    Ok(data.caches.into_iter().map(|data| data.line).collect())
}

/// Quantises one side at a time: the keys of the first layer in `codec`, its values, the keys of the second, ….
fn sides(codec: Codec, measurement: &Measurement) -> Vec<CacheType> {
    let exact = KvCodec::from(Codec::F32);
    let layers = measurement.model.decoder().cache_layers();
    let alone = |side: usize| {
        let mut all = vec![exact; layers];
        all[side / 2] =
            if side.is_multiple_of(2) { KvCodec { k: codec, ..exact } } else { KvCodec { v: codec, ..exact } };
        let names: Vec<String> = all.iter().map(KvCodec::to_string).collect();
        CacheType::Kv(Kv { name: names.join(","), codecs: CacheCodecs::PerLayer(all.into()) })
    };
    (0..2 * layers).map(alone).collect()
}

/// Measures cache types, except results already in the file. Files of types per layer are measured again, as they may
/// have changed.
fn measure(all: &[CacheType], measurement: &Measurement, known: &mut ResumeFile<Known>) -> Result<Vec<CacheData>> {
    let key = |kv: &CacheType| format!("{kv:?}");
    let new: Vec<CacheType> = all.iter().filter(|kv| known.get(&key(kv)).is_none()).cloned().collect();
    let mut progress = Progress::new("cache types: ", new.len().div_ceil(TOGETHER) * measurement.tokens());
    for some in new.chunks(TOGETHER) {
        for (kv, score) in some.iter().zip(measurement.scores(some, &mut progress)?) {
            let line = EvalLine::new(kv, measurement, &score)?;
            let kl_by_position = by_position(&score, measurement);
            if !line.kl_mean.is_finite() {
                return Err(format!("the divergence with {kv} is not a number").into());
            }
            known.add(&key(kv), Known::Cache(CacheData { line, kl_by_position }))?;
        }
    }
    progress.finish();
    let data = |kv: &CacheType| match known.get(&key(kv)) {
        Some(Known::Cache(data)) => Some(data.clone()),
        _ => None,
    };
    Ok(all.iter().filter_map(data).collect())
}

/// Measures the energy in the means of pages.
fn measure_pages(bits: u32, measurement: &Measurement, known: &mut ResumeFile<Known>) -> Result<Option<PageData>> {
    const KEY: &str = "pages";
    if let Some(Known::Pages(data)) = known.get(KEY) {
        return Ok(data.clone());
    }
    let mut progress = Progress::new("pages: ", measurement.tokens());
    let data = pages::measure(bits, measurement, &mut progress)?;
    progress.finish();
    known.add(KEY, Known::Pages(data.clone()))?;
    Ok(data)
}

/// Measures needles in contexts of one length, with an f32 cache and the caches of the report.
fn measure_needles(needles: &Needles, caches: &[CacheType], known: &mut ResumeFile<Known>) -> Result<NeedleData> {
    let mut all = vec![CacheType::from(KvCodec::from(Codec::F32))];
    all.extend(caches.iter().filter(|&kv| *kv != all[0]).cloned().collect::<Vec<_>>());
    let key = |kv: &CacheType, with: bool| format!("needles {with} in {}: {kv:?}", needles.context());
    // Without needles, the cache type hardly matters.
    let measurements = || all.iter().map(|kv| (kv, true)).chain([(&all[0], false)]);
    let new: Vec<_> = measurements().filter(|&(kv, with)| known.get(&key(kv, with)).is_none()).collect();
    let mut progress = Progress::new("needles: ", new.len() * needles.tokens());
    for (kv, with) in new {
        known.add(&key(kv, with), Known::Needles(needles.measure(kv, with, &mut progress)?))?;
    }
    progress.finish();
    let found = |(kv, with): (&CacheType, bool)| match known.get(&key(kv, with)) {
        Some(Known::Needles(Retrieved { probabilities, pass_keys })) => Some(CacheNeedles {
            kv: kv.to_string(),
            probabilities: probabilities.clone(),
            pass_keys: pass_keys.clone(),
        }),
        _ => None,
    };
    let mut caches: Vec<CacheNeedles> = measurements().filter_map(found).collect();
    let without = caches.pop().map(|cache| cache.probabilities).unwrap_or_default();
    Ok(NeedleData { context: needles.context(), depths: needles::depths(), caches, without })
}

/// Measures the answers of all caches.
fn measure_answers(answers: &Answers, caches: &[CacheType], known: &mut ResumeFile<Known>) -> Result<AnswerData> {
    let subject = answers.subject();
    let key = format!("{subject}: {caches:?}");
    let caches = match known.get(&key) {
        Some(Known::Answers(lines)) => lines.clone(),
        _ => {
            let lines = answers.measure(caches)?;
            known.add(&key, Known::Answers(lines.clone()))?;
            lines
        }
    };
    Ok(AnswerData { subject, caches })
}

/// Mean divergences in parts of windows; 0 for a part that no window reaches.
fn by_position(score: &Score, measurement: &Measurement) -> Vec<f64> {
    let longest = measurement.longest().saturating_sub(1);
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
