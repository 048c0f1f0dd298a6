//! Options of an engine.

use std::time::Duration;

use kvant::Codec;
use kvant_models::CacheCodecs;

use crate::PageFiles;

/// Options of [`Engine::start`](crate::Engine::start).
///
/// ```
/// use kvant_engine::EngineOptions;
/// let options = EngineOptions::default().sequences(8).context(2048).queue(100);
/// assert_eq!(options.page_tokens, 64);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EngineOptions {
    /// The codecs of keys and values. Default: f16.
    pub codecs: CacheCodecs,
    /// Maximum tokens of a request, including the prompt. Default: the model's context.
    pub context: Option<usize>,
    /// Maximum running requests. Default: 16.
    pub sequences: usize,
    /// Maximum waiting requests. Further ones are rejected ([`SubmitError::Busy`](crate::SubmitError::Busy)). Default:
    /// 256.
    pub queue: usize,
    /// Maximum tokens of a step over all requests; more than `sequences`. Large steps compute prompts faster; small
    /// steps reduce the time between tokens while a prompt is computed. Default: 512.
    pub step_tokens: usize,
    /// Bytes of all pages. Default: enough for `sequences` texts of `context` tokens.
    pub memory: Option<usize>,
    /// Positions per page: 16, 32, 64, 128 or 256. Default: 64.
    pub page_tokens: usize,
    /// Bytes of host memory for pages that do not fit on the device: prefixes, and preempted requests. Default: 0.
    pub host_memory: usize,
    /// Whether requests share the pages of equal prefixes. Default: true.
    pub prefix_cache: bool,
    /// The directory where pages of prefixes outlive the engine. Default: none.
    pub page_files: Option<PageFiles>,
    /// Identifies the model, for pages that leave the engine: [`Files::samples`](kvant_models::Files::samples). The
    /// engine adds the format of the pages. Default: empty.
    pub model_identity: Vec<u8>,
    /// Identifies all else that changes the bits of keys and values, for [`EngineOptions::page_files`]: options of
    /// loading, and [`Files::modification_times`](kvant_models::Files::modification_times). The engine adds the device
    /// and the dtype of activations. Default: empty.
    pub load_identity: Vec<u8>,
    /// For models with recurrent states: a step ends at each multiple of this number of prompt tokens, rounded up to
    /// pages, so that other prompts can continue there. Default: none. Other prompts can then continue only at the last
    /// page boundary of a step or prompt, and where texts diverge.
    pub state_interval: Option<usize>,
    /// Maximum draft tokens of a request in a step, at most 32, and at most 15 for a model with recurrent states; 0 for
    /// none. Drafts are the tokens that followed an earlier occurrence of the last few tokens. They do not change
    /// texts: a draft is kept only if the model samples an equal token. They speed up repetitive texts on devices where
    /// a step of several tokens costs less than several steps. Default: 0.
    pub drafts: usize,
    /// Whether drafts are also found by prompt lookup. Otherwise only a model's drafter proposes drafts. Default: true.
    pub prompt_lookup: bool,
    /// Whether the number of drafts adapts to the share of accepted ones and to the measured times of steps, down to
    /// none. Otherwise each step has all drafts that are found, for tests and measurements. Default: true.
    pub adaptive_drafts: bool,
    /// For benchmarks: the probability that a step accepts a draft after accepted ones, whatever the model samples.
    /// Texts are then meaningless, and without a drafter, drafts are arbitrary tokens. Default: none.
    pub planted_acceptance: Option<f32>,
    /// Whether a step starts before the result of the previous one is known, if the device samples all its tokens. The
    /// device then waits for the host only for the results of drafts. A request that has ended costs one token, which
    /// is dropped. Default: on CUDA, where device and host run concurrently. On a CPU there is no gain.
    pub overlap: Option<bool>,
    /// Maximum time at start to compile kernels and record passes for all batch sizes, so that no request waits for
    /// this; zero disables it. Compiled kernels are cached on disk, so that later starts are fast. A CPU needs no
    /// warm-up. Default: 5 minutes.
    pub warm_up: Duration,
    /// Maximum unread events of a request. It pauses until they are read. Default: 256.
    pub unread: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            codecs: Codec::F16.into(),
            context: None,
            sequences: 16,
            queue: 256,
            step_tokens: 512,
            memory: None,
            page_tokens: 64,
            host_memory: 0,
            prefix_cache: true,
            page_files: None,
            model_identity: Vec::new(),
            load_identity: Vec::new(),
            state_interval: None,
            drafts: 0,
            prompt_lookup: true,
            adaptive_drafts: true,
            planted_acceptance: None,
            overlap: None,
            warm_up: Duration::from_secs(300),
            unread: 256,
        }
    }
}

impl EngineOptions {
    /// Maximum value of [`EngineOptions::drafts`].
    pub const MAX_DRAFTS: usize = 32;

    /// Checks the options that the pool does not check. `model_context` is the maximum number of tokens that the model
    /// accepts.
    pub(crate) fn check(&self, context: usize, model_context: usize) -> kvant_models::Result<()> {
        let at_least = |arg, min: usize, got: usize| match got >= min {
            true => Ok(()),
            false => {
                let (expected, got) = (format!("at least {min}"), got.to_string());
                Err(kvant_models::Error::Argument { arg, expected, got })
            }
        };
        at_least("context", 2, context)?;
        at_least("sequences", 1, self.sequences)?;
        at_least("step_tokens", self.sequences.saturating_add(1), self.step_tokens)?;
        at_least("unread", 1, self.unread)?;
        at_least("state_interval", 1, self.state_interval.unwrap_or(1))?;
        let at_most = |arg, max: usize, got: usize| match got <= max {
            true => Ok(()),
            false => {
                let (expected, got) = (format!("at most {max}"), got.to_string());
                Err(kvant_models::Error::Argument { arg, expected, got })
            }
        };
        at_most("context", model_context, context)?;
        at_most("drafts", EngineOptions::MAX_DRAFTS, self.drafts)
    }

    /// Sets [`EngineOptions::codecs`].
    #[must_use]
    pub fn codecs(self, codecs: impl Into<CacheCodecs>) -> Self {
        EngineOptions { codecs: codecs.into(), ..self }
    }

    /// Sets [`EngineOptions::context`].
    #[must_use]
    pub fn context(self, tokens: usize) -> Self {
        EngineOptions { context: Some(tokens), ..self }
    }

    /// Sets [`EngineOptions::sequences`].
    #[must_use]
    pub fn sequences(self, sequences: usize) -> Self {
        EngineOptions { sequences, ..self }
    }

    /// Sets [`EngineOptions::queue`].
    #[must_use]
    pub fn queue(self, queue: usize) -> Self {
        EngineOptions { queue, ..self }
    }

    /// Sets [`EngineOptions::step_tokens`].
    #[must_use]
    pub fn step_tokens(self, step_tokens: usize) -> Self {
        EngineOptions { step_tokens, ..self }
    }

    /// Sets [`EngineOptions::memory`].
    #[must_use]
    pub fn memory(self, bytes: usize) -> Self {
        EngineOptions { memory: Some(bytes), ..self }
    }

    /// Sets [`EngineOptions::page_tokens`].
    #[must_use]
    pub fn page_tokens(self, page_tokens: usize) -> Self {
        EngineOptions { page_tokens, ..self }
    }

    /// Sets [`EngineOptions::host_memory`].
    #[must_use]
    pub fn host_memory(self, bytes: usize) -> Self {
        EngineOptions { host_memory: bytes, ..self }
    }

    /// Sets [`EngineOptions::prefix_cache`].
    #[must_use]
    pub fn prefix_cache(self, prefix_cache: bool) -> Self {
        EngineOptions { prefix_cache, ..self }
    }

    /// Sets [`EngineOptions::page_files`]. Engines with equal identities find the pages again.
    #[must_use]
    pub fn page_files(self, page_files: PageFiles) -> Self {
        EngineOptions { page_files: Some(page_files), ..self }
    }

    /// Sets [`EngineOptions::model_identity`].
    #[must_use]
    pub fn model_identity(self, model_identity: Vec<u8>) -> Self {
        EngineOptions { model_identity, ..self }
    }

    /// Sets [`EngineOptions::load_identity`].
    #[must_use]
    pub fn load_identity(self, load_identity: Vec<u8>) -> Self {
        EngineOptions { load_identity, ..self }
    }

    /// Sets [`EngineOptions::state_interval`].
    #[must_use]
    pub fn state_interval(self, tokens: usize) -> Self {
        EngineOptions { state_interval: Some(tokens), ..self }
    }

    /// Sets [`EngineOptions::drafts`].
    #[must_use]
    pub fn drafts(self, drafts: usize) -> Self {
        EngineOptions { drafts, ..self }
    }

    /// Sets [`EngineOptions::prompt_lookup`].
    #[must_use]
    pub fn prompt_lookup(self, prompt_lookup: bool) -> Self {
        EngineOptions { prompt_lookup, ..self }
    }

    /// Sets [`EngineOptions::adaptive_drafts`].
    #[must_use]
    pub fn adaptive_drafts(self, adaptive_drafts: bool) -> Self {
        EngineOptions { adaptive_drafts, ..self }
    }

    /// Sets [`EngineOptions::planted_acceptance`].
    #[must_use]
    pub fn planted_acceptance(self, planted_acceptance: Option<f32>) -> Self {
        EngineOptions { planted_acceptance, ..self }
    }

    /// Sets [`EngineOptions::overlap`].
    #[must_use]
    pub fn overlap(self, overlap: bool) -> Self {
        EngineOptions { overlap: Some(overlap), ..self }
    }

    /// Sets [`EngineOptions::warm_up`].
    #[must_use]
    pub fn warm_up(self, limit: Duration) -> Self {
        EngineOptions { warm_up: limit, ..self }
    }

    /// Sets [`EngineOptions::unread`].
    #[must_use]
    pub fn unread(self, unread: usize) -> Self {
        EngineOptions { unread, ..self }
    }
}
