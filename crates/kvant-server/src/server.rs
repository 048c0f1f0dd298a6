//! A server that runs until it is stopped or its engine fails.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use kvant_engine::Engine;
use kvant_models::chat::ChatTemplate;
use tokio::{net::TcpListener, sync::watch, time};

use crate::{
    ApiKeys, ModelError, Models, ServedModel, ServerOptions, Transfers, app::App, blocking::blocking, connections,
    models::Catalog, routes::router,
};

/// Interval of the health check of engines.
const WATCH: Duration = Duration::from_millis(100);
/// Maximum time to write the last responses.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// The reason why a server ended without being stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The listener, the runtime or the signal handler failed.
    #[error("cannot serve: {0}")]
    Io(#[from] io::Error),
    /// The engine has failed. Its clients have received an error.
    #[error("the engine has failed")]
    Engine,
    /// Requests did not end within [`ServerOptions::drain`]. Their clients have received an error.
    #[error("requests did not end in time")]
    Drain,
}

/// An HTTP server for an engine.
#[derive(Clone)]
pub struct Server(Arc<App>);

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Server").field(&self.0.models.known()).finish()
    }
}

impl Server {
    /// Creates a server for an engine. Without a template, it rejects conversations.
    pub fn new(engine: Engine, template: Option<ChatTemplate>, options: ServerOptions) -> Server {
        let model = ServedModel::new(engine).template(template).sampling(options.sampling.clone());
        let model = model.pooling(options.pooling);
        Server(Arc::new(App::new(Catalog::of_one(model, options.names.clone()), options)))
    }

    /// Creates a server for models that are loaded on demand.
    ///
    /// # Errors
    /// There are no models, or the system cannot start a thread.
    pub fn of_models(models: Models, options: ServerOptions) -> io::Result<Server> {
        Ok(Server(Arc::new(App::new(Catalog::start(models)?, options))))
    }

    /// Loads a model now, by its index in the order of insertion. Blocks: not for async code.
    ///
    /// # Errors
    /// `Load`; `Name` if there is no such model.
    pub fn load(&self, index: usize) -> Result<(), ModelError> {
        let models = &self.0.models;
        let known = models.known().get(index).cloned().ok_or_else(|| ModelError::Name(index.to_string()))?;
        models.load(index).map_err(|reason| ModelError::Load { name: known.name().to_string(), reason })
    }

    /// Lets other workers continue prompts that this one has computed, and the reverse. Engines need a [model
    /// identity](kvant_engine::EngineOptions::model_identity). Only the first call has an effect.
    pub fn transfer(&self, transfers: Transfers) {
        let _ = self.0.transfers.set(transfers);
    }

    /// The routes, for tests and for servers with additional routes.
    pub fn router(&self) -> axum::Router {
        router(&self.0)
    }

    /// Serves until `stop` is ready. Then new requests get 503, and running ones can finish within
    /// [`ServerOptions::drain`].
    ///
    /// # Errors
    /// `Engine` if the engine fails, after its clients got an error; `Drain`; `Io`.
    pub async fn serve(self, listener: TcpListener, stop: impl Future<Output = ()>) -> Result<(), ServeError> {
        let (close, closing) = watch::channel(());
        let app = Arc::clone(&self.0);
        let serving = tokio::spawn(async move {
            connections::serve(listener, router(&app), &app.options, closing).await;
        });
        let outcome = tokio::select! {
            () = stop => self.drain().await,
            () = self.failure() => Err(ServeError::Engine),
        };
        let _ = close.send(());
        let _ = time::timeout(LAST_WORDS, serving).await;
        outcome
    }

    /// Serves on its own runtime until the process receives SIGTERM or SIGINT (Ctrl-C). A second signal stops
    /// immediately.
    ///
    /// # Errors
    /// As [`Server::serve`].
    pub fn run(self, listener: std::net::TcpListener) -> Result<(), ServeError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let outcome = runtime.block_on(async {
            listener.set_nonblocking(true)?;
            let listener = TcpListener::from_std(listener)?;
            let (stop, mut stopped) = watch::channel(());
            let mut signals = Signals::new()?;
            let signalled = async move {
                signals.next().await;
                tracing::info!("stopping: waiting for running requests");
                let _ = stop.send(());
                signals.next().await;
            };
            let stop = async move {
                let _ = stopped.changed().await;
            };
            #[cfg(unix)]
            let reloading = tokio::spawn(reload(self.0.options.keys.clone()));
            let served = tokio::select! {
                outcome = self.serve(listener, stop) => outcome,
                () = signalled => Err(ServeError::Drain),
            };
            #[cfg(unix)]
            reloading.abort();
            served
        });
        runtime.shutdown_background();
        outcome
    }

    async fn drain(&self) -> Result<(), ServeError> {
        self.0.is_draining.store(true, Ordering::Release);
        let limit = self.0.options.drain;
        let drain = |engine: Engine| tokio::spawn(blocking(move || engine.drain(limit)));
        // All are drained concurrently: they share the limit.
        let drains: Vec<_> = self.0.models.close().into_iter().map(drain).collect();
        let mut all_ended = true;
        for drained in drains {
            all_ended &= matches!(drained.await, Ok(Ok(true)));
        }
        if let Some(transfers) = self.0.transfers.get() {
            transfers.clear();
        }
        if all_ended { Ok(()) } else { Err(ServeError::Drain) }
    }

    /// Waits until the only engine has failed. If the server has several models, a failed one is unloaded.
    async fn failure(&self) {
        while !self.0.models.has_failed() {
            self.0.models.retire_failed();
            time::sleep(WATCH).await;
        }
        tracing::error!("the engine has failed");
    }
}

/// Reloads the key file on each SIGHUP.
#[cfg(unix)]
async fn reload(keys: ApiKeys) {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    while hangup.recv().await.is_some() {
        match keys.reload() {
            Ok(Some(count)) => tracing::info!(count, "keys have been read again"),
            Ok(None) => tracing::info!("there is no file of keys to read again"),
            Err(error) => tracing::error!(%error, "keys stay as they are"),
        }
    }
}

/// The signals that stop the process.
struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    #[cfg(unix)]
    fn new() -> io::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    #[cfg(unix)]
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    #[cfg(not(unix))]
    fn new() -> io::Result<Signals> {
        Ok(Signals {})
    }

    #[cfg(not(unix))]
    async fn next(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}
