//! The models of a server: their names, facts known before they are loaded, and the loaded ones.

mod plan;
mod registry;
pub(crate) mod routes;

use std::{
    error::Error,
    io,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use kvant_engine::{Engine, EngineStats};
use kvant_models::{CacheCodecs, Pooling, Sampling, chat::ChatTemplate};

use crate::{
    blocking::blocking,
    error::{ApiError, Result},
};
pub(crate) use registry::Loads;
use registry::{Lease, Loader, Refused, Registry, Resident};

/// A model that is ready to serve.
#[derive(Debug)]
#[non_exhaustive]
pub struct ServedModel {
    /// The engine. When the server unloads the model, no other handle may exist: memory is freed when the last one is
    /// dropped.
    pub engine: Engine,
    /// Converts a conversation to a prompt. Without it, the model rejects conversations.
    pub template: Option<ChatTemplate>,
    /// Defaults of the sampling parameters. Default: [`Sampling::usual`].
    pub sampling: Sampling,
    /// The pooling of embeddings. Without it, the model makes none.
    pub pooling: Option<Pooling>,
}

impl ServedModel {
    /// A model that generates text.
    pub fn new(engine: Engine) -> ServedModel {
        ServedModel { engine, template: None, sampling: Sampling::usual(), pooling: None }
    }

    /// Sets [`ServedModel::template`].
    #[must_use]
    pub fn template(self, template: Option<ChatTemplate>) -> Self {
        ServedModel { template, ..self }
    }

    /// Sets [`ServedModel::pooling`].
    #[must_use]
    pub fn pooling(self, pooling: Option<Pooling>) -> Self {
        ServedModel { pooling, ..self }
    }

    /// Sets [`ServedModel::sampling`].
    #[must_use]
    pub fn sampling(self, sampling: Sampling) -> Self {
        ServedModel { sampling, ..self }
    }
}

impl Resident for ServedModel {
    fn end(self) {
        if self.engine.close().is_err() {
            tracing::error!("a model that was put out is still in use");
        }
    }
}

/// Facts about a model that are known before it is loaded.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelFacts {
    /// Bytes of the loaded model: weights, pages and activations.
    pub bytes: usize,
    /// Maximum tokens of a text.
    pub context: usize,
    /// Whether the model can answer conversations.
    pub has_template: bool,
    /// The codecs of its cache, if known.
    pub cache: Option<CacheCodecs>,
}

impl ModelFacts {
    /// Facts about a model without a chat template.
    pub fn new(bytes: usize, context: usize) -> ModelFacts {
        ModelFacts { bytes, context, has_template: false, cache: None }
    }

    /// Sets [`ModelFacts::has_template`].
    #[must_use]
    pub fn has_template(self, has_template: bool) -> Self {
        ModelFacts { has_template, ..self }
    }

    /// Sets [`ModelFacts::cache`].
    #[must_use]
    pub fn cache(self, cache: CacheCodecs) -> Self {
        ModelFacts { cache: Some(cache), ..self }
    }
}

/// Models that a server loads on demand, within a memory limit.
///
/// If a model does not fit, the least recently used ones are unloaded. A model in use stays until its requests have
/// ended; if its memory is needed, new requests for it wait. Models are loaded and unloaded one at a time.
///
/// ```no_run
/// # fn load(path: &str) -> Result<kvant_server::ServedModel, Box<dyn std::error::Error + Send + Sync>> { todo!() }
/// use kvant_server::{ModelFacts, Models, Server, ServerOptions};
/// let mut models = Models::new(8 << 30);
/// for name in ["small", "large"] {
///     models.add([name], ModelFacts::new(3 << 30, 8192), move || load(name))?;
/// }
/// let server = Server::of_models(models, ServerOptions::new("unused"))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Models {
    limit: usize,
    known: Vec<Arc<Known>>,
    /// Loaders of models that are not yet registered, with the models' bytes.
    loaders: Vec<(usize, Loader<ServedModel>)>,
    search: Option<Search>,
}

/// Adds models that are new.
type Search = Arc<dyn Fn(&mut Models) + Send + Sync>;

/// An error when a model is added or loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A model has no name, or the name of another model.
    #[error("a model must have a name that no other model has, got {0:?}")]
    Name(String),
    /// The model exceeds the memory limit of all models.
    #[error("the model needs {bytes} bytes; the limit is {limit} bytes")]
    Size {
        /// Bytes of the model.
        bytes: usize,
        /// Maximum bytes of all models.
        limit: usize,
    },
    /// The model cannot be loaded.
    #[error("the model {name:?} cannot be loaded: {reason}")]
    Load {
        /// The name of the model.
        name: String,
        /// The error of its loader.
        reason: String,
    },
}

/// A lease of a model, which keeps it loaded.
pub(crate) type ModelLease = Lease<ServedModel>;

/// The names of a model and the facts about it.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub names: Vec<String>,
    pub facts: ModelFacts,
}

impl Known {
    /// The name in responses.
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// Names that clients can request.
    pub fn listed(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str).filter(|name| *name != ANY)
    }
}

/// The name that accepts every name that no other model has.
const ANY: &str = "*";

impl Models {
    /// Creates an empty list. The loaded models take at most `limit` bytes together.
    pub fn new(limit: usize) -> Models {
        Models { limit, known: Vec::new(), loaders: Vec::new(), search: None }
    }

    /// Sets a function that adds new models. It is called now. While the server runs, it is called on a separate thread
    /// when a request names an unknown model or asks for the list of models, at most once a second. Models are never
    /// removed.
    pub fn search(&mut self, search: impl Fn(&mut Models) + Send + Sync + 'static) {
        search(self);
        self.search = Some(Arc::new(search));
    }

    /// Adds a model. Requests can use any of its names; responses have the first. A request that names no model gets
    /// the first model. `*` as the last name accepts every name that no model has. `load` runs on a thread of its own
    /// when a request needs the model.
    ///
    /// # Errors
    /// `Name`; `Size`. The model is then not added.
    pub fn add<N, F, E>(
        &mut self,
        names: impl IntoIterator<Item = N>,
        facts: ModelFacts,
        load: F,
    ) -> Result<(), ModelError>
    where
        N: Into<String>,
        F: Fn() -> Result<ServedModel, E> + Send + Sync + 'static,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let is_taken = |name: &&String| self.known.iter().any(|known| known.names.contains(name));
        if let Some(name) = names.iter().find(is_taken) {
            return Err(ModelError::Name(name.clone()));
        }
        if names.first().is_none_or(|name| name == ANY) {
            return Err(ModelError::Name(String::new()));
        }
        if facts.bytes > self.limit {
            return Err(ModelError::Size { bytes: facts.bytes, limit: self.limit });
        }
        let (name, bytes) = (names[0].clone(), facts.bytes);
        self.known.push(Arc::new(Known { names, facts }));
        let load = move || logged(&name, || load().map_err(|error| error.into().to_string()));
        self.loaders.push((bytes, Box::new(load)));
        Ok(())
    }

    /// The names of the models in responses.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.known.iter().map(|known| known.name())
    }

    /// Bytes of each model.
    pub fn bytes(&self) -> impl Iterator<Item = usize> {
        self.known.iter().map(|known| known.facts.bytes)
    }
}

impl std::fmt::Debug for Models {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

/// Loads a model and logs the result.
fn logged(name: &str, load: impl FnOnce() -> Result<ServedModel, String>) -> Result<ServedModel, String> {
    let started = Instant::now();
    tracing::info!(model = name, "loading");
    let loaded = load();
    let ms = started.elapsed().as_millis() as u64;
    match &loaded {
        Ok(_) => tracing::info!(model = name, ms, "the model is ready"),
        Err(reason) => tracing::error!(model = name, reason, "the model cannot be loaded"),
    }
    loaded
}

/// The models of a running server.
pub(crate) struct Catalog {
    known: RwLock<Vec<Arc<Known>>>,
    registry: Registry<ServedModel>,
    /// The models found so far, with their search. `None` without a search.
    models: Option<Mutex<Models>>,
    /// When the last search ended. Requests wait for one that runs.
    searched: tokio::sync::Mutex<Option<Instant>>,
}

/// The shortest time between two searches for models.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);

/// The state of a model in `/metrics` and in lists of models.
pub(crate) struct Seen {
    /// `None`: the model is not loaded.
    pub stats: Option<EngineStats>,
    pub loads: Loads,
}

impl Catalog {
    /// A catalog of one model, which is always loaded.
    pub fn of_one(model: ServedModel, names: Vec<String>) -> Catalog {
        let facts = ModelFacts::new(0, model.engine.context()).has_template(model.template.is_some());
        let facts = facts.cache(model.engine.options().codecs.clone());
        Catalog::new(vec![Arc::new(Known { names, facts })], Registry::of_one(model), None)
    }

    /// # Errors
    /// There are no models, or the system cannot start a thread.
    pub fn start(mut models: Models) -> io::Result<Catalog> {
        if models.known.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "there are no models to serve"));
        }
        let registry = Registry::start(models.limit, std::mem::take(&mut models.loaders))?;
        let known = models.known.clone();
        Ok(Catalog::new(known, registry, models.search.is_some().then_some(models)))
    }

    fn new(known: Vec<Arc<Known>>, registry: Registry<ServedModel>, models: Option<Models>) -> Catalog {
        Catalog { known: RwLock::new(known), registry, models: models.map(Mutex::new), searched: Default::default() }
    }

    /// The known models, in the order of their indices.
    pub fn known(&self) -> Vec<Arc<Known>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The index of the model that a request names, and the facts about it; of the first model if the request names
    /// none.
    pub async fn find(self: &Arc<Self>, asked: Option<&str>) -> Result<(usize, Arc<Known>)> {
        let Some(asked) = asked else { return Ok((0, Arc::clone(&self.known()[0]))) };
        if let Some(found) = self.named(asked) {
            return Ok(found);
        }
        self.search().await?;
        self.named(asked).or_else(|| self.named(ANY)).ok_or_else(|| self.unknown(asked))
    }

    fn named(&self, name: &str) -> Option<(usize, Arc<Known>)> {
        self.known().into_iter().enumerate().find(|(_, known)| known.names.iter().any(|own| own == name))
    }

    /// Adds models that have appeared since the last search, unless it has just ended.
    pub async fn search(self: &Arc<Self>) -> Result<()> {
        if self.models.is_none() {
            return Ok(());
        }
        let mut searched = self.searched.lock().await;
        if searched.is_none_or(|when| when.elapsed() >= SEARCH_PAUSE) {
            let catalog = Arc::clone(self);
            blocking(move || catalog.search_now()).await?;
            *searched = Some(Instant::now());
        }
        Ok(())
    }

    fn search_now(&self) {
        let Some(models) = &self.models else { return };
        let mut models = models.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(search) = models.search.clone() else { return };
        search(&mut models);
        // The registry gets a model before a request can name it.
        models.loaders.drain(..).for_each(|(bytes, loader)| self.registry.add(bytes, loader));
        models.known.clone_into(&mut self.known.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// 404, in OpenAI's wording.
    fn unknown(&self, asked: &str) -> ApiError {
        let asked: String = asked.chars().take(64).collect();
        let names: Vec<String> = self.known().iter().take(20).map(|known| format!("`{}`", known.name())).collect();
        let message = format!("The model `{asked}` does not exist. This server has {}", names.join(", "));
        let error = ApiError::new(StatusCode::NOT_FOUND, message);
        ApiError { param: Some("model".to_string()), code: Some("model_not_found"), ..error }
    }

    /// Waits for a model. Loads it if necessary.
    pub async fn get(&self, index: usize, limit: Duration) -> Result<ModelLease> {
        self.registry.get(index, limit).await.map_err(|refused| self.refused(index, refused, limit))
    }

    fn refused(&self, index: usize, refused: Refused, limit: Duration) -> ApiError {
        let known = self.known();
        let name = known[index].name();
        match refused {
            // The reason names files of this machine, so it is only logged.
            Refused::Failed(_) => {
                let message = format!("the model `{name}` cannot be loaded: the log of the server has the reason");
                ApiError { code: Some("model_load_failed"), ..ApiError::internal(message) }
            }
            Refused::Late => {
                let seconds = limit.as_secs();
                let message = format!("the model `{name}` was not loaded within {seconds} s: try again later");
                ApiError { code: Some("model_loading"), ..ApiError::short_of(message) }
            }
            Refused::Full => {
                let message = format!("too many requests wait for the model `{name}` to be loaded");
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, message);
                ApiError { code: Some("queue_full"), retry_after: Some(1), ..error }
            }
            Refused::Closed => ApiError::draining(),
        }
    }

    /// Loads a model now. Blocks: not for async code.
    ///
    /// # Errors
    /// Why it cannot be loaded.
    pub fn load(&self, index: usize) -> Result<(), String> {
        match self.registry.get_blocking(index) {
            Ok(_) => Ok(()),
            Err(Refused::Failed(reason)) => Err(reason),
            Err(refused) => Err(self.refused(index, refused, Duration::ZERO).message),
        }
    }

    /// Each model with its state and counts.
    pub fn seen(&self) -> Vec<(Arc<Known>, Seen)> {
        let mut stats = Vec::new();
        self.registry.each(|_, model| stats.push(model.map(|model| model.engine.stats())));
        let seen = stats.into_iter().enumerate();
        let seen = seen.map(|(index, stats)| Seen { stats, loads: self.registry.loads(index) });
        self.known().into_iter().zip(seen).collect()
    }

    /// Removes the cached prefixes of the loaded models.
    pub fn clear_prefixes(&self) {
        self.registry.each(|_, model| {
            if let Some(model) = model {
                model.engine.clear_prefixes();
            }
        });
    }

    /// Bytes of the loaded models.
    pub fn bytes(&self) -> usize {
        self.registry.bytes()
    }

    /// Whether the only model of the server has failed. The server must then end.
    pub fn has_failed(&self) -> bool {
        self.known().len() == 1 && !self.failed().is_empty()
    }

    /// Unloads models whose engines have failed. The next request loads them again.
    pub fn retire_failed(&self) {
        for index in self.failed() {
            self.registry.retire(index);
        }
    }

    fn failed(&self) -> Vec<usize> {
        let mut failed = Vec::new();
        self.registry.each(|index, model| {
            if model.is_some_and(|model| !model.engine.is_healthy()) {
                failed.push(index);
            }
        });
        failed
    }

    /// Forgets all models. Returns the engines of the loaded ones.
    pub fn close(&self) -> Vec<Engine> {
        self.registry.close();
        let mut engines = Vec::new();
        self.registry.each(|_, model| engines.extend(model.map(|model| model.engine.clone())));
        engines
    }
}
