//! `kvant eval --budget`: finds codecs per layer and side within a mean number of bits, and writes them to a file.

mod search;

use std::path::{Path, PathBuf};

use kvant::Codec;
use kvant_models::{CacheCodecs, KvCodec, Model};
use serde::Serialize;

use self::search::{Assignment, Choice, Found, Phase, Search};
use crate::{
    Result,
    cache_type::CacheType,
    files::replace,
    kv::Kv,
    measure::Measurement,
    prediction::{self, EvalLine},
    progress::Progress,
    resume::ResumeFile,
};

/// Maximum caches that are evaluated together.
const TOGETHER: usize = 8;

#[derive(clap::Args)]
pub struct BudgetArgs {
    /// Find a codec for the keys and the values of each layer that minimises the divergence within BITS per number on
    /// average, without norms and means. Writes --out, which --kv @FILE reads. Prints it and the best uniform type,
    /// both measured on the first --budget-tokens of the text
    #[arg(long, value_name = "BITS", requires = "out", allow_negative_numbers = true)]
    budget: Option<f64>,
    /// The file that --budget writes. FILE.part keeps measurements, so that an interrupted search continues
    #[arg(long, value_name = "FILE", requires = "budget")]
    out: Option<PathBuf>,
    /// Maximum tokens that --budget measures
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(2..))]
    budget_tokens: u32,
}

/// The contents of the file.
#[derive(Serialize)]
struct BudgetFile<'a> {
    /// One entry for each layer that has its own keys and values.
    layers: Vec<String>,
    /// Bits per number.
    bits: f64,
    kl_mean: f64,
    /// The text that was measured.
    tokens: usize,
    model: &'a str,
}

impl BudgetArgs {
    /// The budget in bits and the file, if requested.
    pub fn asked(&self) -> Option<(f64, &Path)> {
        self.budget.zip(self.out.as_deref())
    }

    /// The used tokens of the text.
    pub fn tokens(&self) -> usize {
        self.budget_tokens as usize
    }
}

/// Selects among the codecs of `kv`, or all of TurboQuant. `subject` describes model and text.
pub fn run(
    budget: f64,
    out: &Path,
    kv: &[CacheType],
    measurement: &Measurement,
    subject: &str,
) -> Result<Vec<EvalLine>> {
    if let Some(folder) = out.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        return Err(format!("--out: {}: no such directory", folder.display()).into());
    }
    let codecs = codecs(kv)?;
    let sides = Sides::of(measurement.model);
    let search = Search {
        bits: codecs.iter().map(|&codec| bits(codec)).collect(),
        coordinates: sides.coordinates.clone(),
        budget,
    };
    search.check()?;
    let mut part = out.as_os_str().to_os_string();
    part.push(".part");
    let mut measured = ResumeFile::open(part.into(), subject)?;
    let mut phases = Phases { sides: &sides, codecs: &codecs, measurement, measured: &mut measured };
    let Found { best, uniform } = search.run(&mut |phase, all| phases.measure(phase, all))?;
    let layers = |choice: &Choice| sides.layers(&codecs, &choice.widths.iter().copied().map(Some).collect());
    let report = BudgetFile {
        layers: layers(&best).iter().map(KvCodec::to_string).collect(),
        bits: (search.mean_bits(&best.widths) * 1e3).round() / 1e3,
        kl_mean: best.divergence,
        tokens: measurement.tokens(),
        model: subject,
    };
    replace(out, &[serde_json::to_string_pretty(&report)?.as_bytes(), b"\n"])?;
    measured.remove()?;
    let best = Kv { name: format!("@{}", out.display()), codecs: CacheCodecs::PerLayer(layers(&best).into()) };
    let uniform = layers(&uniform).first().map(|&kv| Kv::from(kv));
    let both = [Some(best), uniform].into_iter().flatten().map(CacheType::Kv);
    prediction::measure(&both.collect::<Vec<_>>(), measurement)
}

/// The candidate codecs, sorted by bits.
fn codecs(kv: &[CacheType]) -> Result<Vec<Codec>> {
    let mut codecs = Vec::new();
    for kv in kv {
        match kv {
            CacheType::Kv(Kv { codecs: CacheCodecs::Same(KvCodec { k, v }), .. }) if k == v => codecs.push(*k),
            _ => return Err(format!("--budget: --kv takes single types to choose from, got {kv}").into()),
        }
    }
    if codecs.is_empty() {
        codecs.extend(kvant::codec::BITS.map(Codec::tq_centred));
    }
    codecs.sort_by(|&a, &b| bits(a).total_cmp(&bits(b)));
    if let Some(pair) = codecs.windows(2).find(|pair| bits(pair[0]) == bits(pair[1])) {
        return Err(format!("--budget: --kv has {} and {}, which have equal bits", pair[0], pair[1]).into());
    }
    Ok(codecs)
}

/// Bits of a number, without norms and means.
fn bits(codec: Codec) -> f64 {
    match codec {
        Codec::Dense(dtype) => 8.0 * dtype.size() as f64,
        Codec::TurboQuant(turbo) => f64::from(turbo.bits),
    }
}

/// The keys and values of the layers of a cache, alternating.
struct Sides {
    coordinates: Vec<usize>,
}

impl Sides {
    fn of(model: &Model) -> Sides {
        let layers = model.decoder().cache_blocks();
        let coordinates = layers.flat_map(|(_, attention)| [attention.kv_heads * attention.head_dim; 2]);
        Sides { coordinates: coordinates.collect() }
    }

    fn layers(&self, codecs: &[Codec], assignment: &Assignment) -> Vec<KvCodec> {
        let codec = |side: &Option<usize>| side.map_or(Codec::F32, |codec| codecs[codec]);
        assignment.chunks_exact(2).map(|sides| KvCodec { k: codec(&sides[0]), v: codec(&sides[1]) }).collect()
    }
}

/// Runs the measurements of the search, except the ones already in the file.
struct Phases<'a> {
    sides: &'a Sides,
    codecs: &'a [Codec],
    measurement: &'a Measurement<'a>,
    measured: &'a mut ResumeFile<f64>,
}

impl Phases<'_> {
    fn measure(&mut self, phase: Phase, all: &[Assignment]) -> Result<Vec<f64>> {
        let named = |assignment| {
            let layers = self.sides.layers(self.codecs, assignment);
            let names: Vec<String> = layers.iter().map(KvCodec::to_string).collect();
            (names.join(","), layers)
        };
        let all: Vec<(String, Vec<KvCodec>)> = all.iter().map(named).collect();
        let mut new: Vec<&(String, Vec<KvCodec>)> = Vec::new();
        for one in &all {
            if self.measured.get(&one.0).is_none() && !new.iter().any(|other| other.0 == one.0) {
                new.push(one);
            }
        }
        let label = match phase {
            Phase::Sides => "each side alone: ",
            Phase::Choices => "choices: ",
            Phase::Exchanges => "exchanges: ",
        };
        let mut progress = Progress::new(label, new.len().div_ceil(TOGETHER) * self.measurement.tokens());
        for some in new.chunks(TOGETHER) {
            let cache = |one: &&(String, Vec<KvCodec>)| {
                CacheType::Kv(Kv { name: one.0.clone(), codecs: CacheCodecs::PerLayer(one.1.clone().into()) })
            };
            let types: Vec<CacheType> = some.iter().map(cache).collect();
            let scores = self.measurement.scores(&types, &mut progress)?;
            for (one, score) in some.iter().zip(scores) {
                let kl_mean = score.kl_mean();
                if !kl_mean.is_finite() {
                    return Err(format!("the divergence with {} is not a number", one.0).into());
                }
                self.measured.add(&one.0, kl_mean)?;
            }
        }
        progress.finish();
        Ok(all.iter().filter_map(|(name, _)| self.measured.get(name).copied()).collect())
    }
}
