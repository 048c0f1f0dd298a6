//! The server on a thread of its own.

use std::{
    io,
    net::TcpListener,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use kvant_engine::Engine;
use kvant_models::Sampling;
use kvant_transfer::Transfers;
use tokio::{sync::oneshot, time};
use tonic::{
    Status,
    transport::{Server, server::TcpIncoming},
};
use tonic_health::{ServingStatus, server::HealthReporter};
use vllm_proto::{control_server::ControlServer, inference_server::InferenceServer};

use crate::{abort::Running, control::ControlService, inference::InferenceService, request::random_number};

/// Maximum bytes of a request.
const MAX_MESSAGE: usize = 8 << 20;
/// Interval of the health check of the engine.
const WATCH: Duration = Duration::from_millis(100);

/// Options of a [`GrpcServer`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GrpcOptions {
    /// The names of the model. `*` as the last one accepts every name. A request without a name is accepted too.
    pub names: Vec<String>,
    /// The directory or the name from which routers load tokenizer and template: `model_id`. Default: the first name.
    pub source: Option<String>,
    /// Default sampling parameters. Seeds are random. Default: greedy.
    pub sampling: Sampling,
    /// The publisher of KV events.
    pub events: Option<KvEventSource>,
    /// Transfers of prompts between workers: `kv_transfer_params`.
    pub transfers: Option<Transfers>,
}

/// A publisher of KV events, as `GetKvEventSources` names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventSource {
    /// The address of the PUB socket.
    pub endpoint: String,
    /// The topic of the events.
    pub topic: String,
    /// The address for replays.
    pub replay: Option<String>,
}

impl GrpcOptions {
    /// Options for a model with this name.
    pub fn new(name: impl Into<String>) -> GrpcOptions {
        GrpcOptions {
            names: vec![name.into()],
            source: None,
            sampling: Sampling::default(),
            events: None,
            transfers: None,
        }
    }

    /// Sets [`GrpcOptions::names`].
    #[must_use]
    pub fn names(self, names: Vec<String>) -> Self {
        GrpcOptions { names, ..self }
    }

    /// Sets [`GrpcOptions::source`].
    #[must_use]
    pub fn source(self, source: impl Into<String>) -> Self {
        GrpcOptions { source: Some(source.into()), ..self }
    }

    /// Sets [`GrpcOptions::sampling`].
    #[must_use]
    pub fn sampling(self, sampling: Sampling) -> Self {
        GrpcOptions { sampling, ..self }
    }

    /// Sets [`GrpcOptions::events`].
    #[must_use]
    pub fn events(self, events: KvEventSource) -> Self {
        GrpcOptions { events: Some(events), ..self }
    }

    /// Sets [`GrpcOptions::transfers`].
    #[must_use]
    pub fn transfers(self, transfers: Transfers) -> Self {
        GrpcOptions { transfers: Some(transfers), ..self }
    }
}

/// State shared by all requests.
pub(crate) struct Shared {
    pub engine: Engine,
    pub options: GrpcOptions,
    pub running: Arc<Running>,
    /// Differs between starts.
    pub instance: String,
}

impl Shared {
    /// Whether a request can name a model so.
    pub fn knows(&self, name: &str) -> bool {
        name.is_empty() || self.options.names.iter().any(|known| known == name || known == "*")
    }

    /// Runs long work, such as tokenising a long text, on a thread of its own.
    pub async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Shared) -> T + Send + 'static,
    ) -> Result<T, Status> {
        let shared = Arc::clone(self);
        let (sender, result) = oneshot::channel();
        let thread = thread::Builder::new().name("kvant-request".to_string());
        let started = thread.spawn(move || drop(sender.send(work(&shared))));
        let reason = |error| Status::unavailable(format!("the system cannot start a thread for the request: {error}"));
        started.map_err(reason)?;
        result.await.map_err(|_| Status::internal("a thread of the server panicked"))
    }
}

/// Maximum time in which running requests can end when a server is dropped.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// A running gRPC server. Dropping it stops it as [`GrpcServer::stop`] does, within three seconds.
#[derive(Debug)]
pub struct GrpcServer {
    stop: Option<oneshot::Sender<()>>,
    ended: mpsc::Receiver<()>,
}

impl GrpcServer {
    /// Serves an engine on a thread of its own.
    ///
    /// # Errors
    /// The listener is invalid, or the system starts no thread.
    pub fn start(engine: Engine, options: GrpcOptions, listener: TcpListener) -> io::Result<GrpcServer> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        listener.set_nonblocking(true)?;
        let incoming = {
            let _runtime = runtime.enter();
            TcpIncoming::from(tokio::net::TcpListener::from_std(listener)?).with_nodelay(Some(true))
        };
        let instance = format!("{:016x}", random_number());
        let shared = Arc::new(Shared { engine, options, running: Arc::default(), instance });
        let ((stop, stopped), (end, ended)) = (oneshot::channel(), mpsc::channel());
        let run = move || {
            runtime.block_on(serve(&shared, incoming, stopped));
            runtime.shutdown_background();
            drop(end);
        };
        thread::Builder::new().name("kvant-grpc".to_string()).spawn(run)?;
        Ok(GrpcServer { stop: Some(stop), ended })
    }

    /// Refuses new connections, and waits until running requests have ended, for at most `limit`.
    pub fn stop(mut self, limit: Duration) {
        self.end(limit);
    }

    fn end(&mut self, limit: Duration) {
        // Without its sender, the server stops.
        if self.stop.take().is_some() {
            let _ = self.ended.recv_timeout(limit);
        }
    }
}

impl Drop for GrpcServer {
    fn drop(&mut self) {
        self.end(LAST_WORDS);
    }
}

async fn serve(shared: &Arc<Shared>, incoming: TcpIncoming, stopped: oneshot::Receiver<()>) {
    let (reporter, health) = tonic_health::server::health_reporter();
    let inference = InferenceServer::new(InferenceService(Arc::clone(shared))).max_decoding_message_size(MAX_MESSAGE);
    let control = ControlServer::new(ControlService(Arc::clone(shared)));
    let services = Server::builder().add_service(health).add_service(inference).add_service(control);
    let stopped = async {
        let _ = stopped.await;
    };
    let served = services.serve_with_incoming_shutdown(incoming, stopped);
    tokio::select! {
        served = served => {
            if let Err(error) = served {
                tracing::error!(%error, "the gRPC server has failed");
            }
        }
        () = watch(shared, &reporter) => {}
    }
}

/// Reports the state of the engine as the health of all services.
async fn watch(shared: &Shared, reporter: &HealthReporter) {
    let mut reported = None;
    loop {
        let is_serving = shared.engine.is_healthy() && !shared.engine.is_draining();
        if reported != Some(is_serving) {
            let status = if is_serving { ServingStatus::Serving } else { ServingStatus::NotServing };
            for service in ["", "vllm.Inference", "vllm.Control"] {
                reporter.set_service_status(service, status).await;
            }
            reported = Some(is_serving);
        }
        time::sleep(WATCH).await;
    }
}
