//! The handle of an engine.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use flume::Sender;
use kvant::{KvPool, PrefixCache, PrefixChange, PrefixPage};
use kvant_models::{Model, Tokenizer};

use crate::{
    CacheScope, CompiledGrammar, EngineOptions, EngineRequest, EngineStats, Grammar, Responses, SubmitError,
    commands::{Command, Job, Reader},
    grammar::{self, Compiler, GrammarState},
    lock::lock,
    page_files,
    shared::Shared,
    text,
    worker::Worker,
};

/// Maximum alternatives that a request can ask for at each token.
const MAX_LOGPROBS: usize = 100;
/// Maximum stop strings of a request, and maximum bytes of each.
const MAX_STOPS: usize = 64;
const MAX_STOP_LENGTH: usize = 1024;
/// Stack size of a thread in bytes.
const STACK: usize = 16 << 20;

/// An engine: runs a model for many requests concurrently. Clones are handles of one engine.
///
/// The engine ends when its last handle and the last [`Responses`] are dropped.
#[derive(Clone)]
pub struct Engine(Arc<Handle>);

struct Handle {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    /// A handle of the pool.
    prefixes: PrefixCache,
    tokenizer: Arc<Tokenizer>,
    /// Created with the first grammar.
    compiler: OnceLock<Result<Arc<Compiler>, String>>,
    options: EngineOptions,
    limits: Limits,
    /// Identifies model and format of the pages.
    page_identity: [u8; 32],
    /// Bytes of a page of each layer group.
    page_bytes: Vec<usize>,
    next: AtomicU64,
    threads: [thread::JoinHandle<()>; 2],
}

/// The limits that requests are checked against.
struct Limits {
    context: usize,
    /// All token ids are lower.
    ids: usize,
    /// Number of logits of a token.
    vocab: usize,
    /// Length of an embedding.
    hidden: usize,
    /// Devices that share the model.
    ranks: usize,
}

impl Engine {
    /// Starts an engine: allocates pages, [compiles and records](EngineOptions::warm_up) passes on a GPU, and starts
    /// two threads.
    ///
    /// # Errors
    /// `Argument` for options out of range; `Kvant` with `OutOfMemory` or invalid options of the pages.
    pub fn start(model: Model, tokenizer: Arc<Tokenizer>, options: EngineOptions) -> kvant_models::Result<Engine> {
        let model_context = model.max_length().unwrap_or(usize::MAX);
        let made_for = model.config().max_position_embeddings.unwrap_or(4096);
        let context = options.context.unwrap_or(made_for.min(model_context));
        options.check(context, model_context)?;
        let pool = new_pool(&model, &options, context)?;
        let (commands, received) = flume::unbounded();
        if let Some(files) = options.page_files.as_ref().filter(|_| options.prefix_cache) {
            let (format, device, activations) = (pool.page_format(), model.device(), model.activations());
            let computed = format!("{device}, activations {activations:?}");
            let identity = [&options.model_identity, &options.load_identity, format.as_bytes(), computed.as_bytes()];
            // A weak handle, which does not keep the engine alive.
            let waiting = flume::Sender::downgrade(&commands);
            let wake = move || {
                if let Some(commands) = waiting.upgrade() {
                    let _ = commands.send(Command::Resume);
                }
            };
            pool.set_page_store(Box::new(files.store(&identity).on_read(wake)));
        }
        let page_identity = page_files::hash(&[&options.model_identity, pool.page_format().as_bytes()]);
        let page_bytes = pool.page_bytes();
        let ids = model.decoder().fed_vocab();
        let (vocab, hidden, ranks) = (model.vocab_size(), model.decoder().hidden_size, model.device().ranks());
        let limits = Limits { context, ids, vocab, hidden, ranks };
        let shared =
            Arc::new(Shared::new(first_stats(&pool, &options), options.sequences.saturating_add(options.queue)));
        let prefixes = PrefixCache::new(&pool, b"");
        let (outputs, texts) = flume::unbounded();
        let mut worker =
            Worker::new(model, pool, Arc::clone(&tokenizer), &options, context, Arc::clone(&shared), outputs)?;
        worker.warm_up(options.warm_up);
        let steps = thread("kvant-engine", move || worker.run(&received))?;
        let texts = {
            let (tokenizer, shared) = (Arc::clone(&tokenizer), Arc::clone(&shared));
            let commands = commands.downgrade();
            thread("kvant-text", move || text::run(&tokenizer, &texts, &shared, &commands))?
        };
        let (next, compiler, threads) = (AtomicU64::new(0), OnceLock::new(), [steps, texts]);
        let handle = Handle {
            commands,
            shared,
            prefixes,
            tokenizer,
            compiler,
            options,
            limits,
            page_identity,
            page_bytes,
            next,
            threads,
        };
        Ok(Engine(Arc::new(handle)))
    }

    /// Submits a request. The returned channel delivers its events.
    ///
    /// # Errors
    /// `Invalid` with the field's name; `ContextLength`; `Busy` if the queue is full; `Draining`; `Unhealthy`.
    pub fn submit(&self, mut request: EngineRequest) -> Result<Responses, SubmitError> {
        let handle = &*self.0;
        handle.check(&request)?;
        let grammar = request.grammar.take().map(|grammar| handle.start(grammar)).transpose()?;
        handle.shared.admit()?;
        let id = handle.next.fetch_add(1, Ordering::Relaxed);
        let (events, received) = flume::unbounded();
        let reader = Reader { events, unread: Arc::new(AtomicUsize::new(0)) };
        let unread = Arc::clone(&reader.unread);
        let responses = Responses::new(id, received, handle.commands.clone(), unread, handle.options.unread);
        let job = Job { id, request, grammar, reader, submitted: Instant::now() };
        handle.shared.unseen.fetch_add(1, Ordering::Relaxed);
        if handle.commands.send(Command::Submit(Box::new(job))).is_err() {
            handle.shared.unseen.fetch_sub(1, Ordering::Relaxed);
            handle.shared.ended();
            let reason = handle.shared.failure().unwrap_or_else(|| "its thread has ended".to_string());
            return Err(SubmitError::Unhealthy { reason });
        }
        Ok(responses)
    }

    /// Compiles a grammar for requests of this engine on the caller's thread. This takes some milliseconds, and up to
    /// some seconds for grammars near the limits. The first call also builds a table of the tokenizer's tokens.
    ///
    /// ```no_run
    /// # fn compile(engine: &kvant_engine::Engine, prompt: Vec<u32>) -> Result<(), kvant_engine::SubmitError> {
    /// use kvant_engine::{EngineRequest, Grammar};
    /// let schema = r#"{"type": "array", "items": {"type": "integer"}}"#;
    /// let grammar = engine.compile(&Grammar::JsonSchema(schema.to_string()))?;
    /// let responses = engine.submit(EngineRequest::new(prompt).grammar(grammar))?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` with the field `grammar`: the grammar is invalid, cannot be enforced or is too large, or this build or
    /// this tokenizer does not support grammars.
    pub fn compile(&self, grammar: &Grammar) -> Result<CompiledGrammar, SubmitError> {
        self.0.compiler()?.compile(grammar)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.0.tokenizer
    }

    /// The options.
    pub fn options(&self) -> &EngineOptions {
        &self.0.options
    }

    /// Maximum tokens of a text, including the prompt.
    pub fn context(&self) -> usize {
        self.0.limits.context
    }

    /// The length of an [embedding](EngineRequest::embed).
    pub fn embedding_len(&self) -> usize {
        self.0.limits.hidden
    }

    /// Number of devices that share the model.
    pub fn ranks(&self) -> usize {
        self.0.limits.ranks
    }

    /// Identifies the model ([`EngineOptions::model_identity`]) and the [format](KvPool::page_format) of its pages.
    /// Engines with equal identities can exchange pages.
    pub fn page_identity(&self) -> [u8; 32] {
        self.0.page_identity
    }

    /// Bytes of a page of each layer group.
    pub fn page_bytes(&self) -> &[usize] {
        &self.0.page_bytes
    }

    /// Copies pages of the longest prefix of `tokens` that requests of this scope have computed:
    /// [`PrefixCache::export_pages`](kvant::PrefixCache::export_pages). Empty if there are none, if the scope keeps
    /// none, or if the engine fails. Blocks until the current step ends: not for async code.
    pub fn export_pages(
        &self,
        scope: &CacheScope,
        tokens: &[u32],
        from: &[usize],
        may_grow: bool,
        max_bytes: usize,
    ) -> Vec<PrefixPage> {
        let (reply, pages) = flume::bounded(1);
        let (tokens, from) = (tokens.to_vec(), from.to_vec());
        let export = |salt| Command::Export { salt, tokens, from, may_grow, max_bytes, reply };
        self.exchange(scope, export, &pages).unwrap_or_default()
    }

    /// The number of pages of each layer group that requests of this scope find at the beginning of `tokens`:
    /// [`PrefixCache::held_pages`](kvant::PrefixCache::held_pages). Empty if the scope keeps none, or if the engine
    /// fails. Blocks until the current step ends: not for async code.
    pub fn held_pages(&self, scope: &CacheScope, tokens: &[u32]) -> Vec<usize> {
        let (reply, held) = flume::bounded(1);
        let ask = |salt| Command::Held { salt, tokens: tokens.to_vec(), reply };
        self.exchange(scope, ask, &held).unwrap_or_default()
    }

    /// Keeps pages of a prefix of `tokens` for requests of this scope:
    /// [`PrefixCache::import_pages`](kvant::PrefixCache::import_pages). Returns how many were kept: 0 if one does not
    /// fit the pool, if the scope keeps none, or if the engine fails. Blocks until the current step ends: not for async
    /// code.
    pub fn import_pages(&self, scope: &CacheScope, tokens: &[u32], pages: Vec<PrefixPage>) -> usize {
        let (reply, kept) = flume::bounded(1);
        let import = |salt| Command::Import { salt, tokens: tokens.to_vec(), pages, reply };
        self.exchange(scope, import, &kept).unwrap_or_default()
    }

    /// Sends a command for the prefix cache, and waits for its result.
    fn exchange<T>(
        &self,
        scope: &CacheScope,
        command: impl FnOnce(Arc<[u8]>) -> Command,
        reply: &flume::Receiver<kvant::Result<T>>,
    ) -> Option<T> {
        let salt = scope.pool_salt().filter(|_| self.0.options.prefix_cache)?;
        self.0.commands.send(command(salt)).ok()?;
        let result = reply.recv().ok()?;
        result.inspect_err(|error| tracing::warn!(%error, "pages of a prefix cannot be exchanged")).ok()
    }

    /// Counts since the start up to the latest step, and the current number of running and waiting requests.
    pub fn stats(&self) -> EngineStats {
        let stats = lock(&self.0.shared.stats);
        let unseen = self.0.shared.unseen.load(Ordering::Relaxed);
        EngineStats { waiting: stats.waiting + unseen, ..stats.clone() }
    }

    /// Removes all cached prefixes. Pages of running requests stay, and are cached again when they are full.
    pub fn clear_prefixes(&self) {
        self.0.prefixes.clear();
    }

    /// Calls `report` with the changes of the cached prefixes ([`PrefixCache::watch`]), whose salts
    /// [`CacheScope::salt_of`](crate::CacheScope::salt_of) reads.
    pub fn watch_prefixes(&self, report: impl FnMut(PrefixChange) + Send + 'static) {
        self.0.prefixes.watch(report);
    }

    /// Number of requests that have not ended.
    pub fn live(&self) -> usize {
        self.0.shared.live()
    }

    /// Whether the engine can serve requests. It never recovers from a failure.
    pub fn is_healthy(&self) -> bool {
        self.0.shared.failure().is_none()
    }

    /// Whether the engine accepts no more requests because it ends.
    pub fn is_draining(&self) -> bool {
        self.0.shared.is_draining()
    }

    /// Accepts no more requests, and waits until all have ended, for at most `limit`. The remaining ones then end with
    /// [`FinishReason::Drained`](crate::FinishReason::Drained). Returns whether all ended within the limit.
    pub fn drain(&self, limit: Duration) -> bool {
        self.0.shared.close();
        if self.0.shared.wait(limit) {
            return true;
        }
        let _ = self.0.commands.send(Command::EndAll);
        self.0.shared.wait(Duration::from_secs(10));
        false
    }

    /// Ends the engine, and waits until the memory of its model and pages is free. It first waits until all
    /// [`Responses`] are dropped.
    ///
    /// # Errors
    /// Returns the engine, still running, if it has other handles.
    pub fn close(self) -> Result<(), Engine> {
        let Handle { commands, threads, .. } = Arc::try_unwrap(self.0).map_err(Engine)?;
        // Without further commands, the first thread ends, and then the second one.
        drop(commands);
        for thread in threads {
            // A panic has already been reported as the engine's failure.
            let _ = thread.join();
        }
        Ok(())
    }

    /// Makes the engine's thread panic.
    #[cfg(feature = "internals")]
    pub(crate) fn panic(&self) {
        let _ = self.0.commands.send(Command::Panic);
    }

    /// Lets the drafter fail after the next step.
    #[cfg(feature = "internals")]
    pub(crate) fn fail_drafter(&self) {
        let _ = self.0.commands.send(Command::FailDrafter);
    }

    /// Lets a rank of a group fail within the next step with a prompt.
    #[cfg(feature = "internals")]
    pub(crate) fn fail_rank(&self, rank: usize) {
        let _ = self.0.commands.send(Command::FailRank(rank));
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({} live requests)", self.live())
    }
}

/// Starts a thread.
fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> kvant_models::Result<thread::JoinHandle<()>> {
    // Compiling grammars is recursive.
    let started = thread::Builder::new().name(name.to_string()).stack_size(STACK).spawn(run);
    started
        .map_err(|error| kvant_models::Error::Unsupported { what: format!("thread {name}"), reason: error.to_string() })
}

/// Allocates the pages of an engine.
fn new_pool(model: &Model, options: &EngineOptions, context: usize) -> kvant_models::Result<KvPool> {
    let layers = model.cache_layers(&options.codecs)?;
    let spec = kvant::PoolSpec::new(layers, options.memory.unwrap_or(0)).page_tokens(options.page_tokens);
    let spec = spec.states(model.state_layers()).keeps_boundaries(options.prefix_cache).drafts(options.drafts);
    let spec = match options.memory {
        Some(_) => spec,
        None => spec.room_for_steps(options.sequences, context, options.step_tokens)?,
    };
    model.pool_of(&spec.host_bytes(options.host_memory), context)
}

/// The statistics that do not change.
fn first_stats(pool: &KvPool, options: &EngineOptions) -> EngineStats {
    let (bytes, page_tokens) = (pool.usage().bytes, pool.spec().page_tokens);
    // Sealed pages begin after the first page and end before the last two. All layers may have windows.
    let page = pool.shared(4 * page_tokens) - pool.shared(3 * page_tokens);
    let page = if page > 0 { page } else { pool.need(page_tokens, page_tokens) };
    let pages = bytes / page.max(1);
    let (max_running, max_drafts) = (options.sequences, options.drafts);
    EngineStats { max_running, max_drafts, pages_bytes: bytes, page_tokens, pages, ..EngineStats::default() }
}

impl Handle {
    fn compiler(&self) -> Result<&Arc<Compiler>, SubmitError> {
        self.compiler.get_or_init(|| Compiler::new(&self.tokenizer)).as_ref().map_err(grammar::invalid)
    }

    /// The state of a grammar before the first token.
    fn start(&self, grammar: CompiledGrammar) -> Result<GrammarState, SubmitError> {
        grammar.start(self.compiler()?).ok_or_else(|| grammar::invalid("one of another engine"))
    }

    /// Checks a request. The engine's thread makes the checks that depend on the model's state.
    fn check(&self, request: &EngineRequest) -> Result<(), SubmitError> {
        let Limits { context, ids, vocab, .. } = self.limits;
        let at_most = |field, max: usize, got: usize| {
            if got <= max { Ok(()) } else { Err(SubmitError::invalid(field, format_args!("at most {max}"), got)) }
        };
        if request.prompt.is_empty() {
            return Err(SubmitError::invalid("prompt", "at least one token", "none"));
        }
        let room = if request.max_tokens > 0 { context.saturating_sub(1) } else { context };
        if request.prompt.len() > room {
            return Err(SubmitError::ContextLength { limit: room, got: request.prompt.len() });
        }
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= ids) {
            return Err(SubmitError::invalid("prompt", format_args!("ids below {ids}"), id));
        }
        request.sampling.validate(vocab).map_err(|error| match error {
            kvant_models::Error::Argument { arg, expected, got } => SubmitError::Invalid { field: arg, expected, got },
            other => SubmitError::invalid("sampling", "valid", other),
        })?;
        if request.pooling.is_some() {
            at_most("max_tokens", 0, request.max_tokens)?;
            at_most("prompt_logprobs", 0, request.prompt_logprobs.map_or(0, |top| top.max(1)))?;
        }
        at_most("min_tokens", request.max_tokens, request.min_tokens)?;
        at_most("logprobs", MAX_LOGPROBS, request.logprobs.unwrap_or(0))?;
        at_most("prompt_logprobs", MAX_LOGPROBS, request.prompt_logprobs.unwrap_or(0))?;
        at_most("stop", MAX_STOPS, request.stop.len())?;
        if let Some(stop) = request.stop.iter().find(|stop| !(1..=MAX_STOP_LENGTH).contains(&stop.len())) {
            let expected = format_args!("strings of 1 to {MAX_STOP_LENGTH} bytes");
            return Err(SubmitError::invalid("stop", expected, format_args!("one of {}", stop.len())));
        }
        Ok(())
    }
}
