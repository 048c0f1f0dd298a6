//! `--drafter` and `--drafts`, and texts with drafts.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use clap::builder::RangedU64ValueParser;
use kvant::DType;
use kvant_engine::{Engine, EngineOptions, EngineRequest, EngineStats, Event, FinishReason};
use kvant_models::{CacheCodecs, Error, Files, Finish, GenerateStats, Inspection, Model, Request, Tokenizer};

use crate::{
    Result,
    hub::{self, HubName},
    output, shipped,
};

/// The drafter in the model's own checkpoint.
const OWN: &str = "self";
/// A drafter by its name, or the model's own.
const AUTO: &str = "auto";
/// The name of a released drafter is that of its model with this suffix.
const SUFFIX: &str = "-assistant";
/// Default of `--drafts` with a drafter. The number adapts.
const DRAFTS: usize = 8;

/// `--drafter` and `--drafts`.
#[derive(Clone, clap::Args)]
pub struct DraftArgs {
    /// Guess tokens with a small model, and verify several in one step; texts do not change: directory, GGUF file or
    /// hub name of a Gemma 4 assistant or an EAGLE-3 head, `self` for multi-token prediction in the model's own
    /// checkpoint, or `auto` for the assistant next to the model or in the hub's cache, or else `self`
    #[arg(long, value_name = "MODEL")]
    drafter: Option<PathBuf>,
    /// Maximum guessed tokens per request and step, by the drafter or as they followed earlier in the text. The number
    /// adapts, down to none [default: 8 with --drafter, otherwise 0]
    #[arg(long, value_name = "N",
          value_parser = RangedU64ValueParser::<usize>::new().range(..=EngineOptions::MAX_DRAFTS as u64))]
    drafts: Option<usize>,
}

impl DraftArgs {
    /// Maximum drafts of a request in a step.
    pub fn count(&self) -> usize {
        self.drafts.unwrap_or(if self.has_drafter() { DRAFTS } else { 0 })
    }

    /// Whether a drafter was given.
    pub fn has_drafter(&self) -> bool {
        self.drafter.is_some()
    }

    /// The files of the drafter, if there is one. `place` and `files`: of the model.
    ///
    /// # Errors
    /// There are no such files, or they are no drafter.
    pub fn files(&self, place: Option<&Path>, files: &Files) -> Result<Option<Files>> {
        let Some(drafter) = &self.drafter else { return Ok(None) };
        let model = Inspection::open(files)?;
        // A model without a drafter is no error of `auto`.
        let (found, may_lack) = match drafter.to_str() {
            Some(OWN) => (files.clone(), false),
            Some(AUTO) => match place.and_then(beside) {
                Some(found) => (shipped::files(Some(&found))?, false),
                None => (files.clone(), true),
            },
            _ => (shipped::files(Some(drafter))?, false),
        };
        match model.with_drafter(&found) {
            Err(Error::NotADrafter { .. }) if may_lack => {
                output::note("--drafter auto: there is no drafter for this model; its own text is used\n")?;
                Ok(None)
            }
            checked => checked.map(|_| Some(found)).map_err(|error| self.error(&error)),
        }
    }

    fn error(&self, error: &Error) -> Box<dyn std::error::Error> {
        let name = self.drafter.as_deref().unwrap_or(Path::new(""));
        format!("--drafter {}: {error}", name.display()).into()
    }

    /// Adds the drafter with these files to a model. `dense_weights` as in its load options.
    ///
    /// # Errors
    /// It is no drafter, or that of another model.
    pub fn attach(&self, model: Model, files: Option<&Files>, dense_weights: Option<DType>) -> Result<Model> {
        let Some(files) = files else { return Ok(model) };
        model.with_drafter(files, dense_weights).map_err(|error| self.error(&error))
    }
}

/// The drafter with the name of a model and [`SUFFIX`]: a directory next to it, or a model in the hub's cache.
fn beside(place: &Path) -> Option<PathBuf> {
    let mut name = place.file_name()?.to_os_string();
    name.push(SUFFIX);
    let other = place.with_file_name(name);
    if place.exists() {
        return other.is_dir().then_some(other);
    }
    let found = hub::find(&HubName::parse(&other)?).ok()?;
    found.map(|_| other)
}

/// An engine that writes one text at a time, with drafts.
pub struct Drafting {
    engine: Engine,
}

impl Drafting {
    /// Starts an engine for texts of up to `context` tokens with up to `drafts` drafts in a step.
    pub fn start(
        model: Model,
        tokenizer: Arc<Tokenizer>,
        codecs: &CacheCodecs,
        context: usize,
        drafts: usize,
    ) -> Result<Drafting> {
        let options = EngineOptions::default().codecs(codecs.clone()).context(context.max(2)).sequences(1);
        let options = options.step_tokens(model.pass_tokens().max(2 + drafts)).drafts(drafts);
        Ok(Drafting { engine: Engine::start(model, tokenizer, options)? })
    }

    /// Counts and bytes of the engine.
    pub fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    /// Generates as [`kvant_models::generate`] does. The engine keeps the prefix of the text before.
    pub fn generate(
        &self,
        request: &Request,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<GenerateStats> {
        let (prompt, stop) = (request.prompt.to_vec(), request.stop.to_vec());
        let asked = EngineRequest::new(prompt).max_tokens(request.max_tokens).sampling(request.sampling.clone());
        let (before, started) = (self.stats(), Instant::now());
        let (mut generated_tokens, mut first, mut last) = (0, started, started);
        let mut finish = Finish::Cancelled;
        for event in self.engine.submit(asked.stop_ids(stop))? {
            match event {
                Event::Token(token) => {
                    last = Instant::now();
                    first = if generated_tokens == 0 { last } else { first };
                    generated_tokens += 1;
                    if on_token(token.id).is_break() {
                        break;
                    }
                }
                Event::Finished(finished) => {
                    finish = match finished.reason {
                        FinishReason::StopId(_) => Finish::Stop,
                        FinishReason::OutOfPages => Finish::OutOfPages,
                        _ => Finish::Length,
                    };
                }
                Event::Failed(failure) => return Err(failure.into()),
                _ => {}
            }
        }
        let accepted = usize::try_from(self.stats().drafts.accepted - before.drafts.accepted).unwrap_or(usize::MAX);
        Ok(GenerateStats {
            prompt_tokens: request.prompt.len(),
            generated_tokens,
            prompt_seconds: (first - started).as_secs_f64(),
            // Each step gives one token and its accepted drafts.
            decode_steps: generated_tokens.saturating_sub(1 + accepted),
            decode_seconds: (last - first).as_secs_f64(),
            finish,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafters_are_found_by_name() {
        let folder = std::env::temp_dir().join(format!("kvant-drafters-{}", std::process::id()));
        let (model, drafter) = (folder.join("gemma-4-E2B-it"), folder.join("gemma-4-E2B-it-assistant"));
        std::fs::create_dir_all(&model).unwrap();
        assert_eq!(beside(&model), None);
        std::fs::create_dir_all(&drafter).unwrap();
        assert_eq!(beside(&model), Some(drafter));
        assert_eq!(beside(Path::new("/")), None);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_drafter_implies_drafts() {
        let args = |drafter: Option<&str>, drafts| DraftArgs { drafter: drafter.map(Into::into), drafts };
        assert_eq!((args(None, None).count(), args(Some("self"), None).count()), (0, DRAFTS));
        assert_eq!((args(None, Some(3)).count(), args(Some("self"), Some(0)).count()), (3, 0));
    }
}
